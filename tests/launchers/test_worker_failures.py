"""An expendable worker may be lost: the others continue, or a new process replaces it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launchers.functions import lose_all, lose_with_facts
from launchers.test_local import eventually, script
from manyhands.core.errors import DivergedError, WorkerFailedError
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.supervision import worker_group
from manyhands.testing.launchers import SOON, left_over, processes_below
from manyhands.testing.worker_functions import lose_the_last, rejoin, stop_together, wait_for_the_last

LAUNCHER = LocalLauncher(preload=["manyhands.testing.worker_functions"])
BOTH = frozenset({1, 2})
KILLED = r"was killed by signal 9 \(SIGKILL, often because memory ran out\)"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = left_over()
    yield
    assert eventually(lambda: not left_over() - before, 5), left_over() - before


@dataclass
class Collected:
    """The messages, notices and losses of a worker group."""

    messages: list[Any] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def supervision(self, **more: Any) -> SupervisionOptions:
        settings = {
            "on_message": self.messages.append,
            "on_lost": lambda *what: self.lost.append(what),
            **more,
        }
        return SupervisionOptions(on_notice=self.notices.append, **{"expendable": BOTH, **settings})


def fails(
    function: Callable[..., Any], *arguments: Any, supervision: SupervisionOptions
) -> WorkerFailedError:
    started = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        LAUNCHER.launch(function, 3, *arguments, supervision=supervision)
    assert time.monotonic() - started < SOON
    return caught.value


# ---------------------------------------------------------------------- losing
@pytest.mark.parametrize(
    ("how", "happened"),
    [
        ("SIGKILL", KILLED),
        ("_exit", "exited with code 3"),
        ("exit", "exited with code 3"),
        ("raise", "raised ValueError: rank 2 fails on purpose"),
        ("peer", "raised PeerLostError: rank 0 is gone"),
    ],
)
def test_the_others_continue(how: str, happened: str) -> None:
    collected = Collected()
    first, second, third = LAUNCHER.launch(lose_the_last, 3, how, supervision=collected.supervision())
    assert third is None
    for rank, one in enumerate([first, second]):
        assert (one["before"], one["during"], one["after"]) == ([0, 1, 2], [0, 1, None], [0, 1, None]), rank
        assert one["gone"] == {2}
        assert (
            one["now"] - collected.messages[0] < 2
        )  # seconds after its end; usually 0.05, and 0.8 for `peer`
    ((rank, sentence),) = collected.lost
    assert rank == 2
    assert re.fullmatch(
        rf"worker 2 of 3 \(host \S+, pid \d+\) {happened} at step 120, in backward; the others continue",
        sentence,
    )
    assert [notice.splitlines()[0] for notice in collected.notices] == [sentence]


@pytest.mark.parametrize(
    ("how", "happened"),
    [("SIGSTOP", r"has been stopped \(SIGSTOP\) for \S+ s"), ("hang", r"has been hanging for \S+ s")],
)
def test_a_worker_that_hangs_is_killed_and_the_others_continue(how: str, happened: str) -> None:
    """They wait for it in an exchange and are not to blame, also afterwards."""
    collected = Collected()
    first, second, third = LAUNCHER.launch(
        lose_the_last, 3, how, supervision=collected.supervision(timeout=1)
    )
    assert (first["during"], second["after"], third) == ([0, 1, None], [0, 1, None], None)
    sentence, *details = collected.notices[0].splitlines()
    assert re.fullmatch(
        rf"worker 2 of 3 \(.*\) {happened} at step 120, in backward; it was killed, and the others continue",
        sentence,
    )
    assert [text for _, text in collected.lost] == [sentence]
    assert bool(details) == (how == "hang")  # its stack
    if details:
        assert details[0] == "its stack (innermost frame last):"
        assert "in end" in collected.notices[0]


def test_a_traceback_is_shown_and_its_log_named(tmp_path: Path) -> None:
    collected = Collected()
    LAUNCHER.launch(lose_the_last, 3, "raise", supervision=collected.supervision(logs=tmp_path))
    lines = collected.notices[0].splitlines()
    assert lines[-2:] == [
        "  ValueError: rank 2 fails on purpose",
        f"the whole traceback is in {tmp_path / 'rank-2.log'}",
    ]
    assert "\n" not in collected.lost[0][1]


def test_a_worker_that_dies_during_its_start_ends_the_group() -> None:
    collected = Collected()
    error = fails(lose_the_last, "SIGKILL", "starting", supervision=collected.supervision())
    assert re.match(rf"worker 2 of 3 \(.*\) {KILLED} while it was starting\n", str(error))
    assert (collected.lost, collected.notices) == ([], [])


@pytest.mark.parametrize("expendable", [frozenset({0, 1}), frozenset({2}), frozenset({2, 7}), frozenset()])
def test_a_needed_worker_or_the_last_expendable_one_ends_the_group(expendable: frozenset[int]) -> None:
    collected = Collected()
    error = fails(lose_the_last, "SIGKILL", supervision=collected.supervision(expendable=expendable))
    assert error.rank == 2
    assert re.match(rf"worker 2 of 3 \(.*\) {KILLED} at step 120, in backward\n", str(error))
    assert collected.lost == []


@pytest.mark.parametrize(
    ("expendable", "min_remaining"), [(frozenset({2}), 0), (frozenset({1, 2}), 0), (frozenset({1, 2}), 1)]
)
def test_a_worker_may_be_lost_if_enough_remain(expendable: frozenset[int], min_remaining: int) -> None:
    collected = Collected()
    results = LAUNCHER.launch(
        lose_the_last,
        3,
        "SIGKILL",
        supervision=collected.supervision(expendable=expendable, min_remaining=min_remaining),
    )
    assert results[2] is None
    assert [rank for rank, _ in collected.lost] == [2]


@pytest.mark.parametrize(("expendable", "min_remaining"), [(frozenset({2}), 1), (frozenset({1, 2}), 2)])
def test_a_worker_may_not_be_lost_if_too_few_remain(expendable: frozenset[int], min_remaining: int) -> None:
    collected = Collected()
    error = fails(
        lose_the_last,
        "SIGKILL",
        supervision=collected.supervision(expendable=expendable, min_remaining=min_remaining),
    )
    assert (error.rank, collected.lost) == (2, [])


def test_all_expendable_workers_may_be_lost_if_none_must_remain() -> None:
    collected = Collected()
    assert LAUNCHER.launch(lose_all, 3, supervision=collected.supervision(min_remaining=0)) == [None] * 3
    assert [rank for rank, _ in collected.lost] == [2, 1]


@pytest.mark.parametrize("how", ["SIGSTOP", "hang"])
def test_a_hang_of_a_needed_worker_ends_the_group(how: str) -> None:
    collected = Collected()
    error = fails(
        lose_the_last, how, supervision=collected.supervision(expendable=frozenset({0, 1}), timeout=1)
    )
    assert re.match(r"worker 2 of 3 \(.*\) has been .* at step 120, in backward\n", str(error))
    assert collected.lost == []


def test_when_all_expendable_workers_are_lost_the_last_one_is_named() -> None:
    collected = Collected()
    error = fails(lose_all, supervision=collected.supervision())
    assert error.rank == 1
    first, *_, last = str(error).splitlines()
    assert re.fullmatch(r"worker 1 of 3 \(.*\) exited with code 3 at step 120, in backward", first)
    assert last.endswith("; worker 2 was lost before")
    assert [rank for rank, _ in collected.lost] == [2]


def test_our_own_errors_end_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.2)
    collected = Collected()
    with pytest.raises(DivergedError, match=r"^rank 2 diverged$"):
        LAUNCHER.launch(lose_the_last, 3, "diverge", supervision=collected.supervision())
    assert collected.lost == []


def test_its_messages_arrive_before_it_is_lost() -> None:
    """And posted values are only for replacements."""
    received: list[Any] = []
    supervision = SupervisionOptions(on_message=received.append, on_notice=received.append, expendable=BOTH)
    assert LAUNCHER.launch(lose_with_facts, 3, 500, supervision=supervision) == [{}, {}, None]
    assert received[:-1] == list(range(500))
    assert received[-1].splitlines()[0].endswith("; the others continue")


# ---------------------------------------------------------------------- replacing
def test_a_lost_worker_is_replaced(tmp_path: Path) -> None:
    """The replacement knows what was posted, takes part once it has joined, and returns the result."""
    collected = Collected()
    logs = tmp_path / "logs"
    supervision = collected.supervision(max_replacements=2, logs=logs)
    first, second, third = LAUNCHER.launch(rejoin, 3, str(tmp_path), 1, supervision=supervision)
    exchanged = [[0, 1, "the first"], [0, 1, None], [0, 1, "the replacement"]]
    assert first == second == exchanged
    assert third == [2, [2, 2], frozenset(), exchanged[-1]]  # two exchanges were completed when it joined
    (_, *one, pid), (_, *other, another) = collected.messages
    assert one == [False, {}, frozenset()]
    assert other == [True, {"life": 1}, frozenset()]
    assert pid != another
    ((rank, sentence),) = collected.lost
    assert (rank, collected.notices) == (2, [sentence])
    assert re.fullmatch(
        rf"worker 2 of 3 \(host \S+, pid {pid}\) {KILLED} at step 120, in forward; "
        r"a new worker replaces it \(replacement 1 of 2\)",
        sentence,
    )
    headings = (logs / "rank-2.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in headings] == [
        f"worker 2 of 3, pid {pid}",
        f"worker 2 of 3, replacement 1 of 2, pid {another}",
    ]


def test_a_replacement_that_dies_before_it_has_joined_is_replaced(tmp_path: Path) -> None:
    collected = Collected()
    results = LAUNCHER.launch(
        rejoin, 3, str(tmp_path), 3, supervision=collected.supervision(max_replacements=3)
    )
    assert [values[2] for values in results[:2]] == [[0, 1, "the replacement"]] * 2
    assert results[2][0] == 4
    assert [text.rpartition("; ")[2] for _, text in collected.lost] == [
        f"a new worker replaces it (replacement {number} of 3)" for number in (1, 2, 3)
    ]
    assert "at step 120" in collected.lost[0][1]
    assert not any(
        "at step" in text for _, text in collected.lost[1:]
    )  # the status of the worker before it is not its own


def test_without_replacements_left_the_others_continue(tmp_path: Path) -> None:
    """Also if the lost worker was a replacement that had joined."""
    collected = Collected()
    results = LAUNCHER.launch(
        rejoin, 3, str(tmp_path), 2, "raise", supervision=collected.supervision(max_replacements=2)
    )
    exchanged = [[0, 1, "the first"], [0, 1, None], [0, 1, "the replacement"], [0, 1, None]]
    assert results == [exchanged, exchanged, None]
    fates = [text.rpartition("; ")[2] for _, text in collected.lost]
    assert fates[:2] == [f"a new worker replaces it (replacement {number} of 2)" for number in (1, 2)]
    assert fates[2:] == ["the others continue"]
    assert "raised ValueError: rank 2 fails on purpose" in collected.lost[2][1]


def test_our_own_error_of_a_replacement_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.2)
    with pytest.raises(DivergedError, match=r"^rank 2 diverged$"):
        LAUNCHER.launch(
            rejoin, 3, str(tmp_path), 1, "diverge", supervision=Collected().supervision(max_replacements=2)
        )


def go(folder: Path) -> Callable[[Any], None]:
    return lambda message: (folder / "go").touch()


@pytest.mark.parametrize("when", ["before it says hello", "while it starts"])
def test_a_group_that_is_done_does_not_wait_for_a_replacement(tmp_path: Path, when: str) -> None:
    if when == "before it says hello":
        (tmp_path / "go").touch()
    started = time.monotonic()
    supervision = Collected().supervision(max_replacements=1, on_message=go(tmp_path))
    assert LAUNCHER.launch(wait_for_the_last, 3, str(tmp_path), "", supervision=supervision) == [
        "returned"
    ] * 2 + [None]
    assert time.monotonic() - started < SOON


@pytest.mark.parametrize("when", ["before it says hello", "while it starts"])
def test_a_group_that_fails_ends_a_replacement(tmp_path: Path, when: str) -> None:
    if when == "before it says hello":
        (tmp_path / "go").touch()
    supervision = Collected().supervision(max_replacements=1, on_message=go(tmp_path))
    error = fails(wait_for_the_last, str(tmp_path), "SIGKILL", supervision=supervision)
    assert re.match(rf"worker 0 of 3 \(.*\) {KILLED} at step 120, in backward\n", str(error))


def test_a_signal_reaches_a_replacement_that_has_joined(tmp_path: Path) -> None:
    ready: list[int] = []

    def on_message(message: Any) -> None:
        ready.append(message[1])
        if len(ready) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    supervision = Collected().supervision(max_replacements=1, on_message=on_message)
    assert LAUNCHER.launch(stop_together, 3, str(tmp_path), supervision=supervision) == [signal.SIGTERM] * 3
    assert sorted(ready) == [0, 1, 2]


def test_a_signal_reaches_a_replacement_that_starts_after_it(tmp_path: Path) -> None:
    supervision = Collected().supervision(
        max_replacements=1, on_lost=lambda rank, text: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert LAUNCHER.launch(stop_together, 3, str(tmp_path), supervision=supervision) == [signal.SIGTERM] * 3


def test_a_worker_lost_while_all_stop_is_not_replaced() -> None:
    def on_message(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # 0.3 s before its end

    collected = Collected()
    LAUNCHER.launch(
        lose_the_last,
        3,
        "SIGKILL",
        supervision=collected.supervision(max_replacements=1, on_message=on_message),
    )
    assert collected.lost[0][1].endswith("; the others continue")


def test_a_second_signal_ends_a_replacement_as_well(tmp_path: Path) -> None:
    def on_message(message: Any) -> None:
        if message[1] == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LAUNCHER.launch(
            stop_together,
            3,
            str(tmp_path),
            False,
            supervision=Collected().supervision(max_replacements=1, on_message=on_message),
        )


def test_the_parents_death_leaves_no_process(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"""
        from manyhands.launchers.base import SupervisionOptions
        from manyhands.launchers.local import LocalLauncher
        from manyhands.testing.worker_functions import wait_for_the_last
        def on_message(message):
            print(message[2], flush=True)
        options = SupervisionOptions(on_message, expendable=frozenset((1, 2)), max_replacements=1)
        launcher = LocalLauncher(preload=["manyhands.testing.worker_functions"])
        launcher.launch(wait_for_the_last, 3, {str(tmp_path)!r}, "", supervision=options)
        """,
    )
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        replacement = int(parent.stdout.readline())
        pids = set(processes_below(parent.pid))
        assert replacement in pids
        assert len(pids) == 4  # three workers, and the process that started them
        parent.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
