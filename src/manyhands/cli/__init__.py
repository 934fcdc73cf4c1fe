"""The command line: one small file per command, and the code that turns errors into exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from manyhands.cli import claims, doctor, list_, log_handler, report, show, study, train, verify
from manyhands.cli.grouped import GroupedCommand
from manyhands.core import formatting, tracebacks
from manyhands.core.errors import ManyhandsError, UsageError, cut, shown
from manyhands.core.version import VERSION

_INTERRUPTED = 130  # exit code: 128 + SIGINT

app = typer.Typer(
    name="manyhands",
    help="Train a PyTorch model with many workers, and know what each way of doing so costs.",
    epilog="First steps: manyhands doctor · manyhands train digits-mlp · manyhands show runs/digits-mlp-...",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# the short help fits on one line in the list of commands
app.command(
    "train",
    cls=GroupedCommand,
    short_help="Train a task; write a record and the model.",
    epilog=train.EXAMPLES,
)(train.train)
app.command(
    "verify",
    cls=GroupedCommand,
    short_help="Check that a strategy computes what one worker does.",
    epilog=verify.EXAMPLES,
)(verify.verify)
app.command("study", short_help="Run a grid of runs; print an answer.", epilog=study.EXAMPLES)(study.study)
app.command("report", short_help="Draw the report of a study or of runs.", epilog=report.EXAMPLES)(
    report.report
)
app.add_typer(claims.app, name="claims", short_help="Decide published claims on this machine.")
app.command("list", short_help="List tasks, recipes, strategies, ...", epilog=list_.EXAMPLES)(list_.list_)
app.command("show", short_help="Show a run: settings, result, curves, times.", epilog=show.EXAMPLES)(
    show.show
)
app.command("doctor", short_help="Check this machine.", epilog=doctor.EXAMPLES)(doctor.doctor)


@app.callback(invoke_without_command=True)
def _main(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"manyhands {VERSION}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the exit code is 0, 1 (an error while running), 2 (bad input) or 128 + signal."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # Windows: characters that its code page lacks become ?
        sys.stdout.reconfigure(errors="replace")
    sys.exit(answer(sys.argv[1:]))


def answer(arguments: list[str]) -> int:
    """Run a command and return its exit code; every failure is one sentence on standard error (law 10)."""
    try:
        _check_text(arguments)
        with log_handler.shown():
            outcome = typer.main.get_command(app).main(
                arguments, prog_name="manyhands", standalone_mode=False
            )
    except ManyhandsError as error:
        common = isinstance(error, UsageError)
        return _fail(cut(str(error)) if common else str(error), error.exit_code, common=common)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED)
    except SystemExit as error:
        if isinstance(error.__context__, OSError):  # from typer, when the reader of our output is gone
            raise
        return _fail(
            f"the process was ended with sys.exit({error.code!r}), in a task's code or a library's", 1
        )
    except BrokenPipeError:
        # the reader of our output (such as `| head`) is gone; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 (the last place before a bare traceback)
        if hasattr(error, "format_message"):  # from click: an unknown option, a missing argument
            return _fail(cut(_invalid_value(error) or error.format_message()), 2)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(f"{shown(str(error.filename))} is longer than a path may be", 2)
        return _fail(_unexpected(error), 1)
    if outcome == _INTERRUPTED:  # what typer returns for Ctrl-C if nothing else handles it, such as in a task
        return _fail("interrupted", _INTERRUPTED)
    return outcome if isinstance(outcome, int) else 0


def _invalid_value(error: Any) -> str:
    """The sentence for a value of the wrong type, in the words of our own checks."""
    if not isinstance(error.__cause__, ValidationError):
        return ""
    first = error.__cause__.errors()[0]
    must = first["msg"].split(", ")[0].replace("Input should be", "must be")
    return f"{'/'.join(error.param.opts)} {must}, got {shown(first['input'])}"


def _check_text(arguments: list[str]) -> None:
    """Refuse arguments that are not text: they end up in files and messages."""
    for argument in arguments:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UsageError(f"the argument {shown(argument)} is not text in UTF-8")


def _fail(message: str, code: int, *, common: bool = False) -> int:
    """Print an error and return its exit code; an error that all ranks share is printed once per host."""
    if not common or os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) == "0":
        print("error: " + formatting.printed(message).replace("\n", "\n       "), file=sys.stderr)
    return code


def _unexpected(error: Exception) -> str:
    """The message for an unexpected error, in a task's code or ours: where it happened, and its log file."""
    notes = list(getattr(error, "__notes__", []))
    if not any(note.startswith(tracebacks.LOG_NOTE) for note in notes):  # outside of a run
        with tempfile.NamedTemporaryFile("w", prefix="manyhands-", suffix=".log", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        notes.insert(0, f"{tracebacks.LOG_NOTE}{file.name}")
    if place := tracebacks.users_line(error.__traceback__):
        return "\n".join([cut(tracebacks.headline(place, error)), *notes])
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    said = f": {cut(text[0])}" if text else ""
    place = f"{Path(last.filename).name}:{last.lineno}, in {last.name}"
    return "\n".join([f"{type(error).__name__}{said} (at {place}; {notes[0]})", *notes[1:]])
