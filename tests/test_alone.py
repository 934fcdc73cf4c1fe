"""What `make test` knows of single tests by name is true."""

from __future__ import annotations

import pytest

from conftest import ALONE, FIRST, ROOT, SOAK

TABLES = [(name, starts) for table in (ALONE, SOAK) for name, starts in table.items()]


@pytest.mark.parametrize(("name", "starts"), [*TABLES, *((name, ()) for name in FIRST)])
def test_the_files_and_tests_exist(name: str, starts: tuple[str, ...]) -> None:
    """A test that was renamed would run beside others, or take long in `make test`."""
    text = (ROOT / "tests" / name).read_text()
    for start in starts:
        plain = start.partition("[")[0]
        assert f"def {plain}" in text or f"class {plain}" in text, start
