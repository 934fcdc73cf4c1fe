"""Data sets, their downloads, and the global sample order. Models and strategies are unknown here."""
