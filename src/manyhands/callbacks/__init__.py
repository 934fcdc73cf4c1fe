"""What follows a run: progress, the journal, trackers, the log, the relay from a worker to its parent.

A callback hears of a run and cannot end it (law 12). Nothing here computes or imports torch.
"""
