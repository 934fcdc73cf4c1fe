"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest

from manyhands.core import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0412, "41 ms"),
        (0.25, "0.2 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


def test_the_rest() -> None:
    assert formatting.count(60000, "images") == "60,000 images"
    assert [formatting.plural(n, "epoch") for n in (1, 2, 0.5)] == ["1 epoch", "2 epochs", "0.5 epochs"]
    assert formatting.plural(4_597_260, "parameter") == "4,597,260 parameters"
    parts = [formatting.plural(n, "micro-batch", "micro-batches") for n in (1, 2)]
    assert parts == ["1 micro-batch", "2 micro-batches"]
    assert formatting.score(0.98765, "accuracy") == "98.77 %"
    assert formatting.score(0.00123456, "excess loss") == "0.001235"
    assert formatting.score(None, "accuracy") == "-"
    assert formatting.threshold(0.985, "accuracy") == "98.5 %"
    assert [formatting.size(n) for n in (999, 57_000_000, 2.5e9)] == ["999 B", "57 MB", "2.5 GB"]
    assert formatting.rate(1730.4, "images") == "1,730 images/s"
    assert formatting.rate(0.5) == "0.5 samples/s"
    assert (
        formatting.where_the_time_went({"backward": 6, "data": 0.01, "forward": 3})
        == "backward 67 %, forward 33 %"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("2GB", 2_000_000_000),
        ("2 gb", 2_000_000_000),
        (" 500 MB ", 500_000_000),
        ("500M", 500_000_000),
        ("1.5GiB", 1_610_612_736),
        ("1KiB", 1024),
        ("0.5TB", 500_000_000_000),
        ("0", 0),
    ],
)
def test_bytes(text: str, number: int) -> None:
    assert formatting.nbytes(text) == number


@pytest.mark.parametrize("text", ["", "2XB", "GB", "-1GB", "1e9", "2 G B", "1,5GB", "2GBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a size such as 2GB, 500MB or 1\.5GiB, got "):
        formatting.nbytes(text)


@pytest.mark.parametrize("number", [1, 999, 57_000_000, 2_500_000_000, 4_000_000_000_000])
def test_a_size_that_is_written_is_read_again(number: int) -> None:
    assert formatting.nbytes(formatting.size(number)) == number


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_a_dash(number: float) -> None:
    assert formatting.duration(number) == "-"
    assert formatting.size(number) == "-"


def test_ages() -> None:
    """A loss of pace makes the time left as long as one likes: it was hours with 300 digits."""
    assert formatting.duration(1e308) == "3.17e+300 years"
    assert formatting.duration(2 * formatting.YEAR) == "2 years"


def test_a_line_does_not_end_between_a_number_and_its_unit() -> None:
    text = "answer: the machine varied by 14 % in 2 min 5 s\x1b"
    assert formatting.wrapped(text, 31, then="  ") == (
        "answer: the machine varied by\n  14 % in 2 min 5 s\\x1b"
    )
    assert formatting.together("12 % of 3 GB, 4 samples") == "12\u00a0% of 3\u00a0GB, 4 samples"
