"""Fault injection: scripted faults and slowness, by rank and step (law 5)."""
