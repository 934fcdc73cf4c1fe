"""The fuzz cases: damaged run folders that are read or resumed, and damaged study files."""

from __future__ import annotations

from pathlib import Path

import manyhands as mh
from conftest import ROOT
from fuzzing import Drill, Outside, answered, damaged_copy, faults, generator, place
from manyhands.core.errors import ManyhandsError
from manyhands.records.record import StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import Cell, StudyFolder
from manyhands.report import page
from manyhands.study import estimate
from manyhands.testing import damage
from manyhands.testing.records import record

SMALL = """
name = "small"
title = "A small one"
budget = "5 min"
repeats = 2
price = 0.9

[defaults]
threads = 1
epochs = 1

[[grid]]
task = "quadratic"
batch = [50, 100]
lr = [0.05, 0.1]
[grid.options]
n = [200, 300]

[[grid]]
task = "quadratic"
strategy = ["allreduce", "average", "server"]
workers = [1, 2]
share = 20
strategy_options.every = [1, 8]
timed = false

[[exclude]]
strategy = "average"
workers = 1
"""


def a_study(folder: Path) -> Path:
    """The folder of a study with made-up runs of several strategies."""
    made = [
        record(),
        record(strategy="allreduce", workers=2, batch=256, rate=18_000.0),
        record(
            strategy="server",
            workers=2,
            staleness={0: 5, 2: 3},
            shares=[{"samples": 1}] * 3,
            lost=["worker 1"],
        ),
        record(strategy="pipeline", workers=2, choices={"cut": "cut: blocks 0-1 | 2", "stages": []}),
    ]
    cells = [Cell(each.spec) for each in made]
    with StudyFolder(folder).writing() as journal:
        journal.write(
            "study", name="s", title="S", about="", claim=None, price=1.5, currency="$", command=["a"],
            cells=[cell.to_json() for cell in cells],
        )  # fmt: skip
        journal.write("calibration", seconds=0.03, host="here")
        for number, (cell, each) in enumerate(zip(cells, made, strict=True)):
            run = RunFolder(folder / f"run-{number}")
            run.create()
            run.write_spec(each.spec)
            run.write_environment(each.environment)
            run.write_choices(each.choices)
            run.write_record(each)
            steps = [StepRecord(k, 0, 128 * k, 1 / k, 0.1, 0.01 * k, {"forward": 0.01}) for k in range(1, 20)]
            run.steps_file.write_text("".join(f"{step.to_json()}\n" for step in steps))
            journal.write("started", cell=cell.key, run=run.path.name)
            kind = "repeated" if number == 3 else "finished"
            journal.write(kind, cell=cell.key, run=run.path.name, noise=0.01, timed=True)
        journal.write("excluded", cell="x", reason="it cannot")
        journal.write("over", reason="the budget is spent")
    return folder


def a_run(folder: Path) -> Path:
    """A real, unfinished run with a few checkpoints."""
    mh.train(
        "quadratic", batch=50, epochs=2, samples=300, threads=1, checkpoint_every=0, quiet=True, out=folder,
        options={"n": 200},
    )  # fmt: skip
    (folder / "result.json").unlink()
    return folder


def readers(study: Path, seed: float) -> Drill:
    """show, show --json, load and report on a damaged folder."""

    def case(number: int) -> tuple[str, list[str]]:
        drawn = generator(seed, number)
        with place() as here:
            outside = Outside(here / "outside")
            done = damaged_copy(study, here / "s", outside, drawn, deep=False)
            runs = sorted(path.name for path in Path("s").iterdir() if path.name.startswith("run"))
            run = next((name for name in runs if name in done), runs[0] if runs else "none")
            questions: list[tuple[str, ...]] = [("show", f"s/{run}"), ("show", f"s/{run}", "--json")]
            if number % 5 == 0 or "journal" in done:  # it takes the longest
                questions.append(("report", "s", "--no-pictures"))
            wrong = [fault for words in questions for fault in faults(words, *answered(*words))]
            for path in (f"s/{run}", "s"):
                try:
                    mh.load(path)
                except ManyhandsError:
                    continue
                except Exception as error:  # noqa: BLE001 (such errors are what is looked for)
                    wrong.append(f"load: {type(error).__name__}: {error}")
            return done, wrong + outside.faults()

    return case


def resuming(run: Path, seed: float, *, deep: bool) -> Drill:
    """`train --resume` on a damaged folder: it resumes, or says in one sentence why it cannot."""
    words = (
        "train", "--resume", "run", "--allow-changes", "--samples", "400", "--seconds", "1", "--epochs", "2",
        "--workers", "1", "--strategy", "single", "--threads", "1", "--batch", "50", "--evaluate-every", "1",
        "--set", "n=200", "--set", "dimensions=10", "--set", "condition=10", "--quiet",
    )  # fmt: skip

    def case(number: int) -> tuple[str, list[str]]:
        drawn = generator(seed, number)
        with place() as here:
            outside = Outside(here / "outside")
            done = damaged_copy(run, here / "run", outside, drawn, deep=deep)
            code, out, err = answered(*words)
            wrong = faults(words, code, out, err)
            if code == 0:
                wrong += [f"after it {fault}" for fault in faults(("show", "run"), *answered("show", "run"))]
            return done, wrong + outside.faults()

    return case


def studies(seed: float) -> Drill:
    """`study FILE --dry-run` on a damaged file."""
    texts = [SMALL, *((ROOT / f"studies/{name}.toml").read_text() for name in ("default",))]

    def case(number: int) -> tuple[str, list[str]]:
        drawn = generator(seed, number)
        with place() as here:
            outside = Outside(here / "outside")
            text = drawn.choice([SMALL, SMALL, *texts])
            Path("s.toml").write_bytes(damage.damaged_study(text, drawn))
            words = ("study", "s.toml", "--dry-run")
            wrong = faults(words, *answered(*words))
            done = Path("s.toml").read_bytes().decode(errors="replace") if wrong else ""
            return done, wrong + outside.faults()

    return case


def quick(monkeypatch: object) -> None:
    """Leave out what takes long and does not depend on the damaged files."""
    patch = monkeypatch.setattr  # type: ignore[attr-defined]
    patch(page, "_vega", lambda: "")
    patch(estimate, "PROBE", 0.001)
    patch(estimate, "in_cache", lambda task: task in ("quadratic", "digits-mlp"))
