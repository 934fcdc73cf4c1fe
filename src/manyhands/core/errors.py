"""What can go wrong, each as a sentence for a person; the exit code says whose turn it is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SHOWN = 80  # characters of a value that are told again
LONG_WORD = 300  # characters: longer than a path that somebody means


class ManyhandsError(Exception):
    """A fault while running, told in one sentence: exit code 1."""

    exit_code = 1


class UsageError(ManyhandsError):
    """Bad input, answered before any work starts (law 10): exit code 2."""

    exit_code = 2


class DataUnavailableError(ManyhandsError):
    """A data set that no source could deliver."""


class DivergedError(ManyhandsError):
    """The loss became infinite or not a number."""


class StorageError(ManyhandsError):
    """A file that could not be written; what was written before it is intact."""


class CheckpointError(ManyhandsError):
    """A checkpoint that cannot be used."""


class WorkerFailedError(ManyhandsError):
    """A worker that raised, died or hung, and what the others were doing: one line or several."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(ManyhandsError):
    """A transport noticed that a peer is gone."""


class DeadlineError(ManyhandsError):
    """A transport waited for longer than it may."""


class InterruptedRunError(ManyhandsError):
    """Stopped by Ctrl-C (exit code 130) or SIGTERM (143), after a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message, signal_number)  # both: an exception is pickled as its arguments
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return str(self.args[0])


def shown(value: object) -> str:
    """A value as it was given, text within quotes; a long one is cut: `'aaa...' (5,000 characters)`."""
    try:
        text = repr(value)
    except ValueError:  # Python writes down no whole number of more than 4,300 digits
        return "a number of thousands of digits"
    if len(text) <= SHOWN + 2:
        return text
    if isinstance(value, str):
        return f"{value[:SHOWN] + '...'!r} ({len(value):,} characters)"
    return f"{text[:SHOWN]}... ({len(text):,} characters)"


def cut(message: str) -> str:
    """A message in one line, without words so long that they hide the others (a path of 5,000 letters)."""
    message = re.sub(r"[\x00-\x1f\x7f]", lambda letter: repr(letter[0])[1:-1], message)
    return re.sub(
        rf"\S{{{LONG_WORD},}}[^\s,:;.)]",
        lambda word: f"{word[0][:SHOWN]}... ({len(word[0]):,} characters)",
        message,
    )


def unknown(what: str, name: object, known: Iterable[str]) -> UsageError:
    """The one way to say that a name is not known: the name, a guess at what was meant, the choices."""
    return UsageError(f"unknown {what} {shown(str(name))} ({choices(name, known)})")


def choices(name: object, known: Iterable[str]) -> str:
    """`did you mean 'allreduce'? known: single, allreduce`."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}known: {', '.join(names) or 'none'}"
