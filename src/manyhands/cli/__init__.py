"""The command line: one small file a verb, and the one place where an error becomes a sentence and a code."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import typer

from manyhands import __version__, words
from manyhands.cli import doctor, list_, report, show, study, train, verify
from manyhands.errors import ManyhandsError, UsageError

app = typer.Typer(
    name="manyhands",
    help="Train a PyTorch model with many workers, and know what each way of doing so costs.",
    epilog="First steps: manyhands doctor · manyhands train digits-mlp · manyhands show runs/digits-mlp-...",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify)
app.command("study", epilog=study.EXAMPLES)(study.study)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("list", epilog=list_.EXAMPLES)(list_.list_)
app.command("show", epilog=show.EXAMPLES)(show.show)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


@app.callback(invoke_without_command=True)
def _main(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"manyhands {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the exit code is 0, 1 (a fault while running), 2 (bad input) or 128 + signal."""
    sys.exit(answer(sys.argv[1:]))


def answer(arguments: list[str]) -> int:
    """Carry out a command line; every failure is one sentence on standard error (law 10)."""
    try:
        outcome = typer.main.get_command(app).main(arguments, prog_name="manyhands", standalone_mode=False)
    except ManyhandsError as error:
        return _fail(str(error), error.exit_code, common=isinstance(error, UsageError))
    except typer.Abort:
        return _fail("interrupted", 130)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # whoever read our output (`| head`) has seen enough; keep Python from complaining at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 (the last place before a bare traceback)
        if hasattr(error, "format_message"):  # click's own: an unknown option, a missing argument
            return _fail(error.format_message(), 2)
        return _fail(_unexpected(error), 1)
    return outcome if isinstance(outcome, int) else 0


def _fail(message: str, code: int, *, common: bool = False) -> int:
    """Say it, further lines below the first; of what all ranks on a host find wrong, one speaks."""
    if not common or os.environ.get("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")) == "0":
        print("error: " + words.printed(message).replace("\n", "\n       "), file=sys.stderr)
    return code


def _unexpected(error: Exception) -> str:
    """What nobody foresaw, in a task's code or in ours: where it happened, and where the rest is told."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    with tempfile.NamedTemporaryFile("w", prefix="manyhands-", suffix=".log", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
    text = str(error).strip().splitlines()
    said = f": {text[0]}" if text else ""
    place = f"{Path(last.filename).name}:{last.lineno}, in {last.name}"
    return f"{type(error).__name__}{said} (at {place}; the whole traceback is in {file.name})"
