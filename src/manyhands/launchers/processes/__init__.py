"""Processes of this machine: the fork server, the processes it starts, what they run, and the executor.

Above `supervision` and `control`, below the launchers: it may not import a launcher. The executor works with
any processes that satisfy `ExecutorProcesses` of launchers/base.py, so every launcher uses it.
"""
