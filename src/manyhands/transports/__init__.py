"""How workers exchange tensors: one file a transport, one row each here."""

from manyhands.axes import Member

TRANSPORTS: dict[str, Member] = {
    "solo": Member("manyhands.transports.solo:Solo", "one worker: nobody to talk to"),
    "threads": Member("manyhands.transports.threads:Threads", "threads of one process: for tests"),
    "shm": Member("manyhands.transports.shm:Shm", "processes of one host, through shared memory"),
    "torch": Member("manyhands.transports.torch_:Torch", "torch.distributed: gloo on CPUs, NCCL on CUDA"),
    "mpi": Member("manyhands.transports.mpi:Mpi", "MPI, through mpi4py"),
}
