"""Scripted faults and slowness for drills: what happens to which rank at which step (law 5)."""
