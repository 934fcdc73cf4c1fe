"""Processes: the fork server, the processes it starts, what they run, and an executor on top of them."""
