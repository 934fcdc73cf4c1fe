"""What is opened in a run's folder is a file: no link, no pipe, no folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.files import read_regular


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
