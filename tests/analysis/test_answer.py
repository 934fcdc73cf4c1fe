"""The answer, word by word, for studies that went well and for those that did not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from manyhands.analysis.answer import Answer, answers
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results
from manyhands.testing.records import record, repeated


def study(*records: RunRecord, price: float | None = None) -> Results:
    return Results(Path("results/test"), "test", "A test", records=list(records), price=price)


def one(*records: RunRecord, price: float | None = None) -> Answer:
    (found,) = answers(study(*records, price=price))
    assert found.text == " ".join(found.lines)
    return found


def sure(*records: RunRecord, price: float | None = None) -> Answer:
    """The answer where every cell was run nine times, with hardly any noise: small differences are told."""
    return one(*(again for run in records for again in repeated(run, 9)), price=price)


def gang(workers: int, rate: float, batch: int = 256, steps: int | None = 400, **fields: object) -> RunRecord:
    return record(
        strategy="allreduce", workers=workers, rate=rate, batch=batch, steps_to_target=steps, **fields
    )


ALONE = record(rate=10_240, batch=128, steps_to_target=800)  # 10 s
THREADS = record(rate=15_360, batch=128, threads=2, steps_to_target=800)  # 6.7 s
TWO = gang(2, 20_480)  # 5.0 s
FOUR = gang(4, 17_066)  # 6.0 s


def test_a_study_that_went_well():
    found = sure(ALONE, THREADS, TWO, FOUR)
    assert found.lines == [
        "for mnist-mlp on this machine train with allreduce, 2 workers, batch 256: 2.0x (1.9x to 2.1x) "
        "faster than one worker with one thread at batch 128 (97 % after 5.0 s against 10 s).",
        "It is 1.3x (1.3x to 1.4x) faster than plain threads, one worker with all 2 cores as threads "
        "(6.7 s).",
        "More workers do not pay: 4 are 17 % slower than 2, where 4 workers share 2 cores.",
    ]
    assert found.advised is not None
    assert found.cheapest is not None
    assert (found.advised.variant, found.advised.workers) == ("allreduce", 2)


def test_plain_threads_that_win_are_said_to():
    slow = gang(2, 12_800)  # 8.0 s
    assert sure(ALONE, THREADS, slow).lines == [
        "for mnist-mlp on this machine train with one worker with 2 threads, batch 128: 1.5x (1.4x to 1.6x) "
        "faster than one worker with one thread (97 % after 6.7 s against 10 s).",
        "Plain threads win: the best of several workers, allreduce, 2 workers, batch 256, takes 20 % longer.",
        "Fewest worker-seconds are spent by one worker with one thread, batch 128: 10 against 13.3 to 97 %.",
    ]


def test_one_worker_that_is_fastest_is_said_to():
    assert sure(ALONE, gang(2, 9_309)).lines == [
        "for mnist-mlp on this machine train with one worker with one thread, batch 128: 97 % after 10 s. "
        "Nothing "
        "else pays: allreduce, 2 workers, batch 256 takes 10 % longer.",
        "One worker with all 2 cores as threads was not run.",
    ]


def test_what_takes_much_longer_is_told_in_times():
    assert "allreduce, 2 workers, batch 256 takes 3.0x as long." in one(ALONE, gang(2, 3_413)).text


def test_a_target_that_nobody_reached_is_said_to_be_and_speed_is_told_instead():
    late = {"steps_to_target": None, "metric": 0.952}
    found = sure(
        record(rate=10_000, **late),
        gang(2, 19_000, steps=None, metric=0.941),
        record(rate=15_000, threads=2, **late),
    )
    assert found.lines == [
        "for mnist-mlp no cell reached 97 %; single · 1 thread · batch 128 came nearest with 95.20 %.",
        "By speed alone, on this machine the fastest is allreduce, 2 workers, batch 256: 1.9x (1.8x to 2.0x) "
        "faster than one worker with one thread at batch 128 (19,000 images/s against 10,000 images/s).",
        "It is 1.3x (1.2x to 1.3x) faster than plain threads, one worker with all 2 cores as threads "
        "(15,000 images/s).",
        "Up to 2 workers, the most that were run, each further one pays.",
        "Fewest worker-seconds are spent by one worker with one thread, batch 128: 100 against 105 for a "
        "million "
        "images.",
    ]


def test_one_cell_has_nothing_to_be_compared_with():
    found = one(ALONE)
    assert found.text == (
        "for mnist-mlp on this machine train with one worker with one thread, batch 128: 97 % after 10 s. "
        "It is the only cell, so there is nothing to compare it with."
    )
    assert found.advised == found.cheapest


def test_one_cell_that_arrived_is_not_called_the_only_one():
    """A page said "there is one cell only" and "1 of 2 cells did not reach the target" in one breath."""
    assert one(ALONE, gang(2, 20_480, steps=None)).lines == [
        "for mnist-mlp on this machine train with one worker with one thread, batch 128: 97 % after 10 s. "
        "There is nothing to compare it with: the other cell was not timed to the target.",
        "1 of 2 cells did not reach 97 %.",
    ]


def test_without_the_baseline_there_is_no_speed_up():
    assert sure(TWO, FOUR, THREADS).lines[0] == (
        "for mnist-mlp on this machine train with allreduce, 2 workers, batch 256: 97 % after 5.0 s. No run "
        "had one worker with one thread, so the speed-up is not known."
    )


def test_a_task_that_was_only_timed_is_answered_by_speed():
    def short(run: RunRecord) -> RunRecord:
        return run.model_copy(update={"spec": run.spec.replace(samples=8_000), "epochs": 0.13})

    runs = [record(task="mnist-cnn", rate=900, steps_to_target=None)]
    runs.append(gang(2, 1_730, steps=None, task="mnist-cnn"))
    found = sure(*map(short, runs))
    assert found.lines == [
        "by speed alone, for mnist-cnn on this machine the fastest is allreduce, 2 workers, batch 256: 1.9x "
        "(1.8x to 2.0x) faster than one worker with one thread at batch 128 (1,730 images/s against 900 "
        "images/s).",
        "Only speed was measured; whether it learns was not tried.",
        "One worker with all 2 cores as threads was not run.",
        "Up to 2 workers, the most that were run, each further one pays.",
    ]
    assert found.advised is None
    assert [each.variant for each in found.winners] == ["allreduce"]


def test_a_cell_that_diverged_is_not_advised_however_fast():
    def short(run: RunRecord) -> RunRecord:
        return run.model_copy(update={"spec": run.spec.replace(samples=8_000), "epochs": 0.13})

    runs = [record(task="mnist-cnn", rate=900, steps_to_target=None)]
    runs.append(gang(2, 1_700, steps=None, task="mnist-cnn"))
    wild = record(task="mnist-cnn", strategy="hogwild", workers=4, rate=2_100, batch=256, status="diverged")
    found = one(*map(short, runs), wild)
    assert found.advised is None  # nobody tried whether the others learn
    assert "hogwild" not in found.lines[0]
    assert "hogwild" not in {each.variant for each in found.winners}
    assert "Not advised, because a run diverged: hogwild, 4 workers, batch 256." in found.lines


def test_one_run_of_three_that_diverged_is_enough():
    runs = [gang(2, 30_000, seed=seed, status="diverged" if seed == 2 else "finished") for seed in range(3)]
    found = one(ALONE, THREADS, *runs)
    assert found.advised is not None
    assert (found.advised.variant, found.advised.threads) == ("single", 2)
    assert "Not advised, because a run diverged: allreduce, 2 workers, batch 256." in found.lines


def test_a_price_makes_cost_money():
    dear = gang(2, 18_286)  # 5.6 s
    found = sure(ALONE, THREADS, dear, price=3.6)
    assert (
        found.lines[-1] == "Cheapest is one worker with one thread, batch 128: $0.01 against $0.011 to 97 %."
    )
    cheap = gang(2, 21_000)
    assert sure(ALONE, THREADS, cheap, price=3.6).lines[-1] == "It is the cheapest, too."


def test_a_fine_line_that_the_advice_has_crossed_is_only_told_for_its_cost():
    alone = record(rate=10_240, batch=256, steps_to_target=400)
    costly = sure(ALONE, alone, gang(2, 14_000)).lines
    assert "From 2 workers on a further one brings less than half of what one does alone." in costly
    slower = sure(ALONE, alone, gang(2, 9_000, steps=200)).lines
    assert slower[0].startswith("for mnist-mlp on this machine train with allreduce, 2 workers, batch 256:")
    assert not any("do not pay" in line for line in slower)


def tuned(batch: int, **fields: object) -> list[RunRecord]:
    """A batch with three learning rates, the best of them inside."""
    best = round(200 * (1 + 400 / batch))
    return [
        record(batch=batch, rate=10_000, steps_to_target=steps, epochs=20.0, **fields).model_copy(
            update={"recipe": {"name": "constant", "lr": lr}}
        )
        for lr, steps in ((0.05, round(1.3 * best)), (0.1, best), (0.2, round(1.2 * best)))
    ]


def test_regimes_say_how_large_a_batch_pays_where_the_rate_was_tuned():
    runs = [run for batch in (16, 32, 64, 128, 256, 512, 1024) for run in tuned(batch)]
    (line,) = [line for line in one(*runs).lines if "halves" in line]
    assert line.startswith("Beyond batch 80 (")
    assert line.endswith(") doubling the batch no longer halves the steps.")
    one_rate = [run for run in runs if run.recipe["lr"] == 0.1]
    assert not any("halves" in line for line in one(*one_rate).lines)  # the recipe's critical batch


def test_intervals_that_overlap_are_within_the_noise():
    threads = [
        record(rate=rate, threads=2, steps_to_target=400, seed=n)
        for n, rate in enumerate((9_000, 10_000, 12_000))
    ]
    several = [gang(2, rate, steps=200, seed=n) for n, rate in enumerate((9_500, 10_500, 11_000))]
    lines = one(ALONE, *threads, *several).lines
    assert lines[0].startswith(
        "for mnist-mlp on this machine train with one worker with 2 threads, batch 128:"
    )
    assert lines[1] == "Not told apart from it: allreduce, 2 workers, batch 256 (4.9 s)."
    swapped = [
        record(rate=rate, steps_to_target=400, seed=n) for n, rate in enumerate((9_000, 10_000, 12_000))
    ]
    assert one(*swapped, *several).lines[:2] == [
        "for mnist-mlp on this machine train with one worker with one thread, batch 128: 97 % after 5.1 s. "
        "Nothing is faster beyond the noise.",
        "Not told apart from it: allreduce, 2 workers, batch 256 (4.9 s).",
    ]


def test_threads_that_lose_to_the_fastest_but_not_to_what_is_advised():
    """They were called `not told apart from it` in an answer that had not named them among the winners."""
    fast = repeated(record(strategy="hogwild", workers=2, rate=21_500, batch=256, steps_to_target=400), 9)
    slow = repeated(record(rate=19_200, batch=256, threads=2, steps_to_target=400), 9)
    unsure = [gang(2, rate, seed=n) for n, rate in enumerate((17_500, 20_400, 23_000))]
    lines = one(ALONE, *fast, *slow, *unsure).lines
    assert "train with allreduce, 2 workers, batch 256:" in lines[0]
    assert lines[1] == "Not told apart from it: hogwild, 2 workers, batch 256 (4.8 s)."
    assert lines[2] == (
        "One worker with all 2 cores as threads (5.3 s) is slower than hogwild, 2 workers, batch 256, but "
        "not told apart from what is advised."
    )


def test_one_run_of_each_says_little():
    """Before, each of these was a fact: the simplest of those that may be the fastest is advised."""
    found = one(ALONE, THREADS, TWO, FOUR)
    assert found.lines[:2] == [
        "for mnist-mlp on this machine train with one worker with 2 threads, batch 128: 1.5x (1.06x to 2.1x) "
        "faster than one worker with one thread (97 % after 6.7 s against 10 s).",
        "Not told apart from it: allreduce, 2 workers, batch 256 (5.0 s); allreduce, 4 workers, batch 256 "
        "(6.0 s).",
    ]


def test_what_is_not_told_apart_is_not_called_slower():
    close = gang(4, 19_456)  # 5.3 s
    lines = sure(ALONE, THREADS, TWO, close).lines
    assert lines[1] == "Not told apart from it: allreduce, 4 workers, batch 256 (5.3 s)."
    assert not any("do not pay" in line for line in lines)


def test_among_equals_the_synchronous_one_is_advised():
    wild = record(strategy="hogwild", workers=2, rate=20_600, batch=256, steps_to_target=400)
    found = sure(ALONE, THREADS, TWO, wild)
    assert found.advised is not None
    assert found.advised.variant == "allreduce"
    assert found.lines[1] == "Not told apart from it: hogwild, 2 workers, batch 256 (5.0 s)."


def test_cells_and_runs_that_did_not_arrive_are_counted():
    some = [gang(2, 20_480, seed=n, steps=steps) for n, steps in enumerate((400, 400, None))]
    lines = one(ALONE, *some, FOUR.model_copy(update={"target_samples": None})).lines
    assert "(97 % after 5.0 s in 2 of 3 runs against 10 s)" in lines[0]
    assert lines[-1] == "1 of 3 cells did not reach 97 %."


def test_a_target_that_few_runs_reached_is_not_reached():
    some = [gang(2, 20_480, seed=n, steps=steps) for n, steps in enumerate((400, None, None))]
    assert one(*some).lines[0] == "for mnist-mlp no cell reached 97 % in most of its runs (1 did)."


def test_a_noisy_machine_is_said_to_be():
    noisy = gang(2, 20_480, machine_noise=0.3)
    assert one(ALONE, noisy).lines[-1] == (
        "The machine was noisy while this was measured: run it again before relying on it."
    )


def test_what_was_not_timed_is_answered_by_samples():
    assert one(
        record(timed=False, steps_to_target=800), record(timed=False, batch=512, steps_to_target=300)
    ).text == (
        "for mnist-mlp nothing was timed, so the fastest is not known; the fewest samples to 97 % were "
        "needed by single, 1 thread, batch 128: 102,400 images (84,160 to 124,594)."
    )


def test_samples_that_are_not_told_apart_are_not_called_fewest_alone():
    found = one(
        record(timed=False, steps_to_target=800),
        record(timed=False, batch=512, steps_to_target=210),
        record(timed=False, batch=1024, steps_to_target=300),
    ).text
    assert found.endswith("batch 128: 102,400 images (84,160 to 124,594). Not told apart from it: batch 512.")


def test_what_was_not_timed_can_still_say_how_large_a_batch_pays():
    lines = one(*(run for batch in (16, 64, 256, 1024) for run in tuned(batch, timed=False))).lines
    assert len(lines) == 2
    assert lines[1].startswith("Beyond batch 80 (")


def test_what_was_not_timed_and_did_not_arrive_is_told_by_how_near_it_came():
    assert one(record(timed=False, steps_to_target=None, metric=0.95)).text == (
        "for mnist-mlp no cell reached 97 %; single · 1 thread · batch 128 came nearest with 95.00 %."
    )


def test_the_nearest_of_errors_is_the_smallest():
    wer = {"timed": False, "steps_to_target": None, "metric_name": "wer", "higher_is_better": False}
    runs = [record(metric=score, batch=batch, target=0.05, **wer) for score, batch in ((0.2, 64), (0.7, 128))]
    assert "single · 1 thread · batch 64 came nearest with 0.2" in one(*runs).text


def test_a_study_that_was_interrupted_has_no_answer_yet():
    run = record(status="interrupted", steady_samples_per_second=None)
    found = one(run)
    assert found.text == "for mnist-mlp no run has finished: there is no answer yet."
    assert (found.advised, found.cheapest) == (None, None)


def test_a_run_that_diverged_is_never_the_answer():
    quick = gang(2, 90_000, status="diverged")
    found = one(ALONE, TWO, quick)
    assert found.advised is not None
    assert found.advised.reached == 1


def test_machines_are_counted():
    far = gang(2, 20_480, hosts=["a", "b"])
    assert one(ALONE, far).text.startswith("for mnist-mlp on these 3 machines train with")


def test_each_task_has_its_answer_and_nothing_has_none():
    assert [found.task for found in answers(study(TWO, record(task="mnist-cnn"), ALONE))] == [
        "mnist-mlp",
        "mnist-cnn",
    ]
    assert answers(study()) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_records_does_not_matter(seed: int):
    records = [ALONE, THREADS, TWO, FOUR]
    random.Random(seed).shuffle(records)
    assert one(*records) == one(ALONE, THREADS, TWO, FOUR)


def test_every_speed_up_names_its_baseline():
    for records in ([ALONE, TWO, FOUR], [ALONE, THREADS, TWO], [THREADS, TWO]):
        for line in one(*records).lines:
            assert "x faster" not in line or "one worker with" in line.partition("x faster")[2]


def test_winners_that_differ_only_in_strategy_are_listed_together():
    others = [
        record(strategy=name, workers=2, rate=rate, batch=256, steps_to_target=400)
        for name, rate in (("hogwild", 20_600), ("average", 20_550), ("server", 20_500))
    ]
    found = sure(ALONE, THREADS, TWO, *others[:2])
    assert found.lines[1] == "Not told apart from it: hogwild (5.0 s) and average (5.0 s) with 2 workers."
    more = sure(ALONE, THREADS, TWO, *others, gang(4, 20_480))
    assert more.lines[1] == (
        "Not told apart from it: hogwild, 2 workers, batch 256 (5.0 s); average, 2 workers, batch 256 "
        "(5.0 s); server, 2 workers + 1 server, batch 256 (5.0 s), and 1 more."
    )
