"""Looking after a worker group: who is alive, who hangs, who failed first, and what is said of it (law 5)."""
