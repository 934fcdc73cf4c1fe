"""A script that removes what macOS or Windows does not have, and then runs `manyhands ...` per argument.

    python other_system.py win32 "list tasks" "train digits-mlp --out run" ...

Other packages are imported before that, because they are not tested. It prints the exit code of each command.
"""

from __future__ import annotations

import importlib
import os
import select
import shlex
import signal
import socket
import sys

# names that Linux has and the other system does not
NOT_ON_MACOS = {
    "os": "waitid sched_yield sched_getaffinity posix_fallocate posix_fadvise memfd_create "
    "O_TMPFILE O_DIRECT",
    "signal": "SIGRTMIN SIGRTMAX",
}
NOT_ON_WINDOWS = {
    "os": "fork register_at_fork getuid geteuid getgid killpg setpgid getpgid setsid WNOHANG uname sysconf "
    "O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC pwrite preadv fchmod mkfifo getloadavg statvfs wait4",
    "signal": "SIGKILL SIGBUS SIGCHLD SIGUSR1 SIGUSR2 SIGHUP SIGSTOP SIGALRM pthread_kill",
    "socket": "AF_UNIX send_fds recv_fds socketpair",
    "select": "poll epoll",
}
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
HEAVY = (
    "torch", "torch._dynamo", "torch.distributed", "numpy", "scipy.optimize", "pydantic", "typer", "pooch",
    "rich.progress", "rich.live", "safetensors.torch", "requests", "PIL.Image", "altair", "vl_convert",
    "sklearn.datasets", "multiprocessing.pool", "concurrent.futures.process", "tempfile", "subprocess",
)  # fmt: skip


def hide(system: str) -> None:
    for name in HEAVY:
        importlib.import_module(name)
    held = {"os": os, "signal": signal, "socket": socket, "select": select}
    for missing in (NOT_ON_MACOS, NOT_ON_WINDOWS) if system == "win32" else (NOT_ON_MACOS,):
        for module, names in missing.items():
            for name in names.split():
                if hasattr(held[module], name):
                    delattr(held[module], name)
    if system == "win32":
        for name in MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = system


if __name__ == "__main__":
    assert "manyhands" not in sys.modules
    hide(sys.argv[1])
    from manyhands import cli

    for line in list(sys.argv[2:]):
        sys.argv[1:] = shlex.split(line)
        try:
            cli.main()
        except SystemExit as ended:
            print(f"exit {ended.code}", flush=True)
