"""What runs in one rank: context, training loop, data feed, checkpoints, timing and fault injection.

Uses the interfaces of strategies and transports and no member of them, and nothing of launchers.
"""
