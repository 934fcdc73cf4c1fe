"""Data sets, their downloads, and the global sample order."""
