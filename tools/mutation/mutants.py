"""Mutation testing: break one thing at a time, run the tests of its area, and see whether they notice.

Run it with the Python of the tree that is tested; it needs nothing but the standard library:

    cd tools/mutation
    TREE=/path/of/a/checkout                                      # with its .venv; it is not written to
    $TREE/.venv/bin/python mutants.py --tree $TREE --list         # what each mutant changes; runs no test
    $TREE/.venv/bin/python mutants.py --tree $TREE --area order   # one area: about two minutes
    $TREE/.venv/bin/python mutants.py --tree $TREE --jobs 2 --json after.json | tee after.txt   # everything

All areas together take about 75 minutes with one job. Outcomes are written after each area: to continue an
interrupted run, give its file as `--known after.json` too. Mutants that it has judged are not judged again,
unless the code that they change is different now. Tests with deadlines are among the others, so nothing else
should use the machine, and `--jobs` should not exceed its cores.

How it works: the package is copied, one module is changed, and the copy is put first on PYTHONPATH, so that
child processes import it too. Then the tests of the area run in the tree until the first failure. First of
all they must pass without a mutant, or the area is reported as broken.

    caught     a test failed, hung or crashed, or the module could not be imported
    survived   all tests of the area passed: they do not check this
    dropped    a refactoring has removed the code (`REMOVED` in table.py says why)
    error      the mutant or its tests were not found, or pytest itself failed

At the end there is a table by area and the names of all survivors. The exit code is 1 if there was an error;
survivors are no error. A name begins with the function's name in table.py, which is the one from before the
refactoring, so that outcomes of two trees can be compared by name.

The folder: `mutants.py` runs, `table.py` has the mutants and all paths, `applied.py` applies the table to a
tree, `edits.py` has the kinds of edits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from applied import PACKAGE, DroppedError, Mutated, TableError, mutate, tests_of
from table import AREAS, MUTANTS, Mutant

BASELINE_SECONDS = 400.0
LEAST_SECONDS, SLACK = 150.0, 4.0  # a mutant hangs after so long, or so many times what the baseline took
TEST_SECONDS = 100  # for one test; the slowest takes about 7 on an idle machine
MARK = "MUTANT_FOLDER"  # by which the processes of a mutant are known
CHILD = f"import {PACKAGE}, subprocess, sys; print({PACKAGE}.__file__)"
PARENT = f"{CHILD}; subprocess.run([sys.executable, '-c', 'import {PACKAGE}; print({PACKAGE}.__file__)'])"


@dataclass(frozen=True)
class Outcome:
    """What the tests of a mutant's area said: caught, survived or error."""

    name: str
    area: str
    function: str
    breaks: str
    module: str
    change: list[str]
    verdict: str
    how: str  # the test that failed, or why it is an error
    seconds: float


@dataclass(frozen=True)
class Ran:
    """How pytest ended; `code` is None where it did not."""

    code: int | None
    failed: str
    output: str
    seconds: float


@dataclass
class Results:
    """All that was found so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Runner:
    """Runs tests of one tree against copies of its package."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.source = tree, tree / "src"
        self.python = tree / ".venv/bin/python"

    @contextmanager
    def copy(self, mutated: Mutated | None = None) -> Iterator[Path]:
        """A folder with a copy of the package, mutated; it and its processes are gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="mh-"))  # short: addresses of sockets are below it
        try:
            shutil.copytree(self.source, folder / "src")
            if mutated is not None:
                (folder / "src" / PACKAGE / mutated.module).write_text(mutated.source)
            yield folder
        finally:
            _end_processes(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def environment(self, folder: Path) -> dict[str, str]:
        """The copy comes first, wherever Python is started; no example of another mutant is remembered."""
        return {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            MARK: str(folder),
        }

    def check_path(self) -> None:
        """Children and their children must import the copy, though the tree is installed."""
        with self.copy() as folder:
            done = subprocess.run(
                [self.python, "-c", PARENT],
                cwd=self.tree,
                env=self.environment(folder),
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            if done.stdout.split() != [str(folder / "src" / PACKAGE / "__init__.py")] * 2:
                raise TableError(f"not the copy is imported but {done.stdout}")

    def run(self, folder: Path, tests: Sequence[str], seconds: float) -> Ran:
        """These tests against the copy, until the first that fails."""
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder / 't'}",
            f"--timeout={TEST_SECONDS}",
        ]
        options += ["-o", "timeout_method=thread", "--hypothesis-seed=0"]  # the same examples in every tree
        command = [str(self.python), "-m", "pytest", *options, *tests]
        began, log = time.monotonic(), folder / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output = log.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        return Ran(code, failed[0] if failed else "", output, time.monotonic() - began)

    def judge(self, mutated: Mutated, tests: Sequence[str], seconds: float) -> Outcome:
        """Whether the tests notice a mutant."""
        with self.copy(mutated) as folder:
            ran = self.run(folder, tests, seconds)
            verdict, how = self._verdict(ran, mutated, folder)
        one = mutated.mutant
        return Outcome(
            one.name, one.area, one.function, one.breaks, mutated.module, mutated.change, verdict, how,
            round(ran.seconds, 1),
        )  # fmt: skip

    def _verdict(self, ran: Ran, mutated: Mutated, folder: Path) -> tuple[str, str]:
        if ran.code is None:
            return "caught", f"hangs: stopped after {ran.seconds:.0f} s"
        if ran.code == 0:
            return "survived", ""
        if ran.code == 1:
            return "caught", ran.failed or f"hangs: a test took more than {TEST_SECONDS} s"
        if ran.code < 0:
            return "caught", f"crashes with signal {-ran.code}"
        name = ".".join((PACKAGE, *Path(mutated.module).with_suffix("").parts))
        imported = subprocess.run(
            [self.python, "-c", f"import {name}"],
            env=self.environment(folder),
            capture_output=True,
            check=False,
        )
        if imported.returncode:
            return "caught", "cannot be imported"
        return "error", f"pytest ended with {ran.code}: {' | '.join(ran.output.splitlines()[-5:])}"


def _end_processes(folder: Path) -> None:
    """Kill what this mutant's tests have started and left, known by its environment."""
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it is gone, or somebody else's


# ---- all mutants


def judge_area(
    runner: Runner, area: str, mutants: Sequence[Mutant], jobs: int, known: Sequence[Outcome], found: Results
) -> None:
    """Judge the mutants of an area, except those that are known, and add what is found."""
    judged = {(one.name, *one.change): one for one in known if one.verdict != "error"}
    applied: list[Mutated] = []
    for mutant in mutants:
        try:
            mutated = mutate(mutant, runner.source)
        except DroppedError as reason:
            found.dropped.append(f"{mutant.name}: {reason}")
        except TableError as error:
            found.errors.append(f"{mutant.name}: {error}")
        else:
            if (old := judged.get((mutant.name, *mutated.change))) is None:
                applied.append(mutated)
            else:
                found.outcomes.append(old)
    if not applied:
        return
    try:
        tests = tests_of(area, runner.tree)
    except TableError as error:
        found.errors.append(f"area {area}: {error}")
        return
    with runner.copy() as folder:
        base = runner.run(folder, tests, BASELINE_SECONDS)
    print(f"{area}: unmutated, {base.seconds:.0f} s, exit code {base.code}", flush=True)
    if base.code != 0:
        found.errors.append(f"area {area} is broken: {base.failed or base.output[-300:]}")
        return
    judge = partial(runner.judge, tests=tests, seconds=max(LEAST_SECONDS, SLACK * base.seconds))
    with ThreadPoolExecutor(jobs) as pool:
        for one in pool.map(judge, applied):
            print(f"  {one.verdict:8} {one.seconds:5.1f} s  {one.name}  {one.how}", flush=True)
            found.outcomes.append(one)
            if one.verdict == "error":
                found.errors.append(f"{one.name}: {one.how}")


def summary(found: Results) -> str:
    """The table by area, the survivors by name, what was dropped, and what went wrong."""
    lines = [f"{'area':12}{'mutants':>8}{'caught':>8}{'share':>8}"]
    for area in [*dict.fromkeys(one.area for one in found.outcomes), "all"]:
        verdicts = Counter(one.verdict for one in found.outcomes if area in (one.area, "all"))
        count, caught = verdicts.total() - verdicts["error"], verdicts["caught"]
        lines.append(f"{area:12}{count:8}{caught:8}{caught / max(1, count):8.0%}")
    survivors = [f"{one.name}: {one.breaks}" for one in found.outcomes if one.verdict == "survived"]
    for title, each in (("survivors", survivors), ("dropped", found.dropped), ("errors", found.errors)):
        lines += ["", f"{title}:", *(f"  {line}" for line in each or ["none"])]
    return "\n".join(lines)


def listed(runner: Runner, area: str, mutants: Sequence[Mutant]) -> int:
    """Print what each mutant of an area changes, and its tests; return the number of errors."""
    errors = 0
    for mutant in mutants:
        try:
            mutated = mutate(mutant, runner.source)
            print(f"{mutant.name}: {mutant.breaks} ({mutated.module})", *mutated.change, sep="\n    ")
        except DroppedError as reason:
            print(f"DROPPED {mutant.name}: {reason}")
        except TableError as error:
            errors += 1
            print(f"ERROR {mutant.name}: {error}")
    try:
        print(f"tests of {area}:", *tests_of(area, runner.tree), sep="\n    ")
    except TableError as error:
        errors += 1
        print(f"ERROR area {area}: {error}")
    return errors


def main() -> int:
    """Exit code 0 if everything that was asked for was judged, survivors or not; 1 after an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, required=True, help="a checkout with its .venv")
    parser.add_argument("--area", action="append", choices=AREAS, help="only this area; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at a time")
    parser.add_argument("--json", type=Path, help="write all outcomes there, after each area")
    parser.add_argument("--known", type=Path, help="outcomes of this tree that are not judged again")
    parser.add_argument("--list", action="store_true", help="show what each mutant changes; run no test")
    asked = parser.parse_args()
    runner = Runner(asked.tree.resolve())
    areas = {area: [one for one in MUTANTS if one.area == area] for area in asked.area or AREAS}
    if asked.list:
        return min(1, sum(listed(runner, area, mutants) for area, mutants in areas.items()))
    runner.check_path()
    read = json.loads(asked.known.read_text())["outcomes"] if asked.known else []
    known, found = [Outcome(**each) for each in read], Results()
    for area, mutants in areas.items():
        judge_area(runner, area, mutants, asked.jobs, known, found)
        if asked.json:
            asked.json.write_text(json.dumps(asdict(found), indent=1))
    print("\n" + summary(found))
    return 1 if found.errors else 0


if __name__ == "__main__":
    sys.exit(main())
