"""All rules together: the order, the word for a table, and what a study says as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.analysis.verdicts import (
    RULES,
    WORDS,
    Verdict,
    critical_batch,
    of_runs,
    study_verdicts,
    verdicts,
    word,
)
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block, Cell, Results, Without
from manyhands.testing.records import record, repeated


def gang(workers: int = 2, **fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": workers, "batch": 256, "rate": 19_000.0} | fields))


def study(*records: RunRecord, **fields: object) -> Results:
    return Results(Path("results/test"), "test", "A test", records=list(records), **fields)


def texts(results: Results) -> dict[str, str]:
    return {verdict.rule: verdict.text for verdict in study_verdicts(results)}


def test_every_rule_has_its_own_name():
    names = [name for name, _ in RULES]
    assert len(set(names)) == len(names) == 21


def test_the_largest_loss_comes_first():
    phases = {"forward": 0.2, "backward": 0.3, "communication": 0.2, "data": 0.3}
    found = verdicts(gang(phases=phases), None)
    assert [verdict.rule for verdict in found] == ["data", "communication"]
    assert [verdict.lost for verdict in found] == pytest.approx([0.3, 0.2])


def test_a_good_run_of_one_worker_needs_no_verdict():
    assert verdicts(record(), None) == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, ""),
        ({"near-the-limit": 0.0}, "near the limit"),
        ({"data": 0.3, "communication": 0.2}, "waits for data"),
        ({"communication": 0.3, "data": 0.2, "threads-win": 0.0}, "communication"),
        ({"noisy": 0.0, "threads-win": 0.0, "slower-than-one": 0.0}, "slower than one worker"),
        ({"communication": 0.3, "diverged": 0.0}, "diverged"),
        ({"communication": 0.3, "implausible": 0.0}, "implausible speed-up"),
        ({"communication": 0.3, "unmeasured": 0.0}, "too few steps"),
        ({"like-threads": 0.0, "near-the-limit": 0.0}, "near the limit"),
        ({"like-threads": 0.0}, "not told apart from threads"),
        ({"unclear": 0.0, "like-one": 0.0}, "not told apart from one worker"),
        ({"aside": 0.0}, ""),
    ],
)
def test_a_table_has_room_for_a_few_words(rules: dict[str, float], expected: str):
    assert word([Verdict(rule, "", lost) for rule, lost in rules.items()]) == expected


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"bubble": 0.5, "oversubscribed": 0.2}, "stages wait"),
        ({"oversubscribed": 0.5, "bubble": 0.2}, "more threads than cores"),
        ({"stragglers": 0.1, "oversubscribed": 0.0}, "waits for the slowest"),
        ({"oversubscribed": 0.0, "like-threads": 0.0}, "more threads than cores"),
    ],
)
def test_too_few_cores_do_not_hide_what_costs_more(rules: dict[str, float], expected: str):
    """Whatever shared cores was `more workers than cores`, also stages that wait for each other."""
    assert word([Verdict(rule, "", lost) for rule, lost in rules.items()]) == expected


def test_a_winner_by_time_is_not_called_slower_by_throughput():
    """A row once said both: `not told apart` from the fastest, and `threads are faster`."""
    found = [Verdict("threads-win", "", 0.0), Verdict("staleness", "", 0.0)]
    assert (word(found), word(found, won=True)) == ("threads are faster", "stale updates")


def test_words_are_short_enough_for_a_table():
    assert max(map(len, WORDS.values())) <= 30


def test_a_study_of_nothing_says_nothing():
    assert study_verdicts(study()) == []


def test_a_study_names_its_largest_loss_and_where_it_was():
    found = study_verdicts(study(record(batch=256), gang(), gang(4, rate=12_000.0)))
    assert found[0] == Verdict(
        "oversubscribed",
        "The largest loss is that of mnist-mlp, allreduce · 4 workers · batch 256: 4 workers share 2 cores "
        "and "
        "do 60 % of what 2 cores can do (2x one worker with one thread): at most 40 % is lost by that.",
        pytest.approx(0.4),
    )


def test_a_loss_of_a_few_steps_is_not_the_largest():
    waiting = {"forward": 0.2, "backward": 0.3, "wait": 0.5}
    much, less = gang(phases=waiting), gang(phases={"forward": 0.3, "backward": 0.5, "wait": 0.2}, seed=1)
    assert study_verdicts(study(much, less))[0].lost == pytest.approx(0.5)
    times = much.step_times[0]
    assert times is not None
    few = much.model_copy(update={"step_times": [times.model_copy(update={"steps": 3})] * 2})
    assert study_verdicts(study(few, less))[0].lost == pytest.approx(0.2)


def tuned(lr: float, **fields: object) -> RunRecord:
    run = record(**fields)
    return run.model_copy(update={"recipe": {**run.recipe, "lr": lr}, "recipe_line": f"lr {lr}"})


def test_the_critical_batch_of_a_study_limits_its_advice():
    batches = [
        tuned(
            lr, batch=batch, steps_to_target=round(100 * slower * (1 + 300 / batch)), epochs=30.0, seed=seed
        )
        for batch in (16, 32, 64, 128, 256, 512, 1024)
        for lr, slower in ((0.05, 1.4), (0.1, 1.0), (0.2, 1.3))
        for seed in (0, 1)
    ]
    untuned = [run for run in batches if run.recipe["lr"] == 0.1]
    assert critical_batch(untuned, "mnist-mlp") is None
    fit = critical_batch(batches, "mnist-mlp")
    assert fit is not None
    assert fit.value == pytest.approx(300, rel=0.1)
    phases = {"forward": 0.002, "backward": 0.002, "communication": 0.0027}
    run = gang(phases=phases, batch=128)
    assert "a batch of" in texts(study(run))["communication"]
    assert "a batch of" not in texts(study(run, *batches))["communication"]


def test_implausible_speeds_come_first_and_name_the_largest():
    """`41.5x faster than plain threads` on two cores was the headline of a report, without a caveat."""
    slow = record(batch=256, rate=400.0, threads=2)
    found = study_verdicts(study(slow, gang(), gang(strategy="hogwild", rate=16_600.0)))
    assert found[0].rule == "implausible"
    assert found[0].text.startswith(
        "mnist-mlp: 2 speed-ups are implausible; the largest is that of allreduce, 2 workers, batch 256: "
        "48x one "
        "worker with all 2 cores as threads (35x to 65x) is implausible: 2 cores can give 2x."
    )
    assert "implausible" not in texts(study(record(batch=256, rate=9_000.0, threads=2), gang()))


def test_one_thread_beside_slow_threads_is_not_implausible():
    assert "implausible" not in texts(study(record(rate=400.0, threads=2), record(rate=10_000.0)))
    assert texts(study(record(rate=40_000.0, threads=2), record(rate=10_000.0)))["implausible"].startswith(
        "mnist-mlp: single, 2 threads, batch 128: 4.00x one worker with one thread ("
    )


def test_a_study_says_so_when_plain_threads_win():
    slow = [record(rate=10_000), gang(rate=12_000)]
    assert "threads-win" not in texts(study(*slow, record(threads=2, rate=15_000)))
    threads = repeated(record(threads=2, rate=15_000), 9)
    several = repeated(gang(rate=12_000), 9)
    assert texts(study(*several, *threads))["threads-win"] == (
        "For mnist-mlp plain threads win in throughput: one worker with all 2 cores as threads is 1.25x as "
        "fast as the best of several workers (allreduce, 2 workers, batch 256)."
    )


def test_a_study_says_so_when_plain_threads_are_not_told_apart():
    """`plain threads win, within the noise` was said of a difference that nobody measured."""
    assert "like-threads" not in texts(study(gang(rate=19_000), record(threads=2, batch=256, rate=10_000)))
    assert texts(study(gang(rate=19_000), record(threads=2, batch=256, rate=20_000)))["like-threads"] == (
        "For mnist-mlp the best of several workers in throughput (allreduce, 2 workers, batch 256) is not "
        "told "
        "apart from plain threads: it has 0.95x (0.69x to 1.30x) the speed of one worker with all 2 cores as "
        "threads."
    )


def test_a_study_without_one_worker_says_that_its_speed_ups_have_no_baseline():
    assert "no-baseline" not in texts(study(record(), gang()))
    assert texts(study(gang()))["no-baseline"] == (
        "For mnist-mlp no run had one worker and one thread: its speed-ups have no baseline."
    )


def test_a_study_tells_its_fine_lines():
    cells = (record(batch=256), gang(), gang(4, rate=18_050.0))
    found = texts(study(*(again for run in cells for again in repeated(run, 9))))
    assert found["fine-line"] == (
        "mnist-mlp, allreduce, batch 256: More workers do not pay: 4 are 5 % slower than 2, where 4 workers "
        "share 2 cores."
    )


def test_a_study_counts_the_cells_that_never_arrived():
    late = gang(steps_to_target=None)
    assert "not-reached" not in texts(study(record(), gang()))
    assert texts(study(record(), late))["not-reached"] == (
        "For mnist-mlp 1 of 2 cells never reached 97 %: they count as slower than the time they ran."
    )
    assert texts(study(late))["not-reached"].startswith("For mnist-mlp no cell reached 97 %:")


def test_a_study_says_how_far_to_trust_it():
    noisy, lost = record(machine_noise=0.2), record(status="diverged", batch=4096)
    found = texts(study(noisy, lost, record(), repeated=[record()]))
    assert found["noisy"] == (
        "1 of 3 runs was measured while the machine was more than 15 % slower than at its best."
    )
    assert found["repeated"] == "1 run measured under heavy noise was repeated."
    assert found["diverged"] == "1 run diverged, single · 1 thread · batch 4096."


def test_a_study_says_what_is_missing():
    cell = Without(Cell(record().spec), "no time was left")
    found = texts(study(record(), failed=[cell._replace(reason="worker 1 died")], left=[cell, cell]))
    assert found["failed"] == "1 cell failed: worker 1 died."
    assert found["left"] == "2 cells have not been run, the first because: no time was left."


def test_a_fine_line_is_told_once_a_strategy():
    """A study of many batches told the same of each of them, in seventy remarks."""
    records = [
        record(strategy="allreduce", workers=workers, batch=batch, rate=rate)
        for batch in (128, 256, 512)
        for workers, rate in ((1, 10_000.0), (2, 19_000.0), (4, 9_000.0))
    ]
    told = [verdict.text for verdict in study_verdicts(study(*records)) if verdict.rule == "fine-line"]
    assert len(told) == 1
    assert told[0].startswith("mnist-mlp, allreduce, batch 128 (and at ")


# ---- speeds that were measured in pairs


def paired_study(two: float, four: float, rounds: int = 6) -> Results:
    """One worker, two and four, in rounds of a machine that is slower in every other round."""
    runs = {
        "one": record(batch=256, rate=10_000.0),
        "two": gang(),
        "four": gang(4, rate=18_000.0),
    }
    records = [run.model_copy(update={"cell": cell, "paired": True}) for cell, run in runs.items()]
    blocks = []
    for number in range(rounds):
        machine = 10_000 * (0.8 if number % 2 else 1.0)
        wobble = 1.005 if number % 3 else 0.99
        order = [("one", 1.0), ("two", two * wobble), ("one", 1.0), ("four", four / wobble), ("one", 1.0)]
        blocks += [
            Block(cell, number, at, machine * speed, 20, 1.0) for at, (cell, speed) in enumerate(order)
        ]
    return study(*records, blocks=blocks)


def judged(results: Results) -> list[str]:
    return [word(found) for found in of_runs(results)]


def test_pairs_tell_what_single_runs_cannot():
    """Two workers at 77 % of the limit, and four that are 10 % slower than two on two cores."""
    sure, unsure = paired_study(1.54, 1.386), paired_study(1.54, 1.386)
    unsure.blocks.clear()
    assert judged(sure) == ["", "below the limit", "more threads than cores"]
    assert judged(unsure) == ["", "near the limit", "more threads than cores"], "one run each says 1.9x"
    assert texts(sure)["fine-line"].startswith(
        "mnist-mlp, allreduce, batch 256: More workers do not pay: 4 are 10 % slower than 2, where 4 workers"
    )
    assert "fine-line" not in texts(unsure)


@pytest.mark.parametrize(("two", "implausible"), [(2.02, False), (2.1, True)])
def test_pairs_find_a_smaller_excess_implausible(two: float, implausible: bool):
    results = paired_study(two, 1.9)
    assert ("implausible" in texts(results)) is implausible
    assert (judged(results)[1] == "implausible speed-up") is implausible


def test_each_run_of_equal_settings_has_its_own_verdicts():
    results = study(record(), record(status="diverged"))
    assert judged(results) == ["", "diverged"]
