"""Names from files are shown, not obeyed: no control character of a file reaches the terminal (D16)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from conftest import Answer
from manyhands import cli
from manyhands.callbacks.progress import ProgressBar, ProgressLines
from manyhands.core import formatting
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import Cell, StudyFolder
from manyhands.report import page
from manyhands.study.study_state import CellState
from manyhands.study.view import LineByLine, LiveTable
from manyhands.testing.records import record

# colors, a cleared screen, a bell, an 8-bit escape, a turned direction
NASTY = "\x1b[31mred\x1b[2J\x07\x9b1m\u202etxt\u2066"
SHOWN = r"\x1b[31mred\x1b[2J\x07\x9b1m\u202etxt\u2066"


def harmless(text: str) -> bool:
    return not any(
        character != "\n"
        and (ord(character) < 32 or 127 <= ord(character) < 160 or character in "\u202e\u2066")
        for character in text
    )


def test_what_is_shown_instead() -> None:
    assert formatting.printed(f"a\n\t{NASTY}") == f"a\n\t{SHOWN}"
    assert formatting.line("a\nb\tc\r\u2028") == r"a\x0ab\x09c\x0d\u2028"
    assert formatting.printed("é · ▁▂ 98.5 % 中") == "é · ▁▂ 98.5 % 中"
    assert formatting.printed("\ud800") == r"\ud800", "which could not be printed at all"
    text = json.dumps({"a": NASTY + "\x7f"}, ensure_ascii=False)
    assert harmless(formatting.json_printed(text))
    assert json.loads(formatting.json_printed(text)) == json.loads(text)


@pytest.fixture
def study(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a study with a run whose every text is nasty."""
    monkeypatch.setattr(page, "draw", lambda results, out=None, pictures=True: Path(f"{NASTY}.html"))
    made = record(task=f"{NASTY}", metric_name=NASTY, unit=NASTY, recipe_line=NASTY, lost=[NASTY])
    here_ = made.environment.model_copy(update={"cpu": NASTY, "host": NASTY, "started": NASTY})
    made = made.model_copy(update={"environment": here_, "choices": {"cut": NASTY}})
    folder = RunFolder(Path("s/a"))
    folder.create()
    folder.write_spec(made.spec)
    folder.write_record(made)
    other = Cell(made.spec.replace(seed=1))
    with StudyFolder(Path("s")).writing() as journal:
        cells = [Cell(made.spec).to_json(), other.to_json()]
        journal.write("study", name=NASTY, title=NASTY, about=NASTY, currency=NASTY, price=1, cells=cells)
        journal.write("finished", cell=Cell(made.spec).key, run="a")
        journal.write("failed", cell=other.key, run="b", reason=NASTY)
    return Path("s")


@pytest.mark.parametrize("line", ["show s/a", "show s/a --json", "report s", "report s --json"])
def test_show_and_report(line: str, study: Path, typed: Callable[..., Answer]) -> None:
    answer = typed(*line.split())
    assert answer.code == 0, answer.err
    assert harmless(answer.out + answer.err)
    assert "red" in answer.out


def test_a_studys_table(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from manyhands.cli.study import _print

    _print(StudyFolder(study).read())
    out = capsys.readouterr().out
    assert harmless(out)
    assert SHOWN in out


def test_errors(here: Path, typed: Callable[..., Answer]) -> None:
    Path("run").mkdir()
    Path("run/spec.json").write_text(json.dumps({"task": NASTY, NASTY: 1}))
    for words_ in (("show", "run"), ("train", "--resume", "run"), ("show", NASTY), ("train", NASTY)):
        answer = typed(*words_)
        assert answer.code == 2
        assert harmless(answer.err)
        assert answer.err.count("\n") == 1


def test_notices(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLines().on_notice(f"one\n{NASTY}")
    LineByLine().say(f"one\n{NASTY}")
    assert capsys.readouterr().err == f"one\n{SHOWN}\n" * 2


@pytest.mark.parametrize(
    "kind", [lambda console: ProgressBar(console).on_notice, lambda console: LiveTable(console).say]
)
def test_notices_above_a_bar(kind: Callable[[Console], Callable[[str], None]]) -> None:
    out = io.StringIO()
    kind(Console(file=out, width=200))(f"one\n{NASTY}")
    assert out.getvalue() == f"one\n{SHOWN}\n"


def test_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200, height=20)
    view = LiveTable(console)
    drawn: list[str] = []
    monkeypatch.setattr(view, "lines", lambda: [f"row {NASTY}"])

    class Live:
        def update(self, group: object, refresh: bool) -> None:
            drawn.extend(text.plain for text in group.renderables)  # type: ignore[attr-defined]

    view._live = Live()  # type: ignore[assignment]
    view.note(CellState(Cell(record().spec)), "on its way")
    assert drawn == [f"row {SHOWN}"]


def test_the_command_line_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.answer(["train", "quadratic", f"--{NASTY}"]) == 2
    assert harmless(capsys.readouterr().err)
