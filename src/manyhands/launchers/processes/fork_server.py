"""A process that has the heavy modules imported and forks workers from there: importing torch takes a second.

Why not multiprocessing's fork server: it runs the caller's script again in every child, so a script without
an `if __name__ == "__main__"` would start itself without end. Here a child knows what it is sent, no more.

    parent ── control ──▶ nursery      one byte and a socket for each crew; when it closes, everything ends
    parent ◀── crew ────▶ nursery      in: surroundings, fork (with the child's end of its line), kill
                                       out: born, ended; when it closes, the crew's children are killed
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
from manyhands.launchers.processes.worker_main import redirect, serve

ORPHANED = 1.0  # seconds between looks at whether the parent is still there
PR_SET_PDEATHSIG = 1


class ChildSettings(NamedTuple):
    """What a child has from the process it works for, as it was when the crew was made."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    folder: str

    @classmethod
    def of_this_process(cls) -> ChildSettings:
        """As they are now."""
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
    """A message, with descriptors that the other process receives as its own."""
    frame = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    header = LENGTH.pack(len(frame))
    if descriptors:
        sent = socket.send_fds(channel, [header], list(descriptors))
        header = header[sent:]
    channel.sendall(header + frame)


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """A message and its descriptors; EOFError when the other process has closed its end."""
    header, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
    while len(header) < LENGTH.size:
        header += _some(channel, LENGTH.size - len(header))
    (left,) = LENGTH.unpack(header)
    frame = bytearray()
    while len(frame) < left:
        frame += _some(channel, left - len(frame))
    return pickle.loads(frame), descriptors  # noqa: S301 (from our own parent, over a private socket)


def _some(channel: socket.socket, count: int) -> bytes:
    part = channel.recv(count)
    if not part:
        raise EOFError
    return part


@dataclass(eq=False)
class _Crew:
    channel: socket.socket
    surroundings: ChildSettings | None = None
    children: dict[int, int] = field(default_factory=dict)  # process by rank
    open: bool = True  # whether the parent still sends


@final
class ForkServer:
    """Single-threaded, so that a fork copies nothing that another thread holds."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._crews: list[_Crew] = []
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
            for key, _ in self._selector.select(ORPHANED):
                if key.fileobj is self._control:
                    if not self._new_crew():
                        self._end()
                        return
                elif key.fileobj is self._wake_end:
                    self._wake_end.recv(4096)
                elif key.data.open:
                    self._serve(key.data)
            self._reap()
        self._end()

    def _new_crew(self) -> bool:
        byte, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not byte:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            crew = _Crew(socket.socket(fileno=descriptor))
            self._crews.append(crew)
            self._selector.register(crew.channel, selectors.EVENT_READ, crew)
        return True

    def _serve(self, crew: _Crew) -> None:
        try:
            (order, content), descriptors = receive(crew.channel)
        except (EOFError, OSError):  # no more orders: what is left of the crew goes
            crew.open = False
            self._selector.unregister(crew.channel)
            for pid in crew.children.values():
                _kill(pid)
            self._forget_if_over(crew)
            return
        if order == "surroundings":
            crew.surroundings = content
        elif order == "fork":
            (line,) = descriptors
            self._fork(crew, content, line)
            os.close(line)
        elif order == "kill" and content in crew.children:
            _kill(crew.children[content])

    def _fork(self, crew: _Crew, birth: ForkRequest, line: int) -> None:
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._grow_up(crew, birth, line, nursery)
                os._exit(0)  # without ceremony: nothing of the nursery may run twice
            except BaseException:  # noqa: BLE001 (it goes no further than this)
                traceback.print_exc()
            finally:
                os._exit(70)
        crew.children[birth.rank] = pid
        self._report(crew, ("born", birth.rank, pid))

    def _grow_up(self, crew: _Crew, birth: ForkRequest, line: int, nursery: int) -> None:
        """In the child: forget the nursery and be a rank."""
        die_with_parent(nursery)
        os.setpgid(0, 0)  # what it starts itself ends with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._selector.close()
        for each in (self._control, self._wake_end, self._waker, *(one.channel for one in self._crews)):
            each.close()
        os.set_inheritable(line, False)
        redirect(birth.log, birth.title)
        assert crew.surroundings is not None
        environ, path, argv, folder = crew.surroundings
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:], sys.argv[:] = path, argv
        with contextlib.suppress(OSError):
            os.chdir(folder)
        serve(ControlClient(Connection(socket.socket(fileno=line)), birth.rank, birth.host), birth.rank)

    def _reap(self) -> None:
        """Report who ended, and end what they started: their groups still have their names until then."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(
                    pid, signal.SIGTERM
                )  # not SIGKILL: a resource tracker cleans up and leaves by itself
            _, status = os.waitpid(pid, 0)
            for crew in list(self._crews):
                for rank in [rank for rank, child in crew.children.items() if child == pid]:
                    del crew.children[rank]
                    self._report(crew, ("ended", rank, status))
                    self._forget_if_over(crew)

    def _report(self, crew: _Crew, message: tuple[str, int, int]) -> None:
        with contextlib.suppress(OSError):  # nobody wants to know any more
            send(crew.channel, message)

    def _forget_if_over(self, crew: _Crew) -> None:
        if not crew.open and not crew.children:
            crew.channel.close()
            self._crews.remove(crew)

    def _end(self) -> None:
        for crew in self._crews:
            for pid in crew.children.values():
                _kill(pid)
        while any(crew.children for crew in self._crews):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self._reap()


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies; where it cannot, the line's end does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(control: int, parent: int, modules: list[str]) -> None:
    """Import, then fork on request of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in modules:
        with contextlib.suppress(Exception):  # the call that needs it will say what is wrong with it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or every collection in a child would copy all that it shares with the others
    ForkServer(socket.socket(fileno=control), parent).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
