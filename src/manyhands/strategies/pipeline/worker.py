"""A model cut into stages, a worker each: micro-batches follow each other through them.

              inputs                                    targets
    replica 0   -> [ stage 0 | worker 0 ] -- activations --> [ stage 1 | worker 1 ] -> loss
                                          <-- gradients ----
    replica 1   -> [ stage 0 | worker 2 ] -- activations --> [ stage 1 | worker 3 ] -> loss
                                          <-- gradients ----

What a stage does when is a schedule's to say (schedule.py), how tensors get to the neighbor a link's
(stage_link.py), and where the model is cut follows from what its blocks were measured to take (partition.py).
On one host the parameters live once, in the arena, and each replica fills a row of gradients; so the
update, the checkpoints and evaluation are those of `allreduce`. Workers that share no memory hold
their stage (remote_stages.py).

With batch norm, statistics are a micro-batch's, as if one worker accumulated the same micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch
from manyhands.data.order import sizes
from manyhands.offload.blocks import Cost, blocks_of, joined, measure
from manyhands.offload.recompute import recomputed
from manyhands.strategies.aliases import refuse_use
from manyhands.strategies.base import Setup, Worker
from manyhands.strategies.consistency import check_same_model, spread_buffers, trained
from manyhands.strategies.data_parallel.allreduce import allreduce
from manyhands.strategies.data_parallel.arena import Arena
from manyhands.strategies.options import LayersOptions, PipelineOptions
from manyhands.strategies.pipeline.partition import balanced, described, recorded, stages_of
from manyhands.strategies.pipeline.remote_stages import RemoteStages
from manyhands.strategies.pipeline.schedule import SCHEDULES, Schedule, in_flight
from manyhands.strategies.pipeline.stage_link import ExpectedTensor, StageRoom, links
from manyhands.strategies.synchronous import Gradients, SynchronousWorker
from manyhands.transports.base import Transport


def pipeline(setup: Setup) -> Worker:
    """This rank's stage; a model in one piece is `allreduce`'s."""
    options: PipelineOptions | LayersOptions = setup.options or PipelineOptions()
    stages = options.stages or setup.transport.size
    return allreduce(setup) if stages == 1 else Pipeline(setup, options, stages)


class Recomputed(nn.Module):
    """A stage of which only the inputs are kept until backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        """Its outputs."""
        return recomputed(self.inner, inputs)


@final
class Pipeline(SynchronousWorker):
    """One stage of one replica: forwards and backwards of micro-batches as the schedule says."""

    def __init__(self, setup: Setup, options: PipelineOptions | LayersOptions, stages: int) -> None:
        transport, model = setup.transport, setup.model
        self._transport, self._stages = transport, stages
        self._replica, self._stage = divmod(transport.rank, stages)
        self._replicas = transport.size // stages
        self._micro_batches = options.micro_batches or 1
        self._schedule: Schedule = SCHEDULES[options.schedule]
        check_same_model(model, transport)
        spread_buffers(model, transport)
        blocks = blocks_of(model)
        borders, handed = self._cut(setup, options, blocks)
        parts = [nn.Sequential(*blocks[a:b]) for a, b in pairwise(borders)]
        own = parts[self._stage]
        self._counts = [[b for b in part.buffers() if not b.is_floating_point()] for part in parts]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._links(transport, handed, device)
        deep = in_flight(self._schedule, self._stage, stages, self._micro_batches)
        # what is needed again at once need not be computed again
        self._module: nn.Module = Recomputed(own) if options.recompute and deep > 1 else own
        super().__init__(setup, model, self._memory(setup, transport, own, device))

    # ---- a step

    def accumulate(self, micro_batches: Iterator[Batch], total: int) -> tuple[float, int]:
        """Forwards and backwards in the order of the schedule; the last stage knows the loss."""
        share = sizes(total, self._replicas)[self._replica]
        parts = [size for size in sizes(share, self._micro_batches) if size]
        held: deque[tuple[Tensor | None, Tensor]] = deque()
        mean = 0.0
        for action in self._schedule(self._stage, self._stages, len(parts)):
            if action.kind == "forward":
                inputs, outputs = self._forward(micro_batches, parts[action.micro_batch] / total)
                if self._next is None:
                    mean += outputs.item()
                held.append((inputs, outputs))
            else:
                self._backward(*held.popleft())
        return mean, share

    def _forward(self, micro_batches: Iterator[Batch], weight: float) -> tuple[Tensor | None, Tensor]:
        """Take the next micro-batch through this stage, and hand it on."""
        targets: Tensor | None = None
        if self._before is None:
            batch = next(micro_batches)
            inputs, targets = batch.inputs, batch.targets
            if self._targets is not None:
                self._targets.put(targets)
        else:
            if self._targets is not None and self._next is None:
                targets = self._targets.take()
            inputs = self._before.take()
            inputs.requires_grad_(inputs.is_floating_point())  # whole numbers have no gradient
        if self._next is None:
            assert targets is not None
            outputs = self._compute.forward(self._module, Batch(inputs, targets), weight)
        else:
            outputs = self._compute.through(self._module, inputs)
            self._next.put(outputs.detach())
        return (None if self._before is None else inputs), outputs

    def _backward(self, inputs: Tensor | None, outputs: Tensor) -> None:
        """Of the oldest micro-batch that this stage holds; its inputs' gradient goes to the stage before."""
        if self._behind is None:
            self._compute.backward(outputs)
            if self._targets is not None:
                self._targets.free()  # the loss has saved them until here
        else:
            gradient = self._behind.take()
            if outputs.requires_grad:  # a first stage without trained parameters has nothing to do
                self._compute.backward(outputs, gradient)
            self._behind.free()
        if inputs is None:
            return
        assert self._ahead is not None
        assert self._before is not None
        if inputs.grad is None:
            inputs.grad = torch.zeros_like(inputs)
        self._ahead.put(inputs.grad)
        inputs.grad = None
        self._before.free()

    # ---- whole tensors

    @contextmanager
    def whole(self) -> Iterator[None]:
        """With the counts that only a stage's own worker keeps."""
        self._spread_counts()
        with self._gradients.whole(self.model):
            yield

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together from all stages."""
        self._spread_counts()
        return self._gradients.collect(self.model, self._optimizer)

    def _spread_counts(self) -> None:
        if self._transport.size > 1:
            for stage, counts in enumerate(self._counts):
                for count in counts:
                    self._transport.broadcast(count, stage)

    # ---- building

    def _cut(
        self, setup: Setup, options: PipelineOptions | LayersOptions, blocks: list[nn.Module]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Where stages begin and end, and the bytes handed on and back at each border; rank 0 measures."""
        stages, transport = self._stages, setup.transport
        found = torch.zeros(3 * (stages - 1), dtype=torch.int64)
        if transport.rank == 0:
            assert setup.example is not None
            per_replica = -(-setup.batch // self._replicas)
            example = setup.example(-(-per_replica // self._micro_batches))
            costs = measure(setup.model, example.inputs)
            cuts = options.cut or self._as_before(setup, len(blocks)) or self._balanced(costs, blocks)
            self._check_cuts(cuts, costs)
            chosen = stages_of(costs, cuts)
            setup.choices["stages"] = recorded(chosen)
            setup.choices["cut"] = described(chosen)
            targets = example.targets.nbytes
            handed = [value for stage in chosen[:-1] for value in (stage.outputs, targets)]
            found = torch.tensor([*cuts, *handed], dtype=torch.int64)
        numbers: list[int] = transport.broadcast(found).tolist()
        rest = numbers[stages - 1 :]
        return [0, *numbers[: stages - 1], len(blocks)], list(zip(rest[::2], rest[1::2], strict=True))

    def _as_before(self, setup: Setup, blocks: int) -> tuple[int, ...]:
        """The cut of the run that goes on: each stage draws its dropout from its worker's generator."""
        cuts = tuple(stage["first"] for stage in setup.choices.get("stages", ())[1:])
        return cuts if len(cuts) == self._stages - 1 and max(cuts) < blocks else ()

    def _balanced(self, costs: list[Cost], blocks: list[nn.Module]) -> tuple[int, ...]:
        closed = joined(blocks) | {number for number, cost in enumerate(costs) if not cost.alone}
        handing = [2 * cost.copying for cost in costs]
        return balanced([cost.seconds for cost in costs], self._stages, handing=handing, closed=closed)

    def _check_cuts(self, cuts: tuple[int, ...], costs: list[Cost]) -> None:
        for border in cuts:
            if not costs[border].alone:
                kind = costs[border].name.partition(" ")[2]
                raise UsageError(
                    f"the model cannot be cut at block {border} ({kind}): its inputs are changed in place"
                )

    def _links(self, transport: Transport, handed: list[tuple[int, int]], device: torch.device) -> None:
        """Activations to the next stage, gradients to the one before, targets from the first to the last."""
        wanted: list[ExpectedTensor] = []
        mine: list[str] = []
        stages, micro = self._stages, self._micro_batches
        slots = [in_flight(self._schedule, stage, stages, micro) for stage in range(stages)]
        for replica in range(self._replicas):
            first = replica * stages
            for border, (nbytes, targets) in enumerate(handed):
                here, there = first + border, first + border + 1
                wanted.append(ExpectedTensor(here, there, "activation", StageRoom(slots[border], nbytes)))
                wanted.append(
                    ExpectedTensor(there, here, "gradient", StageRoom(min(2, slots[border]), nbytes))
                )
                mine += [_role(transport.rank, here, there, "next", "before")]
                mine += [_role(transport.rank, there, here, "ahead", "behind")]
                if border == 0:
                    last = first + stages - 1
                    wanted.append(ExpectedTensor(first, last, "activation", StageRoom(max(slots), targets)))
                    mine += [_role(transport.rank, first, last, "targets", "targets")]
        made = links(transport, wanted, device)
        ends = {role: link for role, link in zip(mine, made, strict=True) if role}
        self._next, self._before = ends.get("next"), ends.get("before")
        self._ahead, self._behind = ends.get("ahead"), ends.get("behind")
        self._targets = ends.get("targets")

    def _memory(self, setup: Setup, transport: Transport, own: nn.Module, device: torch.device) -> Gradients:
        named = trained(setup.model)
        held = {id(parameter) for parameter in own.parameters()}
        names = {name for name, parameter in named.items() if id(parameter) in held}
        others = ((name, parameter) for name, parameter in named.items() if name not in names)
        refuse_use("in stages", "and another stage trains it", others)
        if transport.on_host.size == transport.size and device.type == "cpu":
            arena = Arena(setup.model, transport, named, self._stages, names)
            arena.spread()
            return arena
        return RemoteStages(setup.model, transport, named, self._stages, names)


def _role(rank: int, source: int, target: int, sends: str, takes: str) -> str:
    return sends if rank == source else takes if rank == target else ""
