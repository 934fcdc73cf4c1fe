"""Read the files of runs and studies and check them against their schemas; errors are one sentence.

The files may be damaged, or come from a stranger. JSON is checked as a whole first (text, depth, size of
numbers), then field by field. Other code can rely on every value that it gets from here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from manyhands.core.atomic_files import open_regular, read_regular
from manyhands.core.environment import Environment
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.records import renames
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.spec import RunSpec

MAX_BYTES = 100_000_000  # of a file; a record of a thousand ranks has a few million
MAX_LINE = 1_000_000  # bytes of a line of steps.jsonl
MAX_DEPTH = 32  # of nested lists and objects
MAX_STALENESS = 1_000_000  # updates
_COUNTS = ("servers", "stages", "micro_batches")  # options of strategies that determine how work is divided
_SIGNED = ("loss", "metric", "best_metric", "target", "test_loss", "noise", "gradient", "spread")
_OPEN = ("spec", "recipe", "choices")  # parts of a record with their own schema, or without one
_BY_RANK = ("traffic", "hosts", "shares", "memory", "step_times", "timeline")

Count = Annotated[int, Ge(0), Lt(2**63)]
_Model = TypeVar("_Model", bound=BaseModel)


class FaultError(ValueError):
    """The content of a file is not valid; the message says why in a few words."""


def document(content: bytes) -> Any:
    """Parse JSON; NaN, very large numbers and deep nesting raise a FaultError."""
    try:
        found = json.loads(content.decode(), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise FaultError("it is not UTF-8 text") from None
    except RecursionError:
        raise FaultError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise FaultError(f"it is not JSON ({str(error)[:1].lower()}{str(error)[1:]})") from None
    except FaultError:
        raise
    except ValueError:  # Python's limit on digits
        raise FaultError("a number in it is too large") from None
    _check(found)
    return found


def table(content: bytes) -> dict[str, Any]:
    """Parse JSON that must be an object."""
    found = document(content)
    if not isinstance(found, dict):
        raise FaultError(f"it is {_kind(found)}, not an object")
    return found


def spec_bytes(path: Path) -> bytes:
    """Read the bytes of spec.json, which are what is signed."""
    return _content(path, "is not a run folder")


def spec(path: Path, content: bytes) -> RunSpec:
    """Parse the content of spec.json."""
    try:
        fields = table(content)
    except FaultError as fault:
        raise ManyhandsError(f"{path} is damaged: {fault}") from None
    try:
        found = RunSpec.of(**fields)
        _check_options(found)
    except (UsageError, FaultError) as error:
        raise UsageError(f"{path} is not a run's spec: {error}") from None
    return found


def record(path: Path) -> RunRecord:
    """Read result.json."""
    found = _parsed(path, RunRecord, "is not a run's result", "record")
    try:
        _check_options(found.spec)
        _check_choices(found.choices)
        _check_record(found)
    except FaultError as fault:
        raise ManyhandsError(f"{path} is damaged: {fault}") from None
    return found


def environment(path: Path) -> Environment:
    """Read environment.json."""
    return _parsed(path, Environment, "does not describe an environment")


def _parsed(path: Path, model: type[_Model], otherwise: str, file: renames.File | None = None) -> _Model:
    """Read the JSON object of a file as an instance of its model; ManyhandsError if it is not valid."""
    content = _content(path)
    try:
        fields = table(content)
        if file is not None and renames.update(file, fields):
            content = json.dumps(fields).encode()
        return model.model_validate_json(content)
    except ValidationError as error:
        raise ManyhandsError(f"{path} {otherwise}: {_where(error)}") from None
    except FaultError as fault:
        raise ManyhandsError(f"{path} is damaged: {fault}") from None


def choices(path: Path) -> dict[str, Any]:
    """Read choices.json: the options that a strategy chose."""
    content = _content(path)
    try:
        found = table(content)
        _check_choices(found)
    except FaultError as fault:
        raise ManyhandsError(
            f"{path} is damaged: {fault}; remove it to let the strategy choose again"
        ) from None
    return found


def steps(path: Path) -> Iterator[StepRecord]:
    """Read the lines of steps.jsonl, up to the first one that is incomplete or damaged."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    with os.fdopen(descriptor, "rb") as file:
        while (line := file.readline(MAX_LINE)).endswith(b"\n"):
            try:
                fields = table(line)
                renames.update("step", fields)
                yield StepRecord.from_fields(fields)
            except (FaultError, TypeError):
                return


def events(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a study's journal, without a last one that a crash has cut off."""
    *lines, _ = _content(path, limit=10 * MAX_BYTES).split(b"\n")  # the rest is empty or incomplete
    found = []
    for number, line in enumerate(lines, 1):
        try:
            event = table(line)
            kind = event.get("event")
            _KINDS.get(kind if isinstance(kind, str) else "", _Event).model_validate(event)
            for cell in event["cells"] if kind == "study" else ():
                _check_options(RunSpec(**cell["spec"]))
        except ValidationError as error:
            raise ManyhandsError(f"{path} is damaged in line {number}: {_where(error)}") from None
        except FaultError as fault:
            raise ManyhandsError(f"{path} is damaged in line {number}: {fault}") from None
        found.append(event)
    return found


# ---------------------------------------------------------------------- schemas of files without a model
class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Stage(_Strict):
    first: Count
    end: Count
    seconds: float
    saved: Count
    outputs: Count
    parameters: Count


class _Choices(_Strict):
    cut: str = ""
    stages: list[_Stage] = []
    sharded: dict[str, Any] = {}
    offload: dict[str, Any] = {}


def _inside(name: str) -> str:
    """Reject a path that leads out of the study's folder, because runs may be deleted there."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"{name!r} is not the name of a folder")
    return name


class _Event(_Strict):
    event: str
    cell: str | None = None


class _Cell(_Strict):
    spec: RunSpec
    repeat: Count
    timed: bool
    paired: bool = False
    label: str = ""


class _Study(_Event):
    name: str
    title: str
    about: str | None = None
    claim: str | None = None
    price: float | None = None
    currency: str | None = None
    command: list[str] | None = None
    cells: list[_Cell]


class _Over(_Event):
    reason: str


class _Calibration(_Event):
    at: str
    seconds: Annotated[float, Gt(0), Lt(1e9)]
    host: str = ""


class _Block(_Event):
    cell: str
    round: Count
    position: Count
    samples_per_second: Annotated[float, Gt(0), Lt(1e15)]
    steps: Count
    seconds: Annotated[float, Gt(0), Lt(1e9)]


class _Excluded(_Event):
    cell: str
    reason: str


class _Run(_Event):
    cell: str
    run: Annotated[str, AfterValidator(_inside)]
    noise: Annotated[float, Lt(1e9)] | None = None
    timed: bool = True
    reason: str = ""


class _Repeated(_Run):
    noise: Annotated[float, Lt(1e9)]


_KINDS: dict[str, type[_Event]] = {
    "study": _Study,
    "over": _Over,
    "calibration": _Calibration,
    "block": _Block,
    "excluded": _Excluded,
    "repeated": _Repeated,
    **dict.fromkeys(("started", "finished", "failed"), _Run),
}


# ---------------------------------------------------------------------- checks
def _check(found: Any) -> None:
    """Check every value, without recursion."""
    waiting = [(found, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise FaultError("it is nested too deeply")
        if isinstance(value, dict):
            waiting += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            waiting += [(each, depth + 1) for each in value]
        elif isinstance(value, str):
            _check_text(value)
        elif isinstance(value, int | float) and abs(value) >= (2**64 if isinstance(value, int) else math.inf):
            raise FaultError("a number in it is too large")


def _check_text(value: str) -> None:
    if "\0" in value:
        raise FaultError("a text in it contains a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise FaultError("a text in it contains half a character") from None


def _check_options(found: RunSpec) -> None:
    """Check the options that `RunSpec.ranks` depends on."""
    for name in _COUNTS:
        value = found.strategy_options.get(name)
        text = str(value)
        if value is not None and not (text.isascii() and text.isdecimal() and 0 < len(text) < 10):
            raise FaultError(f"option {name} of the strategy should be a whole number, got {value!r}")


def _check_choices(found: dict[str, Any]) -> None:
    try:
        made = _Choices.model_validate(found)
    except ValidationError as error:
        raise FaultError(_where(error)) from None
    borders = [stage.first for stage in made.stages]
    if borders and (borders[0] != 0 or borders != sorted(set(borders))):
        raise FaultError("its stages are not in order")


def _check_record(found: RunRecord) -> None:
    """Check that counts and times are neither negative nor infinite, and that lists by rank are complete."""
    for name, value in found.model_dump(exclude=set(_OPEN)).items():
        _check_numbers(name, value)
        if isinstance(value, float) and name not in _SIGNED and value < 0:
            raise FaultError(f"{name}: {value:g} is not a count or a time")
    ranks = len(found.phases)
    if not ranks:
        raise FaultError("phases: there is no rank")
    for name in _BY_RANK:
        if len(getattr(found, name)) not in (0, ranks):
            raise FaultError(f"{name}: it should have one element for each of the {ranks} ranks")
    if any("bytes" not in operation for traffic in found.traffic for operation in traffic.values()):
        raise FaultError("traffic: an operation has no bytes")
    if any(not 0 <= stale <= MAX_STALENESS for stale in found.staleness):
        raise FaultError("staleness: an update cannot be that stale")


def _check_numbers(name: str, value: Any) -> None:
    """Check the numbers of a field, at any depth."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers(key if key in _SIGNED else name, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_numbers(name, each)
    elif isinstance(value, int | float) and name not in _SIGNED and not _least(value) <= value < 2**63:
        raise FaultError(f"{name}: {value:g} is not a count or a time")


def _least(value: float) -> float:
    """Counts are not negative, but times may be: old versions extrapolated deciles of few steps."""
    return 0 if isinstance(value, int) else -(2**63)


def _content(path: Path, without: str = "", limit: int = MAX_BYTES) -> bytes:
    try:
        return read_regular(path, limit)
    except OSError as error:
        if without:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"{path.parent} {without} ({path.name}: {reason})") from None
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ManyhandsError:
    return ManyhandsError(f"cannot read {path}: {(error.strerror or str(error)).lower()}")


def _where(error: ValidationError) -> str:
    """`steps: input should be a valid integer`."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
    return f"{place}: {said}" if place else said


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a text", bool: "true or false"}.get(type(value), "a number")


def _no_number(name: str) -> Any:
    raise FaultError(f"{name} is not a number")
