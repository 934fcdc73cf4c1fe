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

from manyhands.core import formatting
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data import generators, trees
from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.call import call
from manyhands.tasks.base import Task
from manyhands.tasks.checked_loss import check
from manyhands.tasks.contract import check_real, check_sizes, check_targets, scored
from manyhands.tasks.model_parts import keras_norms
from manyhands.tasks.prepare import prepare

Parameter = weakref.ReferenceType[nn.Parameter]
FEW = 8  # samples
NAMED = 5  # parameters without a gradient that are named


class Examination(NamedTuple):
    """What was found in a task that can be trained."""

    notes: tuple[str, ...]  # what a person should know
    needs_two: bool  # whether the model cannot train on one sample, because of a batch norm
    keras_norms: bool = False  # whether Keras computes batch norms, which nobody can synchronize


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
    task = replace(task, preprocess=copy.deepcopy(task.preprocess).to(device, dtype))
    with _said(f"preprocess of {task.name} fails on the first training samples"):
        batch = prepare(task, train, device, dtype)
    with _said(f"the model of {task.name} fails on the first {batch.size} training samples"):
        outputs = call(model, batch.inputs)
    loss = _checked_loss(task, device, dtype)
    with _said(f"the loss of {task.name} fails on the outputs of the model"):
        check(loss, outputs, batch.targets)
        found = loss(outputs, batch.targets)
    missing = _without_gradient(task, model, found)
    _score(task, model, prepare(task, test, device, dtype))
    notes = (_named(missing),) if missing else ()
    return Examination(notes, _needs_two(model, batch), keras_norms(model)), first


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
    for name in ("model", "loss", "preprocess"):
        part = getattr(task, name)
        if not callable(part):
            raise UsageError(f"the {name} of {task.name} must be a function, but is a {type(part).__name__}")
    if isinstance(task.model, nn.Module):
        raise UsageError(
            f"the model of {task.name} is a network: give a function that builds it, such as model=lambda: "
            f"{type(task.model).__name__}(...), so that every worker builds the same one from its seed"
        )
    if not isinstance(task.preprocess, nn.Module):
        raise UsageError(
            f"preprocess of {task.name} must be an nn.Module, but is a {type(task.preprocess).__name__}"
        )


def _model(task: Task, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with _said(f"the model of {task.name} cannot be built"):
        model: Any = task.build(dtype)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {task.name} must be an nn.Module, but is a {type(model).__name__}")
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
            raise UsageError(f"stream of {name} must yield mh.Batch, but yields a {type(batch).__name__}")
        return batch

    first, second = read(), read()
    for what, leaf in (*trees.named(first.inputs, "inputs"), *trees.named(first.targets, "targets")):
        rows = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None
        if leaf is not None and rows != len(samples):
            shape = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
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
    listed = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
    count = formatting.plural(len(missing), "parameter")
    gets = "gets" if len(missing) == 1 else "get"
    return f"{count} of the model {gets} no gradient from the first samples: {listed}"


@torch.no_grad()
def _score(task: Task, model: nn.Module, batch: Batch) -> None:
    model.eval()
    with _said(f"the metric {task.metric.name} of {task.name} fails on the first test samples"):
        scored(task.metric, call(model, batch.inputs), batch.targets, batch.size)


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
