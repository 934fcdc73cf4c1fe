"""The control plane: authenticated connections between the workers of a group and whoever supervises them."""
