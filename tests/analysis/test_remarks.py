"""Rules that cost no step anything, each on both sides of its threshold, with the sentence it says."""

from __future__ import annotations

import pytest

from manyhands.analysis import causes, remarks
from manyhands.analysis.causes import Verdict
from manyhands.analysis.scaling import Baseline
from manyhands.core.statistics import Summary
from manyhands.records.record import RunRecord
from manyhands.testing.records import record

GIB = 2**30


def gang(**fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": 2, "batch": 256, "rate": 19_000.0} | fields))


def one_thread(rate: float) -> Baseline:
    return Baseline(1, Summary(rate, rate, rate, 1), 128, "one worker, one thread")


def all_threads(rate: float, low: float | None = None) -> Baseline:
    return Baseline(2, Summary(rate, low or rate, rate, 3), 128, "one worker, all 2 cores as threads")


def judged(
    rule: str, found: RunRecord, baseline: Baseline | None = None, threads: Baseline | None = None
) -> Verdict | None:
    return dict(remarks.RULES)[rule](causes.facts(found, baseline, threads))


def said(rule: str, found: RunRecord, *baselines: Baseline | None) -> str:
    verdict = judged(rule, found, *baselines)
    assert verdict is not None
    assert (verdict.rule, verdict.lost) == (rule, 0.0)
    return verdict.text


def test_a_run_that_diverged_says_when_and_with_which_rate():
    assert judged("diverged", record()) is None
    assert said("diverged", record(status="diverged", steps=12)) == (
        "the loss became infinite or NaN at step 12 (sgd · lr 0.1): lower the learning rate or use a longer "
        "warm-up."
    )


def test_a_run_that_was_interrupted_says_how_to_continue():
    assert judged("interrupted", record()) is None
    run = record(status="interrupted", steps=1200, run="runs/mnist-mlp-7f3a")
    assert said("interrupted", run) == (
        "the run was interrupted at step 1,200 and does not count as having reached its target; continue "
        "with: manyhands train --resume runs/mnist-mlp-7f3a."
    )


def test_workers_that_do_less_than_one_are_told_so():
    assert judged("slower-than-one", gang(rate=8_100.0), one_thread(10_000)) is None  # one run: may be noise
    assert judged("slower-than-one", gang(rate=7_000.0)) is None
    assert judged("slower-than-one", record(rate=7_000.0), one_thread(10_000)) is None
    assert said("slower-than-one", gang(rate=7_900.0), one_thread(10_000)) == (
        "2 workers do 79 % of what one worker with one thread does with batch 128: they do not pay off here."
    )


def test_plain_threads_win_if_their_whole_interval_is_ahead():
    assert judged("threads-win", gang(), one_thread(10_000), all_threads(19_300)) is None
    assert judged("threads-win", gang(), one_thread(10_000), all_threads(21_000, low=18_900)) is None
    assert judged("threads-win", record(rate=10_000.0), None, all_threads(21_000)) is None
    assert said("threads-win", gang(), one_thread(10_000), all_threads(26_600, low=25_000)) == (
        "plain threads win: one worker with all 2 cores as threads is 1.40x as fast with batch 128."
    )


def test_workers_that_mostly_compute_are_near_the_limit():
    assert said("near-the-limit", gang(), one_thread(10_000)) == (
        "98 % of the step is computing, 95 % of 2x one worker with one thread: near the limit of these "
        "workers."
    )
    assert said("near-the-limit", gang()) == (
        "98 % of the step is computing: near the limit of these workers."
    )
    assert judged("near-the-limit", gang(rate=17_100.0), one_thread(10_000)) is not None
    assert judged("near-the-limit", gang(rate=16_900.0), one_thread(10_000)) is None


@pytest.mark.parametrize(("share", "near"), [(0.149, True), (0.151, False)])
def test_they_are_not_if_they_lose_15_per_cent(share: float, near: bool):
    phases = {"forward": 0.3, "backward": 0.7 - share, "communication": share / 2, "wait": share / 2}
    assert (judged("near-the-limit", gang(phases=phases)) is not None) is near


def test_neither_is_one_worker_nor_more_workers_than_cores():
    assert judged("near-the-limit", record()) is None
    assert judged("near-the-limit", gang(workers=4)) is None


def test_nor_are_workers_that_plain_threads_beat():
    assert judged("near-the-limit", gang(), one_thread(10_000), all_threads(19_300)) is not None
    assert judged("near-the-limit", gang(), one_thread(10_000), all_threads(25_000)) is None


@pytest.mark.parametrize(("histogram", "stale"), [({3: 1, 4: 9}, False), ({4: 1}, True), ({}, False)])
def test_updates_are_stale_from_four_steps_on(histogram: dict[int, int], stale: bool):
    run = gang(strategy="server", staleness=histogram)
    assert (judged("staleness", run) is not None) is stale


def test_staleness_says_what_helps():
    histogram = {2: 1, 6: 2, 10: 1}
    server = gang(strategy="server", staleness=histogram)
    assert said("staleness", server) == (
        "updates are 6.0 steps stale on average, at most 10: `--staleness-aware` divides the learning rate "
        "of each by it, `--bound 4` keeps it down."
    )
    aware = gang(strategy="server", staleness=histogram, strategy_options={"staleness_aware": True})
    assert said("staleness", aware) == "updates are 6.0 steps stale on average, at most 10."
    assert said("staleness", gang(strategy="hogwild", staleness=histogram)) == (
        "updates are 6.0 steps stale on average, at most 10: fewer workers, or `server --bound 4`, keep it "
        "down."
    )


def with_memory(*ranks: float, hosts: list[str] | None = None) -> RunRecord:
    held = [int(gib * GIB) for gib in ranks]
    run = gang(workers=len(ranks))
    return run.model_copy(update={"memory": held, "hosts": hosts or ["here"] * len(ranks)})


def test_memory_is_nearly_full_from_85_per_cent_on():
    assert judged("memory", with_memory(10, 10.3)) is None  # of 24 GiB
    assert judged("memory", with_memory(11, 11, hosts=["a", "b"])) is None
    assert said("memory", with_memory(11, 11)) == (
        "2 workers hold 23.6 GB of 25.8 GB of memory: a larger batch may not fit; `--offload auto` or "
        "`sharded` need less."
    )


@pytest.mark.parametrize(("training", "much"), [(75.1, False), (74.9, True)])
def test_evaluation_is_minded_from_a_quarter_on(training: float, much: bool):
    run = record().model_copy(update={"seconds": 100.0, "training_seconds": training})
    assert (judged("aside", run) is not None) is much


def test_evaluation_says_how_to_make_it_rarer():
    run = record().model_copy(update={"seconds": 100.0, "training_seconds": 60.0})
    assert said("aside", run) == (
        "40 % of the wall clock went into evaluation and checkpoints, which no speed-up counts; "
        "`--evaluate-every` and `--checkpoint-every` make them rarer."
    )


def test_lost_workers_are_named():
    assert judged("lost", record()) is None
    assert said("lost", gang(lost=["worker 1 was killed"])) == (
        "1 worker was lost during the run, so its speed is that of fewer workers: worker 1 was killed."
    )


@pytest.mark.parametrize(
    ("noise", "timed", "flagged"),
    [(None, True, False), (0.15, True, False), (0.151, True, True), (0.3, False, False)],
)
def test_a_noisy_machine_is_minded_above_15_per_cent(noise: float | None, timed: bool, flagged: bool):
    assert (judged("noisy", record(machine_noise=noise, timed=timed)) is not None) is flagged


def test_a_noisy_machine_is_told_as_such():
    assert said("noisy", record(machine_noise=0.23)) == (
        "the machine was 23 % slower around this run than at its best: do not trust its times."
    )


def test_a_run_of_too_few_steps_says_so():
    assert judged("unmeasured", record()) is None
    assert said("unmeasured", record(step_times=[None], steps=3)) == (
        "no steady speed was measured in 3 steps: the times include the first, slow ones."
    )
