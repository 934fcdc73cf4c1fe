"""Where workers run: one file a launcher, one row each here."""

from manyhands.axes import Member

LAUNCHERS: dict[str, Member] = {
    "inline": Member("manyhands.launchers.inline:Inline", "one worker, in this process"),
    "local": Member("manyhands.launchers.local:Local", "a process a worker, on this machine"),
    "env": Member("manyhands.launchers.env:Env", "workers already started by torchrun, mpirun or Slurm"),
    "mpi": Member("manyhands.launchers.mpi:Mpi", "a rank of mpirun a worker, on this machine or several"),
}
