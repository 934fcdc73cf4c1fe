"""Scaling regimes from records: the best rate for each batch, and batches that never arrived."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from manyhands.analysis.regimes import Estimate, Regimes, about, curve, opening, regimes
from manyhands.records.record import RunRecord
from manyhands.testing.records import record
from manyhands.testing.simulated import Simulated

BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def run(batch: int, steps: int | None = -1, **fields: object) -> RunRecord:
    """On the curve of S_min = 200, B_crit = 400 unless told otherwise; long enough to get there."""
    if steps == -1:
        steps = round(200 * (1 + 400 / batch))
    return record(batch=batch, steps_to_target=steps, epochs=fields.pop("epochs", 20.0), **fields)


def one(records: list[RunRecord]) -> Regimes:
    (found,) = regimes(records)
    return found


def with_rate(found: RunRecord, lr: float) -> RunRecord:
    return found.model_copy(update={"recipe": {**found.recipe, "lr": lr}, "recipe_line": f"lr {lr:g}"})


def tuned(batches: Sequence[int], factors: Sequence[float] = (1.2, 1.0, 1.2)) -> list[RunRecord]:
    """Runs at rates 0.05, 0.1, 0.2, ..., that need this many times the steps of the best one."""
    return [
        with_rate(run(batch, steps=round(factor * 200 * (1 + 400 / batch))), 0.05 * 2**number)
        for batch in batches
        for number, factor in enumerate(factors)
    ]


def test_the_curve_and_its_regimes_are_found():
    found = one([run(batch) for batch in BATCHES])
    assert found.problem is None
    assert found.s_min is not None
    assert found.b_crit is not None
    assert found.perfect_until is not None
    assert found.maximal_from is not None
    assert found.s_min.value == pytest.approx(200, rel=0.02)
    assert found.b_crit.value == pytest.approx(400, rel=0.02)
    assert found.b_crit.low < 400 < found.b_crit.high
    assert found.perfect_until == pytest.approx([0.2 * value for value in found.b_crit])
    assert found.maximal_from == pytest.approx([5 * value for value in found.b_crit])
    assert (found.task, found.label, found.target) == ("mnist-mlp", "", 0.97)


def test_a_curve_is_drawn_from_the_fit():
    found = one([run(batch) for batch in BATCHES])
    assert curve(found, [400, 4e9]) == pytest.approx([400, 200], rel=0.03)
    assert curve(one([run(16), run(32)]), [1, 2]) == []


def test_the_sentence_says_where_the_regimes_end():
    assert one(tuned(BATCHES)).sentence.startswith("Up to batch 80 (")
    wide = one(tuned([batch for batch in BATCHES if batch >= 128]))
    assert wide.sentence.startswith(
        "From batch 128, the smallest that was run, doubling the batch does not halve the steps."
    )
    narrow = one(tuned((8, 16, 32, 64)))
    assert re.fullmatch(
        r"Up to batch 64, the largest that was run, doubling the batch halves the steps "
        r"\(for sure up to [\d.]+\)\. "
        r"The batch from which more brings nothing is beyond the 64 that were run\.",
        narrow.sentence,
    )


def test_without_tuning_it_is_told_of_the_recipe_and_not_in_the_opening_answer():
    """Three studies had critical batches of 4,400, 727 and 241 for one network, because of their recipes."""
    found = one([run(batch) for batch in BATCHES])
    assert (found.tuned, found.edge) == (False, ())
    assert found.sentence.startswith("For this recipe, up to batch 80 (")
    assert opening([found]) == ""


def test_with_a_tuned_rate_it_is_told_of_the_task():
    found = one(tuned(BATCHES))
    assert (found.tuned, found.edge, found.label) == (True, (), "lr tuned")
    assert re.fullmatch(
        r"Beyond batch 80 \(\d+ to \d+\) doubling the batch no longer halves the steps\.", opening([found])
    )


def test_a_best_rate_at_the_edge_is_said():
    records = [*tuned(BATCHES[:-2]), *tuned(BATCHES[-2:], factors=(1.5, 1.2, 1.0))]
    found = one(records)
    assert (found.tuned, found.edge) == (True, (1024, 2048))
    edge = (
        "At batches 1,024 and 2,048 the best learning rate is the smallest or largest that was tried: "
        "a better one may lie outside."
    )
    assert found.sentence.endswith(edge)
    assert opening([found]).endswith(edge)


def test_a_larger_rate_that_diverged_was_tried():
    records = tuned(BATCHES, factors=(1.5, 1.0))
    assert one(records).edge == BATCHES
    lost = [with_rate(run(batch, steps=None, status="diverged"), 0.4) for batch in BATCHES]
    assert one(records + lost).edge == ()


def test_rates_whose_best_are_mostly_at_the_edge_are_not_tuned():
    found = one(tuned(BATCHES, factors=(1.5, 1.2, 1.0)))
    assert (found.tuned, found.edge) == (False, BATCHES)
    assert found.sentence.startswith("For the learning rates that were tried, up to batch")
    assert opening([found]) == ""


def test_what_tuning_leaves_open_is_part_of_the_interval():
    """Where each step on the grid of rates costs much, a rate between two of them may save much."""
    flat, steep = one(tuned(BATCHES, (1.1, 1.0, 1.1))), one(tuned(BATCHES, (2.7, 1.0, 1.1)))
    assert flat.b_crit is not None
    assert steep.b_crit is not None
    assert steep.b_crit.high / steep.b_crit.low > 1.3 * flat.b_crit.high / flat.b_crit.low


def test_steps_that_any_critical_batch_fits_are_refused():
    wild = {64: 900, 90: 300, 128: 1000, 180: 250}
    found = one([run(batch, steps=steps) for batch, steps in wild.items()])
    assert found.b_crit is None
    assert found.problem is not None
    assert found.problem.startswith("the steps vary too much at these batches: any critical batch from ")


def test_three_batches_with_one_seed_are_refused_and_with_two_they_are_not():
    few = [run(batch) for batch in (64, 256, 1024)]
    assert one(few).problem == (
        "3 batches with one seed do not show how noisy they are; a fit needs 4, or several seeds"
    )
    again = [
        run(batch, steps=(each.target_steps or 0) + 9, seed=1)
        for batch, each in zip((64, 256, 1024), few, strict=True)
    ]
    found = one(few + again)
    assert found.b_crit is not None
    assert found.b_crit.low < 400 < found.b_crit.high


def test_recipes_that_differ_in_more_than_the_rate_are_told_apart():
    plain = [run(batch) for batch in BATCHES[:4]]
    other = [each.model_copy(update={"recipe": {**each.recipe, "momentum": 0.9}}) for each in plain]
    third = [each.model_copy(update={"recipe": {**each.recipe, "momentum": 0.0}}) for each in plain]
    labels = [found.label for found in regimes(other + third)]
    assert labels == ["linear + warm-up, momentum 0.9", "linear + warm-up, momentum 0.0"]


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 0.15, 0.3])
@pytest.mark.parametrize(
    "world",
    [
        Simulated(rates=3),
        Simulated(rates=3, seeds=2),
        Simulated(batches=(16, 64, 256, 1024, 4096, 16_384), limit=200 * (1024 + 400) * 1.3),
        Simulated(batches=(64, 512, 4096), seeds=3),
        Simulated(spacing=12_000),
    ],
    ids=["best of 3 rates", "and 2 seeds", "large end not reached", "3 batches", "evaluations far apart"],
)
def test_the_interval_of_a_study_holds_the_truth(world: Simulated, noise: float):
    """Whatever the noise, of which the analysis is not told. The full table: benchmarks/trust."""
    chance = random.Random(f"{world} {noise}")
    fits = [one(world._replace(noise=noise).records(chance)) for _ in range(50)]
    told = [fit.b_crit for fit in fits if fit.b_crit is not None]
    held = sum(each.low <= world.truth.b_crit <= each.high for each in told)
    assert len(told) >= 25
    assert held >= 0.88 * len(told)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((432.1, 378.4, 482.2), "430 (380 to 480)"),
        ((12_345.0, 9_876.0, 23_456.0), "12,000 (9,900 to 23,000)"),
        ((80.0, 40.0, 1601.0), "80 (at least 40)"),
        ((80.0, 3.9, 120.0), "80 (at most 120)"),
        ((80.0, 3.9, 1601.0), "unknown"),
        ((0.5, 0.25, 1.0), "0.5 (0.25 to 1)"),
    ],
)
def test_a_batch_is_told_in_the_digits_that_are_known(value: tuple[float, float, float], text: str):
    assert about(Estimate(*value)) == text


def test_for_each_batch_the_best_rate_counts_and_is_named():
    records = []
    for batch in BATCHES:
        good = run(batch)
        records += [with_rate(good, 0.1), with_rate(run(batch, steps=None), 3.0)]
        records.append(with_rate(run(batch, steps=2 * (good.target_steps or 0)), 0.01))
    found = one(records)
    assert found.label == "lr tuned"
    assert [point.steps for point in found.points] == [round(200 * (1 + 400 / batch)) for batch in BATCHES]
    assert {(point.reached, point.of, point.recipe_line) for point in found.points} == {(1, 1, "lr 0.1")}


def test_a_rate_that_only_some_seeds_survive_does_not_win_by_them():
    lucky = [with_rate(run(64, steps=n, seed=i), 1.0) for i, n in enumerate((300, None, None))]
    steady = [with_rate(run(64, seed=i), 0.1) for i in range(3)]
    found = one([*lucky, *steady, run(16), run(32)])
    assert found.points[-1].steps == 1450
    assert (found.points[-1].reached, found.points[-1].of) == (3, 3)


def test_a_batch_that_nobody_reached_is_a_bound():
    found = one([*(run(batch) for batch in BATCHES[:4]), run(4096, steps=None, epochs=10.0)])
    late = found.points[-1]
    assert (late.steps, late.low, late.high, late.reached, late.of) == (None, None, None, 0, 1)
    assert late.bound == 146
    assert found.s_min is not None
    assert found.s_min.value == pytest.approx(200, rel=0.02)  # the curve is above the bound anyway


def test_a_bound_lifts_a_curve_that_would_come_below_it():
    small = [run(batch) for batch in BATCHES[:4]]
    late = run(4096, steps=None, epochs=40.0)
    assert late.steps > 500
    lifted = one([*small, late])
    assert lifted.s_min is not None
    assert lifted.s_min.value > 280


def test_a_batch_that_only_some_seeds_reached_is_told_as_such():
    seeds = [run(64, steps=n, seed=i) for i, n in enumerate((1400, 1500, None))]
    found = one([*seeds, run(16), run(32), run(128)])
    point = found.points[2]
    assert (point.steps, point.low, point.reached, point.of, point.bound) == (1500, 1400, 2, 3, None)
    assert point.high == 18_750


def test_what_diverged_bounds_nothing():
    lost = run(4096, steps=None, status="diverged")
    found = one([*(run(batch) for batch in BATCHES[:4]), lost])
    assert (found.points[-1].steps, found.points[-1].bound, found.points[-1].of) == (None, None, 1)
    assert found.s_min is not None


def test_a_run_that_noted_the_target_and_diverged_did_not_reach_it():
    found = one([run(16), run(32), run(64), run(128, status="diverged")])
    assert found.points[-1].reached == 0


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([run(16), run(32)], "only 2 batches reached the target; a fit needs 3"),
        ([run(16), run(32, steps=None)], "only 1 batch reached the target; a fit needs 3"),
        (
            [run(16, steps=None), run(32, steps=None)],
            "none of 2 batches reached the target in most of its runs",
        ),
    ],
)
def test_why_there_is_no_fit(records: list[RunRecord], problem: str):
    found = one(records)
    assert found.problem == problem
    assert found.sentence == f"No regimes: {problem}."
    assert (found.s_min, found.b_crit, found.perfect_until, found.maximal_from) == (None,) * 4


def test_one_batch_is_no_curve_and_nothing_gives_nothing():
    assert regimes([run(64), run(64, seed=1)]) == []
    assert regimes([]) == []


def test_asynchronous_runs_and_short_ones_are_left_out():
    records = [run(batch) for batch in BATCHES]
    more = [
        run(64, steps=10, strategy="hogwild", workers=2),
        run(64, steps=10, strategy="average", workers=2),
    ]
    assert one(records + more) == one(records)


def test_recipes_make_curves_of_their_own():
    plain = [run(batch) for batch in BATCHES[:4]]
    other = [each.model_copy(update={"recipe": {"scaling": "none"}}) for each in plain]
    assert [found.label for found in regimes(plain + other)] == ["linear + warm-up", "no scaling"]


def test_rare_evaluations_make_the_curve_less_sure():
    often = [run(batch) for batch in BATCHES]
    rarely = [
        each.model_copy(update={"curve": [each.curve[0].model_copy(update={"step": 1})]}) for each in often
    ]
    sure, unsure = one(often), one(rarely)
    assert sure.b_crit is not None
    assert unsure.b_crit is not None
    assert unsure.b_crit.high - unsure.b_crit.low > sure.b_crit.high - sure.b_crit.low


def test_the_order_of_records_does_not_matter():
    records = [run(batch, seed=seed) for batch in BATCHES for seed in (0, 1)]
    assert one(records[::-1]) == one(records)
