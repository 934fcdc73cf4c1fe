"""TensorBoard and MLflow see what the journal sees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.errors import UsageError
from manyhands.folder import RunFolder


def test_tensorboard_has_every_step(here: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = mh.train("quadratic", epochs=2, track=["tensorboard"], quiet=True)
    events = EventAccumulator(str(here / record.run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    steps = RunFolder(here / record.run).steps()
    assert [event.step for event in events.Scalars("loss")] == [step.samples for step in steps]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([step.loss for step in steps])
    assert len(events.Scalars("metric")) == 2


def test_mlflow_has_every_step(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (here / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    record = mh.train("quadratic", epochs=2, batch=50, track=["mlflow"], quiet=True)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("manyhands").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["batch"] == "50"
    assert run.data.metrics["samples_per_second"] == pytest.approx(record.samples_per_second)
    history = client.get_metric_history(run.info.run_id, "loss")
    steps = RunFolder(here / record.run).steps()
    assert sorted((m.step, m.value) for m in history) == [(step.samples, step.loss) for step in steps]


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")]
)
def test_without_the_extra_it_says_what_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as caught:
        mh.train("quadratic", track=[name])
    needs = f"tracking with {name} needs the package {name}: pip install 'manyhands[tracking]'"
    assert str(caught.value) == needs
    assert list(here.iterdir()) == []
