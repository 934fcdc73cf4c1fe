"""TensorBoard and MLflow see what the journal sees."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.records.run_folder import RunFolder


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


def test_a_package_that_is_broken_is_said_before_any_work(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the versions of its own packages do not fit."""

    def broken(self: object) -> None:
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr("manyhands.callbacks.tracking.MLflow.__init__", broken)
    with pytest.raises(UsageError) as caught:
        mh.train("quadratic", track=["mlflow"])
    assert str(caught.value) == (
        "tracking with mlflow: the package mlflow cannot be imported (TypeError: Descriptors cannot be "
        "created directly); install it again or leave it out"
    )
    assert list(here.iterdir()) == []


# ---- services that fail: it once was nothing for 45 seconds, then exit code 1 and no model
DEAD = "http://127.0.0.1:9"


def run_tracked(typed: Callable[..., Any], tracker: str, **environment: str) -> tuple[str, float]:
    """What is said of a tracker by a run that ends well all the same, and how long that took."""
    since = time.monotonic()
    answer = typed("train", "quadratic", "--epochs", "1", "--out", "run", "--track", tracker, **environment)
    assert answer.code == 0, answer.err
    (sentence,) = [line for line in answer.err.splitlines() if line.startswith(f"{tracker} was ")]
    return sentence, time.monotonic() - since


def test_a_server_that_is_not_there(typed: Callable[..., Any]) -> None:
    pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    dead = {"MLFLOW_TRACKING_URI": DEAD, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    sentence, _ = run_tracked(typed, "mlflow", **dead)
    assert sentence.startswith("mlflow was switched off: MlflowException: API request to http://127.0.0.1:9")
    assert sentence.endswith("; training continues without it")


def test_a_server_that_does_not_answer(
    typed: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow waits and tries again for minutes: neither the first step nor the end waits for it."""
    pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    monkeypatch.setattr("manyhands.callbacks.background.GRACE", 0.3)
    monkeypatch.setattr("manyhands.callbacks.background.EXTRA_GRACE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        sentence, seconds = run_tracked(typed, "mlflow", **environment)
    assert sentence.startswith("mlflow was left behind: it has not answered for ")
    assert seconds < 30.0
    assert (tmp_path / "run/model.safetensors").is_file()


def test_an_address_that_is_none(typed: Callable[..., Any]) -> None:
    pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    sentence, _ = run_tracked(typed, "mlflow", MLFLOW_TRACKING_URI="carrier-pigeon://home")
    assert sentence.startswith("mlflow was switched off: ")
    assert "carrier-pigeon" in sentence


def test_a_file_in_the_place_of_a_folder(typed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    import torch.utils.tensorboard as package

    def in_the_way(folder: str, **settings: Any) -> object:
        Path(folder).touch()
        return package.writer.SummaryWriter(folder, **settings)

    monkeypatch.setattr(package, "SummaryWriter", in_the_way)
    sentence, _ = run_tracked(typed, "tensorboard")
    assert sentence.startswith("tensorboard was switched off: FileExistsError: ")
    assert sentence.endswith("; training continues without it")
