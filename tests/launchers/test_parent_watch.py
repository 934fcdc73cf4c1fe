"""Workers that watch torchrun: what test_torchrun.py, with a real torchrun, does not show."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping

import pytest

from manyhands.launchers.env import parent_watch
from manyhands.launchers.env.parent_watch import ParentWatch
from manyhands.launchers.env.rendezvous import ClusterEnvironment

AGENT = {"TORCHELASTIC_RUN_ID": "none"}
JOB = ClusterEnvironment("torchrun", 0, 2, 0, 2, "cluster", "127.0.0.1:1")


def orphaned(cluster: ClusterEnvironment, environ: Mapping[str, str]) -> str:
    """What a worker prints whose parent is killed while it runs; `stays` if it does not end."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() > 0:
            time.sleep(60)
        sys.stderr = os.fdopen(writing, "w")
        ParentWatch(cluster, environ)
        os.write(writing, b"works\n")
        time.sleep(1.0)
        os.write(writing, b"stays")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"works\n"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    with os.fdopen(reading) as printed:
        return printed.read()


@pytest.mark.parametrize(
    ("cluster", "environ", "expected"),
    [
        (JOB, AGENT, "error: torchrun (pid "),
        (JOB, {}, "stays"),  # variables set by hand: the shell that set them may exit
        (JOB._replace(starter="mpirun"), AGENT, "stays"),  # which ends its own workers
        (JOB._replace(rank=1, local_rank=1), AGENT, ""),  # one prints the message for the host
    ],
)
def test_which_workers_end_with_their_parent(
    cluster: ClusterEnvironment, environ: Mapping[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_watch, "CHECK", 0.1)
    monkeypatch.setattr(parent_watch, "FIRST_RANK_ENDS", 0.2)
    printed = orphaned(cluster, environ)
    assert printed.startswith(expected)
    assert bool(printed) == bool(expected)


@pytest.mark.parametrize(("name", "late"), [("systemd", True), ("init", True), ("python3", False)])
def test_a_worker_whose_parent_died_during_its_start(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its parent is the process that adopts orphans, which never dies."""
    monkeypatch.setattr(parent_watch, "parent_name", lambda: name)
    monkeypatch.setattr(parent_watch.threading.Thread, "start", lambda self: None)
    assert ParentWatch(JOB, AGENT).is_orphan() == late
    assert not ParentWatch(JOB, {}).is_orphan()
