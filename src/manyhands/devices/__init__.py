"""The device that a rank computes on; all that is asked of one goes through here, so tests can fake it."""
