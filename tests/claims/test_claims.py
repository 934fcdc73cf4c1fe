"""Each claim with made-up records on both sides of what settles it, and with too few of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.claims import CLAIMS, Finding, settle
from manyhands.records.record import Noise, RunRecord
from manyhands.records.study_results import Results
from manyhands.testing.records import record


def judged(name: str, records: list[RunRecord]) -> Finding:
    return CLAIMS[name].judge(Results(Path("results/test"), "test", "test", records=records))


@pytest.mark.parametrize("name", CLAIMS)
def test_nothing_settles_nothing_and_says_what_is_missing(name: str) -> None:
    finding = judged(name, [])
    assert finding.holds is None
    assert finding.verdict == "not settled here"
    assert finding.text.startswith("this needs ")


def test_a_study_that_is_about_a_claim_says_what_came_of_it() -> None:
    results = Results(
        Path("results/test"), "test", "test", claim="offload", records=TestOffload().both(0.5, 85.0)
    )
    settled = settle(results)
    assert settled is not None
    assert settled.text == (
        "A network whose activations do not fit trains all the same if they are moved out between forward "
        "and backward, a little slower. (vDNN, Rhu et al. 2016: VGG-16 at batch 256, a 28 GB job, on 12 GB, "
        "18 % slower)\nHolds here: mnist-mlp: offload auto takes 50 % off a worker's memory (1 GB to 500 MB, "
        "including parameters) for 18 % more time."
    )
    assert settle(Results(Path("results/test"), "test", "test")) is None


LINEAR = {"name": "large-batch", "scaling": "linear", "lr": 0.1}


def _ended(batch: int, metric: float, **recipe: Any) -> RunRecord:
    return record(batch=batch, metric=metric).model_copy(update={"recipe": LINEAR | recipe})


def _recipes(kept: float, cold: float, unscaled: float) -> list[RunRecord]:
    return [
        _ended(64, 0.98, warmup=1.0),
        _ended(2048, kept, warmup=1.0),
        _ended(2048, cold, warmup=0.0),
        _ended(2048, unscaled, warmup=0.0, scaling="none"),
    ]


class TestLargeBatch:
    def test_holds(self) -> None:
        finding = judged("large-batch", _recipes(0.978, 0.95, 0.96))
        assert finding.verdict == "holds here"
        assert finding.text == (
            "mnist-mlp: batch 2,048 with linear + warm-up keeps accuracy: 97.80 %, 0.2 points less than the "
            "smallest batch; batch 2,048 with linear, no warm-up loses accuracy: 95.00 %, 3.0 points less "
            "than the smallest batch; batch 2,048 with no scaling loses accuracy: 96.00 %, 2.0 points less "
            "than the smallest batch."
        )
        assert len(finding.table) == 4

    @pytest.mark.parametrize(
        "metrics", [(0.974, 0.95, 0.96), (0.978, 0.979, 0.96), (0.978, 0.95, 0.978)], ids=str
    )
    def test_each_part_can_fail(self, metrics: tuple[float, float, float]) -> None:
        assert judged("large-batch", _recipes(*metrics)).holds is False

    def test_divergence_is_a_loss(self) -> None:
        records = _recipes(0.978, 0.979, 0.96)
        records[2] = records[2].model_copy(update={"status": "diverged"})
        finding = judged("large-batch", records)
        assert finding.holds is True
        assert "batch 2,048 with linear, no warm-up diverges" in finding.text

    def test_a_batch_that_grows_less_settles_nothing(self) -> None:
        assert judged("large-batch", _recipes(0.978, 0.95, 0.96)[1:]).holds is None


def _steps(by_batch: dict[int, int]) -> list[RunRecord]:
    return [record(batch=batch, steps_to_target=steps, epochs=500.0) for batch, steps in by_batch.items()]


CURVE = {batch: 512 * (256 + batch) // batch for batch in (8, 16, 32, 64, 128, 256, 512, 2048, 8192)}


class TestCriticalBatch:
    def test_three_regimes_hold(self) -> None:
        finding = judged("critical-batch", _steps(CURVE))
        assert finding.holds is True
        assert "the critical batch is 256" in finding.text
        assert "Published (Shallue et al. 2018" in finding.text
        assert len(finding.table) == len(CURVE)

    @pytest.mark.parametrize("batches", [(8, 16, 32, 64), (512, 1024, 4096, 8192)], ids=str)
    def test_where_one_end_is_missing_it_does_not(self, batches: tuple[int, ...]) -> None:
        curve = {batch: round(1000 * (1 + 256 / batch)) for batch in batches}
        assert judged("critical-batch", _steps(curve)).holds is False


class TestNoiseScale:
    def _records(self, scale: float) -> list[RunRecord]:
        noise = Noise(small=128, big=256, gradient=1.0, spread=scale, steps=100)
        return [
            *_steps(CURVE),
            record(batch=256, accumulate=2, noise=noise, steps_to_target=1024, epochs=9.0),
        ]

    @pytest.mark.parametrize(("scale", "holds"), [(260, True), (1200, True), (1500, False), (40, False)])
    def test_within_a_factor(self, scale: float, holds: bool) -> None:
        finding = judged("noise-scale", self._records(scale))
        assert finding.holds is holds
        assert f"the noise scale is {scale:,} and the critical batch 256" in finding.text


def _two(strategy: str, rate: float, **more: Any) -> RunRecord:
    return record(strategy=strategy, workers=2, batch=256, rate=rate, **more)


class TestDataOrModel:
    def test_both_sides(self) -> None:
        model = [_two("layers", 9_000), _two("pipeline", 14_000)]
        finding = judged("data-or-model", [_two("allreduce", 18_000), *model])
        assert finding.holds is True
        assert "1.29x as fast as pipeline" in finding.text
        assert judged("data-or-model", [_two("allreduce", 13_000), *model]).holds is False


class TestMoreWorkers:
    def _curve(self, four: float) -> list[RunRecord]:
        rates = {1: 10_000.0, 2: 19_000.0, 4: four}
        return [
            record(strategy="allreduce" if n > 1 else "single", workers=n, batch=256, rate=rate)
            for n, rate in rates.items()
        ]

    def test_both_sides(self) -> None:
        assert judged("more-workers", self._curve(9_000)).holds is True
        assert judged("more-workers", self._curve(38_000)).holds is False


class TestAsynchrony:
    def _records(self, steps: int | None) -> list[RunRecord]:
        stale = {0: 10, 1: 80, 2: 10}
        return [
            _two("allreduce", 18_000, steps_to_target=300),
            _two("hogwild", 20_000, steps_to_target=steps, staleness=stale),
        ]

    def test_both_sides(self) -> None:
        more = judged("asynchrony", self._records(360))
        assert more.holds is True
        assert "hogwild on 2 workers needs 1.20x the samples of allreduce at a staleness of 1" in more.text
        assert judged("asynchrony", self._records(240)).holds is False

    def test_who_never_arrives_needs_more(self) -> None:
        finding = judged("asynchrony", self._records(None))
        assert finding.holds is True
        assert "never reached the target" in finding.text


class TestAveraging:
    def _records(self, rarely: float, end: float) -> list[RunRecord]:
        metrics = {1: 0.978, 64: rarely, "end": end}
        return [
            _two("average", 18_000, strategy_options={"every": every}, metric=metric)
            for every, metric in metrics.items()
        ]

    @pytest.mark.parametrize(
        ("rarely", "end", "holds"),
        [(0.976, 0.95, True), (0.97, 0.95, False), (0.978, 0.977, False)],
    )
    def test_both_sides(self, rarely: float, end: float, holds: bool) -> None:
        assert judged("averaging", self._records(rarely, end)).holds is holds


class TestOffload:
    def both(self, share: float, rate: float) -> list[RunRecord]:
        plain = record(rate=100.0).model_copy(update={"memory": [1_000_000_000]})
        moved = record(rate=rate, offload="auto").model_copy(update={"memory": [round(share * 1e9)]})
        return [plain, moved]

    @pytest.mark.parametrize(
        ("share", "rate", "holds"), [(0.5, 85.0, True), (0.5, 70.0, False), (0.9, 95.0, False)]
    )
    def test_both_sides(self, share: float, rate: float, holds: bool) -> None:
        finding = judged("offload", self.both(share, rate))
        assert finding.holds is holds
        assert finding.table[1]["offload"] == "auto"
