"""Scaling regimes from records: the best rate for each batch, and batches that never arrived."""

from __future__ import annotations

import re

import pytest

from manyhands.analysis.regimes import Estimate, Regimes, about, curve, regimes
from manyhands.records.record import RunRecord
from manyhands.testing.records import record

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
    assert one([run(batch) for batch in BATCHES]).sentence.startswith("Up to batch 80 (")
    wide = one([run(batch) for batch in BATCHES if batch >= 128])
    assert wide.sentence.startswith(
        "From batch 128, the smallest that was run, doubling the batch does not halve the steps."
    )
    narrow = one([run(batch) for batch in (16, 32, 64)])
    assert re.fullmatch(
        r"Up to batch 64, the largest that was run, doubling the batch halves the steps "
        r"\(for sure up to [\d.]+\)\. "
        r"The batch from which more brings nothing is beyond the 64 that were run\.",
        narrow.sentence,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((432.1, 378.4, 482.2), "430 (380 to 480)"),
        ((12_345.0, 9_876.0, 23_456.0), "12,000 (9,900 to 23,000)"),
        ((80.0, 40.0, 1601.0), "80 (at least 40)"),
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


def test_three_batches_are_enough():
    found = one([run(64), run(256), run(1024)])
    assert found.b_crit is not None
    assert found.b_crit.value == pytest.approx(400, rel=0.05)


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
