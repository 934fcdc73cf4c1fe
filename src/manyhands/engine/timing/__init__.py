"""What a step costs, measured from outside (law 7): clock, step timer, timed compute, counted traffic."""
