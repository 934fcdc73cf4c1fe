"""Rules that cost no step anything, each on both sides of its threshold, with the sentence it says."""

from __future__ import annotations

import pytest

from manyhands.analysis import remarks
from manyhands.analysis.facts import Context, Facts, Verdict
from manyhands.analysis.scaling import points
from manyhands.core.registry.strategies import having
from manyhands.records.record import RunRecord, StepTimes
from manyhands.testing.records import record, repeated

GIB = 2**30


def gang(**fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": 2, "batch": 256, "rate": 19_000.0} | fields))


def judged(rule: str, found: RunRecord, context: Context | None = None) -> Verdict | None:
    return dict(remarks.RULES)[rule](Facts(found, context or Context()))


def said(rule: str, found: RunRecord) -> str:
    verdict = judged(rule, found)
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


@pytest.mark.parametrize(("histogram", "stale"), [({0: 6, 1: 5}, False), ({0: 1, 1: 1}, True), ({}, False)])
def test_updates_are_stale_from_one_of_two_on(histogram: dict[int, int], stale: bool):
    """Below four there was said to be no harm, and a network diverged at a staleness of one."""
    run = gang(strategy="server", staleness=histogram)
    assert (judged("staleness", run) is not None) is stale


def test_staleness_says_what_helps():
    histogram = {2: 1, 6: 2, 10: 1}
    much = (
        "updates are 6.0 steps stale on average, at most 10; on a quadratic loss that lowers the largest "
        "stable "
        "learning rate to 12 %."
    )
    fewer = "Fewer workers make it smaller, a learning rate divided by 6.0 or"
    server = gang(strategy="server", staleness=histogram)
    assert said("staleness", server) == f"{much} {fewer} `--staleness-aware` makes up for it."
    assert said("staleness", gang(strategy="hogwild", staleness=histogram)) == (
        f"{much} {fewer} `server --staleness-aware` makes up for it."
    )
    little = said("staleness", gang(strategy="server", staleness={0: 1, 1: 9}))
    assert little.endswith("to 53 %. Fewer workers make it smaller, a lower learning rate makes up for it.")
    aware = gang(strategy="server", staleness=histogram, strategy_options={"staleness_aware": True})
    assert said("staleness", aware) == (
        f"{much} The learning rate is divided by it already; fewer workers make it smaller."
    )


@pytest.mark.parametrize("strategy", having("asynchronous"))
@pytest.mark.parametrize("mean", [1, 4, 13])
def test_a_bound_is_no_advice_and_said_to_do_nothing_where_it_is_used(strategy: str, mean: int):
    """A bound cannot go below workers - 1, and equally fast workers are never as far apart as it allows."""
    assert "bound" not in said("staleness", gang(strategy=strategy, staleness={mean: 1}))
    bounded = gang(strategy="server", staleness={mean: 1}, strategy_options={"bound": 4})
    assert said("staleness", bounded).endswith(
        "; `--bound 4` does not lower it while workers are equally fast."
    )


@pytest.mark.parametrize("staleness", [1, 2, 7])
def test_the_stable_learning_rate_is_that_of_a_delayed_descent(staleness: int):
    """Played through on w^2 / 2: just below the limit it converges, just above it does not."""

    def distance(lr: float) -> float:
        path = [1.0] * (staleness + 1)
        for _ in range(4000):
            path.append(path[-1] - lr * path[-1 - staleness])
        return max(map(abs, path[-3 * staleness - 3 :]))

    limit = 2 * remarks.stable(staleness)  # without staleness it is 2
    assert distance(0.97 * limit) < 0.1
    assert distance(1.03 * limit) > 10


def with_memory(*ranks: float, hosts: list[str] | None = None) -> RunRecord:
    held = [int(gib * GIB) for gib in ranks]
    run = gang(workers=len(ranks))
    return run.model_copy(update={"memory": held, "hosts": hosts or ["here"] * len(ranks)})


def test_memory_is_nearly_full_from_85_per_cent_on():
    assert judged("memory", with_memory(10, 10.3)) is None  # of 24 GiB
    assert judged("memory", with_memory(11, 11, hosts=["a", "b"])) is None
    assert said("memory", with_memory(11, 11)) == (
        "2 workers hold between 11.8 GB (the largest) and 23.6 GB of 25.8 GB of memory, depending on how "
        "much "
        "of it they share: a larger batch may not fit; `--offload auto` or `sharded` need less."
    )


def test_what_ranks_share_is_not_added_up_to_more_than_there_is():
    """Two ranks that share most of their pages were said to hold 30 GB of 25.8 GB."""
    assert "between 15 GB (the largest) and 25.8 GB of 25.8 GB" in said("memory", with_memory(14, 14))


def test_one_rank_holds_what_it_holds():
    alone = record().model_copy(update={"memory": [21 * GIB]})
    assert said("memory", alone).startswith("the worker holds 22.5 GB of 25.8 GB of memory: a larger batch")


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


def counted(run: RunRecord, *steps: int) -> RunRecord:
    """The same, with this number of counted steps of each rank."""
    times = [
        StepTimes(steps=n, mean=0.1, low=0.1, median=0.1, high=0.1, phases={"forward": 0.1}) for n in steps
    ]
    return run.model_copy(update={"step_times": times})


def test_a_run_without_a_counted_step_says_so():
    assert judged("unmeasured", record()) is None
    assert said("unmeasured", record(step_times=[None], steps=3)) == (
        "no steady speed was measured in 3 steps: the times include the first, slow ones."
    )
    assert judged("unmeasured", record(step_times=[None], timed=False)) is None


def test_a_speed_needs_twenty_counted_steps():
    """A run of three counted steps had a verdict like any other."""
    assert judged("unmeasured", counted(gang(), 20, 20)) is None
    assert said("unmeasured", counted(gang(), 19, 19)) == (
        "only 19 steps counted, and 20 make a speed that can be compared: run it longer."
    )
    assert said("unmeasured", counted(record(), 1)).startswith("only 1 step counted,")


def test_steps_of_asynchronous_workers_add_up():
    assert judged("unmeasured", counted(gang(strategy="hogwild"), 10, 10)) is None
    assert judged("unmeasured", counted(gang(strategy="hogwild"), 10, 9)) is not None
    serving = counted(gang(strategy="server"), 500, 10, 9)
    assert judged("unmeasured", serving) is not None, "what a server does is no step"


def test_several_measurements_make_up_for_few_steps():
    short = counted(gang(), 5, 5)
    for times, enough in ((2, False), (3, True)):
        (point,) = points(repeated(short, times), "mnist-mlp")
        assert (judged("unmeasured", short, Context(point=point)) is None) is enough
