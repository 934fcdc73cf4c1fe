"""An executor whose calls run in worker processes, one per worker at a time: a call that crashes fails alone.

A thread supervises the workers and is the only one that uses the control server:

    submit ──▶ pending ──▶ [thread] ── call ──▶ worker ── result ──▶ [thread] ──▶ future
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, final

from manyhands.core.errors import ManyhandsError, WorkerFailedError
from manyhands.launchers.base import ExecutorProcesses
from manyhands.launchers.control.remote_calls import CallResult, pack, unpack
from manyhands.launchers.control.server import ControlEvent, ControlServer
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.worker_state import ProcessExit, WorkerState

T = TypeVar("T")

TICK = 0.5  # seconds
LEAVE = 1.0  # seconds to leave before being killed
MAX_FAILED_STARTS = 3  # in a row: more workers would fail, too


class _PendingCall(NamedTuple):
    future: Future[Any]
    payload: bytes


@final
class WorkerExecutor(Executor):
    """Runs up to `workers` calls at a time, each in a process that later calls use again."""

    def __init__(
        self,
        workers: int,
        make_processes: Callable[[ControlServer], ExecutorProcesses],
        server: ControlServer | None = None,
        connected: Iterable[int] = (),
        *,
        same_script: bool = False,
    ) -> None:
        """A given `server`, whose workers are `connected`, is not closed, and its workers are not killed."""
        self._size = workers
        self._make_processes = make_processes
        self._owns_server = server is None
        self._server = server or ControlServer()
        self._same_script = same_script
        self._lock = threading.Lock()
        self._pending: deque[_PendingCall] = deque()
        self._closed = self._killed = False
        self._thread: threading.Thread | None = None
        # what follows belongs to the thread
        self._ranks = itertools.count()
        self._starting: set[int] = set()
        self._idle: set[int] = set(connected)
        self._running: dict[int, _PendingCall] = {}
        self._disconnected: dict[int, float] = {}  # when, by rank
        self._workers: dict[int, WorkerState] = {}
        self._failed_starts = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call as soon as a worker is idle."""
        payload = pack(fn, args, kwargs, same_script=self._same_script)
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._pending.append(_PendingCall(future, payload))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="manyhands-executor", daemon=True)
                self._thread.start()
        self._server.wake()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls; running calls are finished, and pending ones too unless they are canceled."""
        with self._lock:
            first, self._closed = not self._closed, True
            if cancel_futures:
                for call in self._pending:
                    call.future.cancel()
                    call.future.set_running_or_notify_cancel()  # wakes the threads that wait for it
                self._pending.clear()
        if self._thread is None:
            if first:
                if not self._owns_server:
                    self._make_processes(self._server).close()
                self._close()
            return
        self._server.wake()
        if wait:
            self._thread.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ctrl-C reaches this process only: running calls are not waited for.
        self._killed = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.shutdown(wait=True, cancel_futures=self._killed)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        processes: ExecutorProcesses | None = None
        try:
            processes = self._make_processes(self._server)
            while not self._is_over():
                try:
                    self._start_workers(processes)
                    self._assign_calls()
                    self._poll(processes)
                except (
                    WorkerFailedError
                ) as error:  # the process that starts workers is gone, and they with it
                    self._fail_running(error)
                    self._count_failed_start(error)
                    processes.close()
                    processes = self._make_processes(self._server)
            if self._owns_server:
                self._dismiss(processes)
        except BaseException as error:  # noqa: BLE001 (every future must be completed)
            self._fail_running(error)
            self._fail_pending(error)
            if processes is not None:
                processes.kill_all()
        finally:
            with self._lock:
                self._closed = True  # in case of an error: no thread is left to run calls
            if processes is not None:
                processes.close()
            self._close()

    def _is_over(self) -> bool:
        if self._killed:
            self._fail_running(WorkerFailedError("stopped by Ctrl-C"))
            return True
        with self._lock:
            return self._closed and not self._pending and not self._running

    def _start_workers(self, processes: ExecutorProcesses) -> None:
        """Start as many workers as pending calls need, up to the size of the executor."""
        present = len(self._starting) + len(self._idle) + len(self._running)
        with self._lock:
            needed = len(self._pending) - len(self._starting) - len(self._idle)
        if not processes.can_start_more:
            if not present:
                self._fail_pending(WorkerFailedError("no worker is left to run this call"))
            return
        free = self._size - present
        count = min(needed, free)
        if count > 0:
            ranks = [next(self._ranks) for _ in range(free if processes.starts_all_at_once else count)]
            processes.start(ranks, "of an executor")
            self._starting.update(ranks)

    def _assign_calls(self) -> None:
        while self._idle:
            with self._lock:
                if not self._pending:
                    return
                call = self._pending.popleft()
            if call.future.set_running_or_notify_cancel():
                rank = self._idle.pop()
                self._running[rank] = call
                self._server.send(rank, "call", 0, None, call.payload)

    def _poll(self, processes: ExecutorProcesses) -> None:
        for event in self._server.poll(TICK):
            self._take(event, processes)
        now = time.monotonic()
        for rank, exit_ in processes.exits().items():
            self._exited(rank, exit_)
        grace = 1.0 if processes.reports_exits else 0.0
        for rank, since in list(self._disconnected.items()):
            if now - since >= grace:
                self._exited(rank, ProcessExit("lost"))

    def _take(self, event: ControlEvent, processes: ExecutorProcesses) -> None:
        rank = event.rank
        if event.kind == "hello":
            one = self._workers[rank] = processes.describe(rank)
            one.host, one.pid = event.content
            self._starting.discard(rank)
            self._idle.add(rank)
            self._failed_starts = 0
        elif event.kind == "lost":
            self._disconnected[rank] = time.monotonic()
        elif event.kind == "result" and rank in self._running:
            call = self._running.pop(rank)
            self._idle.add(rank)
            self._complete(call, rank, event.content[1])

    def _complete(self, call: _PendingCall, rank: int, result: CallResult) -> None:
        if result.failure is None:
            try:
                call.future.set_result(unpack(rank, result.value))
            except ManyhandsError as error:
                call.future.set_exception(error)
            return
        message = (
            f"{_name(self._workers.get(rank))} {diagnosis.raised(result.failure)}\n{result.failure.trace}"
        )
        call.future.set_exception(result.failure.error() or WorkerFailedError(message.rstrip(), rank))

    def _exited(self, rank: int, exit_: ProcessExit) -> None:
        self._disconnected.pop(rank, None)
        self._idle.discard(rank)
        if rank in self._running:
            message = f"{_name(self._workers.get(rank))} {diagnosis.exited(exit_)} during a call"
            self._running.pop(rank).future.set_exception(WorkerFailedError(message, rank))
        elif rank in self._starting:
            self._starting.discard(rank)
            message = f"a worker {diagnosis.exited(exit_)} before it started"
            self._count_failed_start(WorkerFailedError(message, rank))

    def _count_failed_start(self, error: WorkerFailedError) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._failed_starts = 0
            self._fail_pending(error)

    def _fail_running(self, error: BaseException) -> None:
        for call in self._running.values():
            call.future.set_exception(error)
        for group in (self._running, self._idle, self._starting, self._disconnected):
            group.clear()

    def _fail_pending(self, error: BaseException) -> None:
        with self._lock:
            calls = list(self._pending)
            self._pending.clear()
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)

    def _dismiss(self, processes: ExecutorProcesses) -> None:
        if not self._killed:
            self._server.send_all("end")
            until = time.monotonic() + LEAVE
            while self._server.connected and time.monotonic() < until:
                self._server.poll(TICK / 10)
        processes.kill_all()

    def _close(self) -> None:
        if self._owns_server:
            self._server.close()


def _name(one: WorkerState | None) -> str:
    return f"a worker (host {one.host}, pid {one.pid})" if one else "a worker"
