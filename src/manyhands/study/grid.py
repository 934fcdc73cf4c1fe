"""Turn a table of settings into cells: a list is a choice of values, each combination is a cell."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from manyhands.core import environment
from manyhands.core.errors import UsageError, choices, shown
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell
from manyhands.runs.defaults import fill_in
from manyhands.strategies import STRATEGIES, options

NESTED = ("options", "strategy_options", "recipe_options")
OWN = ("share", "lr", "repeats", "timed", "paired", "label")  # keys of a grid that are not settings of a run
FOR_ALL = ("repeats", "timed", "paired")  # have one value for all cells of a grid
KEYS = (*RunSpec.model_fields, *OWN)
_LABEL = re.compile(r"[A-Za-z0-9._]{0,40}")  # a part of a folder's name
_SHORT = {"lr": "recipe_options.lr"}
MOST = 10_000  # cells of a study: more is a mistake, and even listing them would take forever

Choices = dict[str, list[Any]]


class StudyFileError(UsageError):
    """Something is wrong with a table of a study file; `key` is the key that it is about."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def flatten(table: Mapping[str, Any], what: str, keys: tuple[str, ...] = KEYS) -> Choices:
    """Return every setting of a table under its dotted name, with the list of its values."""
    found: Choices = {}
    for key, value in table.items():
        if key not in keys:
            raise StudyFileError(key, f"{what} has no key {shown(key)} ({choices(key, keys)})")
        if key in NESTED and not isinstance(value, list):
            if not isinstance(value, dict):
                raise StudyFileError(key, f"{key} is a table of options, got {shown(value)}")
            found |= {f"{key}.{name}": _listed(each) for name, each in value.items()}
            continue
        name = _SHORT.get(key, key)
        if name in found or (name != key and key in found):
            raise StudyFileError(key, f"{key} is short for {name}: give one of them")
        found[name] = _listed(value)
    if "lr" in table and "lr" in _dict(table.get("recipe_options")):
        raise StudyFileError("lr", "lr is short for recipe_options.lr: give one of them")
    if "share" in table and "batch" in table:
        raise StudyFileError(
            "share", "share is the batch per worker and batch is the global batch: give one of them"
        )
    for key, values in found.items():
        if not values:
            raise StudyFileError(key, f"{key} is an empty list: give at least one value")
    return found


def merged(defaults: Choices, own: Choices) -> Choices:
    """Return a grid's settings, and the defaults of those that it does not give."""
    same = {"share": "batch", "batch": "share"}  # two ways to give the same setting
    rest = {
        key: values for key, values in defaults.items() if key not in own and same.get(key, key) not in own
    }
    return {**own, **rest}


def count(settings: Choices, repeats: int) -> int:
    """Return how many cells a grid has, without listing them."""
    chosen = (values for key, values in settings.items() if key not in FOR_ALL)
    return repeats * math.prod(len(values) for values in chosen)


def repeats_of(settings: Choices, otherwise: int) -> int:
    """Return how often each cell of a grid is run."""
    value = _single(settings, "repeats", otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StudyFileError("repeats", f"repeats must be a whole number of at least 1, got {shown(value)}")
    return value


def is_true(settings: Choices, key: str, otherwise: bool) -> bool:
    """Return the value of a key that is true or false for all cells of a grid."""
    value = _single(settings, key, otherwise)
    if not isinstance(value, bool):
        raise StudyFileError(key, f"{key} must be true or false, got {shown(value)}")
    return value


class Labeled(NamedTuple):
    """A spec of a grid, and the label that tells its cell from others with the same spec."""

    spec: RunSpec
    label: str = ""


def expand(settings: Choices) -> list[Labeled]:
    """Return a spec for each combination of values; the last key changes fastest."""
    chosen = {key: values for key, values in settings.items() if key not in FOR_ALL}
    if "task" not in chosen:
        raise StudyFileError("", "a grid needs a task")
    strategies = [name for name in chosen.get("strategy", []) if isinstance(name, str) and name in STRATEGIES]
    specs = []
    for combination in itertools.product(*chosen.values()):
        fields = _fields(dict(zip(chosen, combination, strict=True)))
        _keep_own_options(fields, strategies)
        label = _label(fields.pop("label", ""))
        specs.append(Labeled(_spec(fields), label))
    return specs


def _label(value: Any) -> str:
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        wanted = "up to 40 letters, digits, dots and underscores"
        raise StudyFileError("label", f"label must be {wanted}, got {shown(value)}")
    return value


def unique(cells: Iterable[Cell]) -> list[Cell]:
    """Merge identical cells, timed if any of them is; every cell comes once before any is repeated."""
    found: dict[str, Cell] = {}
    for cell in cells:
        before = found.get(cell.key)
        if before is not None:
            _refuse_clash(before.spec, cell.spec)
        found[cell.key] = cell._replace(timed=cell.timed or (before is not None and before.timed))
    return sorted(found.values(), key=lambda cell: cell.repeat)


def _refuse_clash(one: RunSpec, other: RunSpec) -> None:
    """Refuse different specs with the same id: they would be one cell, and one would never be run."""
    if one.content != other.content:
        changes = "; ".join([*one.differences(other), *one.moves(other)])
        raise UsageError(
            f"two different cells ({changes}) have the same id {one.id}: change any setting of one of them, "
            "such as its seed"
        )


def matches(spec: RunSpec, exclude: Choices) -> bool:
    """Whether a spec has one of the listed values for every setting of an exclude table."""
    return all(_value(spec, key) in values for key, values in exclude.items())


def _value(spec: RunSpec, key: str) -> Any:
    name, _, option = key.partition(".")
    if name == "share":
        return None if spec.batch is None else spec.batch / spec.workers
    value = getattr(spec, name)
    return value.get(option) if option else value


def with_cores(values: Choices) -> Choices:
    """Return the settings with `threads = "all"` replaced by this machine's number of cores."""
    threads = [environment.cores() if value == "all" else value for value in values.get("threads", [])]
    return {**values, "threads": threads} if threads else values


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _single(settings: Choices, key: str, otherwise: Any) -> Any:
    values = settings.get(key, [otherwise])
    if len(values) > 1:
        raise StudyFileError(key, f"{key} is one value for all cells of a grid, not a list")
    return values[0]


def _fields(flat: dict[str, Any]) -> dict[str, Any]:
    """Turn dotted names into tables again, and the batch per worker into the global batch."""
    fields: dict[str, Any] = {}
    for key, value in flat.items():
        name, _, option = key.partition(".")
        if option:
            fields[name] = {**fields.get(name, {}), option: value}
        elif name in NESTED:
            if not isinstance(value, dict):
                raise StudyFileError(name, f"{name} is a table of options, got {shown(value)}")
            fields[name] = {**fields.get(name, {}), **value}
        else:
            fields[name] = value
    share, workers = fields.pop("share", None), fields.get("workers", 1)
    if share is not None and isinstance(workers, int):
        if not isinstance(share, int) or share < 1:
            raise StudyFileError("share", f"share must be a whole number of at least 1, got {shown(share)}")
        fields["batch"] = share * workers
    lr = fields.get("recipe_options", {}).get("lr", 0.0)
    if isinstance(lr, bool) or not isinstance(lr, int | float):
        raise StudyFileError("lr", f"lr must be a number, got {shown(lr)}")
    return fields


def _keep_own_options(fields: dict[str, Any], strategies: list[str]) -> None:
    """Drop options that only other strategies of the grid have: allreduce does not have `every`."""
    strategy, given = fields.get("strategy"), fields.get("strategy_options")
    if not isinstance(strategy, str) or strategy not in STRATEGIES or not given:
        return
    others = {name for other in strategies if other != strategy for name in options.known(other)}
    foreign = others - set(options.known(strategy))
    fields["strategy_options"] = {name: value for name, value in given.items() if name not in foreign}


def _spec(fields: dict[str, Any]) -> RunSpec:
    try:
        filled = fill_in(fields)
    except UsageError as error:
        raise StudyFileError("launcher", str(error)) from None
    try:
        RunSpec(**filled)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        if key == "threads" and isinstance(fields.get(key), str):
            reason = f'threads must be a whole number or "all", got {shown(fields[key])}'
            raise StudyFileError(key, reason) from None
        try:
            RunSpec.of(**filled)
        except UsageError as sentence:
            raise StudyFileError(key, str(sentence)) from None
    return RunSpec.of(**filled)
