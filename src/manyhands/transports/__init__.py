"""How workers exchange tensors: one file a transport, one row each here."""

from manyhands.core.registry import Entry

TRANSPORTS: dict[str, Entry] = {
    "solo": Entry("manyhands.transports.solo:SoloTransport", "one worker: nobody to talk to"),
    "threads": Entry("manyhands.transports.threads:ThreadsTransport", "threads of one process: for tests"),
    "shm": Entry(
        "manyhands.transports.shm.transport:ShmTransport", "processes of one host, through shared memory"
    ),
    "torch": Entry(
        "manyhands.transports.torch_:TorchTransport", "torch.distributed: gloo on CPUs, NCCL on CUDA"
    ),
    "mpi": Entry("manyhands.transports.mpi:MpiTransport", "MPI, through mpi4py"),
}
