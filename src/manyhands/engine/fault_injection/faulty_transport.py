"""A transport that fails at a scripted rank and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar, final, get_args

from manyhands.engine.fault_injection.faults import Fault
from manyhands.transports.base import InPlace, Transport
from manyhands.transports.wrapper import TransportWrapper

T = TypeVar("T")


@final
class FaultyTransport(TransportWrapper):
    """Causes a scripted fault as a rank enters an operation, in which the others then wait for it."""

    def __init__(
        self, inner: Transport, fault: Fault, step: Callable[[], int], rank: int | None = None
    ) -> None:
        super().__init__(inner)
        self._fault, self._step = fault, step
        self._rank = inner.rank if rank is None else rank  # among all workers, also in a subgroup

    def rewrap(self, inner: Transport) -> Self:
        """A wrapper of a part of the transport, with the same fault."""
        return type(self)(inner, self._fault, self._step, self._rank)

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Fail if the fault is due; operations in place, in which no other rank waits, do not fail."""
        if operation not in get_args(InPlace) and self._fault.due(self._rank, self._step(), "collective"):
            self._fault.strike()
        return call(*arguments)
