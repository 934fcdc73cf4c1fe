"""A model divided into stages, one worker each: micro-batches follow each other through them.

              inputs                                    targets
    replica 0   -> [ stage 0 | worker 0 ] -- activations --> [ stage 1 | worker 1 ] -> loss
                                          <-- gradients ----
    replica 1   -> [ stage 0 | worker 2 ] -- activations --> [ stage 1 | worker 3 ] -> loss
                                          <-- gradients ----

A schedule decides what a stage does when (schedule.py), links carry tensors to the neighbors (stage_link.py),
and the partition follows from the measured costs of the model's blocks (partition.py). On one host the
parameters exist once, in the arena, and each replica fills a row of gradients; so the update, checkpoints and
evaluation are those of `allreduce`. Workers that share no memory train their own stage (remote_stages.py).

Batch norm takes its statistics over a micro-batch, as if one worker accumulated the same micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data import trees
from manyhands.data.base import Batch
from manyhands.data.order import sizes
from manyhands.data.trees import Layout, Structure, Tree
from manyhands.offload.blocks import Cost, Entered, blocks_of, joined, measure
from manyhands.offload.recompute import recomputed
from manyhands.strategies.aliases import refuse_use
from manyhands.strategies.base import PartitionedSetup, Worker
from manyhands.strategies.consistency import broadcast_buffers, check_same_model, trained_parameters
from manyhands.strategies.data_parallel.allreduce import allreduce
from manyhands.strategies.data_parallel.arena import Arena
from manyhands.strategies.gather import broadcast_json
from manyhands.strategies.options import LayersOptions, PipelineOptions
from manyhands.strategies.pipeline.partition import balanced, describe, stages_of, to_record
from manyhands.strategies.pipeline.remote_stages import RemoteStages
from manyhands.strategies.pipeline.schedule import SCHEDULES, Schedule, in_flight
from manyhands.strategies.pipeline.stage_link import LinkSize, LinkSpec, StageLink, TreeLink, open_links
from manyhands.strategies.synchronous import Gradients, SynchronousWorker
from manyhands.transports.base import Awaited, Transport


def pipeline(setup: PartitionedSetup) -> Worker:
    """The worker of this rank's stage; with one stage, the worker of `allreduce`."""
    options: PipelineOptions | LayersOptions = setup.options or PipelineOptions()
    stages = options.stages or setup.transport.size
    return allreduce(setup) if stages == 1 else Pipeline(setup, options, stages)


class Recomputed(nn.Module):
    """A stage that keeps only its inputs until backward, and computes its activations again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tree) -> Tree:
        return recomputed(self.inner, inputs)


@final
class Pipeline(SynchronousWorker):
    """One stage of one replica: forwards and backwards of micro-batches in the order of the schedule."""

    def __init__(
        self, setup: PartitionedSetup, options: PipelineOptions | LayersOptions, stages: int
    ) -> None:
        transport, model = setup.transport, setup.model
        self._transport, self._stages = transport, stages
        self._replica, self._stage = divmod(transport.rank, stages)
        self._replicas = transport.size // stages
        self._micro_batches = options.micro_batches or 1
        self._schedule: Schedule = SCHEDULES[options.schedule]
        check_same_model(model, transport)
        broadcast_buffers(model, transport)
        blocks = blocks_of(model)
        cut = self._partition(setup, options, blocks)
        if cut.several_inputs:
            blocks = [Entered(model, blocks[0]), *blocks[1:]]
        parts = [nn.Sequential(*blocks[a:b]) for a, b in pairwise((0, *cut.borders, len(blocks)))]
        own = parts[self._stage]
        self._counts = [[b for b in part.buffers() if not b.is_floating_point()] for part in parts]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._open_links(transport, cut, device)
        deep = in_flight(self._schedule, self._stage, stages, self._micro_batches)
        # activations that are needed again at once need not be computed again
        self._module: nn.Module = Recomputed(own) if options.recompute and deep > 1 else own
        super().__init__(setup, model, self._make_gradients(setup, transport, own, device))

    # ---- a step

    def accumulate(self, micro_batches: Iterator[Batch], total: int) -> tuple[float, int]:
        """Run forwards and backwards in the order of the schedule; the last stage knows the loss."""
        share = sizes(total, self._replicas)[self._replica]
        parts = [size for size in sizes(share, self._micro_batches) if size]
        held: deque[tuple[Tree | None, Tree]] = deque()
        mean = 0.0
        for action in self._schedule(self._stage, self._stages, len(parts)):
            if action.kind == "forward":
                inputs, outputs = self._forward(micro_batches, parts[action.micro_batch] / total)
                if self._is_last:
                    mean += outputs.item()
                held.append((inputs, outputs))
            else:
                self._backward(*held.popleft())
        return mean, share

    def _forward(self, micro_batches: Iterator[Batch], weight: float) -> tuple[Tree | None, Tree]:
        """Run the next micro-batch through this stage, and send the outputs to the next stage."""
        targets: Tree = None
        if self._activations_in is None:
            batch = next(micro_batches)
            inputs, targets = batch.inputs, batch.targets
            if self._targets is not None:
                self._targets.put(targets)
        else:
            if self._targets is not None and self._is_last:
                targets = self._targets.take()
            inputs = self._activations_in.take()
            for tensor in _floating(inputs):  # integers have no gradient
                tensor.requires_grad_()
        outputs: Tree
        if self._activations_out is None:
            outputs = self._compute.forward(self._module, Batch(inputs, targets), weight)
        else:
            outputs = self._compute.through(self._module, inputs)
            self._activations_out.put(trees.mapped(Tensor.detach, outputs))
        return (None if self._activations_in is None else inputs), outputs

    def _backward(self, inputs: Tree | None, outputs: Tree) -> None:
        """Run backward for the oldest micro-batch here; send its inputs' gradient to the stage before."""
        if self._gradients_in is None:
            self._compute.backward(outputs)
            if self._targets is not None:
                self._targets.release()  # the loss has saved them until here
        else:
            pairs = zip(_floating(outputs), self._gradients_in.take(), strict=True)
            # a first stage without trained parameters has nothing to do
            if trained := [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]:
                self._compute.backward(*zip(*trained, strict=True))
            self._gradients_in.release()
        if inputs is None:
            return
        assert self._gradients_out is not None
        assert self._activations_in is not None
        held = _floating(inputs)
        self._gradients_out.put([torch.zeros_like(t) if t.grad is None else t.grad for t in held])
        for tensor in held:
            tensor.grad = None
        self._activations_in.release()

    # ---- whole tensors

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Include the integer buffers, which only a stage's own worker updates."""
        self._broadcast_counts()
        with self._gradients.consolidated(self.model):
            yield

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together from all stages."""
        self._broadcast_counts()
        return self._gradients.collect(self.model, self._optimizer)

    def _broadcast_counts(self) -> None:
        if self._transport.size > 1:
            for stage, counts in enumerate(self._counts):
                for count in counts:
                    self._transport.broadcast(count, stage)

    # ---- building

    def _partition(
        self, setup: PartitionedSetup, options: PipelineOptions | LayersOptions, blocks: list[nn.Module]
    ) -> _Cut:
        """Where stages begin and end, and what is sent between them; rank 0 measures and decides."""
        found: _Cut | None = None
        if setup.transport.rank == 0:
            per_replica = -(-setup.batch // self._replicas)
            example = setup.example(-(-per_replica // self._micro_batches))
            with setup.compute.autocast():
                costs = measure(setup.model, example.inputs)
            borders = options.cut or self._as_before(setup, len(blocks)) or self._balanced(costs, blocks)
            self._check(borders, costs)
            chosen = stages_of(costs, borders)
            setup.choices["stages"] = to_record(chosen)
            setup.choices["cut"] = describe(chosen)
            sent = [_sent(costs[border - 1]) for border in borders]
            tree = not isinstance(example.inputs, Tensor)
            found = _Cut(list(borders), sent, Layout.of(example.targets), tree)
        borders, sent, targets, tree = broadcast_json(setup.transport, found)
        return _Cut(borders, [Layout(*each) for each in sent], Layout(*targets), tree)

    def _as_before(self, setup: PartitionedSetup, blocks: int) -> tuple[int, ...]:
        """The partition of the run that is resumed: each stage draws dropout from its worker's generator."""
        borders = tuple(stage["first"] for stage in setup.choices.get("stages", ())[1:])
        return borders if len(borders) == self._stages - 1 and max(borders) < blocks else ()

    def _balanced(self, costs: list[Cost], blocks: list[nn.Module]) -> tuple[int, ...]:
        forbidden = joined(blocks) | {number for number, cost in enumerate(costs) if not cost.alone}
        transfer = [2 * cost.copying for cost in costs]
        return balanced(
            [cost.seconds for cost in costs], self._stages, transfer=transfer, forbidden=forbidden
        )

    def _check(self, borders: tuple[int, ...], costs: list[Cost]) -> None:
        for border in borders:
            if not costs[border].alone:
                kind = costs[border].name.partition(" ")[2]
                raise UsageError(
                    f"the model cannot be cut at block {border} ({kind}): its inputs are changed in place"
                )

    def _open_links(self, transport: Transport, cut: _Cut, device: torch.device) -> None:
        """Activations to the next stage, gradients to the one before, targets from the first to the last."""
        rank, stages = transport.rank, self._stages
        wanted: list[LinkSpec] = []
        roles: list[str] = []
        structures: dict[str, Structure] = {}

        def want(source: int, target: int, names: tuple[str, str], slots: int, layout: Layout) -> None:
            what: Awaited = "gradient" if names[0].startswith("gradients") else "activation"
            role = names[0] if rank == source else names[1] if rank == target else ""
            structures[role] = layout.structure
            for nbytes in layout.sizes:
                wanted.append(LinkSpec(source, target, what, LinkSize(slots, nbytes)))
                roles.append(role)

        slots = [in_flight(self._schedule, stage, stages, self._micro_batches) for stage in range(stages)]
        for first in range(0, self._replicas * stages, stages):
            for border, layout in enumerate(cut.sent):
                here, there = first + border, first + border + 1
                want(here, there, ("activations out", "activations in"), slots[border], layout)
                back = _gradients(layout)
                want(there, here, ("gradients out", "gradients in"), min(2, slots[border]), back)
            want(first, first + stages - 1, ("targets", "targets"), max(slots), cut.targets)
        ends: dict[str, list[StageLink]] = {}
        for role, link in zip(roles, open_links(transport, wanted, device), strict=True):
            if link is not None:
                ends.setdefault(role, []).append(link)

        def end(role: str) -> TreeLink | None:
            return TreeLink(ends.get(role, []), structures[role]) if role in structures else None

        self._activations_in, self._activations_out = end("activations in"), end("activations out")
        self._gradients_in, self._gradients_out = end("gradients in"), end("gradients out")
        self._targets = end("targets")

    @property
    def _is_last(self) -> bool:
        """Whether this is the last stage, which computes the loss."""
        return self._activations_out is None

    def _make_gradients(
        self, setup: PartitionedSetup, transport: Transport, own: nn.Module, device: torch.device
    ) -> Gradients:
        """In the arena where all workers share memory, else each stage on its own."""
        named = trained_parameters(setup.model)
        held = {id(parameter) for parameter in own.parameters()}
        names = {name for name, parameter in named.items() if id(parameter) in held}
        others = ((name, parameter) for name, parameter in named.items() if name not in names)
        refuse_use("in stages", "and another stage trains it", others)
        if transport.on_host.size == transport.size and device.type == "cpu":
            arena = Arena(setup.model, transport, named, self._stages, names, setup.recipe.scope)
            arena.broadcast()
            return arena
        return RemoteStages(setup.model, transport, named, self._stages, names)


class _Cut(NamedTuple):
    """What rank 0 has decided and measured."""

    borders: list[int]  # the first blocks of all stages but the first
    sent: list[Layout]  # what each stage but the last sends to the next
    targets: Layout
    several_inputs: bool  # whether the model takes a tree instead of one tensor


def _sent(cost: Cost) -> Layout:
    assert cost.layout is not None
    return cost.layout


def _gradients(layout: Layout) -> Layout:
    """The gradients of activations: one per floating-point tensor."""
    sizes = [nbytes for nbytes, floating in zip(layout.sizes, layout.floating, strict=True) if floating]
    return Layout({"list": ["tensor"] * len(sizes)}, sizes, [True] * len(sizes))


def _floating(tree: Tree) -> list[Tensor]:
    return [tensor for tensor in trees.tensors(tree) if tensor.is_floating_point()]
