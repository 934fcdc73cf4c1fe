"""Shared memory between the processes of one host: segments, flags, futexes, mailboxes."""
