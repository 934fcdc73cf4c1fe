"""The gradient noise scale: a ratio of means, its course, and the critical batch beside it."""

from __future__ import annotations

import pytest

from manyhands.analysis.noise_scale import noise_scales
from manyhands.records.record import Evaluation, Noise, RunRecord
from manyhands.testing.records import record


def run(gradient: float, spread: float, steps: int = 100, **fields: object) -> RunRecord:
    return record(noise=Noise(small=64, big=128, gradient=gradient, spread=spread, steps=steps), **fields)


def test_it_is_the_ratio_of_the_means_weighted_by_steps():
    (found,) = noise_scales([run(1.0, 100.0), run(3.0, 900.0, steps=300, seed=1)])
    assert found.scale is not None
    assert found.scale.value == pytest.approx((100 + 3 * 900) / (1 + 3 * 3))
    assert found.scale.low < found.scale.value < found.scale.high
    assert (found.task, found.runs, found.critical, found.ratio) == ("mnist-mlp", 2, None, None)


def test_one_run_has_an_interval_of_no_width():
    (found,) = noise_scales([run(2.0, 100.0), record(seed=1)])
    assert found.scale == (50.0, 50.0, 50.0)


@pytest.mark.parametrize(("gradient", "spread"), [(-1.0, 10.0), (1.0, -10.0)])
def test_estimates_that_came_out_negative_tell_nothing(gradient: float, spread: float):
    (found,) = noise_scales([run(gradient, spread)])
    assert found.scale is None
    assert found.ratio is None


def test_a_negative_estimate_is_averaged_with_the_others_not_dropped():
    (found,) = noise_scales([run(-1.0, 100.0), run(3.0, 100.0, seed=1)])
    assert found.scale is not None
    assert found.scale.value == pytest.approx(100.0)


def test_its_course_is_the_mean_of_all_runs():
    def point(samples: int, noise: tuple[float, float] | None) -> Evaluation:
        return Evaluation(step=1, samples=samples, seconds=1, loss=1, metric=0.5, test_loss=1, noise=noise)

    curves = [
        [point(100, (1.0, 10.0)), point(200, (1.0, 40.0)), point(300, (-1.0, 5.0))],
        [point(100, (3.0, 30.0)), point(200, None)],
    ]
    (found,) = noise_scales([run(1.0, 10.0, curve=curve, seed=n) for n, curve in enumerate(curves)])
    assert found.by_samples == [(100, 10.0), (200, 40.0)]


def test_it_is_compared_with_the_critical_batch():
    records = [
        record(batch=b, steps_to_target=round(200 * (1 + 400 / b)), epochs=20.0) for b in (32, 128, 512, 2048)
    ]
    (found,) = noise_scales([*records, run(1.0, 200.0, batch=64, steps_to_target=1450, epochs=20.0)])
    assert found.critical is not None
    assert found.critical.value == pytest.approx(400, rel=0.03)
    assert found.ratio == pytest.approx(0.5, rel=0.03)


def test_without_measurements_there_is_nothing():
    assert noise_scales([]) == []
    assert noise_scales([record()]) == []


def test_a_run_that_diverged_says_nothing():
    """Its gradients were of the order of 10^30 and drowned all others."""
    noise = Noise(small=128, big=256, gradient=1.0, spread=250.0, steps=100)
    wild = Noise(small=128, big=256, gradient=-1e30, spread=1e33, steps=20)
    good = record(batch=256, accumulate=2, noise=noise)
    [found] = noise_scales([good, record(batch=512, accumulate=2, noise=wild, status="diverged")])
    assert found.scale.value == pytest.approx(250.0)
    assert found.runs == 1


def test_runs_looked_at_a_little_later_are_one_point_of_the_curve():
    """Batches of 512 and 1,024 end their stretch at 24,064 and 24,576 samples: the curve went to and fro."""

    def seen(samples: int, noise: tuple[float, float]) -> Evaluation:
        return Evaluation(step=1, samples=samples, seconds=1.0, noise=noise)

    whole = Noise(small=128, big=256, gradient=1.0, spread=250.0, steps=100)
    one = record(batch=512, noise=whole, curve=[seen(24_064, (1.0, 100.0)), seen(36_352, (1.0, 400.0))])
    other = record(batch=1024, noise=whole, curve=[seen(24_576, (1.0, 300.0))])
    [found] = noise_scales([one, other])
    assert [(point.samples, point.scale) for point in found.by_samples] == [(24_064, 200.0), (36_352, 400.0)]
