"""Strategies whose workers do not step together: `server`, `hogwild`, and the queue of their work."""
