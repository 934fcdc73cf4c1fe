"""The device that a rank computes on. Every call to a device goes through here, so that tests can fake it."""
