"""Workers that torchrun, mpirun or Slurm started: how they find each other, and rank 0 leads them."""
