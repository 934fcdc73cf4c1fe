"""Hand-made states of all workers, and the one message that the diagnosis makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.control.code_position import CodePosition
from manyhands.launchers.control.remote_calls import Failure
from manyhands.launchers.supervision import diagnosis
from manyhands.launchers.supervision.diagnosis import Blame
from manyhands.launchers.worker_state import ProcessExit, WorkerState, exit_of

BARRIER = RankStatus(1204, "wait", "barrier 2,408", 50)
OTHER = RankStatus(9, "other", "", 50)
CHECKPOINT = RankStatus(9, "checkpoint", "", 50)
MOVING = RankStatus(9, "data", "", 99)
KILLED = ProcessExit("signal", 9)
TRACE = "Traceback (most recent call last):\n" + "".join(
    f'  File "deep.py", line {n}, in f{n}\n    f{n + 1}()\n' for n in range(20)
)
BAD = Failure("other", "ValueError", "bad thing", TRACE + "ValueError: bad thing\n")
PEER = Failure("peer", "PeerLostError", "rank 1 is gone", "")
OURS = Failure("ours", "DivergedError", "the loss is nan", "")
WAITS = CodePosition('  File "transports/shm/transport.py", line 3, in barrier\n    spin()\n', True)
ASTRAY = CodePosition('  File "faults.py", line 9, in strike\n    sleep()\n', False)


def worker(rank: int, **about: Any) -> WorkerState:
    return WorkerState(rank, "gpu-2", 4242 + rank, **about)


def test_the_example_of_the_design() -> None:
    everyone = [worker(rank, status=BARRIER) for rank in range(4)]
    everyone[1] = worker(1, status=RankStatus(1204, "backward", "", 49), exit=KILLED, failed_at=1.0)
    assert diagnosis.failed(everyone[1], everyone, 1.3) == (
        "worker 1 of 4 (host gpu-2, pid 4243) was killed by signal 9 (SIGKILL, often because memory ran out) "
        "at step 1,204, in backward\n"
        "workers 0, 2, 3 were waiting in barrier 2,408; they were stopped after 1.3 s"
    )


def test_a_traceback_is_shown_from_its_end_and_its_log_named() -> None:
    everyone = [
        worker(0, status=RankStatus(12, "wait", "all_reduce 3", 4)),
        worker(
            1,
            status=RankStatus(12, "forward", "", 3),
            failure=BAD,
            failed_at=1.0,
            log=Path("runs/x/rank-1.log"),
        ),
    ]
    lines = diagnosis.failed(everyone[1], everyone, 0.72).splitlines()
    assert lines == [
        "worker 1 of 2 (host gpu-2, pid 4243) raised ValueError: bad thing at step 12, in forward",
        "      f17()",
        '    File "deep.py", line 17, in f17',
        "      f18()",
        '    File "deep.py", line 18, in f18',
        "      f19()",
        '    File "deep.py", line 19, in f19',
        "      f20()",
        "  ValueError: bad thing",
        "the whole traceback is in runs/x/rank-1.log",
        "worker 0 was waiting in all_reduce 3; it was stopped after 0.7 s",
    ]


def test_without_a_log_the_traceback_is_longer() -> None:
    text = diagnosis.failed(
        worker(0, failure=BAD, failed_at=1.0), [worker(0, failure=BAD, failed_at=1.0)], 0.0
    )
    assert text.startswith("worker 0 of 1 (host gpu-2, pid 4242) raised ValueError: bad thing\n  ")
    assert "in f2" in text
    assert "log" not in text


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (ProcessExit("signal", 9), "was killed by signal 9 (SIGKILL, often because memory ran out)"),
        (ProcessExit("signal", 11), "was killed by signal 11 (SIGSEGV, a crash in native code)"),
        (ProcessExit("signal", 15), "was killed by signal 15 (SIGTERM)"),
        (ProcessExit("signal", 77), "was killed by signal 77"),
        (ProcessExit("exit", 3), "exited with code 3"),
        (ProcessExit("lost"), "was lost (its connection closed: killed, crashed or exited)"),
    ],
)
def test_exits(how: ProcessExit, sentence: str) -> None:
    assert diagnosis.exited(how) == sentence


def test_wait_statuses() -> None:
    assert exit_of(9) == ProcessExit("signal", 9)
    assert exit_of(3 << 8) == ProcessExit("exit", 3)


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (BAD, "raised ValueError: bad thing"),
        (Failure("other", "KeyError", "", ""), "raised KeyError"),
        (Failure("other", "MemoryError", "", ""), "raised MemoryError (out of memory)"),
        (
            Failure("other", "RuntimeError", "DefaultCPUAllocator: can't allocate memory\nhere", ""),
            "raised RuntimeError: DefaultCPUAllocator: can't allocate memory (out of memory)",
        ),
        (
            Failure("other", "OutOfMemoryError", "CUDA out of memory. Tried to ...", ""),
            "raised OutOfMemoryError: CUDA out of memory. Tried to ...",
        ),
        (Failure("exit", "SystemExit", "3", "", code=3), "exited with code 3"),
    ],
)
def test_raised(failure: Failure, sentence: str) -> None:
    assert diagnosis.raised(failure) == sentence


@pytest.mark.parametrize(
    ("everyone", "rank"),
    [
        # a death is the cause, although the other worker noticed it first
        ([worker(0, failure=PEER, failed_at=1.0), worker(1, exit=KILLED, failed_at=1.2)], 1),
        ([worker(0, failure=PEER, failed_at=1.0), worker(1, failure=BAD, failed_at=1.2)], 1),
        ([worker(0, failure=PEER, failed_at=1.0), worker(1, failure=OURS, failed_at=1.2)], 1),
        # otherwise the first
        ([worker(0, failure=BAD, failed_at=1.2), worker(1, exit=KILLED, failed_at=1.0)], 1),
        ([worker(0, failure=BAD, failed_at=1.0), worker(1, exit=KILLED, failed_at=1.2)], 0),
        # our own errors by rank
        ([worker(0, failure=OURS, failed_at=1.2), worker(1, failure=OURS, failed_at=1.0)], 0),
        # a consequence, if there is nothing else
        ([worker(0), worker(1, failure=PEER, failed_at=1.0)], 1),
    ],
)
def test_the_first_cause(everyone: list[WorkerState], rank: int) -> None:
    assert diagnosis.first_cause(everyone).rank == rank


WORKER_2 = "worker 2 of 3 (host gpu-2, pid 4244)"
BACKWARD = RankStatus(120, "backward", "", 3)


@pytest.mark.parametrize(
    ("about", "arguments", "sentence"),
    [
        (
            {"status": BACKWARD, "exit": KILLED},
            (),
            "was killed by signal 9 (SIGKILL, often because memory ran out) at step 120, in backward; "
            "the others continue",
        ),
        (
            {"status": BACKWARD, "exit": ProcessExit("exit", 3)},
            (None, (1, 2)),
            "exited with code 3 at step 120, in backward; a new worker replaces it (replacement 1 of 2)",
        ),
        (
            {"is_replacement": True, "connected": False, "exit": ProcessExit("exit", 70)},
            (None, (2, 2)),
            "exited with code 70 before it started; a new worker replaces it (replacement 2 of 2)",
        ),
        (
            {"status": BACKWARD, "stalled_for": 12.0, "silent_for": 12.4, "stopped": True},
            ("silent",),
            "has been stopped (SIGSTOP) for 12 s at step 120, in backward; "
            "it was killed, and the others continue",
        ),
        (
            {"status": BACKWARD, "stalled_for": 12.0, "silent_for": 12.4},
            ("silent", (1, 1)),
            "has not responded for 12 s at step 120, in backward; "
            "it was killed, and a new worker replaces it (replacement 1 of 1)",
        ),
    ],
)
def test_the_sentence_about_a_loss(about: dict[str, Any], arguments: tuple[Any, ...], sentence: str) -> None:
    assert diagnosis.loss(worker(2, **about), 3, *arguments) == (f"{WORKER_2} {sentence}", [])


def test_the_details_about_a_loss() -> None:
    """The end of its traceback, its log, or its stack."""
    log = Path("runs/x/rank-2.log")
    sentence, details = diagnosis.loss(worker(2, status=BACKWARD, failure=BAD, log=log), 3)
    assert (
        sentence == f"{WORKER_2} raised ValueError: bad thing at step 120, in backward; the others continue"
    )
    assert details[-2:] == ["  ValueError: bad thing", "the whole traceback is in runs/x/rank-2.log"]
    assert len(details) == diagnosis.TRACE_LINES + 1
    assert diagnosis.loss(worker(2, exit=KILLED, log=log), 3).details == []
    assert diagnosis.loss(worker(2, exit=KILLED, log=log, has_output=True), 3).details == [
        "its output is in runs/x/rank-2.log"
    ]
    sentence, details = diagnosis.loss(
        worker(2, status=BACKWARD, stalled_for=12.0, position=ASTRAY), 3, "busy"
    )
    assert sentence == (
        f"{WORKER_2} has been hanging for 12 s at step 120, in backward; "
        "it was killed, and the others continue"
    )
    assert details == [
        "its stack (innermost frame last):",
        '    File "faults.py", line 9, in strike',
        "      sleep()",
    ]


def test_a_worker_lost_before_is_not_among_the_others() -> None:
    everyone = [worker(rank, status=BARRIER) for rank in range(4)]
    everyone[3].lost = True
    everyone[1] = worker(1, status=BACKWARD, exit=KILLED, failed_at=1.0)
    assert diagnosis.failed(everyone[1], everyone, 1.3).splitlines()[-1] == (
        "workers 0, 2 were waiting in barrier 2,408; they were stopped after 1.3 s; worker 3 was lost before"
    )


def waiting(rank: int, **about: Any) -> WorkerState:
    settings = {"status": BARRIER, "stalled_for": 12.0, "position": WAITS, **about}
    return worker(rank, **settings)


@pytest.mark.parametrize(
    ("everyone", "found"),
    [
        # does not respond
        ([waiting(0), waiting(1, position=None), waiting(2)], Blame((1,), "silent")),
        # is not in a phase that waits
        ([waiting(0), waiting(1, status=RankStatus(9, "data"), position=ASTRAY)], Blame((1,), "busy")),
        # a worker that waits in a phase that does not say so is not to blame
        ([waiting(0, status=OTHER, position=ASTRAY), waiting(1, status=CHECKPOINT)], Blame((0,), "busy")),
        # is in a phase that waits, but its code is somewhere else
        ([waiting(0, position=ASTRAY), waiting(1)], Blame((0,), "astray")),
        # is behind
        ([waiting(0), waiting(1, status=BARRIER._replace(moves=49))], Blame((1,), "behind")),
        ([waiting(0), waiting(1)], Blame((), "deadlock")),
        # silence is worse than being busy
        ([waiting(0, position=None), waiting(1, position=ASTRAY)], Blame((0,), "silent")),
        # a worker that has made progress lately is not to blame, nor is one that has returned
        (
            [waiting(0, status=RankStatus(9, "data", "", 99), stalled_for=0.1), waiting(1, position=ASTRAY)],
            Blame((1,), "astray"),
        ),
        ([waiting(0, returned=True, position=None), waiting(1)], Blame((), "deadlock")),
        # a lost worker keeps no other waiting
        ([waiting(0, lost=True, position=None), waiting(1, position=ASTRAY)], Blame((1,), "astray")),
        # a worker that never sent a status cannot be judged
        ([worker(0), waiting(1)], Blame((), "deadlock")),
    ],
)
def test_the_blame_for_a_hang(everyone: list[WorkerState], found: Blame) -> None:
    assert diagnosis.blame(everyone) == found


def test_a_hang_shows_the_stack() -> None:
    everyone = [waiting(0), waiting(1, status=RankStatus(5, "data", "", 1), position=ASTRAY)]
    assert diagnosis.hung(Blame((1,), "busy"), everyone, 0.04) == (
        "worker 1 of 2 (host gpu-2, pid 4243) has been hanging for 12 s at step 5, in data\n"
        "its stack (innermost frame last):\n"
        '    File "faults.py", line 9, in strike\n'
        "      sleep()\n"
        "worker 0 was waiting in barrier 2,408; it was stopped after 40 ms"
    )


def test_a_worker_that_does_not_respond() -> None:
    everyone = [
        waiting(0),
        waiting(1, position=None, silent_for=13.0),
        waiting(2, status=RankStatus(5, "forward")),
    ]
    assert diagnosis.hung(Blame((1,), "silent"), everyone, 1.0) == (
        "worker 1 of 3 (host gpu-2, pid 4243) has not responded for 13 s at step 1,204, in barrier 2,408\n"
        "worker 0 was waiting in barrier 2,408; worker 2 was in forward at step 5; "
        "they were stopped after 1.0 s"
    )
    everyone[1].stopped = True
    assert "has been stopped (SIGSTOP) for 13 s" in diagnosis.hung(Blame((1,), "silent"), everyone, 1.0)


def test_all_wait_for_each_other() -> None:
    text = diagnosis.hung(Blame((), "deadlock"), [waiting(0), waiting(1), waiting(2)], 0.5)
    assert text.splitlines()[0] == "all workers are waiting in barrier 2,408; none has made progress for 12 s"
    assert text.splitlines()[-1] == "workers 0, 1, 2 were stopped after 0.5 s"


def test_some_wait_for_a_worker_that_has_returned() -> None:
    text = diagnosis.hung(Blame((), "deadlock"), [waiting(0, returned=True), waiting(1)], 0.5)
    lines = text.splitlines()
    assert lines[0] == "worker 1 is waiting in barrier 2,408; none has made progress for 12 s"
    assert lines[-1] == "worker 0 had returned; worker 1 was stopped after 0.5 s"


def test_many_workers_are_written_as_ranges() -> None:
    everyone = [worker(rank, status=BARRIER) for rank in range(64)]
    everyone[5].exit, everyone[5].failed_at = KILLED, 1.0
    last = diagnosis.failed(everyone[5], everyone, 2.0).splitlines()[-1]
    assert last == "workers 0-4, 6-63 were waiting in barrier 2,408; they were stopped after 2.0 s"
    few = [worker(rank, status=BARRIER) for rank in range(4)]
    few[3].exit, few[3].failed_at = KILLED, 1.0
    last = diagnosis.failed(few[3], few, 2.0).splitlines()[-1]
    assert last == "workers 0, 1, 2 were waiting in barrier 2,408; they were stopped after 2.0 s"


def test_workers_that_send_no_status() -> None:
    everyone = [worker(0), worker(1, exit=KILLED, failed_at=1.0), worker(2)]
    first, last = diagnosis.failed(everyone[1], everyone, 0.6).splitlines()
    assert first.endswith("(SIGKILL, often because memory ran out)")
    assert last == "workers 0, 2 were stopped after 0.6 s"
    assert diagnosis.missing([1, 2], 4, 60, "; hint") == "workers 1, 2 of 4 did not start within 1 min; hint"


def test_a_worker_that_died_before_it_started() -> None:
    one = worker(0, exit=ProcessExit("exit", 70), failed_at=1.0, connected=False)
    assert diagnosis.failed(one, [one], 0.1).endswith("exited with code 70 before it started")


def test_a_worker_that_noticed_a_death_was_waiting() -> None:
    """Its error has ended the phase in which it waited: the operation shows it."""
    dead = worker(1, exit=KILLED, failed_at=1.0)
    noticed = worker(0, failure=PEER, failed_at=1.1, status=RankStatus(20, "other", "barrier 43", 5))
    last = diagnosis.failed(dead, [noticed, dead], 0.1).splitlines()[-1]
    assert last == "worker 0 was waiting in barrier 43; it was stopped after 0.1 s"
