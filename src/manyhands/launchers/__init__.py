"""Where workers run: one file a launcher, one row each here."""

from manyhands.core.registry import Entry

LAUNCHERS: dict[str, Entry] = {
    "inline": Entry("manyhands.launchers.inline:InlineLauncher", "one worker, in this process"),
    "local": Entry("manyhands.launchers.local:LocalLauncher", "a process a worker, on this machine"),
    "env": Entry(
        "manyhands.launchers.env.launcher:EnvLauncher", "workers already started by torchrun, mpirun or Slurm"
    ),
    "mpi": Entry(
        "manyhands.launchers.mpi:MpiLauncher", "a rank of mpirun a worker, on this machine or several"
    ),
}
