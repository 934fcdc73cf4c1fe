"""Train with less memory: what the blocks of a model cost, and activations that are moved or recomputed."""
