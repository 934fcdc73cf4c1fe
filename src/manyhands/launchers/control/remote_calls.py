"""A call on its way to a worker, and what came of it on its way back."""

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

# ours: one of our errors; peer: one that only says that somebody else failed; exit: sys.exit
Kind = Literal["ours", "peer", "exit", "other"]

# What a library says when its peer is gone: a consequence, whatever type it has.
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")


class Failure(NamedTuple):
    """A call that raised."""

    kind: Kind
    name: str  # of the exception's type
    text: str
    trace: str  # the formatted traceback
    where: str = ""  # `file:line in function`, the innermost
    pickled: bytes | None = None  # the exception, where it survives the journey
    code: int = 0  # of sys.exit
    own: str = ""  # `file:line in function`, the innermost of the user's own code

    def error(self) -> Exception | None:
        """The exception itself; one that is not a sentence of ours with its traceback as a note."""
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


NONE = CallResult(pickle.dumps(None))  # that of a worker that was lost


def pack(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
    *,
    same_script: bool = False,
) -> bytes:
    """A call as bytes; what cannot travel is answered with a sentence.

    Worker processes do not run the caller's script again, so what is defined in it is not there for them,
    except where every worker was started with the same script.
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
    """What a worker returned."""
    try:
        return pickle.loads(value)  # noqa: S301 (from our own worker)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise WorkerFailedError(
            f"what worker {rank} returned cannot be unpickled here: {what}", rank
        ) from error


def check_workers(launcher: str, workers: int) -> None:
    """A launcher needs somebody to start."""
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
    """Carry out a call, with its place as the first argument where it has one.

    What it raises is part of the answer, except what is to go through.
    """
    try:
        function, arguments, keywords = pickle.loads(payload)  # noqa: S301 (from our own parent)
        value = function(*(() if info is None else (info,)), *arguments, **keywords)
        return CallResult(check_size(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)))
    except through:
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is told)
        return CallResult(failure=_failure(error))


def _failure(error: BaseException) -> Failure:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # the first is `perform` itself
    try:
        error = error.with_traceback(frames)
        trace = "".join(traceback.format_exception(error))
        last = traceback.extract_tb(frames)[-1:]
        where = "".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in last)
        return Failure(
            _kind(error),
            type(error).__name__,
            str(error),
            trace,
            where,
            _pickled(error),
            _code(error),
            users_line(frames),
        )
    except MemoryError:  # no room even for that
        return Failure(_kind(error), type(error).__name__, "", "")


def _kind(error: BaseException) -> Kind:
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, PeerLostError | DeadlineError | ConnectionError):
        return "peer"
    if isinstance(error, ManyhandsError):
        return "ours"
    text = str(error).lower()
    return "peer" if any(words in text for words in _PEER_WORDS) else "other"


def _code(error: BaseException) -> int:
    """As the interpreter reads what sys.exit was given."""
    if not isinstance(error, SystemExit) or error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _pickled(error: BaseException) -> bytes | None:
    """The exception, if it can be put together again from what pickle keeps of it."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None  # noqa: S301 (our own)
    except Exception:  # noqa: BLE001 (an exception with an unusual constructor raises anything)
        return None
