"""What every room may use: errors, formatting, statistics, files, signals, registry, environment.

Nothing here imports torch or another room. Code belongs here only if both towers need it.
"""
