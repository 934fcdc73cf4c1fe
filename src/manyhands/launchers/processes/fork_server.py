"""A process that has imported the heavy modules and forks workers from there: importing torch takes a second.

Why not the fork server of multiprocessing: it runs the caller's script again in every child, so a script
without an `if __name__ == "__main__"` would start itself without end. Here a child knows what it is sent.

    parent ── control ──▶ fork server      one byte and a socket per session; when it closes, everything ends
    parent ◀── session ─▶ fork server      in: settings, fork (with the child's end of its connection), kill
                                           out: started, ended; when it closes, its children are killed
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from manyhands.launchers.control.client import ControlClient
from manyhands.launchers.control.connection import LENGTH, Connection
from manyhands.launchers.processes.worker_main import serve
from manyhands.launchers.worker_logs import redirect_output

CHECK_PARENT = 1.0  # seconds between checks that the parent is alive
PR_SET_PDEATHSIG = 1


class ChildSettings(NamedTuple):
    """What a child takes over from the parent, as it was when the session was opened."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    folder: str

    @classmethod
    def of_this_process(cls) -> ChildSettings:
        """The current settings of this process."""
        folder = ""
        with contextlib.suppress(OSError):  # it was removed meanwhile
            folder = str(Path.cwd())
        return cls(dict(os.environ), list(sys.path), list(sys.argv), folder)


class ForkRequest(NamedTuple):
    """Which worker to fork."""

    rank: int
    host: str
    title: str
    log: Path | None


def send(channel: socket.socket, message: Any, *descriptors: int) -> None:
    """Send a message, with descriptors that the other process receives as its own."""
    frame = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    header = LENGTH.pack(len(frame))
    if descriptors:
        sent = socket.send_fds(channel, [header], list(descriptors))
        header = header[sent:]
    channel.sendall(header + frame)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Receive a message and its descriptors; EOFError if the other process has closed its end."""
    header, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
    while len(header) < LENGTH.size:
        header += _recv(channel, LENGTH.size - len(header))
    (left,) = LENGTH.unpack(header)
    frame = bytearray()
    while len(frame) < left:
        frame += _recv(channel, left - len(frame))
    return pickle.loads(frame), descriptors  # noqa: S301 (from our own parent, over a private socket)


def _recv(channel: socket.socket, count: int) -> bytes:
    part = channel.recv(count)
    if not part:
        raise EOFError
    return part


@dataclass(eq=False)
class _Session:
    channel: socket.socket
    settings: ChildSettings | None = None
    children: dict[int, int] = field(default_factory=dict)  # pid by rank
    open: bool = True  # whether the parent still sends


@final
class ForkServer:
    """Single-threaded, so that a fork copies nothing that another thread holds."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._sessions: list[_Session] = []
        self._selector = selectors.DefaultSelector()
        self._wake_end, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_end, selectors.EVENT_READ)

    def run(self) -> None:
        """Fork, kill and report until the parent is gone; then no child is left."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(CHECK_PARENT):
                if key.fileobj is self._control:
                    if not self._open_session():
                        self._end()
                        return
                elif key.fileobj is self._wake_end:
                    self._wake_end.recv(4096)
                elif key.data.open:
                    self._serve(key.data)
            self._reap()
        self._end()

    def _open_session(self) -> bool:
        byte, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not byte:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            session = _Session(socket.socket(fileno=descriptor))
            self._sessions.append(session)
            self._selector.register(session.channel, selectors.EVENT_READ, session)
        return True

    def _serve(self, session: _Session) -> None:
        try:
            (order, content), descriptors = receive(session.channel)
        except (EOFError, OSError):  # no more orders: kill what is left
            session.open = False
            self._selector.unregister(session.channel)
            for pid in session.children.values():
                _kill(pid)
            self._forget_if_over(session)
            return
        if order == "settings":
            session.settings = content
        elif order == "fork":
            (connection,) = descriptors
            self._fork(session, content, connection)
            os.close(connection)
        elif order == "kill" and content in session.children:
            _kill(session.children[content])

    def _fork(self, session: _Session, request: ForkRequest, connection: int) -> None:
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(session, request, connection, fork_server)
                os._exit(0)  # without cleanup: nothing of the fork server may run twice
            except BaseException:  # noqa: BLE001 (the child must never return to the fork server's loop)
                traceback.print_exc()
            finally:
                os._exit(70)
        session.children[request.rank] = pid
        self._report(session, ("started", request.rank, pid))

    def _become_worker(
        self, session: _Session, request: ForkRequest, connection: int, fork_server: int
    ) -> None:
        """In the child: close what belongs to the fork server, and run calls."""
        die_with_parent(fork_server)
        os.setpgid(0, 0)  # what it starts itself ends with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._selector.close()
        for each in (self._control, self._wake_end, self._waker, *(one.channel for one in self._sessions)):
            each.close()
        os.set_inheritable(connection, False)
        redirect_output(request.log, request.title)
        assert session.settings is not None
        environ, path, argv, folder = session.settings
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:], sys.argv[:] = path, argv
        with contextlib.suppress(OSError):
            os.chdir(folder)
        client = ControlClient(Connection(socket.socket(fileno=connection)), request.rank, request.host)
        serve(client, request.rank)

    def _reap(self) -> None:
        """Report children that ended, and end what they started: their process groups exist until then."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # not SIGKILL: a resource tracker cleans up and leaves by itself
                os.killpg(pid, signal.SIGTERM)
            _, status = os.waitpid(pid, 0)
            for session in list(self._sessions):
                for rank in [rank for rank, child in session.children.items() if child == pid]:
                    del session.children[rank]
                    self._report(session, ("ended", rank, status))
                    self._forget_if_over(session)

    def _report(self, session: _Session, message: tuple[str, int, int]) -> None:
        with contextlib.suppress(OSError):  # the parent has closed its end
            send(session.channel, message)

    def _forget_if_over(self, session: _Session) -> None:
        if not session.open and not session.children:
            session.channel.close()
            self._sessions.remove(session)

    def _end(self) -> None:
        for session in self._sessions:
            for pid in session.children.values():
                _kill(pid)
        while any(session.children for session in self._sessions):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies; elsewhere it ends when its connection closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(control: int, parent: int, modules: list[str]) -> None:
    """Import the modules, then fork on request of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        with contextlib.suppress(Exception):  # the call that needs it will report what is wrong with it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise every collection in a child would copy the memory that it shares with the others
    ForkServer(socket.socket(fileno=control), parent).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
