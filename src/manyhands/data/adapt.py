"""What people already have, as a data set: arrays, torch's data sets and loaders, Hugging Face's tables."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from manyhands.core import formatting
from manyhands.core.errors import UsageError, kind_of
from manyhands.data.arrays import ArrayData
from manyhands.data.base import Batch, Dataset, Request
from manyhands.data.map_style import MapData, as_batch

KINDS = (
    "a torch Dataset or DataLoader, a Hugging Face Dataset, (inputs, targets) as tensors or numpy arrays, or "
    "an object with __len__ and stream"
)


def as_dataset(given: Any, name: str = "train") -> Dataset:
    """A data set of this kind, or a UsageError that says what it should be."""
    found = _known(given, name)
    if found is not None:
        return found
    raise UsageError(f"{name} is {kind_of(given)}: give {KINDS}")


def _known(given: Any, name: str) -> Dataset | None:
    if callable(getattr(given, "stream", None)) and hasattr(type(given), "__len__"):
        own: Dataset = given
        return own
    if isinstance(given, tuple) and len(given) == 2:
        return ArrayData(*given)
    if isinstance(given, tuple) and len(given) > 2 and all(map(_is_array, given)):
        return ArrayData(given[:-1], given[-1])  # several inputs
    if _is_frame(given):
        raise UsageError(
            f"{name} is a table: give (inputs, targets), such as (table[columns], table[column])"
        )
    if isinstance(given, DataLoader):
        return _of_loader(given, name)
    if isinstance(given, TensorDataset):
        return _of_tensors(given, name)
    if isinstance(given, IterableDataset) or type(given).__name__ == "IterableDataset":
        raise UsageError(
            f"{name} is an IterableDataset, which has no samples by number: manyhands deals every sample to "
            "one worker, once per epoch, and resumes at any of them; give a data set with __len__ and "
            "__getitem__"
        )
    if type(given).__module__.partition(".")[0] == "datasets":
        return _of_hugging_face(given, name)
    if isinstance(given, Tensor | np.ndarray):
        raise UsageError(f"{name} has no targets: give (inputs, targets)")
    if (
        hasattr(given, "__getitem__")
        and hasattr(given, "__len__")
        and not isinstance(given, str | bytes | dict)
    ):
        return MapData(given)
    return None


def _is_array(value: object) -> bool:
    return (isinstance(value, Tensor | np.ndarray) and value.ndim > 0) or _is_frame(value)


def _is_frame(value: object) -> bool:
    """Whether it is a table or a column of pandas, or of a library like it."""
    return callable(getattr(value, "to_numpy", None)) and hasattr(value, "shape")


def _of_tensors(given: TensorDataset, name: str) -> Dataset:
    if len(given.tensors) < 2:
        raise UsageError(
            f"{name} is a TensorDataset of one tensor and has no targets: give it inputs and targets"
        )
    *inputs, targets = given.tensors
    return ArrayData(inputs[0] if len(inputs) == 1 else tuple(inputs), targets)


def _of_loader(loader: DataLoader[Any], name: str) -> Dataset:
    """The data set, collate_fn and workers of a loader. One that chooses samples itself is refused."""
    if isinstance(loader.dataset, IterableDataset):
        return as_dataset(loader.dataset, name)
    if loader.batch_sampler is None or type(loader.batch_sampler) is not BatchSampler:
        own = "reads single samples" if loader.batch_sampler is None else "has its own batch sampler"
        raise UsageError(
            f"the DataLoader of {name} {own}: manyhands makes the batches; give it batch_size only"
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain:
        raise UsageError(
            f"the DataLoader of {name} has its own sampler, {kind_of(sampler)}: manyhands deals "
            "every sample to one worker, once per epoch; give the data set itself, or a DataLoader without "
            "a sampler"
        )
    inner = as_dataset(loader.dataset, name)
    own_collate = loader.collate_fn is not default_collate
    if isinstance(inner, MapData) or own_collate:
        inner = MapData(
            loader.dataset,
            loader.collate_fn,
            workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
        )
    taken = ["data set", *(["collate_fn"] if own_collate else [])]
    if isinstance(inner, MapData) and loader.num_workers:
        taken.append(f"{loader.num_workers} reading process{'es' * (loader.num_workers > 1)} per worker")
    are = "is" if len(taken) == 1 else "are"
    note = (
        f"{name}: the {formatting.listed(taken)} of the DataLoader {are} used; batch size and order are "
        "those of the run"
    )
    if loader.drop_last:
        note += ", and --drop-last leaves out the last short batch"
    return replace(inner, notes=(note,)) if isinstance(inner, MapData) else _Noted(inner, (note,))


@dataclass(frozen=True, eq=False)
class _Noted:
    """A data set with a note."""

    inner: Dataset
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inner)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        return self.inner.stream(requests, seed)


def _of_hugging_face(given: Any, name: str) -> Dataset:
    if isinstance(given, dict):
        splits = ", ".join(given)
        raise UsageError(
            f"{name} holds several data sets ({splits}): give one of them, such as "
            f"data[{next(iter(given))!r}]"
        )
    if given.format["type"] == "custom":  # set_transform: a function of the user's makes the samples
        return MapData(given)
    chosen = given.format
    more = chosen["format_kwargs"] if chosen["type"] == "torch" else {}
    shown = {"columns": chosen["columns"], "output_all_columns": chosen["output_all_columns"]}
    return Table(given.with_format("torch", **shown, **more))


@dataclass(frozen=True, eq=False)
class Table:
    """A Hugging Face data set in memory or in memory-mapped files: columns by name, rows by number."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Read the rows of each request; a table is not augmented, so the seed has no effect."""
        for request in requests:
            columns = dict(self.table[request.samples.tolist()])
            for column, values in columns.items():
                if isinstance(values, list):
                    raise UsageError(_not_a_tensor(column, values))
            yield as_batch(columns)


def _not_a_tensor(column: str, values: list[Any]) -> str:
    if values and isinstance(values[0], Tensor):
        return (
            f"the rows of column {column} have different lengths: pad them to one length, or give a "
            "DataLoader with a collate_fn that pads each batch"
        )
    kind = type(values[0]).__name__ if values else "nothing"
    return (
        f"column {column} holds {kind}, not numbers: turn it into numbers, or remove it with remove_columns"
    )
