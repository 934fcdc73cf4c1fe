"""What is opened in a run's folder is a file: no link, no pipe, no folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.core.atomic_files import read_regular, usable
from manyhands.core.errors import UsageError


def test_a_file_is_read_whole_by_way_of_linked_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"content")
    (tmp_path / "linked").symlink_to("real")
    assert read_regular(tmp_path / "linked/file") == b"content"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "it is a link, not a file"),
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.mkdir(), "it is not a regular file"),
    ],
    ids=["link", "pipe", "folder"],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path / "it")
    with pytest.raises(OSError, match=reason):
        read_regular(tmp_path / "it")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("a" * 256, "a name may have at most 255 bytes, a path 3,800"),
        ("é" * 128, "a name may have at most 255 bytes, a path 3,800"),
        ("/".join(["a" * 200] * 20), "a name may have at most 255 bytes, a path 3,800"),
        ("a/" * 300, "it has 300 levels of folders, at most 200 are allowed"),
        ("a\0b", "it contains a NUL character"),
        ("a\udcff", "it is not text in UTF-8"),
    ],
)
def test_a_path_that_nothing_can_be_made_at(path: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be a path: {reason}$"):
        usable(Path(path))


def test_paths_as_people_have_them() -> None:
    for path in ("runs/x", "/tmp/a b/ü", "a" * 255, "a/" * 150, "."):
        assert usable(Path(path)) == Path(path)
