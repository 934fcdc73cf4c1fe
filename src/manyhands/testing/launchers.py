"""The conformance suite of launchers: subclass it, and override `launcher` to make one.

`LauncherSuite` is for all launchers; `WorkerGroupSuite` adds what holds if each worker is a process, which
can die, hang and be stopped alone.
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
from manyhands.launchers.base import DEFAULT_SUPERVISION, Launcher, SupervisionOptions
from manyhands.launchers.supervision import worker_group
from manyhands.testing.worker_functions import (
    LONG,
    add_rank,
    blame_another,
    chat,
    crash,
    diverge,
    echo,
    environment,
    fail,
    hang_in_data,
    leave,
    lose_the_last,
    misuse,
    nap,
    square,
    until_stopped,
)

SOON = 30.0  # seconds: far more than a failure takes to notice, far less than a worker sleeps


def processes_below(ancestor: int) -> dict[int, tuple[int, str]]:
    """Parent and command line of all living descendants of a process, by pid, from /proc."""
    alive: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it ended meanwhile
                continue
            if state != "Z":
                alive[int(entry.name)] = (int(parent), command)
    below = {ancestor}
    while more := {pid for pid, (parent, _) in alive.items() if parent in below} - below:
        below |= more
    return {pid: alive[pid] for pid in below if pid in alive and pid != ancestor}


def left_over() -> set[str]:
    """Workers, shared memory and sockets that exist now, to compare before and after."""
    here = os.getpid()
    below = processes_below(here)
    workers = {
        f"process {pid}: {command}"
        for pid, (parent, command) in below.items()
        # The fork server stays for the next launch.
        if not (parent == here and "launchers.processes.fork_server" in command)
    }
    shared = {str(path) for path in Path("/dev/shm").glob("*")}
    sockets = set(re.findall(r"\S*manyhands-\S+", Path("/proc/net/unix").read_text()))
    return workers | {name for name in shared | sockets if not _is_of_others(name, {here, *below})}


def _is_of_others(name: str, ours: set[int]) -> bool:
    """Whether the process whose pid is in the name is alive and not ours: other programs run here, too."""
    maker = re.search(r"manyhands-(\d+)-", name)
    return bool(maker and int(maker[1]) not in ours and Path("/proc", maker[1]).exists())


class LauncherSuite:
    """Contract tests of a launcher."""

    sizes: tuple[int, ...] = (1,)

    def launcher(self) -> Launcher:
        """Make the launcher under test."""
        raise NotImplementedError

    def test_every_rank_returns_its_result(self) -> None:
        """In the order of ranks; the function gets its rank info and the arguments."""
        for size in self.sizes:
            expected = [(rank, size, 40 + rank) for rank in range(size)]
            assert self.launcher().launch(add_rank, size, 40) == expected

    def test_a_failing_worker_is_reported(self) -> None:
        """With what it raised."""
        with pytest.raises(Exception, match="rank 0 fails on purpose"):
            self.launcher().launch(fail, 1)

    def test_our_own_errors_are_raised_unchanged(self) -> None:
        """Of several, that of the lowest rank."""
        with pytest.raises(DivergedError, match=r"^rank 0 diverged$"):
            self.launcher().launch(diverge, self.sizes[-1])

    def test_messages_arrive_in_order(self) -> None:
        """All of them before the launch returns; exchanged values are by rank."""
        for size in self.sizes:
            messages: list[tuple[int, int]] = []
            values = self.launcher().launch(
                chat, size, 200, supervision=SupervisionOptions(on_message=messages.append)
            )
            for rank in range(size):
                assert [number for sender, number in messages if sender == rank] == list(range(200))
            assert len(messages) == 200 * size
            expected = [[50_000 * k + rank for rank in range(size)] for k in range(4)]
            assert values == [expected] * size

    def test_calls_run_and_fail_alone(self) -> None:
        """Each result or error is in its own future."""
        with self.launcher().executor(2) as executor:
            futures = {executor.submit(square, number): number for number in (3, -1, 5)}
            outcome = {
                futures[future]: str(error) if (error := future.exception()) else future.result()
                for future in as_completed(futures)
            }
            assert list(executor.map(square, range(5))) == [0, 1, 4, 9, 16]
        assert outcome == {3: 9, -1: "-1 is negative", 5: 25}

    def test_nothing_runs_after_shutdown(self) -> None:
        """Like every executor of the standard library."""
        executor = self.launcher().executor(1)
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(square, 2)


class WorkerGroupSuite(LauncherSuite):
    """Contract tests of a launcher whose workers are processes of their own (law 5)."""

    sizes = (1, 2, 3)

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self) -> Any:
        """No process, shared memory or socket outlives a launch."""
        before = left_over()
        yield
        until = time.monotonic() + 5
        while (left := left_over() - before) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left

    def fails(
        self, size: int, function: Any, *arguments: Any, supervision: SupervisionOptions = DEFAULT_SUPERVISION
    ) -> WorkerFailedError:
        """Launch a function that fails, and return the error; it comes long before the other workers end."""
        started = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            self.launcher().launch(function, size, *arguments, supervision=supervision)
        assert time.monotonic() - started < SOON
        return caught.value

    def test_a_worker_knows_its_rank(self) -> None:
        """User code finds the variables that torchrun sets."""
        found = self.launcher().launch(environment, 2)
        assert [one["RANK"] for one in found] == ["0", "1"]
        assert {one["WORLD_SIZE"] for one in found} == {"2"}
        assert len({one["pid"] for one in found} - {os.getpid()}) == 2
        assert {one["folder"] for one in found} == {str(Path.cwd())}
        assert [one["argv"] for one in found] == [sys.argv, sys.argv]

    def test_large_values_can_be_sent(self) -> None:
        """As an argument and as a result."""
        data = bytes(range(256)) * 200_000  # 51 MB
        assert self.launcher().launch(echo, 1, data) == [data[::-1]]

    def test_a_worker_that_raises_is_named(self, tmp_path: Path) -> None:
        """With what it raised, where, what the others were doing, and where its log is."""
        logs = tmp_path / "logs"
        error = self.fails(3, fail, 1, supervision=SupervisionOptions(logs=logs))
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
        """Unchanged, although the others would continue."""
        monkeypatch.setattr(worker_group, "AFTER_OUR_ERROR", 0.3)
        started = time.monotonic()
        with pytest.raises(UsageError, match=r"^there is no task of that name$"):
            self.launcher().launch(misuse, 2)
        assert time.monotonic() - started < SOON

    def test_the_first_cause_is_blamed(self) -> None:
        """Not the worker that noticed it."""
        error = self.fails(2, blame_another)
        assert re.match(r"worker 1 of 2 \(host \S+, pid \d+\) exited with code 3", str(error))

    @pytest.mark.parametrize("how", ["exit", "_exit"])
    def test_a_worker_that_exits_is_named(self, how: str) -> None:
        """With its exit code."""
        error = self.fails(2, leave, how)
        assert re.match(r"worker 1 of 2 \(.*\) exited with code 3 at step 1,204, in backward", str(error))

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGILL"])
    def test_a_worker_that_is_killed_is_named(self, name: str) -> None:
        """With the signal, the step, what it was doing, and what the others were waiting in."""
        first, *_, last = str(self.fails(3, leave, name)).splitlines()
        number = signal.Signals[name].value
        assert re.fullmatch(
            rf"worker 2 of 3 \(host \S+, pid \d+\) was killed by signal {number} \({name}, .*\) "
            r"at step 1,204, in backward",
            first,
        )
        assert re.fullmatch(r"workers 0, 1 were waiting in barrier 2,408; they were stopped after .+", last)

    def test_a_worker_that_hangs_is_named(self) -> None:
        """With its stack."""
        error = self.fails(2, hang_in_data, supervision=SupervisionOptions(timeout=1))
        assert re.match(r"worker 1 of 2 \(.*\) has been hanging for \S+ s at step 5, in data\n", str(error))
        assert "in hang_in_data" in str(error)
        assert "worker 0 was waiting in all_reduce 12; it was stopped after" in str(error)

    def test_a_worker_that_is_stopped_is_named(self) -> None:
        """And killed, although it cannot respond."""
        error = self.fails(2, leave, "SIGSTOP", supervision=SupervisionOptions(timeout=1))
        assert re.match(
            r"worker 1 of 2 \(.*\) has been stopped \(SIGSTOP\) for \S+ s at step 1,204", str(error)
        )

    @pytest.mark.parametrize("how", ["SIGKILL", "raise", "SIGSTOP"])
    def test_an_expendable_worker_may_be_lost(self, how: str) -> None:
        """The others continue, exchange without it, and know that it is gone."""
        lost: list[tuple[int, str]] = []
        supervision = SupervisionOptions(
            timeout=1, expendable=frozenset({1, 2}), on_lost=lambda *what: lost.append(what)
        )
        *others, none = self.launcher().launch(lose_the_last, 3, how, supervision=supervision)
        for one in others:
            assert (one["before"], one["during"], one["after"]) == ([0, 1, 2], [0, 1, None], [0, 1, None])
            assert one["gone"] == {2}
        assert none is None
        ((rank, sentence),) = lost
        happened = {
            "SIGKILL": "was (killed|lost)",
            "raise": "raised ValueError:",
            "SIGSTOP": "has been stopped",
        }
        end = "(it was killed, and )?the others continue"
        about = rf"worker {rank} of 3 \(.*\) {happened[how]} .* at step 120, in backward; {end}"
        assert re.fullmatch(about, sentence)

    def test_other_workers_may_not_be_lost(self) -> None:
        """Only those that are expendable."""
        error = self.fails(
            3, lose_the_last, "SIGKILL", supervision=SupervisionOptions(expendable=frozenset({0, 1}))
        )
        assert error.rank == 2

    def test_a_signal_reaches_all_workers_as_a_request(self) -> None:
        """The first one: they end cleanly."""
        ready: list[Any] = []

        def on_message(message: Any) -> None:
            ready.append(message)
            if len(ready) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        answers = self.launcher().launch(
            until_stopped, 2, True, supervision=SupervisionOptions(on_message=on_message)
        )
        assert answers == [signal.SIGTERM, signal.SIGTERM]

    def test_a_second_signal_ends_all_at_once(self) -> None:
        """Whatever they are doing."""

        def on_message(message: Any) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            self.launcher().launch(
                until_stopped, 2, False, supervision=SupervisionOptions(on_message=on_message)
            )
        assert time.monotonic() - started < SOON

    def test_a_callback_may_fail(self) -> None:
        """That ends the group, with that error."""

        def on_message(message: Any) -> None:
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            self.launcher().launch(
                until_stopped, 2, False, supervision=SupervisionOptions(on_message=on_message)
            )

    def test_a_call_that_crashes_fails_alone(self) -> None:
        """Other calls, and later ones, are not affected."""
        with self.launcher().executor(2) as executor:
            futures = [executor.submit(crash, number) for number in range(6)]
            errors = [future.exception(SOON) for future in futures]
            assert executor.submit(crash, 8).result(SOON) == 8
        assert [future.result() for future in futures[::2]] == [0, 2, 4]
        assert all(isinstance(error, WorkerFailedError) for error in errors[1::2])

    def test_calls_can_be_canceled(self) -> None:
        """Those that have not started."""
        with self.launcher().executor(1) as executor:
            first = executor.submit(nap, 0.5)
            rest = [executor.submit(nap, LONG) for _ in range(3)]
            while not first.running():
                time.sleep(0.01)
            assert rest[0].cancel()
            executor.shutdown(cancel_futures=True)
        assert first.result() != os.getpid()
        assert all(future.cancelled() for future in rest)
