"""A run against one worker and against the limit of the cores, on both sides of each interval."""

from __future__ import annotations

import pytest

from manyhands.analysis import comparisons
from manyhands.analysis.facts import Context, Facts, Verdict
from manyhands.analysis.scaling import Baseline, Point, points
from manyhands.core.statistics import Summary
from manyhands.records.record import RunRecord, StepTimes
from manyhands.testing.records import record, repeated

RULES = dict(comparisons.RULES)


def gang(**fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": 2, "batch": 256, "rate": 19_000.0} | fields))


def one_thread(rate: float, batch: int = 256) -> Baseline:
    return Baseline(1, Summary(rate, rate, rate, 9), batch, "one worker, one thread")


def all_threads(rate: float, low: float | None = None) -> Baseline:
    return Baseline(2, Summary(rate, low or rate, rate, 3), 256, "one worker, all 2 cores as threads")


def judged(
    rule: str,
    found: RunRecord,
    one: Baseline | None = None,
    threads: Baseline | None = None,
    point: Point | None = None,
) -> Verdict | None:
    return RULES[rule](Facts(found, Context(one, threads, point)))


def sure(speed_up: float, against: float | None = None, width: float = 0.01, **fields: object) -> Point:
    """The cell of a run with a speed-up that is known this well, as paired measurements give it."""
    (point,) = points([gang(**fields)], "mnist-mlp")
    between = [
        None if x is None else Summary(x, x * (1 - width), x * (1 + width), 6) for x in (speed_up, against)
    ]
    return point._replace(speed_up=between[0], against_threads=between[1])


def named(verdict: Verdict | None) -> str:
    return "" if verdict is None else verdict.rule


def text(verdict: Verdict | None) -> str:
    assert verdict is not None
    assert verdict.lost == 0
    return verdict.text


# ---- beyond the cores


def test_a_speed_up_is_implausible_if_its_whole_interval_is_beyond_the_cores():
    """41x on two cores was told as a fact: the baseline had been measured while the machine was busy."""
    assert judged("implausible", gang(rate=24_000.0), one_thread(10_000)) is None  # one run: 1.9x to 3.0x
    assert text(judged("implausible", gang(rate=26_000.0), one_thread(10_000))) == (
        "2.60x one worker with one thread (2.08x to 3.25x) is implausible: 2 cores can give 2x. The "
        "baseline was "
        "probably slow: measure both again on an idle machine."
    )


def test_of_two_baselines_the_one_with_one_thread_says_which_is_odd():
    """Threads were measured in a slow minute: every run beside them seemed to be implausibly fast."""
    assert named(judged("implausible", gang(), None, all_threads(450.0))) == "implausible"
    assert judged("implausible", gang(), one_thread(10_000), all_threads(450.0)) is None


def test_a_noisy_machine_makes_a_run_less_sure():
    quiet, noisy = gang(rate=7_000.0, machine_noise=0.15), gang(rate=7_000.0, machine_noise=0.5)
    assert named(judged("slower-than-one", quiet, one_thread(10_000))) == "slower-than-one"
    assert named(judged("slower-than-one", noisy, one_thread(10_000))) == "like-one"


@pytest.mark.parametrize(("speed_up", "implausible"), [(2.015, False), (2.03, True)])
def test_where_the_cell_is_known_better_than_one_run_its_interval_counts(speed_up: float, implausible: bool):
    found = judged("implausible", gang(), one_thread(10_000), None, sure(speed_up))
    assert (found is not None) is implausible


def test_a_smaller_batch_of_the_baseline_is_named():
    said = text(judged("implausible", gang(rate=60_000.0), one_thread(10_000, batch=32)))
    assert said.endswith("It had batch 32, not 256, which may be a part of it.")


def test_what_is_implausible_is_not_near_the_limit():
    assert judged("limits", gang(rate=26_000.0), one_thread(10_000)) is None


@pytest.mark.parametrize(
    "fields", [{"workers": 4, "hosts": ["a", "a", "b", "b"]}, {"workers": 4, "cores": 4}]
)
def test_more_cores_or_hosts_can_give_more(fields: dict):
    assert judged("implausible", gang(rate=38_000.0, **fields), one_thread(10_000)) is None
    assert judged("implausible", gang(rate=60_000.0, **fields), one_thread(10_000)) is not None
    assert judged("implausible", gang(rate=38_000.0, workers=4), one_thread(10_000)) is not None


# ---- one worker


def test_workers_that_do_less_than_one_are_told_so():
    assert judged("slower-than-one", gang(rate=7_000.0)) is None
    assert judged("slower-than-one", record(rate=7_000.0), one_thread(10_000)) is None
    assert judged("slower-than-one", gang(rate=12_600.0), one_thread(10_000)) is None
    assert text(judged("slower-than-one", gang(rate=7_900.0), one_thread(10_000))) == (
        "2 workers do 79 % of what one worker with one thread does with batch 256: they do not pay off here."
    )


@pytest.mark.parametrize("rate", [8_100.0, 12_400.0])
def test_one_run_within_the_noise_is_not_told_apart_from_one_worker(rate: float):
    found = judged("slower-than-one", gang(rate=rate), one_thread(10_000))
    assert named(found) == "like-one"
    assert text(found).startswith(
        "2 workers are not told apart from one worker with one thread (batch 256): they have "
    )


def test_pairs_tell_apart_what_one_run_cannot():
    run = gang(rate=9_500.0)
    assert named(judged("slower-than-one", run, one_thread(10_000))) == "like-one"
    assert named(judged("slower-than-one", run, one_thread(10_000), None, sure(0.95))) == "slower-than-one"


# ---- threads


def test_plain_threads_win_if_their_whole_interval_is_ahead():
    assert judged("threads-win", gang(), None, all_threads(12_000)) is None
    assert judged("threads-win", record(rate=10_000.0), None, all_threads(21_000)) is None
    found = judged("threads-win", gang(), None, all_threads(26_600, low=25_000))
    assert named(found) == "threads-win"
    assert text(found) == (
        "plain threads win: one worker with all 2 cores as threads is 1.40x as fast with batch 256."
    )


def test_threads_that_are_as_fast_are_not_told_apart():
    found = judged("threads-win", gang(), None, all_threads(19_000))
    assert named(found) == "like-threads"
    assert text(found) == (
        "plain threads are not told apart from it: it has 1.00x (0.80x to 1.25x) the speed of one worker "
        "with all 2 cores as threads (batch 256)."
    )


# ---- the limit


def test_workers_that_mostly_compute_are_near_the_limit():
    found = judged("limits", gang(), one_thread(10_000))
    assert named(found) == "near-the-limit"
    assert text(found) == (
        "98 % of the step is computing, 95 % (76 to 119 %) of 2x one worker with one thread: near the "
        "limit of "
        "these workers."
    )
    assert text(judged("limits", gang())) == "98 % of the step is computing: near the limit of these workers."


@pytest.mark.parametrize(("rate", "rule"), [(17_100.0, "near-the-limit"), (16_900.0, "unclear")])
def test_85_per_cent_are_near_the_limit(rate: float, rule: str):
    assert named(judged("limits", gang(rate=rate), one_thread(10_000))) == rule


@pytest.mark.parametrize(("share", "near"), [(0.149, True), (0.151, False)])
def test_they_are_not_if_they_lose_15_per_cent(share: float, near: bool):
    phases = {"forward": 0.3, "backward": 0.7 - share, "communication": share / 2, "wait": share / 2}
    assert (judged("limits", gang(phases=phases)) is not None) is near


def test_two_workers_at_77_per_cent_get_a_verdict():
    """None of their losses was large enough for a rule, so nothing at all was said of them."""
    phases = {"forward": 0.3, "backward": 0.53, "communication": 0.09, "wait": 0.05, "other": 0.03}
    run = gang(rate=15_400.0, phases=phases)
    assert text(judged("limits", run, one_thread(10_000), None, sure(1.54))) == (
        "2 workers do 77 % (76 to 78 %) of 2x one worker with one thread; beside computing, a step has "
        "9 % communication, 5 % waiting, 3 % work of the trainer."
    )
    assert named(judged("limits", run, one_thread(10_000), None, sure(1.54))) == "below-the-limit"


def test_77_per_cent_in_one_run_of_each_may_as_well_be_all_of_it():
    unsure = Baseline(1, Summary(10_000.0, 8_000.0, 12_500.0, 1), 256, "one worker, one thread")
    assert text(judged("limits", gang(rate=15_400.0), unsure)) == (
        "2 workers do 77 % (56 to 105 %) of 2x one worker with one thread, which is not told apart from "
        "all of it."
    )


def test_neither_one_worker_nor_more_workers_than_cores_are_near_the_limit():
    assert judged("limits", record()) is None
    assert judged("limits", gang(workers=4)) is None


def test_nor_are_workers_that_plain_threads_beat():
    assert named(judged("limits", gang(), one_thread(10_000), all_threads(19_300))) == "near-the-limit"
    assert judged("limits", gang(), one_thread(10_000), all_threads(25_000)) is None


@pytest.mark.parametrize("rule", ["slower-than-one", "threads-win", "limits"])
def test_a_run_of_few_steps_is_not_compared(rule: str):
    times = StepTimes(steps=19, mean=0.1, low=0.1, median=0.1, high=0.1, phases={"forward": 0.1})
    run = gang(rate=5_000.0, step_times=[times, times])
    assert judged(rule, run, one_thread(10_000), all_threads(20_000)) is None
    often = points(repeated(run, 3), "mnist-mlp")[0]
    assert judged("slower-than-one", run, one_thread(10_000), None, often) is not None


@pytest.mark.parametrize("rule", RULES)
def test_a_run_that_was_not_timed_is_not_compared(rule: str):
    assert judged(rule, gang(rate=90_000.0, timed=False), one_thread(10_000), all_threads(20_000)) is None
