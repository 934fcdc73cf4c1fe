"""Supervision of a worker group: which workers are alive, hang or failed first, and the message (law 5).

What lives here: the worker group (one call of a function on all ranks), the watchdog, the failures that the
other workers survive, and the diagnosis that turns all of it into one message. It sees processes only through
`GroupProcesses` of launchers/base.py: it may import that and `control`, never `processes` or a launcher.
"""
