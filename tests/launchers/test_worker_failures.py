"""A worker may be lost and the others go on; another comes in its place, where processes can be started."""

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

from launchers.test_local import eventually, script
from launchers.workers import lose_all, lose_with_facts
from manyhands.core.errors import DivergedError, WorkerFailedError
from manyhands.launchers.base import Supervision
from manyhands.launchers.local import LocalLauncher
from manyhands.launchers.supervision import worker_group
from manyhands.testing.launchers import SOON, left_over, processes_below
from manyhands.testing.worker_functions import lose_the_last, rejoin, stop_together, wait_for_the_last

LAUNCHER = LocalLauncher(preload=["manyhands.testing.worker_functions"])
BOTH = frozenset({1, 2})
KILLED = r"was killed by signal 9 \(SIGKILL, often: out of memory\)"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = left_over()
    yield
    assert eventually(lambda: not left_over() - before, 5), left_over() - before


@dataclass
class Kept:
    """All that a gang says, and who was lost."""

    heard: list[Any] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def supervision(self, **more: Any) -> Supervision:
        settings = {"hear": self.heard.append, "lost": lambda *what: self.lost.append(what), **more}
        return Supervision(notice=self.notices.append, **{"spare": BOTH, **settings})


def fails(function: Callable[..., Any], *arguments: Any, supervision: Supervision) -> WorkerFailedError:
    begun = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        LAUNCHER.launch(function, 3, *arguments, supervision=supervision)
    assert time.monotonic() - begun < SOON
    return caught.value


# ---------------------------------------------------------------------- losing
@pytest.mark.parametrize(
    ("how", "deed"),
    [
        ("SIGKILL", KILLED),
        ("_exit", "ended with exit code 3"),
        ("exit", "ended with exit code 3"),
        ("raise", "raised ValueError: rank 2 fails on purpose"),
        ("peer", "raised PeerLostError: rank 0 is gone"),
    ],
)
def test_the_others_go_on(how: str, deed: str) -> None:
    kept = Kept()
    first, second, third = LAUNCHER.launch(lose_the_last, 3, how, supervision=kept.supervision())
    assert third is None
    for rank, one in enumerate([first, second]):
        assert (one["before"], one["during"], one["after"]) == ([0, 1, 2], [0, 1, None], [0, 1, None]), rank
        assert one["gone"] == {2}
        assert (
            one["now"] - kept.heard[0] < 2
        )  # seconds after its end; usually a twentieth, and 0.8 for `peer`
    ((rank, sentence),) = kept.lost
    assert rank == 2
    assert re.fullmatch(
        rf"worker 2 of 3 \(host \S+, pid \d+\) {deed} at step 120, in backward; the others go on", sentence
    )
    assert [notice.splitlines()[0] for notice in kept.notices] == [sentence]


@pytest.mark.parametrize(
    ("how", "deed"),
    [("SIGSTOP", r"has been stopped \(SIGSTOP\) for \S+ s"), ("hang", r"has been hanging for \S+ s")],
)
def test_one_that_hangs_is_killed_and_the_others_go_on(how: str, deed: str) -> None:
    """They wait for it in an exchange and are not to blame, nor is it held against them afterwards."""
    kept = Kept()
    first, second, third = LAUNCHER.launch(lose_the_last, 3, how, supervision=kept.supervision(timeout=1))
    assert (first["during"], second["after"], third) == ([0, 1, None], [0, 1, None], None)
    sentence, *details = kept.notices[0].splitlines()
    assert re.fullmatch(
        rf"worker 2 of 3 \(.*\) {deed} at step 120, in backward; it was killed and the others go on", sentence
    )
    assert [text for _, text in kept.lost] == [sentence]
    assert bool(details) == (how == "hang")  # where it stood
    if details:
        assert details[0] == "it was here:"
        assert "in end" in kept.notices[0]


def test_a_traceback_is_shown_and_its_log_named(tmp_path: Path) -> None:
    kept = Kept()
    LAUNCHER.launch(lose_the_last, 3, "raise", supervision=kept.supervision(logs=tmp_path))
    lines = kept.notices[0].splitlines()
    assert lines[-2:] == [
        "  ValueError: rank 2 fails on purpose",
        f"the whole traceback is in {tmp_path / 'rank-2.log'}",
    ]
    assert "\n" not in kept.lost[0][1]


def test_before_it_has_begun_it_ends_the_gang() -> None:
    kept = Kept()
    error = fails(lose_the_last, "SIGKILL", "starting", supervision=kept.supervision())
    assert re.match(rf"worker 2 of 3 \(.*\) {KILLED} while it was starting\n", str(error))
    assert (kept.lost, kept.notices) == ([], [])


@pytest.mark.parametrize("spare", [frozenset({0, 1}), frozenset({2}), frozenset({2, 7}), frozenset()])
def test_one_that_is_not_spare_or_the_last_one_ends_the_gang(spare: frozenset[int]) -> None:
    kept = Kept()
    error = fails(lose_the_last, "SIGKILL", supervision=kept.supervision(spare=spare))
    assert error.rank == 2
    assert re.match(rf"worker 2 of 3 \(.*\) {KILLED} at step 120, in backward\n", str(error))
    assert kept.lost == []


@pytest.mark.parametrize(
    ("spare", "remain"), [(frozenset({2}), 0), (frozenset({1, 2}), 0), (frozenset({1, 2}), 1)]
)
def test_as_many_must_remain_as_was_said(spare: frozenset[int], remain: int) -> None:
    kept = Kept()
    results = LAUNCHER.launch(
        lose_the_last, 3, "SIGKILL", supervision=kept.supervision(spare=spare, remain=remain)
    )
    assert results[2] is None
    assert [rank for rank, _ in kept.lost] == [2]


@pytest.mark.parametrize(("spare", "remain"), [(frozenset({2}), 1), (frozenset({1, 2}), 2)])
def test_no_fewer_may_remain_than_was_said(spare: frozenset[int], remain: int) -> None:
    kept = Kept()
    error = fails(lose_the_last, "SIGKILL", supervision=kept.supervision(spare=spare, remain=remain))
    assert (error.rank, kept.lost) == (2, [])


def test_all_that_are_spare_may_be_lost_where_none_must_remain() -> None:
    kept = Kept()
    assert LAUNCHER.launch(lose_all, 3, supervision=kept.supervision(remain=0)) == [None] * 3
    assert [rank for rank, _ in kept.lost] == [2, 1]


@pytest.mark.parametrize("how", ["SIGSTOP", "hang"])
def test_a_hang_of_one_that_is_not_spare_ends_the_gang(how: str) -> None:
    kept = Kept()
    error = fails(lose_the_last, how, supervision=kept.supervision(spare=frozenset({0, 1}), timeout=1))
    assert re.match(r"worker 2 of 3 \(.*\) has been .* at step 120, in backward\n", str(error))
    assert kept.lost == []


def test_when_all_that_are_spare_are_lost_the_last_one_is_named() -> None:
    kept = Kept()
    error = fails(lose_all, supervision=kept.supervision())
    assert error.rank == 1
    first, *_, last = str(error).splitlines()
    assert re.fullmatch(r"worker 1 of 3 \(.*\) ended with exit code 3 at step 120, in backward", first)
    assert last.endswith("; worker 2 had been lost before")
    assert [rank for rank, _ in kept.lost] == [2]


def test_our_own_errors_end_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.2)
    kept = Kept()
    with pytest.raises(DivergedError, match=r"^rank 2 diverged$"):
        LAUNCHER.launch(lose_the_last, 3, "diverge", supervision=kept.supervision())
    assert kept.lost == []


def test_what_it_told_is_heard_before_it_is_lost() -> None:
    """And what it posted survives it: here for nobody."""
    said: list[Any] = []
    supervision = Supervision(hear=said.append, notice=said.append, spare=BOTH)
    assert LAUNCHER.launch(lose_with_facts, 3, 500, supervision=supervision) == [{}, {}, None]
    assert said[:-1] == list(range(500))
    assert said[-1].splitlines()[0].endswith("; the others go on")


# ---------------------------------------------------------------------- joining
def test_another_takes_its_place(tmp_path: Path) -> None:
    """It knows that it joins and what was posted, counts when it says so, and answers for the rank."""
    kept = Kept()
    logs = tmp_path / "logs"
    supervision = kept.supervision(replacements=2, logs=logs)
    first, second, third = LAUNCHER.launch(rejoin, 3, str(tmp_path), 1, supervision=supervision)
    exchanged = [[0, 1, "the first"], [0, 1, None], [0, 1, "the new one"]]
    assert first == second == exchanged
    assert third == [2, [2, 2], frozenset(), exchanged[-1]]  # two exchanges were completed when it joined
    (_, *one, pid), (_, *other, another) = kept.heard
    assert one == [False, {}, frozenset()]
    assert other == [True, {"life": 1}, frozenset()]
    assert pid != another
    ((rank, sentence),) = kept.lost
    assert (rank, kept.notices) == (2, [sentence])
    assert re.fullmatch(
        rf"worker 2 of 3 \(host \S+, pid {pid}\) {KILLED} at step 120, in forward; "
        r"a new one takes its place \(1 of 2\)",
        sentence,
    )
    headings = (logs / "rank-2.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in headings] == [
        f"worker 2 of 3, pid {pid}",
        f"worker 2 of 3, joins (1 of 2), pid {another}",
    ]


def test_who_dies_before_it_has_joined_is_replaced_as_well(tmp_path: Path) -> None:
    kept = Kept()
    results = LAUNCHER.launch(rejoin, 3, str(tmp_path), 3, supervision=kept.supervision(replacements=3))
    assert [values[2] for values in results[:2]] == [[0, 1, "the new one"]] * 2
    assert results[2][0] == 4
    assert [re.split(r" at | joins|; ", text)[-1] for _, text in kept.lost] == [
        f"a new one takes its place ({number} of 3)" for number in (1, 2, 3)
    ]
    assert "at step 120" in kept.lost[0][1]
    assert not any(
        "at step" in text for _, text in kept.lost[1:]
    )  # what the one before it did is not its own


def test_until_nobody_is_left_to_come(tmp_path: Path) -> None:
    """Also when it had joined: the gang goes on without that rank."""
    kept = Kept()
    results = LAUNCHER.launch(
        rejoin, 3, str(tmp_path), 2, "raise", supervision=kept.supervision(replacements=2)
    )
    exchanged = [[0, 1, "the first"], [0, 1, None], [0, 1, "the new one"], [0, 1, None]]
    assert results == [exchanged, exchanged, None]
    fates = [text.rpartition("; ")[2] for _, text in kept.lost]
    assert fates[:2] == [f"a new one takes its place ({number} of 2)" for number in (1, 2)]
    assert fates[2:] == ["the others go on"]
    assert "raised ValueError: rank 2 fails on purpose" in kept.lost[2][1]


def test_one_of_our_errors_ends_the_gang_also_from_one_that_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.2)
    with pytest.raises(DivergedError, match=r"^rank 2 diverged$"):
        LAUNCHER.launch(
            rejoin, 3, str(tmp_path), 1, "diverge", supervision=Kept().supervision(replacements=2)
        )


def go(folder: Path) -> Callable[[Any], None]:
    return lambda message: (folder / "go").touch()


@pytest.mark.parametrize("when", ["before it says hello", "while it begins"])
def test_a_gang_that_ends_does_not_wait_for_who_has_not_joined(tmp_path: Path, when: str) -> None:
    if when == "before it says hello":
        (tmp_path / "go").touch()
    begun = time.monotonic()
    supervision = Kept().supervision(replacements=1, hear=go(tmp_path))
    assert LAUNCHER.launch(wait_for_the_last, 3, str(tmp_path), "", supervision=supervision) == [
        "returned"
    ] * 2 + [None]
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("when", ["before it says hello", "while it begins"])
def test_a_gang_that_fails_ends_who_is_on_its_way(tmp_path: Path, when: str) -> None:
    if when == "before it says hello":
        (tmp_path / "go").touch()
    supervision = Kept().supervision(replacements=1, hear=go(tmp_path))
    error = fails(wait_for_the_last, str(tmp_path), "SIGKILL", supervision=supervision)
    assert re.match(rf"worker 0 of 3 \(.*\) {KILLED} at step 120, in backward\n", str(error))


def test_a_signal_reaches_one_that_has_joined(tmp_path: Path) -> None:
    ready: list[int] = []

    def hear(message: Any) -> None:
        ready.append(message[1])
        if len(ready) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    supervision = Kept().supervision(replacements=1, hear=hear)
    assert LAUNCHER.launch(stop_together, 3, str(tmp_path), supervision=supervision) == [signal.SIGTERM] * 3
    assert sorted(ready) == [0, 1, 2]


def test_a_signal_reaches_one_that_comes_after_it(tmp_path: Path) -> None:
    supervision = Kept().supervision(
        replacements=1, lost=lambda rank, text: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert LAUNCHER.launch(stop_together, 3, str(tmp_path), supervision=supervision) == [signal.SIGTERM] * 3


def test_who_is_lost_while_all_stop_is_not_replaced() -> None:
    def hear(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # 0.3 s before its end

    kept = Kept()
    LAUNCHER.launch(lose_the_last, 3, "SIGKILL", supervision=kept.supervision(replacements=1, hear=hear))
    assert kept.lost[0][1].endswith("; the others go on")


def test_a_second_signal_ends_one_that_joined_as_well(tmp_path: Path) -> None:
    def hear(message: Any) -> None:
        if message[1] == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        LAUNCHER.launch(
            stop_together, 3, str(tmp_path), False, supervision=Kept().supervision(replacements=1, hear=hear)
        )


def test_the_parents_death_leaves_no_process(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"""
        from manyhands.launchers.base import Care
        from manyhands.launchers.local import Local
        from manyhands.testing.worker_functions import wait_for_the_last
        def hear(message):
            print(message[2], flush=True)
        care = Care(hear, spare=frozenset((1, 2)), replacements=1)
        launcher = Local(preload=["manyhands.testing.worker_functions"])
        launcher.launch(wait_for_the_last, 3, {str(tmp_path)!r}, "", care=care)
        """,
    )
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        joiner = int(parent.stdout.readline())
        pids = set(processes_below(parent.pid))
        assert joiner in pids
        assert len(pids) == 4  # three workers, and who started them
        parent.kill()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
