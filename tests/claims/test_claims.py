"""Each claim with made-up records on both sides of its thresholds, and without the power to refute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.claims import CLAIMS, Finding, limit_trial, settle
from manyhands.claims.limit_trial import LimitedSide, LimitTrial
from manyhands.core.errors import UsageError
from manyhands.records.record import Evaluation, RunRecord
from manyhands.records.study_results import Block, Results
from manyhands.testing.records import record

HERE = Path("results/test")
SEEDS = (0, 1, 2)
JITTER = (0.99, 1.0, 1.01)  # what differs between seeds


def made(recipe: dict[str, Any], **fields: Any) -> RunRecord:
    """A record with the options of this recipe."""
    return record(**fields).model_copy(update={"recipe": recipe})


def judged(name: str, records: list[RunRecord], folder: Path = HERE, **more: Any) -> Finding:
    return CLAIMS[name].judge(Results(folder, "test", "test", records=records, **more))


@pytest.mark.parametrize("name", CLAIMS)
def test_nothing_settles_nothing_and_says_what_is_missing(name: str) -> None:
    finding = judged(name, [])
    assert finding.holds is None
    assert finding.verdict == "not settled"
    assert finding.text.startswith("this needs ")


def test_a_study_that_is_about_a_claim_says_what_came_of_it() -> None:
    results = Results(HERE, "test", "test", claim="averaging", records=TestAveraging().runs())
    (settled,) = settle(results)
    said, verdict = settled.text.split("\n")
    assert said.startswith("Workers that average every H steps")
    assert verdict.startswith("Holds here: cifar-resnet depth=8, 2 workers: 60.0 % every 1")
    assert settle(Results(HERE, "test", "test")) == []


def test_one_set_of_runs_decides_both_claims_about_the_critical_batch() -> None:
    found = settle(Results(HERE, "test", "test", claim="noise-scale"))
    assert [each.claim.name for each in found] == ["critical-batch", "noise-scale"]


class TestLargeBatch:
    def runs(self, seeds: tuple[int, ...] = SEEDS, epochs: float = 22.0, **errors: float) -> list[RunRecord]:
        """Errors by recipe and batch; the smallest batch has 2 %."""
        wanted = {"with64": 0.02, "with512": 0.02, "with2048": 0.021, "with4096": 0.03}
        wanted |= {"cold2048": 0.026, "flat2048": 0.1} | errors
        recipes = {
            "with": {"scaling": "linear", "warmup": 1.0},
            "cold": {"scaling": "linear", "warmup": 0.0},
            "flat": {"scaling": "none", "warmup": 0.0},
        }
        return [
            made(
                {"lr": 0.02, **recipes[key[:4]]},
                batch=int(key[4:]),
                epochs=epochs,
                seed=seed,
                metric=1 - error * JITTER[seed],
                status="diverged" if error == 1.0 else "finished",
            )
            for key, error in wanted.items()
            for seed in seeds
        ]

    def test_it_holds_and_tells_the_knee(self) -> None:
        finding = judged("large-batch", self.runs())
        assert finding.verdict == "holds here"
        assert "up to 2,048 (32x), and grow by 50 % at 4,096; the knee is near" in finding.text
        assert [part.threshold for part in finding.parts] == [32, 0.0, 0.0]
        assert 32 <= finding.parts[0].found.value <= 64
        assert "published" in finding.plots[-1].title

    @pytest.mark.parametrize(
        ("errors", "part"),
        [
            ({"with2048": 0.024}, 0),
            ({"cold2048": 0.020}, 1),
            ({"flat2048": 0.020}, 2),
        ],
        ids=str,
    )
    def test_each_part_can_fail(self, errors: dict[str, float], part: int) -> None:
        finding = judged("large-batch", self.runs(**errors))
        assert finding.holds is False
        assert finding.parts[part].holds is False

    def test_the_knee_below_does_not_matter_for_what_breaks_later(self) -> None:
        """The old judge looked at the largest batch only, and said no although 32x was kept."""
        assert judged("large-batch", self.runs(with4096=1.0)).holds is True

    def test_recipes_are_compared_at_the_batch_of_the_claim(self) -> None:
        """At 64x the recipe itself may break: there the others seemed no worse."""
        finding = judged("large-batch", self.runs(with4096=1.0, cold4096=0.9, flat4096=0.2))
        assert finding.holds is True
        assert "without scaling, batch 2,048 has" in finding.text

    def test_a_batch_at_which_every_run_diverges_is_beyond_the_knee_however_few_its_steps(self) -> None:
        finding = judged("large-batch", self.runs(with4096=0.021, with8192=1.0))
        assert finding.holds is True
        assert "up to 4,096 (64x), and every run diverges at 8,192" in finding.text
        assert finding.parts[0].found.high == 128

    def test_an_open_knee_says_how_many_seeds_would_settle_it(self) -> None:
        runs = [
            run.model_copy(update={"metric": 0.972}) if (run.spec.batch, run.spec.seed) == (2048, 2) else run
            for run in self.runs()
        ]
        finding = judged("large-batch", runs)
        assert finding.parts[0].holds is None
        assert "seeds" in finding.parts[0].settles

    def test_divergence_is_a_loss(self) -> None:
        assert judged("large-batch", self.runs(with2048=1.0)).parts[0].holds is False
        cold = judged("large-batch", self.runs(cold2048=1.0))
        assert cold.holds is True
        assert "(3 of 3 runs diverged)" in cold.text

    @pytest.mark.parametrize("more", [{"seeds": (0, 1)}, {"epochs": 6.0}], ids=str)
    def test_without_power_nothing_is_refuted(self, more: dict[str, Any]) -> None:
        """Two seeds, or 176 steps at the large batch: what was lost may be the experiment's fault."""
        finding = judged("large-batch", self.runs(with2048=0.024, cold2048=0.02, flat2048=0.02, **more))
        assert finding.holds is None
        assert "not settled, because" in finding.text

    def test_batches_that_grow_less_settle_nothing(self) -> None:
        runs = [run for run in self.runs() if run.spec.batch in (64, 512)]
        finding = judged("large-batch", runs)
        assert finding.holds is None
        assert "no batch of 32x was trained for 300 steps" in finding.text


class TestCriticalBatch:
    BATCHES = (8, 32, 128, 512, 2048, 8192)

    def runs(
        self,
        steps: dict[int, float] | None = None,
        seeds: tuple[int, ...] = SEEDS,
        rates: tuple[float, ...] = (2.0, 1.0, 2.0),
    ) -> list[RunRecord]:
        """Steps by batch, and how many times as many at each learning rate."""
        curve = steps or {batch: 100 * (1 + 256 / batch) for batch in self.BATCHES}
        return [
            made(
                {"lr": 0.01 * 3**number, "scaling": "none"},
                batch=batch,
                seed=seed,
                epochs=2000.0,
                steps_to_target=round(needed * worse * JITTER[seed]),
                curve=[],
            )
            for batch, needed in curve.items()
            for number, worse in enumerate(rates)
            for seed in seeds
        ]

    def test_three_regimes_hold(self) -> None:
        finding = judged("critical-batch", self.runs())
        assert finding.holds is True
        assert "a doubling saves 48 % (47 to 48 %) of the steps" in finding.text
        assert "The critical batch of mnist-mlp is 25" in finding.text
        assert "Published (Shallue et al. 2018" in finding.text
        assert len(finding.table) == len(self.BATCHES)

    @pytest.mark.parametrize("power", [0.5, 1.0])
    def test_another_shape_does_not(self, power: float) -> None:
        """A doubling that never halves, and one that always does."""
        finding = judged("critical-batch", self.runs({b: 80_000 / b**power for b in self.BATCHES}))
        assert finding.holds is False

    def test_one_end_alone_is_too_little_to_refute(self) -> None:
        steps = {batch: 100 * (1 + 256 / batch) for batch in (8, 16, 32, 64)}
        finding = judged("critical-batch", self.runs(steps))
        assert finding.holds is None
        assert "the batches grow 8x, not 256x" in finding.text

    def test_few_seeds_are_too_few_to_refute(self) -> None:
        steps = {b: 80_000 / b for b in self.BATCHES}
        assert judged("critical-batch", self.runs(steps, seeds=(0, 1))).holds is None

    @pytest.mark.parametrize(
        ("rates", "why"), [((1.0, 2.0, 3.0), "smallest"), ((3.0, 2.0, 1.0), "largest"), ((1.0,), "only one")]
    )
    def test_a_best_rate_at_the_edge_leaves_it_open(self, rates: tuple[float, ...], why: str) -> None:
        """A large batch whose rate could not grow any more looks flat whatever the truth is."""
        finding = judged("critical-batch", self.runs(rates=rates))
        assert finding.holds is None
        assert f"the best rate is the {why} that was tried" in finding.text


class TestNoiseScale:
    """Runs that make one more percent of accuracy per `pace` steps; slower where the batch is small."""

    def runs(
        self, seeds: tuple[int, ...] = SEEDS, factor: float = 1.0, *, falls: bool = False, still: bool = False
    ) -> list[RunRecord]:
        batches = (16, 64, 256, 1024, 4096)
        return [self.run(batch, seed, factor, falls, still) for batch in batches for seed in seeds]

    def run(self, batch: int, seed: int, factor: float, falls: bool, still: bool) -> RunRecord:
        """The critical batch of the n-th interval is 60 * 1.3^n (or 60); a step in it makes n / 40 of it."""
        points, steps = [], 0.0
        for number in range(1, 41):
            critical = 60 * (1.0 if still else 1.3 ** (number / 4))
            steps += 40 * (1 + critical / batch) * JITTER[seed] ** (1 + batch / 1000)
            noise = factor * (60 * 1.3 ** ((40 - number) / 4) if falls else critical)
            points.append(
                Evaluation(
                    step=round(steps),
                    samples=round(steps) * batch,
                    seconds=steps,
                    loss=0.1,
                    metric=0.88 + 0.0025 * number,
                    noise=(1.0, noise),
                )
            )
        last = points[-1]
        return record(
            batch=batch, seed=seed, epochs=3000.0, steps_to_target=last.step, target=0.979
        ).model_copy(
            update={
                "curve": points,
                "noise": {"small": 8, "big": 16, "gradient": 1, "spread": 9, "steps": 9},
                "recipe": {"lr": 0.1, "scaling": "none"},
                "status": "target",
            }
        )

    def test_both_rise_and_are_alike(self) -> None:
        finding = judged("noise-scale", self.runs())
        assert finding.holds is True, finding.text
        assert len(finding.table) >= 4
        assert [part.threshold for part in finding.parts] == [0.8, 5.0]

    def test_noise_that_falls_does_not_predict(self) -> None:
        finding = judged("noise-scale", self.runs(falls=True))
        assert finding.parts[0].holds is False

    def test_too_far_apart(self) -> None:
        finding = judged("noise-scale", self.runs(factor=40.0))
        assert finding.parts[1].holds is False
        assert finding.holds is False

    def test_a_critical_batch_that_stands_still_cannot_be_followed(self) -> None:
        finding = judged("noise-scale", self.runs(falls=True, still=True))
        assert finding.parts[0].holds is None
        assert "grows only 1." in finding.text

    def test_few_seeds_refute_nothing(self) -> None:
        assert judged("noise-scale", self.runs(seeds=(0, 1), falls=True)).parts[0].holds is None


class TestAsynchrony:
    def runs(
        self,
        cost: float = 0.1,
        seeds: tuple[int, ...] = SEEDS,
        stale: tuple[int, ...] = (3, 7, 15),
        cured: float = 0.97,
        rates: tuple[float, ...] = (2.0, 1.0, 2.0),
    ) -> list[RunRecord]:
        """The samples grow by a share per update of staleness."""
        found = []
        for number, worse in enumerate(rates):
            lr = {"lr": 0.01 * 3**number}
            for seed in seeds:
                for staleness in (0, *stale):
                    samples = 100_000 * (1 + cost) ** staleness * worse * JITTER[seed]
                    found.append(self.run(staleness, seed, samples, lr, {}))
                aware = {"staleness_aware": True}
                found.append(self.run(stale[-1], seed, 300_000, lr, aware, best_metric=cured + 0.001 * seed))
        return found

    def run(
        self,
        staleness: int,
        seed: int,
        samples: float,
        recipe: dict[str, Any],
        options: dict[str, Any],
        **more: Any,
    ) -> RunRecord:
        workers = staleness + 1
        batch = 64 * workers
        how: dict[str, Any] = {"strategy": "server", "strategy_options": options} if workers > 1 else {}
        more = {"best_metric": 0.9 + 0.001 * seed} | more
        return made(
            recipe,
            **how,
            **more,
            workers=workers,
            batch=batch,
            seed=seed,
            epochs=60.0,
            steps_to_target=round(samples / batch),
            curve=[],
            staleness={staleness: 100} if workers > 1 else {},
        )

    def test_dose_and_response(self) -> None:
        finding = judged("asynchrony", self.runs())
        assert finding.holds is True
        assert "10.0 % (9.9 % to 10.1 %) more per update of staleness" in finding.text
        assert "reach 97.1 % with rates divided by the staleness and 90.1 % without" in finding.text
        assert [dot.x for dot in finding.plots[0].lines[0].dots] == [0, 3, 7, 15]

    def test_staleness_that_saves_samples_refutes_it(self) -> None:
        assert judged("asynchrony", self.runs(cost=-0.05)).parts[0].holds is False

    def test_a_cure_that_harms_refutes_it(self) -> None:
        assert judged("asynchrony", self.runs(cured=0.8)).parts[1].holds is False

    def test_no_effect_is_not_settled(self) -> None:
        assert judged("asynchrony", self.runs(cost=0.0)).parts[0].holds is None

    def test_little_staleness_refutes_nothing(self) -> None:
        """The old study had a staleness below 3: it could not have shown anything."""
        finding = judged("asynchrony", self.runs(cost=-0.05, stale=(1, 3)))
        assert finding.parts[0].holds is None
        assert "the staleness is at most 3, not 7" in finding.text

    def test_few_seeds_refute_nothing(self) -> None:
        assert judged("asynchrony", self.runs(cost=-0.05, seeds=(0, 1))).parts[0].holds is None

    def test_a_best_rate_at_the_edge_leaves_it_open(self) -> None:
        finding = judged("asynchrony", self.runs(rates=(3.0, 2.0, 1.0)))
        assert finding.parts[0].holds is None
        assert "the best rate is the largest that was tried" in finding.text

    def test_a_run_that_never_arrives_counts_with_what_it_saw(self) -> None:
        late = [
            run.model_copy(update={"target_samples": None, "status": "diverged", "samples": 9_000})
            if run.spec.workers == 16
            else run
            for run in self.runs()
        ]
        finding = judged("asynchrony", late)
        assert finding.parts[0].holds is True
        assert "more than 36x at 15" in finding.text, "3,600,000 samples of its schedule, not 9,000"

    def test_another_size_of_the_update_is_not_compared(self) -> None:
        """A global batch of 256 for any number of workers: the old design."""
        runs = [run.model_copy(update={"spec": run.spec.replace(batch=256)}) for run in self.runs()]
        assert judged("asynchrony", runs).holds is None


class TestAveraging:
    def runs(
        self, rarely: float = 0.60, end: float = 0.3, seeds: tuple[int, ...] = SEEDS, **more: Any
    ) -> list[RunRecord]:
        task = {"task": "cifar-resnet", "options": {"depth": 8}} | more
        sent = {1: 64e6, 16: 4e6, "end": 64e3}
        return [
            record(
                **task,
                strategy="average",
                workers=2,
                seed=seed,
                batch=128,
                metric=accuracy * JITTER[seed] ** (1.1 if every != 1 else 1),
                strategy_options={"every": every},
                traffic=[{"sum": {"calls": 1, "bytes": sent[every], "seconds": 0.1}}] * 2,
            )
            for every, accuracy in ((1, 0.60), (16, rarely), ("end", end))
            for seed in seeds
        ]

    def test_it_holds(self) -> None:
        finding = judged("averaging", self.runs())
        assert finding.holds is True, finding.text
        assert "sends 16.0 times less" in finding.text
        assert "one average at the end gives 30.0 %, 30.0 points" in finding.text

    @pytest.mark.parametrize(("more", "part"), [({"rarely": 0.5}, 0), ({"end": 0.6}, 2)], ids=str)
    def test_each_half_can_fail(self, more: dict[str, float], part: int) -> None:
        finding = judged("averaging", self.runs(**more))
        assert finding.parts[part].holds is False

    def test_bytes_that_do_not_fall_refute_it(self) -> None:
        runs = [run.model_copy(update={"traffic": self.runs()[0].traffic}) for run in self.runs()]
        assert judged("averaging", runs).parts[1].holds is False

    def test_a_stable_network_cannot_show_what_the_end_costs(self) -> None:
        """The old study, on MNIST: 'does not hold' was the network's fault."""
        finding = judged("averaging", self.runs(end=0.6, task="mnist-mlp", options={}))
        assert finding.parts[2].holds is None
        assert "stable from their initialization" in finding.text

    @pytest.mark.parametrize(("epochs", "holds"), [(1.0, None), (2.0, False)])
    def test_a_short_training_refutes_nothing(self, epochs: float, holds: bool | None) -> None:
        """Copies drift apart fastest in the first steps: losing there says little about a whole training."""
        runs = [run.model_copy(update={"epochs": epochs}) for run in self.runs(rarely=0.5)]
        finding = judged("averaging", runs)
        assert finding.parts[0].holds is holds
        assert ("it was trained for 1 of at least 2 epochs" in finding.text) == (holds is None)

    def test_few_seeds_refute_nothing(self) -> None:
        finding = judged("averaging", self.runs(rarely=0.5, end=0.6, seeds=(0, 1)))
        assert [part.holds for part in finding.parts] == [None, True, None]


def blocks(rates: dict[str, float], rounds: int) -> list[Block]:
    """Blocks in rounds around a baseline of 1,000 samples per second, on a machine that drifts."""
    found = []
    for number in range(rounds):
        drift = 1 + 0.1 * (number % 2)
        keys = [key for key in rates for key in ("base", key)]
        for position, key in enumerate([*keys, "base"]):
            noise = 1.0 + 0.001 * (number % 3)
            rate = drift * (1000.0 if key == "base" else rates[key] * noise)
            found.append(Block(key, number, position, rate, 50, 2.0, 1))
    return found


class TestDataOrModel:
    def judged(self, data: float, rounds: int, layers: float = 900.0, pipeline: float = 1400.0) -> Finding:
        rates = {"data": data, "layers": layers, "pipeline": pipeline}
        runs = [
            record(
                strategy=strategy,
                workers=2,
                batch=128,
                rate=rate,
                cell=key,
                paired=True,
                steps_to_target=None,
            )
            for (key, rate), strategy in zip(rates.items(), ("allreduce", "layers", "pipeline"), strict=True)
        ]
        base = record(batch=128, rate=1000.0, cell="base", paired=True, steps_to_target=None)
        return judged("data-or-model", [base, *runs], blocks=blocks(rates, rounds))

    @pytest.mark.parametrize(("data", "holds"), [(1900.0, True), (1100.0, False), (1400.0, None)])
    def test_both_sides_in_pairs(self, data: float, holds: bool | None) -> None:
        finding = self.judged(data, rounds=6)
        assert finding.holds is holds
        assert "as fast as pipeline" in finding.text
        assert "6 rounds" in finding.text

    @pytest.mark.parametrize(
        ("layers", "pipeline", "expected"),
        [
            (900.0, 1400.0, [True, True]),
            (1080.0, 1400.0, [None, True]),  # not told apart from 1.1x
            (1400.0, 1390.0, [False, None]),
            (900.0, 700.0, [True, False]),
        ],
    )
    def test_what_the_model_in_parts_brings(
        self, layers: float, pipeline: float, expected: list[bool | None]
    ) -> None:
        """The claim says three things; `holds` was once told of the first of them only."""
        finding = self.judged(2500.0, rounds=6, layers=layers, pipeline=pipeline)
        names = [part.name for part in finding.parts]
        assert names == [
            "mnist-mlp: data over model parallelism",
            "mnist-mlp: layers on successive workers, over one worker",
            "mnist-mlp: a pipeline over layers",
        ]
        assert [part.holds for part in finding.parts] == [True, *expected]

    def test_three_rounds_refute_nothing(self) -> None:
        finding = self.judged(1000.0, rounds=3)
        assert finding.holds is None
        assert "3 paired rounds of the 5 that are needed" in finding.text

    def test_repeats_of_a_study_are_rounds_too(self) -> None:
        runs = [
            record(strategy=strategy, workers=2, batch=128, rate=rate * drift, repeat=repeat)
            for repeat, drift in enumerate((1.0, 1.3, 0.9, 1.1, 1.0))
            for strategy, rate in (("allreduce", 1900.0), ("pipeline", 1000.0))
        ]
        finding = judged("data-or-model", runs)
        assert finding.holds is True
        assert "1.90x" in finding.text


class TestMoreWorkers:
    def runs(self, most: int, last: float, cores: int = 16) -> list[RunRecord]:
        counts = [1, 2, 4, most]
        rates = [100.0, 190.0, 350.0, last]
        return [
            record(
                strategy="single" if workers == 1 else "allreduce",
                workers=workers,
                batch=128,
                rate=rate * drift,
                repeat=repeat,
                cores=cores,
            )
            for workers, rate in zip(counts, rates, strict=True)
            for repeat, drift in enumerate((0.99, 1.0, 1.01))
        ]

    @pytest.mark.parametrize(("last", "holds"), [(250.0, True), (600.0, False), (350.0, None)])
    def test_with_a_core_for_each(self, last: float, holds: bool | None) -> None:
        assert judged("more-workers", self.runs(8, last)).holds is holds

    def test_few_workers_refute_nothing(self) -> None:
        assert judged("more-workers", self.runs(6, 600.0)).holds is None

    def test_sharing_cores_is_not_the_claim(self) -> None:
        """The old verdict, 'holds', came from four workers on two cores."""
        finding = judged("more-workers", self.runs(8, 50.0, cores=2))
        assert finding.holds is None
        assert "only as oversubscription" in finding.text
        assert "several hosts" in finding.text

    def test_nothing_but_sharing_settles_nothing(self) -> None:
        finding = judged("more-workers", self.runs(8, 50.0, cores=1))
        assert finding.holds is None
        assert finding.table, "the numbers are shown all the same"


PLAN = {"offload": {"mode": "auto", "predicted_peak_plain": 600_000_000}}
KILLED, TRAINED = LimitedSide(exit=1, killed=True), LimitedSide(exit=0)


class TestOffload:
    def runs(
        self, left: float = 400e6, rate: float = 95.0, whole: float = 1e9, rounds: int = 3
    ) -> list[RunRecord]:
        found = []
        for repeat in range(rounds):
            plain = {"memory": [int(whole)], "repeat": repeat}
            moved = {"memory": [int(left) + 1000 * repeat], "repeat": repeat, "choices": PLAN}
            found.append(record(rate=100.0 + repeat).model_copy(update=plain))
            found.append(record(rate=rate + repeat, offload="auto").model_copy(update=moved))
        return found

    def judged(self, folder: Path, trial: LimitTrial | None, **more: float) -> Finding:
        if trial is not None:
            limit_trial.write(folder, [trial])
        return judged("offload", self.runs(**more), folder)  # type: ignore[arg-type]

    def trial(self, plain: LimitedSide = KILLED, offloaded: LimitedSide = TRAINED) -> LimitTrial:
        return LimitTrial(limit=700_000_000, enforced_by="a memory cgroup", plain=plain, offloaded=offloaded)

    def test_it_does_not_fit_and_trains_all_the_same(self, tmp_path: Path) -> None:
        finding = self.judged(tmp_path, self.trial())
        assert finding.holds is True, finding.text
        assert "under a limit of 700 MB (a memory cgroup)" in finding.text
        assert "saves 100 % (96 % to 100 %) of the 600 MB of activations" in finding.text

    def test_nobody_saves_more_than_all(self, tmp_path: Path) -> None:
        """A real study was told to save 145 % of the activations: freed memory is kept beside them."""
        finding = self.judged(tmp_path, self.trial(), left=200e6)
        assert finding.parts[1].found == (1.0, 1.0, 1.0)
        assert (
            "saves all of the 600 MB of activations, and what the process kept beside them (1 GB to 200 MB"
            in finding.text
        )
        assert [row["rounds"] for row in finding.table] == [3, 3]

    @pytest.mark.parametrize(
        ("more", "part"),
        [({"left": 900e6}, 1), ({"rate": 50.0}, 2)],
        ids=str,
    )
    def test_memory_and_time_can_fail(self, tmp_path: Path, more: dict[str, float], part: int) -> None:
        finding = self.judged(tmp_path, self.trial(), **more)
        assert finding.parts[part].holds is False

    def test_both_sides_ended_by_the_limit_refute_it(self, tmp_path: Path) -> None:
        assert self.judged(tmp_path, self.trial(offloaded=KILLED)).parts[0].holds is False

    def test_a_failure_for_another_reason_says_nothing_about_memory(self, tmp_path: Path) -> None:
        finding = self.judged(tmp_path, self.trial(plain=LimitedSide(exit=1, said="no such file")))
        assert finding.parts[0].holds is None
        assert "the limit was too wide" in finding.text

    def test_without_a_trial_it_is_open(self, tmp_path: Path) -> None:
        assert self.judged(tmp_path, None).holds is None
        finding = self.judged(
            tmp_path, LimitTrial(problem="no memory cgroup can be made here: that needs root")
        )
        assert finding.holds is None
        assert "that needs root" in finding.text

    def test_few_activations_refute_nothing(self, tmp_path: Path) -> None:
        """The old study: activations were a quarter of the memory of which 30 % had to be saved."""
        finding = self.judged(tmp_path, self.trial(), whole=2.4e9, left=2.3e9)
        assert finding.parts[1].holds is None
        assert "activations are only 25 % of the memory" in finding.text

    def test_a_file_that_is_no_trial_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / limit_trial.NAME).write_text('{"trials": [{"limit": "much"}]}')
        with pytest.raises(UsageError, match=r"limit\.json is not a list of trials: trials\.0\.limit: "):
            limit_trial.read(tmp_path)
