"""Callbacks for TensorBoard and MLflow, whose packages come with the extra `tracking`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.callbacks.base import Callback
from manyhands.core.errors import UsageError, unknown
from manyhands.records.record import RunRecord, Start, StepRecord

_MISSING = "tracking with {0} needs the package {0}: pip install 'manyhands[tracking]'"
_BROKEN = "tracking with {0}: the package {0} cannot be imported ({1}); install it again or leave it out"


def member(name: str) -> Callback:
    """The callback of this name. Its package is imported here; its service is asked when a run starts."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise UsageError(_MISSING.format(name)) from error
    except Exception as error:  # such as versions of its own packages that do not fit
        raise UsageError(_BROKEN.format(name, f"{type(error).__name__}: {error}")) from error


class TensorBoard(Callback):
    """Writes event files into the run's folder: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._writer: Any = None

    def on_start(self, start: Start) -> None:
        """Open the event file; a resumed run replaces the steps that it repeats."""
        self._writer = self._make(str(Path(start.run) / "tensorboard"), purge_step=start.samples)
        self._writer.add_text("spec", start.spec.to_json(), start.samples)

    def on_step(self, step: StepRecord) -> None:
        """Write scalars over samples seen, so that runs with different batch sizes can be compared."""
        for name, value in _scalars(step).items():
            self._writer.add_scalar(name, value, step.samples)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """Logs to the tracking server MLflow is set up for (MLFLOW_TRACKING_URI, or a local folder)."""

    name = "mlflow"
    batch = 100  # metrics per request

    def __init__(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._make, self._metric = MlflowClient, Metric
        self._client: Any = None
        self._run: str | None = None
        self._waiting: list[Any] = []

    def on_start(self, start: Start) -> None:
        """Create a run in the experiment `manyhands`, with the spec as its parameters."""
        self._client = self._make()  # may connect to the tracking server
        experiment = self._client.get_experiment_by_name("manyhands")
        number = experiment.experiment_id if experiment else self._client.create_experiment("manyhands")
        self._run = self._client.create_run(number, run_name=Path(start.run).name).info.run_id
        for name, value in start.spec.model_dump(exclude_defaults=True).items():
            self._client.log_param(self._run, name, value)

    def on_step(self, step: StepRecord) -> None:
        """Collect metrics, and send them a hundred at a time."""
        now = round(step.seconds * 1000)
        self._waiting += [
            self._metric(name, value, now, step.samples) for name, value in _scalars(step).items()
        ]
        if len(self._waiting) >= self.batch:
            self._send()

    def on_end(self, record: RunRecord) -> None:
        """Log the result, and whether the run finished."""
        self._send()
        if self._run is not None:
            self._client.log_metric(self._run, "samples_per_second", record.samples_per_second)
            done = record.status in ("finished", "target")
            self._client.set_terminated(self._run, "FINISHED" if done else "FAILED")
            self._run = None

    def close(self) -> None:
        """Mark a run that did not end as failed."""
        if self._run is not None:
            self._send()
            self._client.set_terminated(self._run, "FAILED")
            self._run = None

    def _send(self) -> None:
        if self._run is not None and self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting)
            self._waiting = []


def _scalars(step: StepRecord) -> dict[str, float]:
    values = {"loss": step.loss, "lr": step.lr, "test_loss": step.test_loss, "metric": step.metric}
    return {name: value for name, value in values.items() if value is not None}


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
