"""Train with less memory: activations leave while they are not needed, or are computed again.

`all` moves everything worth it, `conv` what convolutions are given (vDNN's choice), `auto` measures once and
chooses for each part of the model whether it is kept, recomputed or moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from manyhands.core import formatting
from manyhands.core.allocator import returned_memory
from manyhands.core.errors import UsageError
from manyhands.devices.device import HOST, Device
from manyhands.offload import budget, memory_plan, profile
from manyhands.offload.activation_store import ActivationStore, DiskStore
from manyhands.offload.memory_plan import Plan, Segment, Speed
from manyhands.offload.pinned_store import PinnedStore
from manyhands.offload.recompute import recomputed
from manyhands.offload.saved_tensors import AHEAD, Tape

LESS = 0.2  # of the activations' memory is what `auto` aims for where no budget is given
AHEADS = (64 * 2**20, 16 * 2**20, 4 * 2**20, 0)  # bytes fetched ahead that it may choose from


class Way:
    """How one module is run: its units, and segments of them."""

    def __init__(self, units: list[nn.Module], segments: tuple[Segment, ...], size: int, ahead: int) -> None:
        self.size, self.ahead = size, ahead  # numbers in the inputs it was chosen for
        self.parts: list[tuple[Segment, nn.Module]] = [
            (segment, units[segment.start] if segment.stop == segment.start + 1 else nn.Sequential(*part))
            for segment in segments
            for part in [units[segment.start : segment.stop]]
        ]


@final
class Offload:
    """Runs modules so that what autograd saves takes little memory; results are the same to the last bit."""

    def __init__(
        self,
        mode: str,
        memory: int | None = None,
        folder: str | None = None,
        choices: dict[str, Any] | None = None,
        *,
        remembered: int | None = None,  # bytes of an optimizer's memory that are still to come
        device: Device = HOST,
    ) -> None:
        self._mode, self._memory, self._folder = mode, memory, folder
        self._choices = {} if choices is None else choices
        self._store: ActivationStore | None = None
        self._ways: WeakKeyDictionary[nn.Module, Way] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[nn.Module, list[profile.Unit]] = WeakKeyDictionary()
        self._speed: Speed | None = None
        self._runs = 0
        self._tapes: WeakSet[Tape] = WeakSet()  # of passes that backward has not finished
        self._passes = 1  # that were in flight at a time
        self._device = device
        self._others = budget.Others(memory, remembered, device)
        self._open = ExitStack()

    def run(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """The module's outputs."""
        if self._mode == "none" or not torch.is_grad_enabled():
            plainly: Tensor = module(inputs)
            return plainly
        way = self._ways.get(module)
        if way is None or inputs.numel() > way.size or self._learnt(module):
            way = self._ways[module] = self._choose(module, inputs)
        store = self._store
        assert store is not None
        held = (*module.parameters(), *module.buffers(), inputs)
        conv = self._mode == "conv"
        tape = Tape(store, held, moving=not conv, promote=conv, ahead=way.ahead)
        self._tapes.add(tape)
        self._runs += 1
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
            if conv:
                with _moving_inside_convolutions(module, tape):
                    return self._through(way, tape, inputs, steer=False)
            return self._through(way, tape, inputs, steer=self._mode == "auto")

    def _learnt(self, module: nn.Module) -> bool:
        """Whether the plan was made for less than there is: passes in flight, an optimizer, kernels."""
        if self._memory is None or self._mode != "auto":
            return False
        passes, self._passes = self._passes, max(self._passes, len(self._tapes) + 1)
        return self._passes > passes or (not self._tapes and self._others.grown(module))

    def close(self) -> None:
        """End its threads and give back the disk; what was moved is told to the record."""
        store, self._store = self._store, None
        if store is not None:
            told = self._choices.setdefault("offload", {})
            runs = max(1, self._runs)
            told |= {
                "written_a_pass": store.written // runs,
                "read_a_pass": store.read // runs,
                "waited_a_pass": round(store.waited / runs, 6),
            }
            self._open.close()

    def _through(self, way: Way, tape: Tape, flowing: Tensor, *, steer: bool) -> Tensor:
        for segment, part in way.parts:
            if steer:
                tape.moving = segment.moves
            # no other name holds what flows, so that it is freed as soon as it is moved
            flowing = recomputed(part, flowing) if segment.how == "recompute" else part(flowing)
        return flowing

    def _choose(self, module: nn.Module, inputs: Tensor) -> Way:
        if self._store is None:
            pinned = self._device.memory_of == "device"  # then main memory is nearer than a disk
            self._store = PinnedStore(self._device) if pinned else DiskStore(self._folder)
            self._open.callback(self._store.close)
            self._open.enter_context(returned_memory())  # what is kept for the next step is not spared
        units = profile.units_of(module)
        if self._mode != "auto":
            how = tuple(Segment(number, number + 1, "move", True) for number in range(len(units)))
            self._choices["offload"] = {"mode": self._mode}
            # a disk that is too small is told before anything is computed
            wanted = [self._mode == "all" or isinstance(unit, _ConvNd) for unit in units]
            sizes = profile.sizes(units, inputs) or []
            self._store.reserve(
                sum(unit.touched for unit, moved in zip(sizes, wanted, strict=False) if moved)
            )
            return Way(units, how, inputs.numel(), AHEAD)
        known = self._known.get(module)
        if known is None or inputs.numel() > self._ways[module].size:
            known = self._known[module] = profile.timed(units, inputs)
        if self._speed is None:
            self._speed = budget.probe(self._store)
        self._others.look(module)  # last, as measuring loads parts of the program too
        chosen = self._plan(known)
        self._store.reserve(chosen.moved)
        self._store.in_flight = chosen.ahead
        self._tell(known, chosen)
        return Way(units, chosen.segments, inputs.numel(), chosen.ahead)

    def _plan(self, known: list[profile.Unit]) -> Plan:
        assert self._speed is not None
        if self._memory is None:  # activations alone count: no choice makes gradients and kernels smaller
            known = [unit.lean() for unit in known]
            room = max(int(LESS * memory_plan.plain(known)), memory_plan.least(known))
        else:
            least = memory_plan.least(known)
            others = self._others.nbytes
            room = self._memory - others
            if room < least:
                raise UsageError(
                    f"memory {formatting.size(self._memory)} cannot hold even one block of this model "
                    f"beside its "
                    f"{formatting.size(others)} of parameters, gradients and the rest: it takes at least "
                    f"{formatting.size(others + least)}"
                )
            room = max(least, room // self._passes)  # each pass has its own
        chosen = memory_plan.choose(known, room, self._speed, [a for a in AHEADS if a < room])
        if chosen is None:  # rounding on the grid: there is room for everything moved and no more
            chosen = memory_plan.choose(known, room, self._speed, [0], levels=4 * memory_plan.LEVELS)
        assert chosen is not None
        return chosen

    def _tell(self, known: list[profile.Unit], chosen: Plan) -> None:
        count: dict[str, int] = {"keep": 0, "move": 0, "recompute": 0}
        for segment in chosen.segments:
            count[segment.how] += segment.stop - segment.start
        compute = sum(unit.forward + unit.backward for unit in known)
        assert self._speed is not None
        self._choices["offload"] = {
            "mode": self._mode,
            "units": count,
            "predicted_peak": chosen.peak,
            "predicted_peak_plain": memory_plan.plain(
                known if self._memory else [unit.lean() for unit in known]
            ),
            "moved_a_pass": chosen.moved,
            "seconds_a_pass": round(compute, 6),
            "seconds_more": round(chosen.seconds, 6),
            "ahead": chosen.ahead,
            "write_bytes_a_second": round(self._speed.write),
            "read_bytes_a_second": round(self._speed.read),
        }


@contextmanager
def _moving_inside_convolutions(module: nn.Module, tape: Tape) -> Iterator[None]:
    def enter(*_: object) -> None:
        tape.moving = True

    def leave(*_: object) -> None:
        tape.moving = False

    handles = []
    for member in module.modules():
        if isinstance(member, _ConvNd):
            handles += [
                member.register_forward_pre_hook(enter),
                member.register_forward_hook(leave, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
