"""Runs that only measure speed: `evaluate_every = 0` never looks at the test set."""

from __future__ import annotations

from pathlib import Path

import pytest

import manyhands
from manyhands.callbacks.progress import summary
from manyhands.core.errors import UsageError
from manyhands.records.record import RunRecord

WAYS = {
    "single": {},
    "allreduce": {"workers": 2},
    "average": {"workers": 2, "strategy": "average", "strategy_options": {"every": 4}},
    "hogwild": {"workers": 2, "strategy": "hogwild"},
    "server": {"workers": 2, "strategy": "server"},
}


def run(way: str, out: Path, **settings: object) -> RunRecord:
    chosen = {"batch": 8, "epochs": 4, "threads": 1, "evaluate_every": 0, **WAYS[way], **settings}
    return manyhands.train("quadratic", out=out, quiet=True, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_to_the_end_without_an_evaluation(way: str, tmp_path: Path) -> None:
    record = run(way, tmp_path / "run")
    assert record.status == "finished"
    assert record.samples == 4 * record.train_samples
    assert record.curve == []
    assert (record.metric, record.best_metric, record.target_samples) == (None, None, None)
    assert all(phases.get("evaluation", 0.0) == 0.0 for phases in record.phases)
    assert summary(record)[0].startswith("never evaluated · ")


def test_it_learns_the_same(tmp_path: Path) -> None:
    with_, without = run("single", tmp_path / "a", evaluate_every=1.0), run("single", tmp_path / "b")
    assert with_.curve
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0][-64:] == models[1][-64:]  # the tensors; the run's id in the header differs
    assert with_.loss == without.loss


def test_it_cannot_stop_at_a_target(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--stop-at-target needs evaluations, but evaluate_every is 0"):
        run("single", tmp_path / "run", stop_at_target=True)


@pytest.mark.parametrize("way", ["hogwild", "server"])
def test_the_throughput_of_asynchronous_workers_is_the_sum_of_their_own(way: str, tmp_path: Path) -> None:
    """Each between the ends of its own steps: rank 0 sees the others' updates only when its own step ends."""
    record = run(way, tmp_path / "run", epochs=8)
    pieces = record.spec.batch // record.spec.workers if record.spec.batch else 0
    workers = [times for times in record.step_times if times is not None][-2:]
    expected = sum(pieces / times.mean for times in workers)
    assert record.steady_samples_per_second == pytest.approx(expected, rel=1e-6)
