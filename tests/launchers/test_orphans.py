"""Whose child a worker of torchrun is: what a real torchrun, in test_torchrun.py, does not show."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping

import pytest

from manyhands.launchers.env import orphans
from manyhands.launchers.env.orphans import OrphanWatch
from manyhands.launchers.env.rendezvous import StarterInfo

AGENT = {"TORCHELASTIC_RUN_ID": "none"}
JOB = StarterInfo("torchrun", 0, 2, 0, 2, "job", "127.0.0.1:1")


def orphaned(job: StarterInfo, environ: Mapping[str, str]) -> str:
    """What a worker says whose parent is killed while it works, or `stays`."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() > 0:
            time.sleep(60)
        sys.stderr = os.fdopen(writing, "w")
        OrphanWatch(job, environ)
        os.write(writing, b"works\n")
        time.sleep(1.0)
        os.write(writing, b"stays")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"works\n"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    with os.fdopen(reading) as said:
        return said.read()


@pytest.mark.parametrize(
    ("job", "environ", "says"),
    [
        (JOB, AGENT, "error: torchrun (pid "),
        (JOB, {}, "stays"),  # variables set by hand: the shell that set them may leave
        (JOB._replace(starter="mpirun"), AGENT, "stays"),  # which ends its own
        (JOB._replace(rank=1, local_rank=1), AGENT, ""),  # one speaks for all of a host
    ],
)
def test_who_ends_with_its_parent(
    job: StarterInfo, environ: Mapping[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "LOOK", 0.1)
    monkeypatch.setattr(orphans, "LEADER_FIRST", 0.2)
    said = orphaned(job, environ)
    assert said.startswith(says)
    assert bool(said) == bool(says)


@pytest.mark.parametrize(("name", "late"), [("systemd", True), ("init", True), ("python3", False)])
def test_one_whose_parent_died_before_it_could_look(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its parent is whoever takes in orphans, and that one never dies."""
    monkeypatch.setattr(orphans, "parents_name", lambda: name)
    monkeypatch.setattr(orphans.threading.Thread, "start", lambda self: None)
    assert OrphanWatch(JOB, AGENT).is_orphan() == late
    assert not OrphanWatch(JOB, {}).is_orphan()
