"""Sparse samples: packed and unpacked bit by bit, gathered as scipy does, read from svmlight files."""

from __future__ import annotations

import bz2
import gzip
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.datasets import dump_svmlight_file

from manyhands.core.errors import UsageError
from manyhands.data.base import Batch, Request
from manyhands.data.order import Order
from manyhands.data.sparse_samples import SparseData, pack, svmlight, svmlight_files, unpack

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 7))


def sparse_data(lengths: list[int], features: int = 9, seed: int = 0) -> SparseData:
    generator = np.random.default_rng(seed)
    rows = [np.sort(generator.permutation(features)[:length]) for length in lengths]
    indices = np.concatenate([np.empty(0, dtype=np.int64), *rows]).astype(np.int64)
    values = generator.standard_normal(len(indices)).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return SparseData(indptr, indices, values, generator.integers(0, 2, len(lengths)), features)


def matrix(data: SparseData) -> scipy.sparse.csr_matrix:
    return scipy.sparse.csr_matrix((data.values, data.indices, data.indptr), shape=(len(data), data.features))


def dense(batch: Batch, features: int) -> np.ndarray:
    """A packed batch as a matrix; the last column is where padding goes."""
    indices, values = unpack(batch.inputs)
    out = torch.zeros(batch.size, features + 1)
    return out.scatter_add_(1, indices, values).numpy()


def read(data: SparseData, samples: list[int]) -> Batch:
    (batch,) = data.stream([Request(0, np.array(samples, dtype=np.int64))], seed=0)
    return batch


# ---- one tensor


@given(
    SIZES.flatmap(
        lambda size: st.tuples(
            arrays.arrays(np.int64, size, elements=st.integers(0, 2**63 - 1)),
            arrays.arrays(np.uint32, size, elements=st.integers(0, 2**32 - 1)),
        )
    )
)
def test_what_is_unpacked_is_what_was_packed_bit_by_bit(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Features beyond what a float can count, and any float at all: minus zero, NaN with its payload."""
    indices, bits = torch.from_numpy(pair[0]), torch.from_numpy(pair[1].view(np.int32))
    packed = pack(indices, bits.view(torch.float32))
    assert packed.shape == (len(indices), 2, indices.shape[1])
    assert packed.dtype == torch.int64
    features, values = unpack(packed)
    assert torch.equal(features, indices)
    assert values.dtype == torch.float32
    assert torch.equal(values.contiguous().view(torch.int32), bits)


# ---- gathering


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12) | st.integers(1, 9).map(lambda w: [w] * 6),
    st.data(),
)
def test_a_batch_is_the_rows_that_scipy_gives(lengths: list[int], draw: st.DataObject) -> None:
    data = sparse_data(lengths)
    samples = draw.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    batch = read(data, samples)
    longest = max(1, *(lengths[sample] for sample in samples))
    assert batch.inputs.shape == (len(samples), 2, longest)
    assert batch.inputs.dtype == torch.int64
    assert np.array_equal(dense(batch, data.features)[:, :-1], matrix(data)[samples].toarray())
    assert batch.targets.tolist() == data.targets[samples].tolist()
    indices, values = unpack(batch.inputs)
    padding = torch.arange(longest) >= torch.tensor([lengths[sample] for sample in samples])[:, None]
    assert torch.equal(indices == data.features, padding)
    assert not values[padding].any()
    assert data.ragged or not padding.any()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_a_part_is_what_scipy_takes(lengths: list[int], draw: st.DataObject) -> None:
    data = sparse_data(lengths)
    samples = draw.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    part = data.take(np.array(samples, dtype=np.int64))
    assert len(part) == len(samples)
    assert part.features == data.features
    assert np.array_equal(matrix(part).toarray(), matrix(data)[samples].toarray())
    assert np.array_equal(part.targets, data.targets[samples])


def test_a_batch_is_what_pack_makes_of_it() -> None:
    batch = read(sparse_data([3, 3, 3]), [2, 0])
    assert torch.equal(pack(*unpack(batch.inputs)), batch.inputs)


@pytest.mark.parametrize("lengths", [[4] * 30, list(range(10)) * 3])
def test_an_epoch_reads_every_sample_once(lengths: list[int]) -> None:
    data = sparse_data(lengths)
    requests = list(islice(Order(30, 7, seed=1).batches(), 5))
    batches = list(data.stream(requests, seed=0))
    order = np.concatenate([request.samples for request in requests])
    assert np.array_equal(
        np.concatenate([dense(batch, 9)[:, :-1] for batch in batches]), matrix(data)[order].toarray()
    )


def test_samples_without_any_feature_are_padding() -> None:
    data = sparse_data([0, 0])
    assert data.ragged
    assert read(data, [1, 0]).inputs.tolist() == [[[9], [0]], [[9], [0]]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"values": np.ones(3)}, "the values are float64, not float32"),
        ({"targets": np.zeros(3, dtype=np.int64)}, "3 row boundaries but 3 targets"),
        ({"values": np.ones(2, np.float32)}, "3 entries by the row boundaries, 3 indices and 2 values"),
        ({"features": 4}, "indices must be from 0 to 3"),
        ({"indices": np.array([0, -1, 2])}, "indices must be from 0 to 4"),
    ],
)
def test_arrays_that_do_not_fit_together(change: dict[str, object], sentence: str) -> None:
    fields: dict[str, object] = {
        "indptr": np.array([0, 1, 3]),
        "indices": np.array([0, 1, 4]),
        "values": np.ones(3, np.float32),
        "targets": np.array([0, 1]),
        "features": 5,
    }
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        SparseData(**{**fields, **change})  # type: ignore[arg-type]


# ---- svmlight

GOOD = b"+1 1:0.5 3:-2 # a comment\n-1 2:1e-3\n\n-1\n+1 qid:7 4:1\n"


def written(path: Path, text: bytes) -> Path:
    opened = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["a.svm", "a.svm.gz", "a.svm.bz2", "a"])
def test_a_file_written_by_hand(tmp_path: Path, name: str) -> None:
    data = svmlight(written(tmp_path / name, GOOD))
    assert (len(data), data.features) == (4, 4)
    assert data.indptr.tolist() == [0, 2, 3, 3, 4]
    assert data.indices.tolist() == [0, 2, 1, 3]
    assert data.values.tolist() == np.float32([0.5, -2, 1e-3, 1]).tolist()
    assert data.targets.tolist() == [1, 0, 0, 1]
    kinds = [field.dtype for field in (data.indptr, data.indices, data.values, data.targets)]
    assert kinds == [np.int64, np.int64, np.float32, np.int64]


@pytest.mark.parametrize("zero_based", [False, True])
@pytest.mark.parametrize("name", ["a.svm", "a.svm.gz"])
def test_what_was_written_is_read_again(tmp_path: Path, name: str, zero_based: bool) -> None:
    data = sparse_data([3, 0, 9, 1, 5])
    dump_svmlight_file(matrix(data), data.targets * 2 - 1, str(tmp_path / "plain"), zero_based=zero_based)
    path = written(tmp_path / name, (tmp_path / "plain").read_bytes())
    again = svmlight(path)
    assert np.array_equal(matrix(again).toarray(), matrix(data).toarray())
    assert np.array_equal(again.targets, data.targets)


def test_there_may_be_more_features_than_the_file_has(tmp_path: Path) -> None:
    assert svmlight(written(tmp_path / "a", GOOD), features=100).features == 100


@pytest.mark.parametrize(
    ("labels", "targets"), [((-1, 1), [0, 1]), ((0, 1), [0, 1]), ((1, 2), [0, 1]), ((0.5, -3), [1, 0])]
)
def test_the_larger_label_is_the_positive_class(
    tmp_path: Path, labels: tuple[float, float], targets: list[int]
) -> None:
    text = f"{labels[0]} 1:1\n{labels[1]} 1:2\n"
    assert svmlight(written(tmp_path / "a", text.encode())).targets.tolist() == targets


def test_files_that_belong_together_count_from_the_same_number(tmp_path: Path) -> None:
    """Read alone, the second file's features would be shifted by one against the first's."""
    first = written(tmp_path / "train", b"1 0:1\n-1 2:1\n")
    second = written(tmp_path / "test", b"-1 1:1 7:1\n")
    train, test = svmlight_files([first, second])
    assert train.features == test.features == 8
    assert train.indices.tolist() == [0, 2]
    assert test.indices.tolist() == [1, 7]
    assert test.targets.tolist() == [0]


NOT_SVMLIGHT = "{path} is not an svmlight file: line {line}: {reason}"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b"1 1:2\n-1 1:a\n", 2, "could not convert string to float: b'a'"),
        (b"1 1:2\n\n# more\nspam 1:1\n", 4, "could not convert string to float: b'spam'"),
        (b"1,2 1:3\n", 1, "could not convert string to float: b'1,2'"),
        (b"1 x:3\n", 1, "invalid literal for int() with base 10: b'x'"),
        (b"1 3:1 2:1\n", 1, "Feature indices in SVMlight/LibSVM data file should be sorted and unique."),
        (b"1 99999999999999999999:1\n", 1, "Python int too large to convert to C long"),
        (b"1 1:1\n" * 25_000 + b"1 1:1:1\n", 25_001, "could not convert string to float: b'1:1'"),
    ],
)
def test_a_line_that_cannot_be_read(tmp_path: Path, text: bytes, line: int, reason: str) -> None:
    for name in ("a", "a.gz"):
        path = written(tmp_path / name, text)
        with pytest.raises(UsageError) as error:
            svmlight(path)
        assert str(error.value) == NOT_SVMLIGHT.format(path=path, line=f"{line:,}", reason=reason)


LABELS = "{path} must have exactly two labels, such as -1 and 1, found "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", LABELS + "none"),
        (b"1 1:1\n", LABELS + "1"),
        (b"1 1:1\n-1 1:1\n0.5 1:1\n", LABELS + "-1, 0.5, 1"),
        (b"".join(b"%d 1:1\n" % label for label in range(1, 54)), LABELS + "1, 2, 3, 4, 5 and 48 more"),
        (b"1 1:1\nnan 1:1\n", LABELS + "1, nan"),
        (b"1 1:1\n-1 1:1 2:nan\n", "{path}: sample 2 has the value nan, not a finite number"),
        (b"1 1:1\n\n-1 1:1\n1 2:1e60\n", "{path}: sample 3 has the value inf, not a finite number"),
    ],
)
def test_a_file_that_is_not_for_two_classes(tmp_path: Path, text: bytes, sentence: str) -> None:
    path = written(tmp_path / "a", text)
    with pytest.raises(UsageError) as error:
        svmlight(path)
    assert str(error.value) == sentence.format(path=path)


def test_no_file_and_no_gzip(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError) as error:
            svmlight(path)
        assert str(error.value) == f"there is no file {path}"
    path = tmp_path / "a.gz"
    path.write_bytes(GOOD)
    with pytest.raises(UsageError) as error:
        svmlight(path)
    assert str(error.value) == f"{path} cannot be read: BadGzipFile: Not a gzipped file (b'+1')"
    whole = gzip.compress(GOOD * 100)
    path.write_bytes(whole[:-20])
    with pytest.raises(UsageError, match=r"a\.gz cannot be read: EOFError: Compressed file ended before"):
        svmlight(path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", GOOD), written(tmp_path / "b", b"0 1:1\n1 1:1\n")
    with pytest.raises(UsageError) as error:
        svmlight_files([first, second])
    assert str(error.value) == f"{second} has the label 0, but {first} has -1 and 1"
    with pytest.raises(UsageError) as error:
        svmlight(first, features=3)
    assert str(error.value) == f"{first} needs 4 features, not 3"
