"""Examine a user's task on a few samples before the first step: each fault is one sentence (law 10).

What a task promises can be checked in a moment: that a sample is the same whenever it is read, that all
tensors have one row per sample, that the model accepts them, that the loss is a mean or (sum, weight) and has
a gradient, and that the metric scores each sample. Nothing is left changed: the model is built only for this,
and random states are restored.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from manyhands.core import formatting
from manyhands.core.errors import ManyhandsError, UsageError, kind_of
from manyhands.data import generators, trees
from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.call import call
from manyhands.data.trees import Tree
from manyhands.tasks.base import Metric, Task
from manyhands.tasks.checked_loss import check
from manyhands.tasks.contract import check_real, check_sizes, check_targets, scored
from manyhands.tasks.model_parts import keras_norms
from manyhands.tasks.prepare import prepare

Parameter = weakref.ReferenceType[nn.Parameter]
FEW = 8  # samples


class Examination(NamedTuple):
    """What was found in a task that can be trained."""

    notes: tuple[str, ...]  # what a person should know
    needs_two: bool  # whether the model cannot train on one sample, because of a batch norm
    keras_norms: bool = False  # whether Keras computes batch norms, which nobody can synchronize
    writes: tuple[str, ...] = ()  # parameters that forward changes


def examine(task: Task, device: torch.device, dtype: torch.dtype) -> Examination:
    """Try the task on its first samples, or raise a UsageError that says what is wrong with it."""
    check_sizes(task)
    _check_parts(task)
    devices = [device] if device.type == "cuda" else []
    with generators.kept(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        found, first = _examine(task, device, dtype)
        _check_new(task, dtype, first)
    return found


def _examine(task: Task, device: torch.device, dtype: torch.dtype) -> tuple[Examination, Parameter | None]:
    """What was found, and a parameter of the model, which should be gone with the model."""
    model = _model(task, device, dtype)
    first = next((weakref.ref(parameter) for parameter in model.parameters()), None)
    train, test = (_read(task, name) for name in ("train", "test"))
    check_targets(task)
    check_real(task.preprocess, f"the preprocessing of {task.name}")
    _check_untrained(task)
    task = replace(task, preprocess=copy.deepcopy(task.preprocess).to(device, dtype))
    with _said(f"preprocess of {task.name} fails on the first training samples"):
        batch = prepare(task, train, device, dtype)
    before = _versions(model)
    with _said(f"the model of {task.name} fails on the first {batch.size} training samples"):
        outputs = call(model, batch.inputs)
    changed = [name for name, version in _versions(model).items() if version != before[name]]
    loss = _checked_loss(task, device, dtype)
    with _said(f"the loss of {task.name} fails on the outputs of the model"):
        check(loss, outputs, batch.targets)
        found = loss(outputs, batch.targets)
    _check_scalars(task, model, batch, outputs, found)
    missing = _without_gradient(task, model, found)
    task.preprocess.eval()
    _score(task, loss, model, prepare(task, test, device, dtype))
    own = dict(model.named_parameters())
    notes = [_named(missing)] if missing else []
    notes += _about_buffers([name for name in changed if name not in own])
    writes = tuple(name for name in changed if name in own)
    return Examination(tuple(notes), _needs_two(model, batch), keras_norms(model), writes), first


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was changed, and each buffer of the user's own modules."""
    found = {name: parameter._version for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(("torch.", "manyhands.")):
            for key, buffer in module.named_buffers(name, recurse=False):
                found[key] = hash((id(buffer), buffer._version))
    return found


def _about_buffers(names: list[str]) -> list[str]:
    if not names:
        return []
    return [
        f"forward changes {formatting.first_few(names)} of the model: with several workers each sees only "
        "its own samples, so such buffers will differ from those of one worker"
    ]


def _check_scalars(task: Task, model: nn.Module, batch: Batch, outputs: Tree, found: Any) -> None:
    """Refuse a scalar of the model that the loss uses and that is not a mean over samples."""
    value = found if isinstance(found, Tensor) else found[0]
    scalars = [tensor for tensor in trees.tensors(outputs) if not tensor.ndim and tensor.requires_grad]
    if not scalars or not value.requires_grad or batch.size < 2:
        return
    gradients = torch.autograd.grad(value, scalars, retain_graph=True, allow_unused=True)
    if not any(gradient is not None and bool(gradient) for gradient in gradients):
        return
    middle = 1 + batch.size // 3 if batch.size > 2 else 1
    model.eval()  # so that dropout makes no difference
    with torch.no_grad():
        parts = (slice(None), slice(0, middle), slice(middle, None))
        whole, one, two = (
            [float(t) for t in trees.tensors(call(model, trees.rows(batch.inputs, part))) if not t.ndim]
            for part in parts
        )
    model.train()
    share = middle / batch.size
    for all_, first, second in zip(whole, one, two, strict=True):
        mean = share * first + (1 - share) * second
        if abs(mean - all_) > 1e-3 * max(abs(all_), abs(mean)) + 1e-6:
            raise UsageError(
                f"the loss of {task.name} uses a scalar of the model that is not a mean over samples: it is "
                f"{all_:.6g} for {batch.size} samples, but {mean:.6g} when computed from two parts of them; "
                "return one value per sample instead, or let the loss return (sum, weight)"
            )


def _check_new(task: Task, dtype: torch.dtype, first: Parameter | None) -> None:
    """Refuse a function that returns the same network each time: this examination has changed it."""
    gc.collect()
    held = first and first()
    if held is not None and any(parameter is held for parameter in task.build(dtype).parameters()):
        raise UsageError(
            f"the model of {task.name} is the same network each time: build it inside the function, so that "
            "every worker and every run begins with a new one"
        )


def _check_parts(task: Task) -> None:
    if not isinstance(task.metric, Metric):
        raise UsageError(
            f"the metric of {task.name} must be an mh.Metric, but is {kind_of(task.metric)}: use "
            "mh.Metric(name=..., scores=...)"
        )
    if isinstance(task.loss, type):
        name = task.loss.__name__
        raise UsageError(f"the loss of {task.name} is the class {name}: use {name}()")
    for name in ("model", "loss", "preprocess"):
        part = getattr(task, name)
        if not callable(part):
            raise UsageError(f"the {name} of {task.name} must be a function, but is {kind_of(part)}")
    if isinstance(task.model, nn.Module):
        raise UsageError(
            f"the model of {task.name} is a network: give a function that builds it, such as model=lambda: "
            f"{type(task.model).__name__}(...), so that every worker builds the same one from its seed"
        )
    if not isinstance(task.preprocess, nn.Module):
        raise UsageError(f"preprocess of {task.name} must be an nn.Module, but is {kind_of(task.preprocess)}")


def _check_untrained(task: Task) -> None:
    """Refuse parameters that nobody trains or saves, and that each process would draw for itself."""
    for name, part in (("preprocess", task.preprocess), ("the loss", task.loss)):
        if isinstance(part, nn.Module) and any(p.requires_grad for p in part.parameters()):
            raise UsageError(
                f"{name} of {task.name} has parameters, but only those of the model are trained and saved: "
                "move them into the model, or freeze them with requires_grad_(False)"
            )


def _model(task: Task, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with _said(f"the model of {task.name} cannot be built"):
        model: Any = task.build(dtype)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {task.name} must be an nn.Module, but is {kind_of(model)}")
    held = (*model.parameters(), *model.buffers())
    if any(isinstance(each, UninitializedParameter | UninitializedBuffer) for each in held):
        raise UsageError(
            f"the model of {task.name} has lazy layers, whose shapes are not known yet: call it once on a "
            "sample inside the function that builds it"
        )
    check_real(model, f"the model of {task.name}")
    return model.to(device, dtype).train()


def _read(task: Task, name: str) -> Batch:
    """The first samples of a data set, read twice to see whether they stay the same."""
    data: Dataset = getattr(task, name)
    samples = np.arange(min(FEW, len(data)), dtype=np.int64)

    def read() -> Batch:
        said = _said(f"the first samples of {name} cannot be read")
        with said, closing(data.stream([Request(0, samples)], seed=0)) as stream:
            batch = next(stream)
        if not isinstance(batch, Batch):
            raise UsageError(f"stream of {name} must yield mh.Batch, but yields {kind_of(batch)}")
        return batch

    first, second = read(), read()
    for what, leaf in (*trees.named(first.inputs, "inputs"), *trees.named(first.targets, "targets")):
        rows = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None
        if leaf is not None and rows != len(samples):
            shape = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{kind_of(leaf)}"
            raise UsageError(
                f"{what} of {name} must be tensors with one row per sample, but {len(samples)} samples have "
                f"{shape}"
            )
    if not trees.equal(tuple(first), tuple(second)):
        raise UsageError(
            f"the samples of {name} are not the same when they are read again with the same seed, so a run "
            "could not be repeated or resumed: draw random numbers from torch, numpy.random or random, not "
            "from a generator of your own"
        )
    return first


def _checked_loss(task: Task, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(task.loss, nn.Module):
        return task.loss
    loss = copy.deepcopy(task.loss).to(device)
    return loss.double() if dtype == torch.float64 else loss


def _without_gradient(task: Task, model: nn.Module, found: Any) -> list[str]:
    """The names of trained parameters that get no gradient; the loss must have one."""
    value, weight = (found, 1.0) if isinstance(found, Tensor) else found
    if not value.requires_grad and float(weight):
        raise UsageError(
            f"the loss of {task.name} has no gradient: it must be computed from the model's outputs by "
            "torch, without .item(), .detach() or numpy"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError(f"the model of {task.name} has no parameter that requires a gradient")
    if value.requires_grad:
        with _said(f"the backward pass of {task.name} fails on the first training samples"):
            value.backward()
    return [name for name, parameter in trained.items() if parameter.grad is None]


def _named(missing: list[str]) -> str:
    count = formatting.plural(len(missing), "parameter")
    gets = "gets" if len(missing) == 1 else "get"
    return f"{count} of the model {gets} no gradient from the first samples: {formatting.first_few(missing)}"


@torch.no_grad()
def _score(task: Task, loss: Any, model: nn.Module, batch: Batch) -> None:
    model.eval()
    with _said(f"the metric {task.metric.name} of {task.name} fails on the first test samples"):
        outputs = call(model, batch.inputs)
        scored(task.metric, outputs, batch.targets, batch.size)
    with _said(f"the loss of {task.name} fails on the first test samples"):
        loss(outputs, batch.targets)


@torch.no_grad()
def _needs_two(model: nn.Module, batch: Batch) -> bool:
    """Whether training on a single sample fails, as batch norm over one value per channel does."""
    if batch.size < 2:
        return False
    model.train()
    try:
        call(model, trees.rows(batch.inputs, slice(0, 1)))
    except Exception as error:  # noqa: BLE001 (no batch may have one sample, and then the model need not take it)
        return "more than 1 value per channel" in str(error)
    return False


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Add to an error of the user's code what failed; the command line names its line."""
    try:
        yield
    except ManyhandsError:
        raise
    except Exception as error:
        error.add_note(f"{what}; nothing was trained")
        raise
