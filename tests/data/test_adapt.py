"""What people have becomes a data set, or is refused in one sentence; samples stay a pure function."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from bring.rows import Squares, padded
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data import trees
from manyhands.data.adapt import as_dataset
from manyhands.data.arrays import ArrayData
from manyhands.data.base import Batch, Request
from manyhands.data.map_style import MapData
from manyhands.data.order import Order

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


def read(data: Any, samples: list[int], epoch: int = 0, seed: int = 0) -> Batch:
    with closing(data.stream([Request(epoch, np.array(samples, dtype=np.int64))], seed)) as stream:
        batch: Batch = next(stream)
    return batch


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "more": {"twice": 2 * index}, "labels": index}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return itertools.count()


GIVEN: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "tables": lambda: (pd.DataFrame(X.numpy(), columns=["a", "b"]), pd.Series(Y.numpy())),
    "read-only arrays": lambda: (np.broadcast_to(X.numpy(), (10, 2)), Y.numpy()),
    "big-endian arrays": lambda: (X.numpy().astype(">f4"), Y.numpy().astype(">i8")),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "list of pairs": lambda: list(zip(X, Y, strict=True)),
    "Subset": lambda: Subset(TensorDataset(X.flip(0), Y.flip(0)), list(range(9, -1, -1))),
    "ConcatDataset": lambda: ConcatDataset([TensorDataset(X[:4], Y[:4]), TensorDataset(X[4:], Y[4:])]),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
    "DataLoader in order": lambda: DataLoader(list(zip(X, Y, strict=True)), batch_size=3),
    "ArrayData": lambda: ArrayData(X, Y),
}


@pytest.mark.parametrize("name", GIVEN)
def test_it_is_the_same_data(name: str) -> None:
    data = as_dataset(GIVEN[name]())
    assert len(data) == 10
    batch = read(data, [7, 0, 3])
    assert torch.equal(batch.inputs, X[[7, 0, 3]])
    assert batch.targets.tolist() == [7, 0, 3]


def test_a_dict_is_inputs_by_name_and_one_target() -> None:
    batch = read(as_dataset(Dicts()), [4, 2])
    assert trees.equal(batch.inputs, {"x": X[[4, 2]], "more": {"twice": torch.tensor([8, 4])}})
    assert batch.targets.tolist() == [4, 2]


def test_of_several_tensors_the_last_is_the_target() -> None:
    batch = read(as_dataset(TensorDataset(X, Y, Y + 1)), [5])
    assert trees.equal(batch.inputs, (X[[5]], Y[[5]]))
    assert batch.targets.tolist() == [6]


def test_of_a_tuple_of_several_arrays_the_last_is_the_target() -> None:
    batch = read(as_dataset((X, X.numpy()[:, :1], Y)), [7, 0])
    assert [tensor.shape[1] for tensor in batch.inputs] == [2, 1]
    assert batch.targets.tolist() == [7, 0]


def test_a_collate_fn_pads_each_batch() -> None:
    loader = DataLoader([torch.ones(n, dtype=torch.int64) for n in (1, 4, 2)], collate_fn=padded)  # type: ignore[arg-type]
    batch = read(as_dataset(loader), [0, 2])
    assert batch.inputs.tolist() == [[1, 0], [1, 1]]
    assert batch.targets.tolist() == [[1, -100], [1, 1]]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "train is None: give a torch Dataset or DataLoader, a Hugging Face"),
    "a text": (lambda: "data.csv", "train is a str: give a torch Dataset"),
    "a dict": (lambda: {"x": X, "y": Y}, "train is a dict: give"),
    "lists of numbers": (lambda: ([1.0, 2.0], [0, 1]), "the data hold no tensor: turn lists of numbers"),
    "a table": (lambda: pd.DataFrame({"x": [1.0], "y": [0]}), "train is a table: give (inputs, targets), su"),
    "inputs only": (lambda: X, "train has no targets: give (inputs, targets)"),
    "one tensor": (lambda: TensorDataset(X), "train is a TensorDataset of one tensor and has no targets"),
    "uneven": (lambda: (X, Y[:9]), "10 inputs but 9 targets: each sample needs both"),
    "uneven trees": (lambda: ({"a": X, "b": X[:3]}, Y), "10 inputs.a but 3 inputs.b: each sample needs"),
    "texts": (lambda: (np.array(["a", "b"]), Y[:2]), "an array of <U1 cannot be a tensor: turn texts"),
    "a number": (lambda: (X, torch.tensor(3)), "targets is one number, but its first dimension must count"),
    "an iterator": (Endless, "train is an IterableDataset, which has no samples by number: manyhands deals"),
    "a loader of an iterator": (lambda: DataLoader(Endless()), "train is an IterableDataset, which has no"),
    "a sampler": (
        lambda: DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 10, 10)),
        "the DataLoader of train has its own sampler, a WeightedRandomSampler: manyhands deals every sample",
    ),
    "a batch sampler": (
        lambda: DataLoader(
            TensorDataset(X, Y),
            batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(Y), 2, False),
        ),
        "the DataLoader of train has its own batch sampler: manyhands makes the batches",
    ),
    "no batches": (lambda: DataLoader(TensorDataset(X, Y), batch_size=None), "the DataLoader of train reads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused(name: str) -> None:
    given, sentence = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        as_dataset(given())
    assert str(caught.value).startswith(sentence)


SAMPLES: dict[str, tuple[list[Any], str]] = {
    "no target": ([X[0], X[1]], "a sample must be (input, target), but a batch of them is a Tensor: use a"),
    "no target in a dict": ([{"x": 1}], "a sample that is a dict must have its target under one of labels, "),
    "two targets": ([{"label": 1, "target": 2}], "a sample that is a dict must have its target under one of"),
    "texts": ([("a", 1)], "the inputs of a batch hold a str, not a tensor: turn it into numbers in the data"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_cannot_be_used_are_refused(name: str) -> None:
    given, sentence = SAMPLES[name]
    with pytest.raises(UsageError) as caught:
        read(as_dataset(given), [0])
    assert str(caught.value).startswith(sentence)


def test_what_is_taken_from_a_loader_is_said() -> None:
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, collate_fn=padded, drop_last=True)
    data = as_dataset(loader, "test")
    assert isinstance(data, MapData)
    assert (data.workers, data.collate_fn) == (2, padded)
    assert data.notes == (
        "test: the data set, collate_fn and 2 reading processes per worker of the DataLoader are used; batch "
        "size and order are those of the run, and --drop-last leaves out the last short batch",
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_random_samples_are_a_pure_function(workers: int) -> None:
    """Of (seed, epoch, sample): whatever was read before, in whatever batch, by however many processes."""
    data = MapData(Squares(noisy=True), workers=workers)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    with data.pooled() as source:
        several = read(source, [3, 8, 1], epoch=2, seed=5).inputs
        for row, sample in enumerate((3, 8, 1)):
            assert torch.equal(read(source, [sample], epoch=2, seed=5).inputs[0], several[row])
        assert not torch.equal(read(source, [3], epoch=3, seed=5).inputs[0], several[0])
        assert not torch.equal(read(source, [3], epoch=2, seed=6).inputs[0], several[0])
        alone = MapData(Squares(noisy=True))
        assert torch.equal(read(alone, [3, 8, 1], epoch=2, seed=5).inputs, several)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index]


def test_a_batch_that_draws_is_read_again_once() -> None:
    calls: list[int] = []

    class Sometimes(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            calls.append(index)
            return (torch.rand(1) if index > 4 else torch.zeros(1)), index

    data = MapData(Sometimes())
    read(data, [0, 1])
    assert calls == [0, 1]
    read(data, [5, 6])
    assert calls == [0, 1, 5, 6, 5, 6]
    read(data, [7])
    assert calls == [0, 1, 5, 6, 5, 6, 7]


class TestDecoders:
    def test_batches_come_in_order_and_no_answer_is_left_over(self) -> None:
        requests = list(itertools.islice(Order(37, 5, 0).batches(), 20))
        expected = [batch.targets.tolist() for batch in MapData(Squares()).stream(requests, 0)]
        with MapData(Squares(), workers=3).pooled() as source:
            for stop in (20, 3, 20):
                with closing(source.stream(requests, 0)) as stream:
                    found = [batch.targets.tolist() for batch in itertools.islice(stream, stop)]
                assert found == expected[:stop]
        assert multiprocessing.active_children() == []

    def test_an_error_of_a_sample_is_raised_where_it_is_read(self) -> None:
        class Bad(Squares):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                if index == 3:
                    raise OSError(f"no file {index}")
                return super().__getitem__(index)

        with MapData(Bad(), workers=2).pooled() as source:
            with pytest.raises(OSError, match=r"^no file 3$"):
                read(source, [1, 3])
            assert read(source, [1, 2]).size == 2

    def test_a_process_that_dies_is_a_sentence(self) -> None:
        class Deadly(Squares):
            def __getitem__(self, index: int) -> tuple[Tensor, int]:
                os.kill(os.getpid(), signal.SIGKILL)
                return super().__getitem__(index)

        with (
            MapData(Deadly(), workers=2).pooled() as source,
            pytest.raises(ManyhandsError, match=r"^process 0 of the 2 that read the data has died \(signal"),
        ):
            read(source, [1])

    def test_processes_end_with_a_parent_that_is_killed(self) -> None:
        ours, theirs = multiprocessing.Pipe()

        def parent() -> None:
            with MapData(Squares(), workers=2).pooled() as source:
                read(source, [1])
                theirs.send([child.pid for child in multiprocessing.active_children()])
                signal.pause()

        process = multiprocessing.get_context("fork").Process(target=parent)
        process.start()
        children = ours.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for child in children:
            _wait_until_gone(child)


def _wait_until_gone(pid: int) -> None:
    import time

    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


class TestHuggingFace:
    @pytest.fixture
    def datasets(self) -> Any:
        return pytest.importorskip("datasets")

    def test_columns_by_name(self, datasets: Any) -> None:
        data = as_dataset(datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}))
        batch = read(data, [7, 0, 3])
        assert torch.equal(batch.inputs["x"], X[[7, 0, 3]])
        assert batch.targets.tolist() == [7, 0, 3]

    def test_columns_that_the_user_hides_stay_hidden(self, datasets: Any) -> None:
        columns = {"x": X.tolist(), "leak": Y.tolist(), "label": Y.tolist()}
        for kind in ("numpy", "torch", None):
            table = datasets.Dataset.from_dict(columns)
            table.set_format(kind, columns=["x", "label"])
            assert list(read(as_dataset(table), [7, 0]).inputs) == ["x"]

    def test_a_transform_of_the_user(self, datasets: Any) -> None:
        table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
        table.set_transform(lambda rows: {"x": [torch.rand(1) for _ in rows["x"]], "label": rows["label"]})
        data = as_dataset(table)
        assert torch.equal(read(data, [1, 2]).inputs["x"][1], read(data, [2]).inputs["x"][0])

    @pytest.mark.parametrize(
        ("columns", "sentence"),
        [
            ({"x": ["a", "b"], "label": [0, 1]}, "column x holds str, not numbers: turn it into numbers, or"),
            ({"x": [[1], [1, 2]], "label": [0, 1]}, "the rows of column x have different lengths: pad them"),
        ],
    )
    def test_columns_that_are_not_numbers(self, datasets: Any, columns: Any, sentence: str) -> None:
        with pytest.raises(UsageError) as caught:
            read(as_dataset(datasets.Dataset.from_dict(columns)), [0, 1])
        assert str(caught.value).startswith(sentence)

    def test_several_splits(self, datasets: Any) -> None:
        splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})})
        with pytest.raises(UsageError, match=r"^train holds several data sets \(train\): give one of them"):
            as_dataset(splits)
