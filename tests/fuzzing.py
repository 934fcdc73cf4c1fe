"""Drills in forked children: what crashes, hangs, is not foreseen or touches a stranger's file is found."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from manyhands import cli
from manyhands.testing import damage

CATCH_ALL = "the whole traceback is in "
Drill = Callable[
    [int], tuple[str, list[str]]
]  # a number -> what was done, and what was wrong with the answer


class Finding(NamedTuple):
    """A drill that did not end as it must."""

    number: int
    done: str
    wrong: str


class Child:
    """A process that works through drills, telling of each when it begins and how it ended."""

    def __init__(self, drill: Drill, numbers: list[int]) -> None:
        self.numbers, self.at, self.since = numbers, numbers[0], time.monotonic()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _work(drill, numbers, writer)
        os.close(writer)
        self.reader = reader

    def end(self) -> int:
        """Be gone; the way it ended."""
        os.close(self.reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


def _work(drill: Drill, numbers: list[int], writer: int) -> None:
    """In the child: whatever happens, it does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in numbers:
            try:
                done, wrong = drill(number)
            except Exception as error:  # noqa: BLE001 (that is what is looked for)
                done, wrong = "see the seed", [f"{type(error).__name__}: {error}"]
            os.write(writer, json.dumps([number, done[:500], wrong[:3]]).encode() + b"\n")
    finally:
        os._exit(1)


def all_of(drill: Drill, count: int, limit: float, at_once: int = 2) -> list[Finding]:
    """Do so many drills, each within its time; a child that dies or hangs is replaced after that drill."""
    found: list[Finding] = []
    waiting = [list(range(first, count, at_once)) for first in range(min(at_once, count))]
    children = [Child(drill, numbers) for numbers in waiting]
    buffers = {child.pid: b"" for child in children}
    while children:
        ready, _, _ = select.select([child.reader for child in children], [], [], 0.2)
        for child in list(children):
            ended = ""
            if child.reader in ready:
                piece = os.read(child.reader, 2**16)
                *lines, buffers[child.pid] = (buffers[child.pid] + piece).split(b"\n")
                for line in lines:
                    number, done, wrong = json.loads(line)
                    found += [Finding(number, done, each) for each in wrong]
                    child.numbers.remove(number)
                    child.since = time.monotonic()
                ended = "" if piece else "died"
            if not ended and time.monotonic() - child.since > limit:
                ended = "hung"
            if not ended:
                continue
            children.remove(child)
            status = child.end()
            if child.numbers:  # all others are done
                number = child.numbers.pop(0)
                how = f"it died of signal {status & 127}" if ended == "died" else f"no answer in {limit:g} s"
                found.append(Finding(number, "see the seed", how))
            if child.numbers:
                children.append(Child(drill, child.numbers))
                buffers[children[-1].pid] = b""
    return found


def answered(*words: str) -> tuple[int, str, str]:
    """The command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.answer(list(words))
    return code, out.getvalue(), err.getvalue()


def faults(words: tuple[str, ...], code: int, out: str, err: str) -> list[str]:
    """What is wrong with an answer, whatever the question was."""
    wrong = []
    if CATCH_ALL in err or "Traceback" in err:
        wrong.append(f"{words[0]}: {err.strip().partition(CATCH_ALL)[0][-400:]}")
    if code not in (0, 1, 2):
        wrong.append(f"{words[0]}: exit code {code}")
    if code and not err.startswith("error: ") and "\nerror: " not in err:
        wrong.append(f"{words[0]}: no sentence, but {err[:200]!r}")
    if any(character in out + err for character in "\x1b\x07\x9b\u202e"):
        wrong.append(f"{words[0]}: prints control characters")
    return wrong


class Outside:
    """Files that nobody may touch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "file").write_text("untouched")
        (path / "file.json").write_text("{}")
        (path / "step-000000001.safetensors").write_text("untouched")
        self._before = self._seen()

    def _seen(self) -> dict[str, tuple[int, bytes]]:
        return {each.name: (each.lstat().st_mode, each.read_bytes()) for each in self.path.iterdir()}

    def faults(self) -> list[str]:
        """Whether somebody did."""
        return [] if self._seen() == self._before else ["a file outside the folder was changed"]


def generator(seed: float, number: int) -> random.Random:
    """Of one drill."""
    return random.Random(f"{seed}:{number}")


@contextlib.contextmanager
def place() -> Any:
    """An empty folder for one drill, which is gone afterwards; logs of what is not foreseen go there, too."""
    with tempfile.TemporaryDirectory(prefix="drill-", ignore_cleanup_errors=True) as folder:
        before, temporary = Path.cwd(), tempfile.tempdir
        os.chdir(folder)
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = temporary
            os.chdir(before)


def damaged_copy(base: Path, into: Path, outside: Outside, drawn: random.Random, *, deep: bool) -> str:
    """A copy of a folder with something wrong in it; `deep`: also checkpoints with a right checksum."""
    shutil.copytree(base, into, symlinks=True)
    checkpoints = sorted(into.rglob("step-*.safetensors"))
    if deep and checkpoints and drawn.random() < 0.5:
        return damage.damage_checkpoint(checkpoints[-1], drawn)
    return damage.damage_folder(into, outside.path, drawn)


def told(found: list[Finding]) -> str:
    """The findings, alike ones once."""
    kinds = Counter(each.wrong for each in found)
    first = {each.wrong: each for each in reversed(found)}
    lines = [
        f"{count} x {wrong} (drill {first[wrong].number}: {first[wrong].done})"
        for wrong, count in kinds.items()
    ]
    return "\n".join(lines)
