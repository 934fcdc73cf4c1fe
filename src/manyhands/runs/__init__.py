"""The parent of a run: defaults, checks, launch, restarts, resume; verify and autotune are runs too.

The one room where the axes meet. It may use every room of the running tower.
"""
