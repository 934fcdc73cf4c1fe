"""What every launcher promises: subclass, say how to make one, and pytest does the rest."""

from __future__ import annotations

from concurrent.futures import as_completed

import pytest

from manyhands.launchers.base import Launcher, Place


def add_rank(place: Place, number: int) -> tuple[int, int, int]:
    """A worker function at module level, so that any launcher can send it anywhere."""
    return place.rank, place.size, number + place.rank


def fail(place: Place) -> None:
    """A worker that fails."""
    raise ValueError(f"rank {place.rank} fails on purpose")


def square(number: int) -> int:
    """A trial."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


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

    def test_trials_run_and_fail_alone(self) -> None:
        """Results and failures come through their own futures."""
        with self.launcher().executor(2) as executor:
            futures = {executor.submit(square, number): number for number in (3, -1, 5)}
            outcome = {
                futures[future]: str(error) if (error := future.exception()) else future.result()
                for future in as_completed(futures)
            }
        assert outcome == {3: 9, -1: "-1 is negative", 5: 25}

    def test_nothing_runs_after_shutdown(self) -> None:
        """As every executor of the standard library."""
        executor = self.launcher().executor(1)
        executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(square, 2)
