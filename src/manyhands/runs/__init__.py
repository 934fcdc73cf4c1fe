"""The parent process of a run: defaults, checks, launch, restarts and resume; also verify and autotune.

This is the only room that combines all axes. It may use every room of the running tower.
"""
