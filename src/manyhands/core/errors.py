"""The errors of manyhands: each message is one sentence for the user, each class has an exit code."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SHOWN = 80  # characters of a value that are repeated in a message
LONG_WORD = 300  # characters: longer than any path in use


class ManyhandsError(Exception):
    """A run failed. Exit code 1."""

    exit_code = 1


class UsageError(ManyhandsError):
    """Bad input, reported before any work starts (law 10). Exit code 2."""

    exit_code = 2


class DataUnavailableError(ManyhandsError):
    """No source could deliver a data set."""


class DivergedError(ManyhandsError):
    """The loss became infinite or not a number."""


class StorageError(ManyhandsError):
    """A file could not be written. What was written before is intact."""


class CheckpointError(ManyhandsError):
    """A checkpoint that cannot be used."""


class WorkerFailedError(ManyhandsError):
    """A worker failed, died or hung. The message also says what the others were doing."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLostError(ManyhandsError):
    """A transport noticed that a peer has ended."""


class DeadlineError(ManyhandsError):
    """A wait of a transport took longer than its timeout."""


class InterruptedRunError(ManyhandsError):
    """Stopped by Ctrl-C (exit code 130) or SIGTERM (143), after a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message, signal_number)  # both, because an exception is pickled as its arguments
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __str__(self) -> str:
        return str(self.args[0])


def kind_of(value: object) -> str:
    """What a value is, with an article: `a str`, `an int`, `None`."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def shown(value: object) -> str:
    """A value as it was given, text in quotes. Long values are shortened: `'aaa...' (5,000 characters)`."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
    if len(text) <= SHOWN + 2:
        return text
    if isinstance(value, str):
        return f"{value[:SHOWN] + '...'!r} ({len(value):,} characters)"
    return f"{text[:SHOWN]}... ({len(text):,} characters)"


def cut(message: str) -> str:
    """A message on one line, with very long words shortened (such as a path of 5,000 characters)."""
    message = re.sub(r"[\x00-\x1f\x7f]", lambda letter: repr(letter[0])[1:-1], message)
    return re.sub(
        rf"\S{{{LONG_WORD},}}[^\s,:;.)]",
        lambda word: f"{word[0][:SHOWN]}... ({len(word[0]):,} characters)",
        message,
    )


def unknown(what: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for an unknown name: the name, a suggestion, and the choices."""
    return UsageError(f"unknown {what} {shown(str(name))} ({choices(name, known)})")


def choices(name: object, known: Iterable[str]) -> str:
    """`did you mean 'allreduce'? known: single, allreduce`."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}known: {', '.join(names) or 'none'}"
