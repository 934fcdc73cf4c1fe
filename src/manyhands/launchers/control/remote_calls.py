"""Remote calls: a function and its arguments on the way to a worker, its result or error on the way back."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NamedTuple

from manyhands.core.errors import DeadlineError, ManyhandsError, PeerLostError, UsageError, WorkerFailedError
from manyhands.core.rank_info import RankInfo
from manyhands.core.tracebacks import users_line
from manyhands.launchers.control.connection import check_size

# ours: a ManyhandsError; peer: an error that only reports that another worker failed; exit: sys.exit
FailureKind = Literal["ours", "peer", "exit", "other"]

# What libraries say when a peer is gone, in exceptions of any type.
_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
)


class Failure(NamedTuple):
    """How a call failed."""

    kind: FailureKind
    name: str  # of the exception's type
    text: str
    trace: str  # the formatted traceback
    pickled: bytes | None = None  # the exception, if it can be pickled
    code: int = 0  # of sys.exit
    user_line: str = ""  # `file:line in function` of the innermost frame in the user's code

    def error(self) -> Exception | None:
        """The exception itself; one that is not a ManyhandsError has its traceback as a note."""
        if self.pickled is None:
            return None
        error: Exception = pickle.loads(self.pickled)  # noqa: S301 (from our own worker)
        if not isinstance(error, ManyhandsError):
            error.add_note(f"in a worker:\n{self.trace.rstrip()}")
        return error


class CallResult(NamedTuple):
    """What a call returned, pickled, or how it failed."""

    value: bytes = b""
    failure: Failure | None = None


NONE = CallResult(pickle.dumps(None))  # the result of a worker that was lost


def pack(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
    *,
    same_script: bool = False,
) -> bytes:
    """A call as bytes; UsageError if it cannot be pickled.

    Worker processes do not run the caller's script again, so they do not have what it defines, unless every
    worker was started with the same script.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler if same_script else _Pickler
    try:
        pickler(buffer, pickle.HIGHEST_PROTOCOL).dump((function, arguments, dict(keywords or {})))
    except UsageError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(f"{name} and its arguments cannot be sent to a worker process: {error}") from error
    return check_size(buffer.getvalue())


def unpack(rank: int, value: bytes) -> Any:
    """The value that a worker returned."""
    try:
        return pickle.loads(value)  # noqa: S301 (from our own worker)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise WorkerFailedError(
            f"the result of worker {rank} cannot be unpickled here: {what}", rank
        ) from error


def check_workers(launcher: str, workers: int) -> None:
    """Refuse a number of workers below 1."""
    if workers < 1:
        raise UsageError(f"the {launcher} launcher runs 1 worker or more, not {workers}")


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, type | FunctionType) and item.__module__ == "__main__":
            script = getattr(sys.modules["__main__"], "__file__", None)
            where = f"the script {Path(script).name}" if script else "this session"
            raise UsageError(
                f"{item.__qualname__} is defined in {where}, which worker processes do not run again: "
                "move it to a module that they can import"
            )
        return NotImplemented


def perform(
    payload: bytes, info: RankInfo | None, through: tuple[type[BaseException], ...] = ()
) -> CallResult:
    """Run a call, with the rank info as the first argument if there is one.

    What it raises becomes part of the result, except exceptions of the types in `through`.
    """
    try:
        function, arguments, keywords = pickle.loads(payload)  # noqa: S301 (from our own parent)
        value = function(*(() if info is None else (info,)), *arguments, **keywords)
        return CallResult(check_size(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))
    except through:
        raise
    except BaseException as error:  # noqa: BLE001 (any error is reported to the parent)
        return CallResult(failure=_failure(error))


def _failure(error: BaseException) -> Failure:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # the first is `perform` itself
    try:
        error = error.with_traceback(frames)
        trace = "".join(traceback.format_exception(error))
        return Failure(
            _kind(error),
            type(error).__name__,
            str(error),
            trace,
            _pickled(error),
            _code(error),
            users_line(frames),
        )
    except MemoryError:  # not enough memory even for that
        return Failure(_kind(error), type(error).__name__, "", "")


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, PeerLostError | DeadlineError | ConnectionError):
        return "peer"
    if isinstance(error, ManyhandsError):
        return "ours"
    text = str(error).lower()
    return "peer" if any(message in text for message in _PEER_MESSAGES) else "other"


def _code(error: BaseException) -> int:
    """The exit code that the interpreter makes of the argument of sys.exit."""
    if not isinstance(error, SystemExit) or error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _pickled(error: BaseException) -> bytes | None:
    """The exception, if pickle can restore it."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None  # noqa: S301 (our own)
    except Exception:  # noqa: BLE001 (an exception with an unusual constructor raises anything)
        return None
