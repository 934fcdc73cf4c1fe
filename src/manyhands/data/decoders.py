"""Processes that read batches ahead, in the order of the requests.

Each process has its own pipe, and request k goes to process k modulo their number, so that the order needs no
numbers. Processes are forked: the data set is not copied, and need not be picklable. Batches come back by
value, as numpy arrays: nothing is left behind in shared memory if a process is killed. A process ends with
its parent, whose end of the pipe only the parent holds.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from manyhands.core.errors import ManyhandsError
from manyhands.data import trees
from manyhands.data.arrays import as_tensor
from manyhands.data.base import Batch, Request

AHEAD = 2  # requests that a process may have at a time, as in torch's DataLoader

Read = Callable[[Request, int], Batch]


class _Decoder(NamedTuple):
    process: multiprocessing.process.BaseProcess
    pipe: Connection


@final
class DecoderPool:
    """Some processes that read with the same function."""

    def __init__(self, count: int, read: Read, begin: Callable[[int], None] | None = None) -> None:
        self._decoders: list[_Decoder] = []
        self._count, self._read, self._begin = count, read, begin

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        for number in range(self._count):
            ours, theirs = context.Pipe()
            others = [ours, *(decoder.pipe for decoder in self._decoders)]
            process = context.Process(
                target=_serve, args=(number, theirs, others, self._read, self._begin), daemon=True
            )
            process.start()
            theirs.close()
            self._decoders.append(_Decoder(process, ours))
        return self

    def __exit__(self, *_: object) -> None:
        for decoder in self._decoders:
            decoder.pipe.close()
        for decoder in self._decoders:
            decoder.process.join(1.0)
            if decoder.process.is_alive():  # in the middle of a sample
                decoder.process.kill()
                decoder.process.join()

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """One batch per request, read ahead by all processes. One stream is read at a time."""
        asked: deque[int] = deque()
        source, number, ended = iter(requests), 0, False
        try:
            while True:
                while not ended and len(asked) < AHEAD * self._count:
                    request = next(source, None)
                    if request is None:
                        ended = True
                        break
                    self._send(number % self._count, request, seed)
                    asked.append(number % self._count)
                    number += 1
                if not asked:
                    return
                yield self._receive(asked.popleft())
        finally:
            for index in asked:  # answers that nobody wants: the next stream must not get them
                with suppress(Exception):
                    self._receive(index)

    def _send(self, index: int, request: Request, seed: int) -> None:
        try:
            self._decoders[index].pipe.send((request, seed))
        except OSError as error:
            raise self._died(index) from error

    def _receive(self, index: int) -> Batch:
        try:
            found = self._decoders[index].pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(index) from error
        if isinstance(found, BaseException):
            raise found
        return Batch(*(trees.each(as_tensor, tree) for tree in found))

    def _died(self, index: int) -> ManyhandsError:
        process = self._decoders[index].process
        process.join(1.0)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return ManyhandsError(
            f"process {index} of the {self._count} that read the data has died ({how}): with 0 workers the "
            "data are read by the trainer itself, which shows where"
        )


def _serve(
    number: int, pipe: Connection, others: list[Connection], read: Read, begin: Callable[[int], None] | None
) -> None:
    """Answer requests until the pipe is closed."""
    for other in others:  # otherwise this process would keep them open after the parent's death
        other.close()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)
    if begin is not None:
        begin(number)
    while True:
        try:
            request, seed = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = tuple(trees.mapped(_as_array, tree) for tree in read(request, seed))
        except Exception as error:  # noqa: BLE001 (it is raised where the batch is asked for)
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return


def _as_array(tensor: Tensor) -> Any:
    narrow = tensor.dtype is torch.bfloat16  # which numpy does not know
    return (tensor.float() if narrow else tensor).detach().cpu().numpy()
