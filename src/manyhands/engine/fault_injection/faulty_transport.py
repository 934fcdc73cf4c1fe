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
    """Lets a scripted fault strike as a rank comes to an operation, while the others wait for it in there."""

    def __init__(
        self, inner: Transport, fault: Fault, step: Callable[[], int], rank: int | None = None
    ) -> None:
        super().__init__(inner)
        self._fault, self._step = fault, step
        self._who = inner.rank if rank is None else rank  # in the gang, whatever part of it this is

    def rewrap(self, inner: Transport) -> Self:
        """The same worker, the same fault."""
        return type(self)(inner, self._fault, self._step, self._who)

    def around(self, operation: str, nbytes: int, call: Callable[..., T], *arguments: Any) -> T:
        """Now, or not yet; what needs nobody's doing is no place to fail in."""
        if operation not in get_args(InPlace) and self._fault.due(self._who, self._step(), "collective"):
            self._fault.strike()
        return call(*arguments)
