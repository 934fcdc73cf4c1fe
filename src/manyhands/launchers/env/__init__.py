"""Workers that torchrun, mpirun or Slurm started: how they find each other, and how rank 0 leads them.

A launcher, on the top floor: it may import every part of launchers/ but the launchers other than `inline`.
"""
