"""What every launcher promises: subclass, say how to make one, and pytest does the rest.

`LauncherSuite` is for all; `WorkerGroupSuite` adds what holds where workers are processes of their own,
which can die, hang and be stopped alone.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import DivergedError, UsageError, WorkerFailedError
from manyhands.launchers.base import PLAIN, Launcher, Supervision
from manyhands.launchers.supervision import worker_group
from manyhands.testing.worker_functions import (
    LONG,
    add_rank,
    blame_another,
    chat,
    crash,
    diverge,
    echo,
    fail,
    hang_in_data,
    leave,
    lose_the_last,
    misuse,
    nap,
    square,
    surroundings,
    until_stopped,
)

SOON = 30.0  # far more than a verdict takes, far less than a worker sleeps


def processes_below(ancestor: int) -> dict[int, tuple[int, str]]:
    """The parent and the command line of all living descendants of a process, from /proc."""
    alive: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it ended while we looked
                continue
            if state != "Z":
                alive[int(entry.name)] = (int(parent), command)
    below = {ancestor}
    while more := {pid for pid, (parent, _) in alive.items() if parent in below} - below:
        below |= more
    return {pid: alive[pid] for pid in below if pid in alive and pid != ancestor}


def left_over() -> set[str]:
    """Workers, shared memory and sockets that exist now: compare before and after."""
    here = os.getpid()
    below = processes_below(here)
    workers = {
        f"process {pid}: {command}"
        for pid, (parent, command) in below.items()
        # The process that forks workers stays for the next launch.
        if not (parent == here and "launchers.nursery" in command)
    }
    shared = {str(path) for path in Path("/dev/shm").glob("*")}
    sockets = set(re.findall(r"\S*manyhands-\S+", Path("/proc/net/unix").read_text()))
    return workers | {name for name in shared | sockets if not _is_anothers(name, {here, *below})}


def _is_anothers(name: str, ours: set[int]) -> bool:
    """Whether its maker, whose process is in the name, lives and is not ours: the machine is not all ours."""
    maker = re.search(r"manyhands-(\d+)-", name)
    return bool(maker and int(maker[1]) not in ours and Path("/proc", maker[1]).exists())


class LauncherSuite:
    """Contract tests of a launcher."""

    sizes: tuple[int, ...] = (1,)

    def launcher(self) -> Launcher:
        """Make one."""
        raise NotImplementedError

    def test_every_rank_returns_its_result(self) -> None:
        """By rank, with its place and the arguments."""
        for size in self.sizes:
            expected = [(rank, size, 40 + rank) for rank in range(size)]
            assert self.launcher().launch(add_rank, size, 40) == expected

    def test_a_failing_worker_is_heard(self) -> None:
        """What it raised says what happened."""
        with pytest.raises(Exception, match="rank 0 fails on purpose"):
            self.launcher().launch(fail, 1)

    def test_our_own_errors_come_as_they_are(self) -> None:
        """Of several, that of the lowest rank."""
        with pytest.raises(DivergedError, match=r"^rank 0 diverged$"):
            self.launcher().launch(diverge, self.sizes[-1])

    def test_what_is_told_is_heard_in_order(self) -> None:
        """All of it before the launch returns, and everybody's exchanged values by rank."""
        for size in self.sizes:
            heard: list[tuple[int, int]] = []
            values = self.launcher().launch(chat, size, 200, supervision=Supervision(hear=heard.append))
            for rank in range(size):
                assert [number for teller, number in heard if teller == rank] == list(range(200))
            assert len(heard) == 200 * size
            expected = [[50_000 * k + rank for rank in range(size)] for k in range(4)]
            assert values == [expected] * size

    def test_trials_run_and_fail_alone(self) -> None:
        """Results and failures come through their own futures."""
        with self.launcher().executor(2) as executor:
            futures = {executor.submit(square, number): number for number in (3, -1, 5)}
            outcome = {
                futures[future]: str(error) if (error := future.exception()) else future.result()
                for future in as_completed(futures)
            }
            assert list(executor.map(square, range(5))) == [0, 1, 4, 9, 16]
        assert outcome == {3: 9, -1: "-1 is negative", 5: 25}

    def test_nothing_runs_after_shutdown(self) -> None:
        """As every executor of the standard library."""
        executor = self.launcher().executor(1)
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(square, 2)


class WorkerGroupSuite(LauncherSuite):
    """Contract tests of a launcher whose workers are processes of their own (law 5)."""

    sizes = (1, 2, 3)

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self) -> Any:
        """No process, no shared memory, no socket outlives a launch."""
        before = left_over()
        yield
        until = time.monotonic() + 5
        while (left := left_over() - before) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left

    def fails(
        self, size: int, function: Any, *arguments: Any, supervision: Supervision = PLAIN
    ) -> WorkerFailedError:
        """Launch what will fail, and return how; always long before the others would have ended."""
        begun = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            self.launcher().launch(function, size, *arguments, supervision=supervision)
        assert time.monotonic() - begun < SOON
        return caught.value

    def test_a_worker_knows_where_it_is(self) -> None:
        """And user code finds the usual variables."""
        found = self.launcher().launch(surroundings, 2)
        assert [one["RANK"] for one in found] == ["0", "1"]
        assert {one["WORLD_SIZE"] for one in found} == {"2"}
        assert len({one["pid"] for one in found} - {os.getpid()}) == 2
        assert {one["folder"] for one in found} == {str(Path.cwd())}
        assert [one["argv"] for one in found] == [sys.argv, sys.argv]

    def test_big_values_travel(self) -> None:
        """Both ways."""
        data = bytes(range(256)) * 200_000  # 51 MB
        assert self.launcher().launch(echo, 1, data) == [data[::-1]]

    def test_a_worker_that_raises_is_named(self, tmp_path: Path) -> None:
        """With what it raised, where, what the others were doing, and where the rest is written."""
        logs = tmp_path / "logs"
        error = self.fails(3, fail, 1, supervision=Supervision(logs=logs))
        lines = str(error).splitlines()
        assert error.rank == 1
        assert re.fullmatch(
            r"worker 1 of 3 \(host \S+, pid \d+\) raised ValueError: rank 1 fails on purpose"
            r"( at step 12, in barrier 9)?",
            lines[0],
        )
        assert "in fail" in str(error)
        assert f"the whole traceback is in {logs / 'rank-1.log'}" in lines
        assert re.search(r"workers 0, 2 were .*stopped after", lines[-1])
        written = (logs / "rank-1.log").read_text()
        assert "about to fail" in written
        assert "ValueError: rank 1 fails on purpose" in written

    def test_one_of_our_errors_ends_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it is, although the others would go on."""
        monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.3)
        begun = time.monotonic()
        with pytest.raises(UsageError, match=r"^there is no task of that name$"):
            self.launcher().launch(misuse, 2)
        assert time.monotonic() - begun < SOON

    def test_the_first_cause_is_blamed(self) -> None:
        """Not who noticed it."""
        error = self.fails(2, blame_another)
        assert re.match(r"worker 1 of 2 \(host \S+, pid \d+\) ended with exit code 3", str(error))

    @pytest.mark.parametrize("how", ["exit", "_exit"])
    def test_a_worker_that_leaves_is_named(self, how: str) -> None:
        """With its exit code."""
        error = self.fails(2, leave, how)
        assert re.match(r"worker 1 of 2 \(.*\) ended with exit code 3 at step 1,204, in backward", str(error))

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGILL"])
    def test_a_worker_that_is_killed_is_named(self, name: str) -> None:
        """With the signal, its step, what it was doing, and what the others were waiting in."""
        first, *_, last = str(self.fails(3, leave, name)).splitlines()
        number = signal.Signals[name].value
        assert re.fullmatch(
            rf"worker 2 of 3 \(host \S+, pid \d+\) was killed by signal {number} \({name}, .*\) "
            r"at step 1,204, in backward",
            first,
        )
        assert re.fullmatch(r"workers 0, 1 were waiting in barrier 2,408; they were stopped after .+", last)

    def test_a_worker_that_hangs_is_named(self) -> None:
        """With where it stands."""
        error = self.fails(2, hang_in_data, supervision=Supervision(timeout=1))
        assert re.match(r"worker 1 of 2 \(.*\) has been hanging for \S+ s at step 5, in data\n", str(error))
        assert "in hang_in_data" in str(error)
        assert "worker 0 was waiting in all_reduce 12; it was stopped after" in str(error)

    def test_a_worker_that_is_stopped_is_named(self) -> None:
        """And killed, although it cannot hear us."""
        error = self.fails(2, leave, "SIGSTOP", supervision=Supervision(timeout=1))
        assert re.match(
            r"worker 1 of 2 \(.*\) has been stopped \(SIGSTOP\) for \S+ s at step 1,204", str(error)
        )

    @pytest.mark.parametrize("how", ["SIGKILL", "raise", "SIGSTOP"])
    def test_one_that_is_spare_may_be_lost(self, how: str) -> None:
        """The others go on, exchange without it, and know that it is gone."""
        lost: list[tuple[int, str]] = []
        supervision = Supervision(timeout=1, spare=frozenset({1, 2}), lost=lambda *what: lost.append(what))
        *others, none = self.launcher().launch(lose_the_last, 3, how, supervision=supervision)
        for one in others:
            assert (one["before"], one["during"], one["after"]) == ([0, 1, 2], [0, 1, None], [0, 1, None])
            assert one["gone"] == {2}
        assert none is None
        ((rank, sentence),) = lost
        deed = {"SIGKILL": "was (killed|lost)", "raise": "raised ValueError:", "SIGSTOP": "has been stopped"}
        end = "(it was killed and )?the others go on"
        about = rf"worker {rank} of 3 \(.*\) {deed[how]} .* at step 120, in backward; {end}"
        assert re.fullmatch(about, sentence)

    def test_one_that_is_not_spare_may_not(self) -> None:
        """Although others are."""
        error = self.fails(3, lose_the_last, "SIGKILL", supervision=Supervision(spare=frozenset({0, 1})))
        assert error.rank == 2

    def test_a_signal_reaches_all_workers_as_a_request(self) -> None:
        """The first one: they end in good order."""
        ready: list[Any] = []

        def hear(message: Any) -> None:
            ready.append(message)
            if len(ready) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        answers = self.launcher().launch(until_stopped, 2, True, supervision=Supervision(hear=hear))
        assert answers == [signal.SIGTERM, signal.SIGTERM]

    def test_a_second_signal_ends_all_at_once(self) -> None:
        """Whatever they are doing."""

        def hear(message: Any) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            self.launcher().launch(until_stopped, 2, False, supervision=Supervision(hear=hear))
        assert time.monotonic() - begun < SOON

    def test_whoever_listens_may_fail(self) -> None:
        """That ends the gang, with that error."""

        def hear(message: Any) -> None:
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            self.launcher().launch(until_stopped, 2, False, supervision=Supervision(hear=hear))

    def test_a_trial_that_crashes_fails_alone(self) -> None:
        """The others, and those that come later, do not notice."""
        with self.launcher().executor(2) as executor:
            futures = [executor.submit(crash, number) for number in range(6)]
            errors = [future.exception(SOON) for future in futures]
            assert executor.submit(crash, 8).result(SOON) == 8
        assert [future.result() for future in futures[::2]] == [0, 2, 4]
        assert all(isinstance(error, WorkerFailedError) for error in errors[1::2])

    def test_trials_can_be_canceled(self) -> None:
        """Those that have not begun."""
        with self.launcher().executor(1) as executor:
            first = executor.submit(nap, 0.5)
            rest = [executor.submit(nap, LONG) for _ in range(3)]
            while not first.running():
                time.sleep(0.01)
            assert rest[0].cancel()
            executor.shutdown(cancel_futures=True)
        assert first.result() != os.getpid()
        assert all(future.cancelled() for future in rest)
