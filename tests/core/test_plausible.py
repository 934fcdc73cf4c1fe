"""What cores and devices can give, and speed-ups on both sides of it."""

from __future__ import annotations

import pytest

from manyhands.core import plausible
from manyhands.core.statistics import Summary


@pytest.mark.parametrize(
    ("workers", "threads", "known", "limit"),
    [
        (2, 1, {"cores": 2}, 2),
        (4, 1, {"cores": 2}, 2),  # they take turns
        (2, 1, {"cores": 8}, 2),  # the others are idle
        (2, 4, {"cores": 8}, 8),
        (1, 2, {"cores": 2}, 2),
        (4, 1, {"cores": 2, "hosts": ["a", "b", "a", "b"]}, 4),
        (4, 1, {"cores": 2, "hosts": ["a", "a", "a", "b"]}, 3),
        (4, 2, {}, 8),  # nobody counted the cores
        (4, 1, {"cores": 2, "device": "cuda:0"}, 4),
    ],
)
def test_the_limit_is_what_they_can_keep_busy(workers: int, threads: int, known: dict, limit: int):
    assert plausible.limit(workers, threads, **known) == limit


@pytest.mark.parametrize(("low", "beyond"), [(1.9, False), (2.0, False), (2.01, True)])
def test_a_speed_up_is_implausible_if_all_of_it_is_beyond(low: float, beyond: bool):
    assert plausible.implausible(Summary(2.4, low, 3.0, 1), 2) is beyond


def test_the_sentence_names_the_speed_its_interval_and_the_limit():
    assert plausible.sentence(Summary(41.2, 35.2, 48.0, 1), 2, "one worker with one thread") == (
        "41x one worker with one thread (35x to 48x) is implausible: 2 cores can give 2x. The baseline was "
        "probably slow: measure both again on an idle machine."
    )
    assert plausible.sentence(Summary(2.1, 2.04, 2.16, 6), 2, "one worker").endswith(
        "Either the baseline was slow throughout, or a worker's share of the batch fits a cache that the "
        "whole "
        "batch does not."
    )
    assert "2.37x one worker (2.10x to 2.68x) is implausible: 2 devices can give 2x." in plausible.sentence(
        Summary(2.37, 2.1, 2.68, 1), 2, "one worker", "cuda:0"
    )
