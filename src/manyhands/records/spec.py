"""RunSpec: all settings of a run, validated and immutable."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from manyhands.core import formatting
from manyhands.core.errors import UsageError, choices, shown
from manyhands.core.registry import reason_of
from manyhands.core.registry.strategies import STRATEGIES, UNKNOWN, StrategyEntry
from manyhands.core.registry.transports import TRANSPORTS
from manyhands.records.user_names import file_of, is_brought, short_name

DIGITS = 12  # of an id; with 8, two of ten thousand cells had the same id with a probability of 1 %
OLD_DIGITS = 8  # of an id that version 0.1.0 wrote


def same_id(one: str, other: str) -> bool:
    """Whether two ids belong to one spec: an old id of 8 digits is the beginning of the new one of 12."""
    short, long = sorted((one, other), key=len)
    return one == other or ((len(short), len(long)) == (OLD_DIGITS, DIGITS) and long.startswith(short))


# Larger values are mistakes: they exceed any counter, clock or machine. The limits of this machine are
# checked when a run is started (runs/checks.py).
MOST: dict[str, int] = {
    "workers": 65_536,
    "threads": 1_024,
    "batch": 10**12,
    "accumulate": 10**9,
    "epochs": 10**9,
    "samples": 10**15,
    "seconds": 10**9,
    "evaluate_every": 10**9,
    "memory": 10**18,
    "checkpoint_every": 10**9,
    "keep": 10**6,
    "timeout": 10**9,
    "restarts": 10**6,
    "patience": 10**9,
}


class RunSpec(BaseModel):
    """All settings of a run. `None` means that the task decides.

    `batch` is the number of samples per optimizer step over all workers (law 1): it is divided over `workers`
    and, in each of them, over `accumulate` micro-batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    task: str
    options: dict[str, Any] = {}
    strategy: str = "single"
    strategy_options: dict[str, Any] = {}
    transport: str = "solo"
    launcher: str = "inline"
    workers: int = 1
    threads: int | None = None  # per worker
    batch: int | None = None
    accumulate: int = 1
    drop_last: bool = False  # leave out the last batch of an epoch if it is short; its samples are not used
    recipe: str | None = None
    recipe_options: dict[str, Any] = {}
    lr_schedule: str | None = None  # a function of the user's from samples to a learning rate
    epochs: float | None = None  # the horizon of the schedule and the first budget
    samples: int | None = None  # further budgets: the first one that is used up ends the run
    seconds: float | None = None
    target: float | None = None
    stop_at_target: bool = False
    patience: int | None = None  # end after this many evaluations without a better metric
    keep_best: bool = False  # write the model of the best evaluation to best.safetensors
    init: str | None = None  # a file of weights to start from
    evaluate_every: float = 1.0  # epochs; 0: never, for runs that only measure speed
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["full", "bf16", "fp16"] = "full"  # narrow: mixed, by autocast; parameters stay float32
    compile: bool = False  # by torch.compile
    sync_batchnorm: bool = False  # statistics over the global batch; otherwise over each worker's share
    offload: Literal["none", "all", "conv", "auto"] = "none"  # activations moved out of memory until backward
    memory: int | None = None  # bytes that each worker may use, with offload auto
    offload_to: str | None = None  # the folder for activations on disk
    noise_scale: bool = False  # compare gradients of parts of a batch with that of the whole batch
    device: Literal["auto", "cpu", "cuda"] = "auto"
    checkpoint_every: float = 60.0  # seconds; 0 is after every step
    keep: int = 3  # number of checkpoints
    timeout: float | None = None  # seconds without progress that count as a hang; None: from the step times
    restarts: int = 0  # from the last checkpoint after a worker failed; asynchronous: of that worker alone
    strict: bool = False  # the loss of a worker ends the run, even if the others could continue

    # These fields do not change what a run computes: they are not part of its id and may change on resume.
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"launcher", "checkpoint_every", "keep", "keep_best", "timeout", "restarts", "strict", "offload_to"}
    )
    # These change it by rounding at most: they are part of the id, so that a study can compare them, but may
    # change on resume, and the sample sequence continues (law 6).
    placement: ClassVar[frozenset[str]] = frozenset(
        {
            "strategy",
            "strategy_options",
            "transport",
            "workers",
            "threads",
            "offload",
            "memory",
            "noise_scale",
        }
    )

    @field_validator("workers", "batch", "accumulate", "samples", "threads", "keep", "patience")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be at least 1, got {shown(value)}")
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return formatting.nbytes(value) if isinstance(value, str) else value

    @field_validator("memory")
    @classmethod
    def _some_memory(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(f"must be at least 1 byte, got {shown(value)}")
        return value

    @field_validator("restarts")
    @classmethod
    def _no_less_than_none(cls, value: int) -> int:
        if value < 0:
            raise ValueError(f"must be 0 or more, got {shown(value)}")
        return value

    @field_validator("epochs", "seconds", "timeout")
    @classmethod
    def _positive(cls, value: float | None) -> float | None:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"must be a number above 0, got {value:g}")
        return value

    @field_validator("evaluate_every")
    @classmethod
    def _zero_or_positive(cls, value: float) -> float:
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"must be a number of epochs, or 0 for never, got {value:g}")
        return value

    @field_validator("checkpoint_every")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if not value >= 0:
            raise ValueError(f"must be 0 or more seconds, got {value:g}")
        return value

    @field_validator("target")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"must be a finite number, got {value:g}")
        return value

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int) -> int:
        if not 0 <= value < 2**63:
            raise ValueError(f"must be from 0 to 2**63 - 1, got {shown(value)}")
        return value

    @field_validator(*MOST)
    @classmethod
    def _not_too_much(cls, value: float | None, info: ValidationInfo) -> float | None:
        most = MOST[info.field_name or ""]
        if value is not None and value > most:
            got = shown(value) if isinstance(value, int) else f"{value:g}"
            raise ValueError(f"must be at most {most:,}, got {got}")
        return value

    @classmethod
    def of(cls, /, **fields: Any) -> Self:
        """Make a spec, or raise a `UsageError` that says in one sentence what is wrong with it (law 10)."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise UsageError(_sentence(error, list(cls.model_fields))) from None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise UsageError(f"a spec must be a JSON object, got {fields!r}")
        return cls.of(**fields)

    def to_json(self) -> str:
        """All fields as JSON."""
        return self.model_dump_json(indent=2)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return type(self).of(**{**self.model_dump(), **fields})

    @property
    def content(self) -> str:
        """The fields that determine the computation, as one text.

        Fields at their defaults are left out, so that a field added in a later version changes no old id.
        """
        fields = self.model_dump(mode="json", exclude_defaults=True, exclude=set(self.incidental))
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, a hash of `content`."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:DIGITS]

    @property
    def name(self) -> str:
        """The name of its folder: `mnist-cnn-7f3a2b1c09de`, or `spirals-0b1c2d3e4f5a` for file.py:spirals."""
        return f"{self._stem}-{self.id}"

    @property
    def old_name(self) -> str:
        """The name of its folder in version 0.1.0, so that such folders can be resumed."""
        return f"{self._stem}-{self.id[:OLD_DIGITS]}"

    @property
    def _stem(self) -> str:
        return short_name(self.task)

    @property
    def user_files(self) -> dict[Path, str]:
        """The user's files, and what they are first needed for: task, recipe or lr_schedule."""
        found: dict[Path, str] = {}
        for what in ("task", "recipe", "lr_schedule"):
            name = getattr(self, what)
            if name is not None and (file := file_of(name)) is not None:
                found.setdefault(file, what)
        return found

    @property
    def brought(self) -> list[str]:
        """The names that stand for objects of a Python program."""
        named = (self.task, self.recipe, self.lr_schedule)
        return list(dict.fromkeys(name for name in named if name is not None and is_brought(name)))

    def alone(self, **fields: Any) -> Self:
        """Return a copy with one worker in this process: strategy single, transport solo, launcher inline."""
        null = {name: type(self).model_fields[name].default for name in _WHO_WORKS}
        return self.replace(**{**null, **fields})

    @property
    def traits(self) -> StrategyEntry:
        """The registry entry of the strategy; `UNKNOWN` if this version does not have it."""
        return STRATEGIES.get(self.strategy, UNKNOWN)

    @property
    def servers(self) -> int:
        """The number of ranks that hold parameters and do not train."""
        return int(self.strategy_options.get("servers", 1)) if self.traits.serves else 0

    @property
    def round_workers(self) -> int | None:
        """The number of workers that a server's synchronous round waits for; None without such rounds."""
        backup = self.strategy_options.get("backup") if self.traits.serves else None
        return None if backup is None else self.workers - int(backup)

    @property
    def ranks(self) -> int:
        """The number of processes: workers and servers."""
        return self.servers + self.workers

    @property
    def stages(self) -> int:
        """The number of pipeline stages, one worker each; 1 if every worker has the whole model."""
        return int(self.strategy_options.get("stages") or self.workers) if self.traits.staged else 1

    @property
    def named_transport(self) -> str | None:
        """The transport, if titles should name it; None in the usual cases: one rank, or shared memory."""
        row = TRANSPORTS.get(self.transport)
        usual = row is not None and (row.one_rank or row.shared_memory)
        return None if usual else self.transport

    @property
    def replicas(self) -> int:
        """The number of copies of the model, each of which trains on a share of the batch."""
        return self.workers // self.stages

    @property
    def update_scope(self) -> str:
        """What of the model one optimizer sees: all of it, whole parameters, or single elements."""
        if self.servers:
            return "model" if self.servers == 1 else "elements"
        return "model" if self.workers == 1 else self.traits.scope

    @property
    def micro_batches(self) -> int:
        """The number of parts of each replica's share of the batch."""
        return int(self.strategy_options.get("micro_batches") or self.accumulate)

    @property
    def division(self) -> str:
        """How the batch is divided (law 1): `batch 512 = 2 workers x 128 x 2 accumulated`."""
        if self.batch is None:
            return f"{self.workers} workers"
        if self.stages > 1:
            share = _share(self.batch, self.replicas * self.micro_batches)
            pipelines = formatting.plural(self.replicas, "pipeline")
            return (
                f"batch {self.batch} = {pipelines} of {self.stages} stages x {share} x "
                f"{formatting.plural(self.micro_batches, 'micro-batch', 'micro-batches')}"
            )
        share = _share(self.batch, self.workers * self.micro_batches)
        accumulated = f" x {self.micro_batches} accumulated" if self.micro_batches > 1 else ""
        serving = f" · {self.servers} server{'s'[: self.servers > 1]}" if self.servers else ""
        workers = f"{self.workers} worker{'s'[: self.workers > 1]}"
        return f"batch {self.batch} = {workers} x {share}{accumulated}{serving}"

    def differences(self, other: RunSpec) -> list[str]:
        """Changes from this spec to another that change the computation: `batch 256 -> 512`."""
        return self._changes(other, lambda name: not self._is_placement(name))

    def moves(self, other: RunSpec) -> list[str]:
        """Changes from this spec to another that only change where it is computed: `workers 4 -> 2`."""
        return self._changes(other, self._is_placement)

    def _is_placement(self, name: str) -> bool:
        return name in self.placement or name.startswith("strategy.")

    def _changes(self, other: RunSpec, counts: Callable[[str], bool]) -> list[str]:
        before, after = self._flat(), other._flat()
        pairs = (
            (name, before.get(name, _NOT_SET), after.get(name, _NOT_SET))
            for name in sorted({**before, **after})
            if counts(name)
        )
        return [f"{name} {_plain(old)} -> {_plain(new)}" for name, old, new in pairs if old != new]

    def _flat(self) -> dict[str, str]:
        """Every setting by name, its value as JSON (in which 1, 1.0 and true are different)."""
        fields = self.model_dump(mode="json", exclude=set(self.incidental))
        options = {f"option {key}": value for key, value in fields.pop("options").items()}
        recipe = {f"recipe.{key}": value for key, value in fields.pop("recipe_options").items()}
        strategy = {f"strategy.{key}": value for key, value in fields.pop("strategy_options").items()}
        return {
            name: json.dumps(value) for name, value in {**fields, **options, **recipe, **strategy}.items()
        }


_NOT_SET = "not set"
_WHO_WORKS = ("strategy", "strategy_options", "transport", "launcher", "workers")


def _share(batch: int, parts: int) -> str:
    least, rest = divmod(batch, parts)
    return f"{least}" if not rest else f"{least} or {least + 1}"


def _plain(value: str) -> str:
    return "none" if value == "null" else value.strip('"').removesuffix(".0")


def _sentence(error: ValidationError, known: list[str]) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "spec"
    if first["type"] == "extra_forbidden":
        return f"a run has no setting {shown(name)} ({choices(name, known)})"
    if first["type"] == "missing":
        return f"a run needs a {name}"
    if first["type"] == "value_error":
        return f"{name} {first['ctx']['error']}"
    return f"{name} {reason_of(error)}, got {shown(first['input'])}"
