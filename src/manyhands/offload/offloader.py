"""Run modules with less memory: activations are moved out until backward needs them, or recomputed.

`all` moves every large tensor, `conv` the inputs of convolutions (as vDNN does). `auto` measures once and
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
from manyhands.data import trees
from manyhands.data.call import call
from manyhands.data.trees import Tree
from manyhands.devices.device import HOST, Device
from manyhands.offload import budget, memory_plan, profile
from manyhands.offload.activation_store import ActivationStore, DiskStore
from manyhands.offload.memory_plan import Plan, Segment, Speed
from manyhands.offload.pinned_store import PinnedStore
from manyhands.offload.recompute import recomputed
from manyhands.offload.saved_tensors import AHEAD, SavedTensorLog

TARGET_SHARE = 0.2  # of the memory of activations: the goal of `auto` without a budget
AHEADS = (64 * 2**20, 16 * 2**20, 4 * 2**20, 0)  # bytes to prefetch, from which `auto` chooses


class ModulePlan:
    """How one module is run: its units, grouped into segments."""

    def __init__(self, units: list[nn.Module], segments: tuple[Segment, ...], size: int, ahead: int) -> None:
        self.size, self.ahead = size, ahead  # bytes of the inputs it was made for
        self.parts: list[tuple[Segment, nn.Module]] = [
            (segment, units[segment.start] if segment.stop == segment.start + 1 else nn.Sequential(*part))
            for segment in segments
            for part in [units[segment.start : segment.stop]]
        ]


@final
class Offload:
    """Runs modules so that the tensors saved by autograd take less memory. No bit of a result changes."""

    def __init__(
        self,
        mode: str,
        memory: int | None = None,
        folder: str | None = None,
        choices: dict[str, Any] | None = None,
        *,
        optimizer_state: int | None = None,  # bytes that the optimizer will still allocate
        device: Device = HOST,
    ) -> None:
        self._mode, self._memory, self._folder = mode, memory, folder
        self._choices = {} if choices is None else choices
        self._store: ActivationStore | None = None
        self._plans: WeakKeyDictionary[nn.Module, ModulePlan] = WeakKeyDictionary()
        self._profiles: WeakKeyDictionary[nn.Module, list[profile.Unit]] = WeakKeyDictionary()
        self._speed: Speed | None = None
        self._runs = 0
        self._logs: WeakSet[SavedTensorLog] = WeakSet()  # of passes whose backward has not ended
        self._passes = 1  # the most that were in flight at a time
        self._device = device
        self._others = budget.OtherMemory(memory, optimizer_state, device)
        self._open = ExitStack()

    def run(self, module: nn.Module, inputs: Tree) -> Tree:
        """The module's outputs."""
        if self._mode == "none" or not torch.is_grad_enabled():
            return call(module, inputs)
        plan = self._plans.get(module)
        if plan is None or _nbytes(inputs) > plan.size or self._outdated(module):
            plan = self._plans[module] = self._choose(module, inputs)
        store = self._store
        assert store is not None
        held = (*module.parameters(), *module.buffers(), *trees.tensors(inputs))
        conv = self._mode == "conv"
        log = SavedTensorLog(store, held, moving=not conv, promote=conv, ahead=plan.ahead)
        self._logs.add(log)
        self._runs += 1
        with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
            if conv:
                with _moving_inside_convolutions(module, log):
                    return self._run_parts(plan, log, inputs, steer=False)
            return self._run_parts(plan, log, inputs, steer=self._mode == "auto")

    def _outdated(self, module: nn.Module) -> bool:
        """Whether memory has grown since the plan was made: passes in flight, optimizer state, kernels."""
        if self._memory is None or self._mode != "auto":
            return False
        passes, self._passes = self._passes, max(self._passes, len(self._logs) + 1)
        return self._passes > passes or (not self._logs and self._others.grown(module))

    def close(self) -> None:
        """End the threads, free the disk, and add what was moved to the choices of the record."""
        store, self._store = self._store, None
        if store is not None:
            summary = self._choices.setdefault("offload", {})
            runs = max(1, self._runs)
            summary |= {
                "written_a_pass": store.written // runs,
                "read_a_pass": store.read // runs,
                "waited_a_pass": round(store.waited / runs, 6),
            }
            self._open.close()

    def _run_parts(self, plan: ModulePlan, log: SavedTensorLog, tree: Tree, *, steer: bool) -> Tree:
        for segment, part in plan.parts:
            if steer:
                log.moving = segment.moves
            # no other variable refers to the tensors, so that each is freed as soon as it is moved
            tree = recomputed(part, tree) if segment.how == "recompute" else part(tree)
        return tree

    def _choose(self, module: nn.Module, inputs: Tree) -> ModulePlan:
        if self._store is None:
            pinned = self._device.memory_of == "device"  # then main memory is faster than a disk
            self._store = PinnedStore(self._device) if pinned else DiskStore(self._folder)
            self._open.callback(self._store.close)
            self._open.enter_context(
                returned_memory()
            )  # memory that is kept for the next step would not be saved
        units = profile.units_of(module, several_inputs=not isinstance(inputs, Tensor))
        if self._mode != "auto":
            how = tuple(Segment(number, number + 1, "move", True) for number in range(len(units)))
            self._choices["offload"] = {"mode": self._mode}
            # so that a disk that is too small is an error before the first computation
            moves = [self._mode == "all" or isinstance(unit, _ConvNd) for unit in units]
            sizes = profile.sizes(units, inputs) or []
            self._store.reserve(sum(unit.touched for unit, moved in zip(sizes, moves, strict=False) if moved))
            return ModulePlan(units, how, _nbytes(inputs), AHEAD)
        measured = self._profiles.get(module)
        if measured is None or _nbytes(inputs) > self._plans[module].size:
            measured = self._profiles[module] = profile.timed(units, inputs)
        if self._speed is None:
            self._speed = budget.probe(self._store)
        self._others.measure(module)  # last, because measuring also loads parts of the program
        chosen = self._plan(measured)
        self._store.reserve(chosen.moved)
        self._store.in_flight = chosen.ahead
        self._record(measured, chosen)
        return ModulePlan(units, chosen.segments, _nbytes(inputs), chosen.ahead)

    def _plan(self, units: list[profile.Unit]) -> Plan:
        assert self._speed is not None
        if self._memory is None:  # only activations count: no choice makes gradients and kernels smaller
            units = [unit.lean() for unit in units]
            room = max(int(TARGET_SHARE * memory_plan.plain(units)), memory_plan.least(units))
        else:
            least = memory_plan.least(units)
            others = self._others.nbytes
            room = self._memory - others
            if room < least:
                raise UsageError(
                    f"memory {formatting.size(self._memory)} is too small for one block of this model "
                    f"besides {formatting.size(others)} of parameters, gradients and the rest: it needs at "
                    f"least {formatting.size(others + least)}"
                )
            room = max(least, room // self._passes)  # each pass in flight has its own
        chosen = memory_plan.choose(units, room, self._speed, [a for a in AHEADS if a < room])
        if chosen is None:  # rounding on the grid: there is only room if everything is moved
            chosen = memory_plan.choose(units, room, self._speed, [0], levels=4 * memory_plan.LEVELS)
        assert chosen is not None
        return chosen

    def _record(self, units: list[profile.Unit], chosen: Plan) -> None:
        count: dict[str, int] = {"keep": 0, "move": 0, "recompute": 0}
        for segment in chosen.segments:
            count[segment.how] += segment.stop - segment.start
        compute = sum(unit.forward + unit.backward for unit in units)
        assert self._speed is not None
        self._choices["offload"] = {
            "mode": self._mode,
            "units": count,
            "predicted_peak": chosen.peak,
            "predicted_peak_plain": memory_plan.plain(
                units if self._memory else [unit.lean() for unit in units]
            ),
            "moved_a_pass": chosen.moved,
            "seconds_a_pass": round(compute, 6),
            "seconds_more": round(chosen.seconds, 6),
            "ahead": chosen.ahead,
            "write_bytes_a_second": round(self._speed.write),
            "read_bytes_a_second": round(self._speed.read),
        }


def _nbytes(tree: Tree) -> int:
    return sum(tensor.nbytes for tensor in trees.tensors(tree))


@contextmanager
def _moving_inside_convolutions(module: nn.Module, log: SavedTensorLog) -> Iterator[None]:
    def enter(*_: object) -> None:
        log.moving = True

    def leave(*_: object) -> None:
        log.moving = False

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
