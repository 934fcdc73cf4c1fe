"""How a value or a name is repeated in a message."""

from __future__ import annotations

import pytest

from manyhands.core.errors import cut, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two", "'two'"),
        (3, "3"),
        (None, "None"),
        ("a" * 80, f"'{'a' * 80}'"),
        ("a" * 5000, f"'{'a' * 80}...' (5,000 characters)"),
        ("\n" * 100, f"'{chr(92) + 'n'}" + f"{chr(92)}n" * 79 + "...' (100 characters)"),
        (list(range(1000)), f"{str(list(range(1000)))[:80]}... (4,890 characters)"),
    ],
)
def test_shown(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_that_python_does_not_write_down() -> None:
    assert shown(10**5000) == "a number of thousands of digits"


def test_a_message_is_one_line_of_words_that_can_be_read() -> None:
    assert (
        cut(f"there is no file {'x' * 5000}: look")
        == f"there is no file {'x' * 80}... (5,000 characters): look"
    )
    assert cut("a path of 200 letters stays " + "y" * 200) == "a path of 200 letters stays " + "y" * 200
    assert cut("red \x1b[31m\n") == r"red \x1b[31m\n"
