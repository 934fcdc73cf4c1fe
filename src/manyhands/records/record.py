"""StepRecord and RunRecord: the results of a run as plain data, read without torch (law 8)."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from manyhands.core import formatting
from manyhands.core.environment import Environment
from manyhands.core.errors import UsageError
from manyhands.records.phases import ASIDE, Span, training_phases
from manyhands.records.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

_encode = json.JSONEncoder(separators=(",", ":")).encode
Status = Literal["finished", "target", "interrupted", "diverged"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step: a line of steps.jsonl."""

    step: int  # 1 is the first
    epoch: int  # 0 is the first
    samples: int  # seen so far, including this step
    loss: float  # the mean over this step's global batch, before its update
    lr: float
    seconds: float  # training time so far: evaluation and checkpoints do not count
    phases: dict[str, float] = field(default_factory=dict)  # seconds in this step
    metric: float | None = None  # of the evaluation after this step, if there was one
    test_loss: float | None = None
    worker: int | None = None  # asynchronous strategies: the worker that made this update
    staleness: int | None = None  # updates since the worker read the parameters; None: not yet applied
    synchronized: bool = True  # False if the device ran ahead: phases are times of the host

    def to_json(self) -> str:
        """One line of JSON, without `asdict`: its deep copies were half of the overhead of a step."""
        fields: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "loss": _number(self.loss),
            "lr": self.lr,
            "seconds": round(self.seconds, 6),
            "phases": {name: round(value, 7) for name, value in self.phases.items()},
        }
        if self.metric is not None:
            fields |= {"metric": _number(self.metric), "test_loss": _number(self.test_loss)}
        if self.worker is not None:
            fields |= {"worker": self.worker, "staleness": self.staleness}
        if not self.synchronized:
            fields["synchronized"] = False
        return _encode(fields)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read a line that `to_json` wrote."""
        return cls.from_fields(json.loads(line))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Make a step from the fields of a line; TypeError if they are not valid."""
        if fields.get("loss", 0.0) is None:  # a step between two averages has no common loss
            fields = {**fields, "loss": math.nan}
        made = cls(**fields)
        if not isinstance(made.phases, dict):
            raise TypeError("the phases of a step are not a table")
        counts = [made.step, made.epoch, made.samples]
        counts += [each for each in (made.worker, made.staleness) if each is not None]
        numbers = [made.loss, made.lr, made.seconds, *made.phases.values()]
        numbers += [each for each in (made.metric, made.test_loss) if each is not None]
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
            raise TypeError("a count of a step is not a whole number")
        if not all(type(number) in (int, float) for number in numbers):
            raise TypeError("a value of a step is not a number")
        return made


def _number(value: float | None) -> float | None:
    """Return None for infinity and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


class WorkShare(BaseModel):
    """How much one rank trained."""

    model_config = ConfigDict(frozen=True)

    samples: int = 0
    steps: int = 0
    dropped: int = 0  # leases that came too late for their round and were repeated


class Evaluation(BaseModel):
    """One evaluation on the test set: a point of a run's curves."""

    model_config = ConfigDict(frozen=True)

    step: int
    samples: int
    seconds: float  # training time
    loss: float | None = None  # mean training loss since the previous evaluation; None if not finite
    metric: float | None = None
    test_loss: float | None = None
    noise: tuple[float, float] | None = None  # gradient and spread of Noise, since the previous one


class StepTimes(BaseModel):
    """The step times of a rank in this session, without evaluation and without the first steps.

    On a CPU every step is timed phase by phase. An asynchronous device is synchronized at each change of
    phase in some steps only. The phases are from these steps, which take a little longer; the durations are
    from the other steps.
    """

    model_config = ConfigDict(frozen=True)

    steps: int  # the number of steps measured
    mean: float  # seconds; this and the next three from steps without synchronization, if there are any
    low: float  # the first decile: one step of ten was faster
    median: float
    high: float  # the last decile: one step of ten was slower
    phases: dict[str, float]  # seconds per synchronized step, on average
    synchronized_steps: int | None = None  # on a CPU all steps; None, in records of 0.1.0, means all

    @property
    def sampled(self) -> bool:
        """Whether only some steps were synchronized."""
        return self.synchronized_steps is not None and self.synchronized_steps < self.steps


class Noise(BaseModel):
    """The noise of gradients, estimated from smaller and larger batches (McCandlish et al. 2018).

    `gradient` and `spread` are means over steps of unbiased estimates of |G|^2 and tr(S): with too few steps
    either may be negative.
    """

    model_config = ConfigDict(frozen=True)

    small: float  # samples per smaller batch
    big: float  # samples per larger batch
    gradient: float  # squared norm of the true gradient
    spread: float  # trace of the covariance of one sample's gradient
    steps: int

    @property
    def scale(self) -> float | None:
        """B_simple, the batch at which noise and signal are equal; None if an estimate is not positive."""
        return self.spread / self.gradient if self.gradient > 0 and self.spread > 0 else None


class RunRecord(BaseModel):
    """The result of a run, finished or not: the content of result.json."""

    model_config = ConfigDict(frozen=True)

    id: str
    run: str  # the folder
    status: Status
    message: str | None = None
    spec: RunSpec
    recipe: dict[str, Any]  # with every option, as it was used
    recipe_line: str
    parameters: int
    unit: str
    train_samples: int
    test_samples: int
    steps: int
    samples: int
    epochs: float
    seconds: float  # wall clock from the first step, including evaluation and checkpoints
    training_seconds: float  # without evaluation and checkpoints
    samples_per_second: float  # relative to training_seconds
    loss: float | None  # of the last step; None if it is not finite
    metric_name: str
    metric: float | None
    best_metric: float | None
    target: float
    target_samples: int | None  # when the metric first reached the target
    target_seconds: float | None
    target_steps: int | None = None
    curve: list[Evaluation] = []
    phases: list[dict[str, float]]  # seconds by phase, one dict per rank; see `phases_of`
    # calls, bytes and seconds of training by operation, one dict per rank: payload bytes sent or received, in
    # one unit for every transport (transports/base.py); old records count evaluations too
    traffic: list[dict[str, dict[str, float]]] = []
    hosts: list[str] = []  # by rank
    shares: list[WorkShare] = []  # what each rank did in this session
    staleness: dict[int, int] = {}  # updates by staleness, in this session
    lost: list[str] = []  # workers that were lost while the others continued
    peak_memory: int  # bytes, the largest rank
    memory: list[int] = []  # bytes of every rank, before the first checkpoint
    memory_of: Literal["host", "device"] = "host"  # main memory, or memory that torch reserved on the GPU
    host_memory: int | None = None  # bytes of main memory, the largest rank, if `memory` is that of a GPU
    step_times: list[StepTimes | None] = []  # of every rank; None if it made too few steps
    steady_samples_per_second: float | None = None  # in this session, without the first steps
    timeline: list[list[Span]] = []  # the phases of every rank in one typical step, or in a few; starts at 0
    noise: Noise | None = None  # with --noise-scale
    choices: dict[str, Any] = {}  # options that the strategy chose, such as the partition of the model
    resumed: int  # how many times the run was resumed
    environment: Environment
    repeat: int = 0  # number of the repeat, in a study that runs each cell several times
    timed: bool = True  # whether it ran alone on the machine, so that its times count
    higher_is_better: bool | None = None  # of the metric; None in old records
    machine_noise: float | None = None  # how much slower than at its best the machine was around the run
    # whether dividing a batch over workers changes what is learned: dropout, or batch norm that is not
    # synchronized; None in old records
    split_matters: bool | None = None
    skipped_steps: int = 0  # without an update, because gradients overflowed: with precision fp16
    cell: str | None = None  # the key of its cell, in a study
    paired: bool = False  # its speed was measured in blocks next to those of a baseline: see Results.blocks
    label: str = ""  # of its cell

    @property
    def throughput(self) -> float:
        """Samples per second without the first steps, if known: runs are compared by this."""
        return self.steady_samples_per_second or self.samples_per_second

    @property
    def worker_step_times(self) -> StepTimes | None:
        """The step times of the first rank that trains and was not lost."""
        return next((times for times in self.step_times[self.spec.servers :] if times), None)

    @property
    def worker_phases(self) -> dict[str, float]:
        """Seconds by phase of the first rank that trains and was not lost."""
        first = self.spec.servers
        ranks = (rank for rank, phases in enumerate(self.phases) if phases and rank >= first)
        return self.phases_of(next(ranks, 0))

    def phases_of(self, rank: int) -> dict[str, float]:
        """Seconds by phase of a rank; if only some steps were synchronized, in the proportions of these."""
        phases, times = self.phases[rank], self.step_times[rank] if rank < len(self.step_times) else None
        if times is None or not times.sampled:
            return phases
        training = sum(training_phases(phases).values()) / (sum(times.phases.values()) or 1.0)
        aside = {name: phases[name] for name in ASIDE if name in phases}
        return {**{name: seconds * training for name, seconds in times.phases.items()}, **aside}

    @property
    def mean_staleness(self) -> float | None:
        """The mean staleness of all updates; None for synchronous strategies."""
        total = sum(self.staleness.values())
        return sum(stale * count for stale, count in self.staleness.items()) / total if total else None

    @property
    def reached(self) -> bool:
        """Whether an evaluation reached the target."""
        return self.target_samples is not None

    # ---- for people, in a program or a notebook

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.run)

    def history(self) -> list[StepRecord]:
        """Every step of the run, from its folder."""
        found: list[StepRecord] = _of_room("records.run_folder", "RunFolder")(self.folder).steps()
        return found

    def frame(self) -> pd.DataFrame:
        """Return the evaluations as a pandas data frame, one row each."""
        try:
            import pandas as pd
        except ImportError:
            raise UsageError("a data frame needs pandas: pip install 'manyhands[notebook]'") from None
        return pd.DataFrame([point.model_dump() for point in self.curve])

    def chart(self, name: str | None = None) -> Any:
        """Return a chart of the run, which a notebook displays; by default its learning curve."""
        return _of_room("report.notebook", "chart_of")(self.folder, name)

    def state_dict(self, *, best: bool = False) -> dict[str, Any]:
        """Return the tensors of the trained model, or of the best evaluation, by name."""
        found: dict[str, Any] = _of_room("runs.trained", "state_dict")(self, best=best)
        return found

    def model(self, *, best: bool = False, trust: bool = False) -> Any:
        """Return the trained model, or that of the best evaluation, in evaluation mode.

        Its task file is imported, if this account started the run, or with `trust`.
        """
        return _of_room("runs.trained", "model")(self, best=best, trust=trust)

    def __repr__(self) -> str:
        return f"RunRecord({' · '.join(self._facts().values())})"

    __str__ = __repr__

    def _facts(self) -> dict[str, str]:
        """What a person wants to see first."""
        spec = self.spec
        workers = formatting.plural(spec.workers, "worker")
        epochs = formatting.plural(round(self.epochs, 2), "epoch")
        learned = f"{self.metric_name} {formatting.score(self.metric, self.metric_name)}"
        return {
            "task": spec.task.partition("@")[0],
            "status": self.status,
            "how": f"{spec.strategy}, {workers}, batch {spec.batch:,}" if spec.batch else spec.strategy,
            "result": learned if self.curve else "not evaluated",
            "trained": f"{epochs} in {formatting.duration(self.training_seconds)}",
            "speed": formatting.rate(self.samples_per_second, self.unit),
            "folder": str(self.run),
        }

    def _repr_html_(self) -> str:
        """A small card."""
        facts = self._facts()
        head = f"<b>{escape(facts.pop('task'))}</b> · {escape(facts.pop('status'))}"
        rows = "".join(
            f"<tr><td style='opacity:.75;text-align:left'>{name}</td>"
            f"<td style='text-align:left'>{escape(text)}</td></tr>"
            for name, text in facts.items()
        )
        return f"<div><p>{head}</p><table>{rows}</table></div>"


def _of_room(room: str, name: str) -> Any:
    """Something of a room that reading records must not need: it is loaded when it is asked for (law 8)."""
    return getattr(importlib.import_module(f"manyhands.{room}"), name)


@dataclass(frozen=True)
class OneWorker:
    """How fast one worker was in an earlier run."""

    samples_per_second: float
    threads: int


@dataclass(frozen=True)
class Start:
    """Facts about a run before its first step, for the headline."""

    run: str
    spec: RunSpec
    recipe_line: str
    parameters: int
    unit: str
    train_samples: int
    horizon: int  # samples of the whole schedule
    threads: int
    device: str
    metric_name: str
    target: float
    step: int  # 0, or where a resumed run continues
    samples: int
    seconds: float  # training time so far
    one_worker: OneWorker | None = None
    recipe_changes: str = ""  # what the strategy changed in the recipe: `momentum 0 instead of 0.9`

    @property
    def whole_recipe(self) -> str:
        """The recipe in one line, with what the strategy changed in it."""
        if not self.recipe_changes:
            return self.recipe_line
        return f"{self.recipe_line} · changed for {self.spec.strategy}: {self.recipe_changes}"
