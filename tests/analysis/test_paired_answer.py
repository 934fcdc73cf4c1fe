"""A study in pairs, from its blocks to the answer: steps run once, speeds next to each other."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from manyhands.analysis.answer import Answer, answers
from manyhands.analysis.rows import rows
from manyhands.analysis.scaling import baselines, points
from manyhands.analysis.target import ToTarget, to_target
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Block, Results
from manyhands.testing.paired_blocks import BASELINE, Machine, drifting, paired_study
from manyhands.testing.records import record

TRUE = {"one": 8_000.0, "threads": 13_000.0, "allreduce": 13_200.0, "hogwild": 13_500.0, "four": 9_600.0}


def paired(cell: str, rate: float, **fields: object) -> RunRecord:
    """The record of a cell that only measured speed; its own rate is not the one that counts."""
    made = record(rate=rate * 0.6, steps_to_target=None, batch=256, cell=cell, paired=True, **fields)
    return made.model_copy(update={"run": f"results/test/{cell}", "epochs": 0.3})


def speeds() -> list[RunRecord]:
    ways: dict[str, dict[str, object]] = {
        "one": {},
        "threads": {"threads": 2},
        "allreduce": {"strategy": "allreduce", "workers": 2},
        "hogwild": {"strategy": "hogwild", "workers": 2},
        "four": {"strategy": "allreduce", "workers": 4},
    }
    return [
        paired(BASELINE if name == "one" else name, TRUE[name], split_matters=False, **way)
        for name, way in ways.items()
    ]


def learning(steps: tuple[int | None, ...] = (300, 310, 290), **fields: object) -> list[RunRecord]:
    """Runs to the target with several seeds, untimed."""
    made = []
    for seed, number in enumerate(steps):
        run = record(steps_to_target=number, seed=seed, batch=256, timed=False, split_matters=False, **fields)
        name = f"results/test/{fields.get('strategy', 'single')}-{seed}"
        made.append(run.model_copy(update={"run": name}))
    return made


def blocks(seed: int = 0) -> list[Block]:
    true = {BASELINE if name == "one" else name: rate for name, rate in TRUE.items()}
    cells = [name for name in true if name != BASELINE]
    machine = Machine(noise=0.02, spells=0.0)
    return paired_study(cells, drifting(true, machine, random.Random(seed)), budget=60)[0]


def study(*records: RunRecord, made: list[Block] | None = None) -> Results:
    found = blocks() if made is None else made
    return Results(Path("results/test"), "test", "A test", records=list(records), blocks=found)


def one(results: Results) -> Answer:
    (found,) = answers(results)
    return found


def test_speeds_come_from_rounds_and_not_from_runs():
    made = blocks()
    found = {
        (each.variant, each.workers, each.threads): each for each in points(speeds(), "mnist-mlp", None, made)
    }
    two = found["allreduce", 2, 1]
    assert two.speed_up is not None
    assert two.speed_up.low < 1.65 < two.speed_up.high
    assert two.speed_up.high / two.speed_up.low < 1.15  # drift cancels
    assert two.throughput.high / two.throughput.low > 1.15  # but a speed is that of a visit
    assert two.how == f"{two.speed_up.n} paired rounds"
    baseline, threads = baselines(speeds(), "mnist-mlp", 256, made)
    assert baseline is not None
    assert threads is not None
    assert (baseline.cell, threads.cell) == (BASELINE, "threads")
    assert points(speeds(), "mnist-mlp")[0].how == "1 run"  # without blocks, the runs count


def test_what_one_worker_learned_counts_for_all_who_make_the_same_steps():
    found = {each.cell: each for each in to_target([*speeds(), *learning()], None, blocks())}
    assert set(found) == {BASELINE, "threads", "allreduce", "four"}  # hogwild makes other steps
    samples = found[BASELINE].samples
    assert samples is not None
    assert {each.samples for each in found.values()} == {samples}
    two = found["allreduce"]
    assert two.seconds is not None
    assert two.seconds.median == pytest.approx(300 * 256 / 13_200, rel=0.2)
    assert two.basis.startswith("3 seeds x ")
    assert two.basis.endswith(" paired rounds")
    relative = two.seconds.high / two.seconds.median
    assert relative > max(samples.high / samples.median, 1.1)  # both uncertainties


def test_where_the_division_of_a_batch_matters_nothing_is_shared():
    def divided(run: RunRecord) -> RunRecord:
        return run.model_copy(update={"split_matters": True})

    found = to_target([*map(divided, speeds()), *map(divided, learning())], None, blocks())
    assert {each.cell for each in found} == {BASELINE, "threads"}


def test_the_simplest_of_the_winners_is_advised_and_all_of_them_are_named():
    wild = learning((290, 300, 310), strategy="hogwild", workers=2)
    found = one(study(*speeds(), *learning(), *wild))
    assert isinstance(found.advised, ToTarget)
    assert (found.advised.variant, found.advised.threads) == ("single", 2)
    assert {(each.variant, each.workers) for each in found.winners} == {
        ("single", 1),
        ("allreduce", 2),
        ("hogwild", 2),
    }
    assert found.groups[0] == found.winners
    assert "Not told apart from it: " in found.text
    assert "Plain threads win" not in found.text
    assert "Measured in " in found.text
    assert "paired rounds and 3 seeds; the machine varied by" in found.text
    gained = r": 1\.[67]x \(1\.[56]x to 1\.7x\) faster than one worker with one thread \(97 % after"
    assert re.search(gained, found.lines[0])


def test_learning_that_differs_by_more_than_its_seeds_decides():
    wild = learning((600, 610, 620), strategy="hogwild", workers=2)
    found = one(study(*speeds(), *learning(), *wild))
    assert "hogwild" not in {each.variant for each in found.winners}


def test_what_diverged_or_was_not_tried_is_not_advised():
    wild = learning((290, None, 310), strategy="hogwild", workers=2)
    wild[1] = wild[1].model_copy(update={"status": "diverged"})
    found = one(study(*speeds(), *learning(), *wild))
    assert "hogwild" not in {each.variant for group in found.groups for each in group}
    assert "Not advised, because a run diverged: hogwild, 2 workers, batch 256." in found.text


def test_where_only_speed_was_measured_what_makes_the_same_steps_is_advised():
    """hogwild was once told as "the fastest" of such a study; with its recipe it diverged in 5 of 6 runs."""
    found = one(study(*speeds()))
    assert found.advised is not None
    assert (found.advised.variant, found.advised.threads) == ("single", 2)
    assert {each.variant for each in found.winners} == {"single", "allreduce"}
    assert [each.variant for each in found.untried] == ["hogwild"]
    assert found.text.startswith("for mnist-mlp on this machine train with one worker with 2 threads")
    assert "it makes the steps that one worker makes, and learns the same" in found.text
    assert "Not compared: hogwild, 2 workers, batch 256 (" in found.text
    assert "because it makes other steps, and whether it learns as well was not tried." in found.text


def test_what_is_faster_by_speed_alone_is_said_and_not_advised():
    faster = {"hogwild": 1.3}
    fast = [
        block._replace(samples_per_second=block.samples_per_second * faster.get(block.cell, 1.0))
        for block in blocks()
    ]
    found = one(study(*speeds(), made=fast))
    assert (found.advised.variant if found.advised else "") == "single"
    assert "By speed alone hogwild, 2 workers, batch 256 (" in found.text
    assert "is faster, but it makes other steps, and whether it learns as well was not tried." in found.text


def test_a_division_that_matters_makes_other_steps():
    """Dropout or batch norm that is not synchronized: several workers do not learn what one learns."""
    runs = [
        run.model_copy(update={"split_matters": True}) if run.spec.workers > 1 else run for run in speeds()
    ]
    found = one(study(*runs))
    assert {each.variant for each in found.winners} == {"single"}
    assert {each.variant for each in found.untried} == {"allreduce", "hogwild"}


def test_speed_alone_does_not_advise_what_nobody_tried():
    wild = [run for run in speeds() if run.spec.strategy == "hogwild"]
    found = one(study(*wild))
    assert found.advised is None
    assert found.text.startswith("by speed alone, for mnist-mlp on this machine the fastest is hogwild")
    assert "whether it learns was not tried" in found.text


def test_a_machine_of_two_cores_is_not_three_times_as_fast():
    slow = [
        block._replace(samples_per_second=block.samples_per_second / 2) if block.cell == BASELINE else block
        for block in blocks()
    ]
    assert "is implausible" in one(study(*speeds(), *learning(), made=slow)).text
    assert "implausible" not in one(study(*speeds(), *learning())).text


def test_a_cell_with_a_label_is_a_cell_of_its_own():
    again = paired("again", TRUE["threads"], threads=2, split_matters=False, label="again")
    true = {BASELINE: 8_000.0, "threads": 13_000.0, "again": 13_000.0}
    made, _ = paired_study(["threads", "again"], drifting(true, Machine(), random.Random(3)), 40)
    results = study(*speeds()[:2], again, *learning(), made=made)
    found = {each.variant: each for each in points(results.records, "mnist-mlp", None, made)}
    assert set(found) == {"single", "single (again)"}
    assert len(one(results).winners) == 2
    told = {row["label"]: row["told_apart"] for row in rows(results) if row["threads"] == 2}
    assert told == {"": False, "again": False}


def test_rows_say_how_sure_they_are():
    made = {row["run"]: row for row in rows(study(*speeds(), *learning()))}
    four, two = made["results/test/four"], made["results/test/allreduce"]
    assert (four["told_apart"], two["told_apart"]) == (True, False)
    assert two["speed_up_low"] < two["speed_up"] < two["speed_up_high"]  # type: ignore[operator]
    assert two["throughput_low"] < two["throughput"] < two["throughput_high"]  # type: ignore[operator]
    assert two["throughput"] == pytest.approx(13_200, rel=0.2)
    assert two["rounds"] >= four["rounds"] >= 3  # type: ignore[operator]
    assert made["results/test/single-0"]["throughput"] is None


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_is_the_same_on_another_day(seed: int):
    found = one(study(*speeds(), *learning(), made=blocks(seed)))
    assert found.advised is not None
    assert (found.advised.variant, found.advised.threads) == ("single", 2)
