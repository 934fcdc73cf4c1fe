"""Read a study file (TOML) and check it; an error names the line that it is about (law 10)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.analysis.pairs import LOOKS
from manyhands.claims import CLAIMS
from manyhands.core import registry
from manyhands.core.errors import UsageError, choices, shown, unknown
from manyhands.recipes import RECIPES
from manyhands.recipes.base import LARGEST
from manyhands.records.spec import RunSpec
from manyhands.records.study_results import Cell, Without
from manyhands.records.user_names import is_users
from manyhands.runs.checks import check_combination, check_names
from manyhands.study import grid
from manyhands.study.grid import Choices, StudyFileError
from manyhands.study.paired_cells import learning_cells, missing_baselines, speed_cell
from manyhands.study.toml_lines import TomlLines
from manyhands.tasks import TASKS

KEYS = (
    "name", "title", "about", "fallback", "claim", "price", "currency", "budget", "block", "rounds",
    "min_rounds", "repeats", "keep_models", "jobs", "defaults", "grid", "exclude",
)  # fmt: skip
STUDIES = "studies"
_UNITS = {"s": 1, "sec": 1, "seconds": 1, "min": 60, "minutes": 60, "h": 3600, "hours": 3600}
_LONGEST = 100  # characters of a name, at most
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


@dataclass(frozen=True)
class Study:
    """The content of a study file: facts about the study, and its cells in the order in which they run."""

    path: Path
    name: str
    title: str
    about: str = ""
    fallback: str | None = None  # the task to use if a cell's data are unavailable
    claim: str | None = None
    price: float | None = None  # per worker and hour
    currency: str = "$"
    budget: float | None = None  # seconds
    block: float = 1.0  # seconds of a block of a paired cell
    rounds: int = LOOKS[-1]  # of paired blocks, at most
    min_rounds: int = LOOKS[0]  # before a cell that loses is ended
    keep_models: bool = False
    jobs: int = 1  # cells at a time that are not timed, if the command line does not say
    cells: list[Cell] = field(default_factory=list)
    excluded: list[Without] = field(default_factory=list)  # combinations that cannot work
    left_out: int = 0  # cells that the file's own [[exclude]] leaves out
    compared: list[RunSpec] = field(default_factory=list)  # what grids with paired = true say
    notes: list[str] = field(default_factory=list)  # what was added to the file's cells


def find(text: str) -> Path:
    """Return the path of a study file, given its path or its name in ./studies or among those of manyhands.

    Those of manyhands are in the repository's studies/, and inside this package in a wheel.
    """
    given = Path(text).expanduser()
    if given.is_file() or given.suffix or given.name != text:
        return given
    known: dict[str, Path] = {}
    here = Path(__file__)
    for folder in (here.parent / "files", here.parents[3] / STUDIES, Path(STUDIES)):  # the last one wins
        known |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    if text not in known:
        raise unknown("study", text, known)
    return known[text]


def read(path: Path, notice: Callable[[str], None] = lambda text: None) -> Study:
    """Read a study file; every cell is checked before any of them runs.

    A task file that it names is imported; `notice` is called with a sentence about that before.
    """
    try:
        text = path.read_text()
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read the study {path}: {reason.lower()}") from None
    except RecursionError:
        raise UsageError(f"{path} is not a study: its tables and lists are nested too deeply") from None
    except ValueError as error:  # from tomllib, or from Python for a number with thousands of digits
        raise UsageError(f"{path} is not TOML: {str(error)[:1].lower()}{str(error)[1:]}") from None
    return _StudyFile(path, content, TomlLines(text), notice).study()


def of_dict(content: Mapping[str, Any], name: str) -> Study:
    """A study from what its file would hold: `{"grid": [{"task": "digits-mlp", "workers": [1, 2]}]}`."""
    return _StudyFile(Path(name), dict(content), TomlLines(""), lambda text: None).study()


def with_baselines(study: Study) -> Study:
    """Return the study with the cells of one worker that several workers are compared with."""
    cells, sentence = missing_baselines(study.cells)
    return replace(study, cells=[*cells, *study.cells], notes=[sentence]) if cells else study


class _StudyFile:
    """The content of one file, and the lines that its errors are about."""

    def __init__(
        self, path: Path, content: dict[str, Any], lines: TomlLines, notice: Callable[[str], None]
    ) -> None:
        self._path, self._content, self._lines, self._notice = path, content, lines, notice
        self._named: set[Path] = set()  # task files that `notice` was called for
        self._compared: list[RunSpec] = []

    @contextmanager
    def _at(self, table: str = "", index: int = 0) -> Iterator[None]:
        """Add the line in this table to a StudyFileError that is raised inside."""
        try:
            yield
        except StudyFileError as error:
            line = self._lines.of(table, index, error.key)
            if line is None and table:  # the key is in [defaults], or else it is the grid that is wrong
                line = self._lines.of("defaults", 0, error.key) or self._lines.of(table, index)
            elif line is None:  # the key is a table
                line = self._lines.of(error.key.partition(".")[0])
            where = f"{self._path}, line {line}" if line else str(self._path)
            raise UsageError(f"{where}: {error}") from None

    def study(self) -> Study:
        with self._at():
            facts = self._facts()
        with self._at("defaults"):
            defaults = grid.flatten(self._table("defaults"), "[defaults]")
        excludes = []
        for index, table in enumerate(self._tables("exclude")):
            with self._at("exclude", index):
                keys = (*RunSpec.model_fields, "share", "lr")
                excludes.append(grid.with_cores(grid.flatten(table, "an exclude", keys)))
        cells, excluded, left_out = self._cells(defaults, excludes)
        return Study(**facts, cells=cells, excluded=excluded, left_out=left_out, compared=self._compared)

    def _cells(self, defaults: Choices, excludes: list[Choices]) -> tuple[list[Cell], list[Without], int]:
        tables = self._tables("grid")
        if not tables:
            raise UsageError(f"{self._path} has no cells: it needs at least one [[grid]]")
        cells: list[Cell] = []
        reasons: dict[str, str] = {}
        left_out: set[str] = set()
        for index, table in enumerate(tables):
            with self._at("grid", index):
                mine = []
                for cell in self._of_grid(table, defaults):
                    if any(grid.matches(cell.spec, exclude) for exclude in excludes):
                        left_out.add(cell.key)
                        continue
                    mine.append(cell)
                    if cell.key not in reasons and (reason := cannot_work(cell.spec)):
                        reasons[cell.key] = reason
                if mine and all(cell.key in reasons for cell in mine):
                    raise StudyFileError("", f"no cell of this grid can work: {reasons[mine[0].key]}")
                cells += mine
        if not cells:
            raise UsageError(f"{self._path} has no cells: [[exclude]] leaves none of them")
        found = grid.unique(cells)
        if len(found) > grid.MOST:
            raise UsageError(
                f"{self._path} has {len(found):,} cells in its grids, but a study has at most {grid.MOST:,}"
            )
        can = [cell for cell in found if cell.key not in reasons]
        cannot = [Without(cell, reasons[cell.key]) for cell in found if cell.key in reasons]
        return can, cannot, len(left_out)

    def _of_grid(self, table: dict[str, Any], defaults: Choices) -> Iterator[Cell]:
        own = grid.flatten(table, "a grid")
        settings = grid.with_cores(grid.merged(defaults, own))
        paired = grid.is_true(settings, "paired", False)
        if paired and {"repeats", "seconds", "samples", "timed"} & settings.keys():
            raise StudyFileError(
                "paired",
                "paired cells are measured in rounds of blocks: give no repeats, seconds, samples or timed",
            )
        repeats = 1 if paired else grid.repeats_of(settings, self._content.get("repeats", 1))
        if (cells := grid.count(settings, repeats)) > grid.MOST:
            raise StudyFileError("", f"this grid has {cells:,} cells, but a study has at most {grid.MOST:,}")
        timed = grid.is_true(settings, "timed", True)
        for spec, label in grid.expand(settings):
            for file, what in spec.user_files.items():
                if file not in self._named:
                    self._named.add(file)
                    self._notice(f"importing {file.absolute()}, a {what} file of {self._path}")
            _check_names(spec)
            if paired:
                yield speed_cell(spec, label)
                yield from learning_cells([spec])
                self._compared.append(spec)
                continue
            for repeat in range(repeats):
                yield Cell(spec, repeat, timed, label=label)

    def _facts(self) -> dict[str, Any]:
        """Return the settings of the study that are not tables."""
        content = self._content
        for key in content:
            if key not in KEYS:
                raise StudyFileError(key, f"a study has no key {shown(key)} ({choices(key, KEYS)})")
        for key in ("name", "title", "about", "fallback", "claim", "currency"):
            _must(key, content.get(key, ""), lambda value: isinstance(value, str), "text")
        name = content.get("name", self._path.stem)
        if not name or name.startswith(".") or "/" in name or not name.isprintable() or len(name) > _LONGEST:
            raise StudyFileError("name", f"name must be a valid folder name, got {shown(name)}")
        fallback = content.get("fallback")
        if fallback is not None and fallback not in TASKS:
            raise StudyFileError("fallback", str(unknown("task", fallback, TASKS)))
        claim = content.get("claim")
        if claim is not None and claim not in CLAIMS:
            raise StudyFileError("claim", str(unknown("claim", claim, CLAIMS)))
        _must(
            "price", content.get("price", 1), lambda value: _number(value) and value > 0, "a number above 0"
        )
        _must(
            "keep_models", content.get("keep_models", False), lambda v: isinstance(v, bool), "true or false"
        )
        jobs = content.get("jobs", 1)
        _must("jobs", jobs, lambda n: type(n) is int and n >= 1, "a whole number from 1 on")
        grid.repeats_of({"repeats": [content.get("repeats", 1)]}, 1)
        facts = {
            "path": self._path,
            "name": name,
            "title": content.get("title", name),
            "budget": seconds(content["budget"]) if "budget" in content else None,
        }
        if "block" in content:
            facts["block"] = seconds(content["block"], "block")
        if "rounds" in content:
            least = LOOKS[0]
            _must("rounds", content["rounds"], lambda n: type(n) is int and n >= least, f"at least {least}")
            facts["rounds"] = content["rounds"]
        if "min_rounds" in content:
            least, most = LOOKS[0], facts.get("rounds", LOOKS[-1])
            wanted = f"a whole number from {least} to rounds ({most})"
            _must(
                "min_rounds", content["min_rounds"], lambda n: type(n) is int and least <= n <= most, wanted
            )
            facts["min_rounds"] = content["min_rounds"]
        plain = ("about", "fallback", "claim", "price", "currency", "keep_models", "jobs")
        return facts | {key: content[key] for key in plain if key in content}

    def _table(self, name: str) -> dict[str, Any]:
        table = self._content.get(name, {})
        if not isinstance(table, dict):
            raise StudyFileError(name, f"{name} is a table: write [{name}]")
        return table

    def _tables(self, name: str) -> list[dict[str, Any]]:
        tables = self._content.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            with self._at():
                raise StudyFileError(name, f"{name} is a list of tables: write [[{name}]]")
        return tables


def seconds(value: Any, key: str = "budget") -> float:
    """Parse a time: `"90 s"`, `"5 min"`, `"1 h 30 min"`, or a number of seconds."""
    wanted = 'a time such as 300, "90 s", "5 min" or "2 h"'
    if isinstance(value, str):
        text = value.strip().lower()
        parts = _TIME.findall(text)
        if not parts or _TIME.sub("", text) or any(unit not in _UNITS for _, unit in parts):
            raise StudyFileError(key, f"{key} must be {wanted}, got {shown(value)}")
        value = sum(float(number) * _UNITS[unit] for number, unit in parts)
    _must(key, value, lambda given: _number(given) and given > 0, wanted)
    return float(value)


def cannot_work(spec: RunSpec) -> str | None:
    """Return why a combination of known names cannot be run, as far as that is known without its data."""
    try:
        check_combination(spec)
    except UsageError as error:
        return str(error)
    return None


def _check_names(spec: RunSpec) -> None:
    """Refuse unknown names with an error about the key that has the name."""
    try:
        check_names(spec)
    except UsageError as error:
        axis = re.match(r"unknown (\w+) ", str(error))
        raise StudyFileError(axis[1] if axis else _option("strategy_options", error), str(error)) from None
    try:
        if spec.options:
            from manyhands.tasks import find

            registry.parse(spec.task, find.builder(spec.task), spec.options)
    except UsageError as error:
        raise StudyFileError(_option("options", error), str(error)) from None
    try:
        _check_recipe(spec)
    except UsageError as error:
        raise StudyFileError(_option("recipe_options", error), str(error)) from None


def _check_recipe(spec: RunSpec) -> None:
    if not spec.recipe_options:
        return
    if spec.recipe is not None and is_users(spec.recipe):
        from manyhands.engine.recipe import parse_options

        parse_options(spec, spec.recipe)
        return
    if spec.recipe is not None:
        registry.parse(
            f"recipe {spec.recipe}", registry.member("recipe", RECIPES, spec.recipe), spec.recipe_options
        )
        return
    # the task's own recipe is known once the task is built; refuse only options that no recipe has
    known = {
        name: None
        for recipe in RECIPES
        for name in registry.options(registry.member("recipe", RECIPES, recipe))
    }
    for name in spec.recipe_options:
        if name not in known:
            raise UsageError(f"no recipe has an option {shown(name)} ({choices(name, known)})")


def _option(table: str, error: UsageError) -> str:
    """Return the key that an error about an option is about."""
    named = re.search(r"option '?(\w+)'?", str(error))
    return f"{table}.{named[1]}" if named else table


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _must(key: str, value: Any, holds: Callable[[Any], bool], wanted: str) -> None:
    if not holds(value):
        raise StudyFileError(key, f"{key} must be {wanted}, got {shown(value)}")
