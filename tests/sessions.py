"""The ranks of one run as processes, each told its own folder: hosts that share no files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.core.rank_info import RankInfo
from manyhands.core.signals import StopRequest
from manyhands.devices.device import HOST
from manyhands.engine.context import own_state
from manyhands.engine.job import Job
from manyhands.engine.session import Session
from transports.groups import PipeChannel, run_processes, send


class Line(PipeChannel):
    """With what a free strategy asks of it, and what the parent would have heard."""

    status_slot = None
    gone: frozenset[int] = frozenset()

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe)
        self.notices: list[str] = []

    def tell(self, message: Any) -> None:
        if message[0] == "on_notice":
            self.notices.append(message[1])


class Sat(NamedTuple):
    """What one rank was left with."""

    model: dict[str, Tensor]
    steps: int
    resumed: int
    notices: list[str]


def sit(pipe: Connection, rank: int, hosts: tuple[str, ...], job: Job) -> None:
    """Be one rank of a run."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    line = Line(pipe)
    try:
        with own_state(1, HOST), StopRequest() as stop:
            session = Session(RankInfo(rank, hosts, line), job, 1, stop)
            try:
                session._run()
                state = session.context.worker.model.state_dict()
                model = {name: tensor.detach().clone() for name, tensor in state.items()}
            finally:
                session.journal.close()
                session.context.close()
        answer = ("result", Sat(model, session.position.step, session.position.resumed, line.notices))
    except Exception:  # noqa: BLE001 told to the test
        answer = ("failure", traceback.format_exc())
    send(pipe, answer)


def together(job: Job, folders: Sequence[Path], hosts: Sequence[str] = ()) -> list[Sat]:
    """Run a job with a rank in each folder; the first failure by rank is raised."""
    torch.set_num_threads(1)
    where = tuple(hosts) or ("here",) * len(folders)
    jobs = [replace(job, folder=folder) for folder in folders]
    return run_processes(sit, [(rank, where, mine) for rank, mine in enumerate(jobs)])
