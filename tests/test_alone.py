"""What `make test` knows of single tests by name is true."""

from __future__ import annotations

import pytest

from conftest import ALONE, FIRST, ROOT


@pytest.mark.parametrize("name", [*ALONE, *FIRST])
def test_the_files_and_tests_exist(name: str) -> None:
    """A test that was renamed would run beside others, and a file would begin last."""
    text = (ROOT / "tests" / name).read_text()
    for start in ALONE.get(name, ()):
        assert f"def {start.partition('[')[0]}" in text, start
