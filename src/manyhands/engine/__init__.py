"""One rank at work: its context, its loop, its feed, checkpoints, timing and fault injection.

Knows the interfaces of strategies and transports and no member of them; knows nothing of launchers.
"""
