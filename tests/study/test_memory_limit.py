"""Training under a memory limit: what the system counts, and that a failure is an outcome."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.claims import limit_trial
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results
from manyhands.study import memory_limit
from manyhands.study.memory_limit import killed, memory_group, try_limit
from manyhands.testing.records import record

ROOM = 200_000_000
GREEDY = (
    "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid())); b = bytearray({size})"
)


def runs(**memory: int) -> list[RunRecord]:
    return [record(offload=mode).model_copy(update={"memory": [size]}) for mode, size in memory.items()]


def test_both_versions_of_the_counter_are_read(tmp_path: Path) -> None:
    assert killed(tmp_path) == 0
    (tmp_path / "memory.events").write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    assert killed(tmp_path) == 2
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert killed(tmp_path) == 5


def test_the_limit_ends_who_needs_more_and_nobody_else() -> None:
    with memory_group(ROOM) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        for size, ended in ((ROOM // 10, 0), (10 * ROOM, 1)):
            command = [sys.executable, "-c", GREEDY.format(size=size), str(group)]
            subprocess.run(command, check=False, capture_output=True)
            assert killed(group) == ended
    assert not group.exists()


@pytest.mark.parametrize("given", [{}, {"none": 10**9}, {"auto": 10**9}], ids=str)
def test_a_trial_needs_both_sides(tmp_path: Path, given: dict[str, int]) -> None:
    trial = try_limit(Results(tmp_path, "x", "x", records=runs(**given)))
    assert trial.problem == "a trial needs the memory of runs with offload none and auto"
    assert limit_trial.read(tmp_path) == [trial]


def test_where_no_group_can_be_made_the_outcome_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "GROUPS", tmp_path / "none")
    trial = try_limit(Results(tmp_path, "x", "x", records=runs(none=10**9, auto=10**8)))
    assert "needs root" in trial.problem


def test_a_side_that_fails_is_an_outcome_and_not_taken_for_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is not there: both sides fail, and neither was ended by the limit."""
    monkeypatch.setattr(memory_limit, "memory_group", lambda limit: contextlib.nullcontext(tmp_path))
    spec = record().spec.replace(task="missing.py:task")
    both = [
        each.model_copy(update={"spec": spec.replace(offload=each.spec.offload)})
        for each in runs(none=9, auto=4)
    ]
    trial = memory_limit._trial(Results(tmp_path, "x", "x", records=both))
    assert trial.limit == 6, "the geometric mean"
    assert trial.plain is not None
    assert trial.plain.exit == 1
    assert "missing.py" in trial.plain.said
    assert not trial.plain_failed
    assert not trial.offloaded_trained
