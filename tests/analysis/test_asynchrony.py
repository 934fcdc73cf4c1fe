"""Staleness, and what it costs in samples and saves in seconds."""

from __future__ import annotations

import pytest

from manyhands.analysis.asynchrony import Asynchrony, asynchronous
from manyhands.records.record import RunRecord
from manyhands.testing.records import record


def gang(strategy: str, steps: int | None, rate: float, **fields: object) -> RunRecord:
    return record(strategy=strategy, workers=2, batch=256, steps_to_target=steps, rate=rate, **fields)


def by_variant(records: list[RunRecord]) -> dict[str, Asynchrony]:
    return {each.variant: each for each in asynchronous(records)}


def test_an_asynchronous_run_is_held_against_the_all_reduce():
    found = by_variant(
        [
            gang("allreduce", 200, 20_000),
            gang("hogwild", 250, 40_000, staleness={0: 3, 1: 5}),
            gang("server", 300, 16_000, staleness={2: 4}),
        ]
    )
    assert list(found) == ["allreduce", "hogwild", "server"]
    assert (found["allreduce"].staleness, found["allreduce"].samples_ratio) == (0.0, 1.0)
    hogwild = found["hogwild"]
    assert (hogwild.staleness, hogwild.histogram) == (0.625, {0: 3, 1: 5})
    assert hogwild.samples_ratio == pytest.approx(1.25)
    assert hogwild.seconds_ratio == pytest.approx(0.625)
    assert hogwild.against == "allreduce, 2 workers"
    assert (hogwild.reached, hogwild.of) == (1, 1)
    assert found["server"].seconds_ratio == pytest.approx(1.875)


def test_else_against_one_worker():
    found = by_variant([record(batch=256, steps_to_target=200), gang("hogwild", 300, 10_000)])
    assert found["hogwild"].samples_ratio == pytest.approx(1.5)
    assert found["hogwild"].against == "single, 1 thread"


def test_without_either_or_without_the_target_there_is_no_ratio():
    alone = by_variant([gang("hogwild", 300, 10_000)])["hogwild"]
    assert (alone.samples_ratio, alone.against) == (None, "")
    late = by_variant([gang("allreduce", 200, 10_000), gang("hogwild", None, 10_000)])["hogwild"]
    assert (late.samples, late.samples_ratio, late.seconds_ratio, late.reached, late.of) == (
        None,
        None,
        None,
        0,
        1,
    )


def test_another_recipe_is_another_reason_to_need_more_samples():
    other = {"recipe": {"name": "large-batch", "lr": 0.5, "momentum": 0.0}}
    hogwild = gang("hogwild", 250, 40_000, staleness={1: 5}).model_copy(update=other)
    server = gang("server", 300, 16_000, staleness={1: 4})
    found = by_variant([gang("allreduce", 200, 20_000), server, hogwild])
    assert {name: each.same_recipe for name, each in found.items()} == {
        "allreduce": True,
        "server": True,
        "hogwild": False,
    }


def test_histograms_of_seeds_are_added():
    runs = [gang("hogwild", 300, 10_000, seed=n, staleness={n: 2}) for n in (0, 1)]
    assert by_variant(runs)["hogwild"].histogram == {0: 2, 1: 2}


def test_a_task_without_asynchronous_runs_has_no_trade_off():
    assert asynchronous([gang("allreduce", 200, 20_000), record()]) == []
    assert asynchronous([]) == []
