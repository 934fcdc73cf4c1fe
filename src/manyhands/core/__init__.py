"""What every room may use: errors, formatting, statistics, files, signals, registry, environment.

Nothing here imports torch or another room. A line belongs here only if at least two towers need it.
"""
