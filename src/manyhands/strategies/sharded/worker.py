"""Parameters, gradients and optimizer state in shards, gathered one block at a time: torch's FSDP2.

    shard of rank 0   [ block 0 | block 1 | block 2 ]      between steps every worker holds its rows
    shard of rank 1   [ block 0 | block 1 | block 2 ]

    forward    gather block 0, compute, drop it, gather block 1, ...
    backward   gather block 2, compute, sum its gradient into shards, drop it, gather block 1, ...
    update     each worker its own rows

FSDP takes the mean over workers by default. Here it sums, because each loss is already weighted by its part
of the global batch (law 4). All workers must gather the same blocks, so a worker with fewer micro-batches
runs a sample with weight zero instead. Each micro-batch's gradient is summed into shards at once: keeping
whole gradients until the last micro-batch would take the memory that accumulation is meant to save.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from manyhands.core.errors import UsageError
from manyhands.data import trees
from manyhands.data.base import Batch
from manyhands.data.trees import Tree
from manyhands.offload.blocks import blocks_of, joined
from manyhands.recipes import optimizers
from manyhands.strategies import state
from manyhands.strategies.aliases import refuse_use
from manyhands.strategies.base import Outcome, PartitionedSetup, Votes, Worker, gradients_of
from manyhands.strategies.consistency import broadcast_buffers, check_same_model, trained_parameters
from manyhands.strategies.sharded.fsdp_hooks import route_messages
from manyhands.strategies.sharded.shards import Shards
from manyhands.strategies.single import Single
from manyhands.strategies.sparse_gradients import refuse
from manyhands.strategies.step_header import StepHeader
from manyhands.transports.base import Transport


def sharded(setup: PartitionedSetup) -> Worker:
    """A worker with its shard; a single worker shards nothing."""
    return Sharded(setup) if setup.transport.size > 1 else Single(setup)


@final
class Sharded:
    """Rows of every tensor at every worker; `model` is complete in `consolidated` and after `finalize`."""

    model: nn.Module

    def __init__(self, setup: PartitionedSetup) -> None:
        model, transport = setup.model, setup.transport
        refuse(model, "sharded")
        check_same_model(model, transport)
        broadcast_buffers(model, transport)
        for parameter in model.parameters():
            transport.broadcast(parameter.data)
        self._transport, self._compute, self._clip = transport, setup.compute, setup.recipe.clip
        self._example = setup.example
        self._sample: Batch | None = None
        whole = sum(parameter.nbytes for parameter in model.parameters())
        self._plain = _without_values(model)
        self._units = _shard(model, transport)
        self.model = self._model = model
        self._used: set[str] = set()
        self._notes_use = False
        self._watch()
        self._shards = Shards(model, self._plain, transport)
        self._named = trained_parameters(model)
        self._local = {name: self._shards.local[name] for name in self._named}
        self._header = StepHeader(model, len(self._named))
        device = next(iter(self._local.values())).device if self._local else None
        self._own = torch.zeros(self._header.length, dtype=self._header.dtype, device=device)
        self._summed = torch.zeros_like(self._own)
        self._header.bind(self._own, self._summed)
        self._optimizer = optimizers.for_model(setup.recipe, model, self._local, norms=self._norms)
        setup.choices["sharded"] = {
            "parameters": sum(local.nbytes for local in self._shards.local.values()),
            "gradients": sum(local.nbytes for local in self._local.values()),
            "whole": whole,
            "groups": _groups(self._units),
        }

    def step(
        self, micro_batches: Iterable[Batch], total: int, lr: float, votes: Callable[[], Votes] = Votes
    ) -> Outcome:
        """Sum all workers' weighted gradients into shards, one micro-batch at a time; update the own rows."""
        mean, samples = 0.0, 0
        self._used.clear()
        for batch in self._matched(micro_batches, total):
            if batch is None:
                self._run_empty()
                continue
            self._notes_use = True
            loss = self._compute.forward(self._model, batch, weight=batch.size / total)
            self._compute.backward(loss)
            self._notes_use = False
            mean += loss.item()
            samples += batch.size
        touched = [name in self._used for name in self._named]
        weight = self._compute.take_weight()
        skip = self._compute.overflows(_local(gradients_of(self._named.values())))
        self._header.write(mean, votes()._replace(skip=skip), touched, samples / total, weight)
        self._transport.all_reduce(self._summed.copy_(self._own))
        outcome, missing = self._header.read()
        self._take_gradients(set(missing))
        if (divisor := (self._header.weight or 1.0) * self._compute.scale) != 1.0:
            self._compute.divide(self._local.values(), divisor)
        if self._clip is not None:
            self._compute.clip(self._local.values(), self._clip, self._norm)
        optimizers.set_lr(self._optimizer, lr)
        self._compute.update(self._optimizer, skip=outcome.votes.skip)
        self._shards.broadcast()
        return outcome

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Inside, `model` is a plain copy with whole tensors, which exchanges nothing."""
        if self.model is self._plain:  # finalized
            yield
            return
        self._shards.fill()
        self.model = self._plain
        try:
            yield
        finally:
            self.model = self._model
            self._shards.empty()

    def finalize(self) -> None:
        """Use the plain copy from now on."""
        if self.model is not self._plain:
            self._shards.fill()
            self.model = self._plain

    def state(self) -> dict[str, Tensor]:
        """Whole tensors, put together at rank 0 from all workers' shards; the others only send theirs."""
        finalized = self.model is self._plain
        if not finalized:
            self._shards.fill(rank_0_only=True)
        packed = state.pack(self._plain, self._optimizer, self._shards.gathered)
        if not finalized:
            self._shards.empty()
        return packed if self._transport.rank == 0 else {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this worker's rows of the tensors."""
        with self.consolidated():
            state.unpack_model(tensors, self._plain)
            self._shards.take()
        state.unpack_optimizer(tensors, self._optimizer, self._shards.part)
        self._header.rebase()

    def _matched(self, micro_batches: Iterable[Batch], total: int) -> Iterator[Batch | None]:
        """This worker's micro-batches, then an empty one for each that another worker has more.

        Shares differ by at most one sample, so where the batch divides evenly so do the micro-batches.
        """
        if total % self._transport.size:
            batches = list(micro_batches)
            counts = self._transport.all_gather(torch.tensor([len(batches)]))
            micro_batches = batches
            missing = max(int(count) for count in counts) - len(batches)
        else:
            missing = 0
        for batch in micro_batches:
            if self._sample is None:
                one = (trees.rows(tree, slice(0, 1)) for tree in batch)
                self._sample = Batch(*(trees.mapped(Tensor.clone, tree) for tree in one))
            yield batch
        yield from [None] * missing

    def _run_empty(self) -> None:
        """Gather and sum with the others; change no sum, no statistics and no random state."""
        if self._sample is None:
            self._sample = self._example(1)
        model = self._model
        modes = [(module, module.training) for module in model.modules()]
        before = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.random.fork_rng(devices=[self._own.device] if self._own.is_cuda else []):
            model.eval()
            self._compute.backward(self._compute.forward(model, self._sample, weight=0.0))
        for module, training in modes:
            module.training = training
        for buffer, values in before:
            buffer.copy_(values)

    def _watch(self) -> None:
        """Record which parameters get a gradient: FSDP sums zeros for those that do not."""
        watched: set[str] = set()
        for unit in self._units:
            unit.unshard()
            for name, parameter in self._model.named_parameters():
                # those that are not sharded appear with every unit
                if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in watched:
                    parameter.register_hook(partial(self._note_use, name))  # type: ignore[no-untyped-call]
                    watched.add(name)
            unit.reshard()

    def _note_use(self, name: str, gradient: Tensor) -> None:
        if self._notes_use:
            self._used.add(name)

    @torch.no_grad()
    def _take_gradients(self, missing: set[int]) -> None:
        """Give the optimizer this worker's rows of the gradients, none where no worker had a gradient."""
        for number, (name, parameter) in enumerate(self._named.items()):
            gradient, parameter.grad = parameter.grad, None
            local = self._local[name]
            if number in missing:
                continue
            if isinstance(parameter, DTensor):
                assert isinstance(gradient, DTensor)
                local.grad = gradient.to_local()
            else:
                summed = torch.zeros_like(parameter) if gradient is None else gradient
                self._transport.all_reduce(summed)
                local.grad = self._shards.part(name, summed)

    def _norms(self, parts: list[Tensor]) -> Tensor:
        """The norms of whole tensors, of which every worker holds some rows."""
        squares = torch.stack([part.square().sum() for part in parts])
        return self._transport.all_reduce(squares).sqrt_()

    def _norm(self, parts: list[Tensor]) -> Tensor:
        """The norm of the whole gradient."""
        if not parts:  # no parameter had a gradient, anywhere
            return torch.zeros(())
        whole: Tensor = torch.linalg.vector_norm(self._norms(parts))
        return whole


def _local(gradients: Iterable[Tensor]) -> Iterator[Tensor]:
    """This worker's rows of gradients."""
    return (each.to_local() if isinstance(each, DTensor) else each for each in gradients)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of the model with the same buffers and empty parameters."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
    try:
        made = copy.deepcopy(model, memo)
    except RuntimeError as error:
        raise UsageError(
            f"strategy sharded needs a copy of the model, which cannot be made ({_first_line(error):.90}): "
            "use torch.nn.utils.parametrizations instead of hooks, or another strategy"
        ) from error
    for module, twin in zip(model.modules(), made.modules(), strict=True):
        twin._buffers = module._buffers  # also buffers that will be replaced
    return made


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _shard(model: nn.Module, transport: Transport) -> list[FSDPModule]:
    """Shard a model block by block over a transport's process group, with sums instead of means."""
    device = next(model.parameters(), torch.empty(0)).device
    mesh = DeviceMesh.from_group(transport.process_group, device.type)  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP shards nothing else
    units, left_out = _units(model)
    for module in units:
        module.register_forward_hook(_own_outputs)  # before FSDP's own hook, which sees what it returns
    replaced = ((name, p) for name, p in model.named_parameters() if p not in left_out)
    refuse_use("by strategy sharded", "which keeps the initial values", replaced)
    made = [
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model, ignored_params=left_out)
        for unit in units
    ]
    for module, unit in zip(units, made, strict=True):
        if _begins_in_place(module):
            module.register_forward_pre_hook(
                _own_inputs, with_kwargs=True
            )  # after FSDP's own hook, which passes a view
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            # workers may use different parameters; an older FSDP requires the same ones
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        if device.type == "cpu":  # on CUDA they overlap with computation, and a clock would wait for them
            route_messages(unit, transport)
    return made


def _units(model: nn.Module) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """The modules that are gathered at one time, blocks before the model, and the unsharded parameters."""
    try:
        blocks = blocks_of(model)
    except UsageError:
        blocks = []
    inside = {id(module) for module in model.modules()}
    if joined(blocks) or any(id(block) not in inside for block in blocks):
        blocks = []  # modules that share parameters are gathered together
    units = [block for block in blocks if block is not model and any(True for _ in block.parameters())]
    units.append(model)
    left_out: set[nn.Parameter] = set()
    seen: set[int] = set()
    for unit in units:
        mine = [parameter for parameter in unit.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in mine}
        sizes: dict[torch.dtype, int] = {}
        for parameter in mine:
            if parameter.requires_grad:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
        most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        left_out |= {
            p for p in mine if p.dim() == 0 or p.numel() == 0 or (p.requires_grad and p.dtype != most)
        }
    return units, left_out


def _groups(units: list[FSDPModule]) -> int:
    """How many units have parameters of their own; all parameters of the model may be in its blocks."""
    seen: set[int] = set()
    count = 0
    for unit in units:
        assert isinstance(unit, nn.Module)
        found = {id(parameter) for parameter in unit.parameters() if isinstance(parameter, DTensor)}
        count += bool(found - seen)
        seen |= found
    return count


def _begins_in_place(module: nn.Module) -> bool:
    """Whether the first layer declares that it overwrites its inputs."""
    leaves = (layer for layer in module.modules() if not list(layer.children()))
    return bool(getattr(next(leaves, None), "inplace", False))


def _own_inputs(
    module: nn.Module, inputs: tuple[Tree, ...], named: dict[str, Tree]
) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Copies, which the module may overwrite."""
    positional: tuple[Tree, ...] = trees.mapped(Tensor.clone, inputs)
    keywords: dict[str, Tree] = trees.mapped(Tensor.clone, named)
    return positional, keywords


def _own_outputs(module: nn.Module, inputs: object, outputs: Tree) -> Tree:
    """A copy of a view: overwriting a view would disconnect FSDP from backward."""
    return trees.mapped(lambda tensor: tensor.clone() if tensor._base is not None else tensor, outputs)
