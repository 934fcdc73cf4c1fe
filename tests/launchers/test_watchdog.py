"""The deadline for a hang, with a clock that is made up."""

from __future__ import annotations

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.supervision.watchdog import Watchdog


def steps(patience: Watchdog, times: list[float], ranks: int = 2, phase: str = "forward") -> None:
    """Every rank makes a step at each of these times."""
    for step, now in enumerate(times):
        for rank in range(ranks):
            patience.observe(rank, RankStatus(step, phase, "", step), now)


def test_before_the_first_step_there_is_time() -> None:
    patience = Watchdog()
    for now in range(0, 300, 10):
        patience.observe(0, RankStatus(0, "data", "", 0), now)
        assert not patience.is_over(now)
    assert patience.deadline() == 300
    assert patience.is_over(301)


def test_quick_steps_are_given_ten_seconds() -> None:
    patience = Watchdog()
    steps(patience, [0.1 * k for k in range(50)])
    assert patience.deadline() == 10
    last = 4.9
    patience.observe(0, RankStatus(49, "forward", "", 49), last + 9)
    patience.observe(1, RankStatus(49, "wait", "", 49), last + 9)
    assert not patience.is_over(last + 9.9)
    assert patience.is_over(last + 10.1)


def test_slow_steps_are_given_twenty_times_the_slowest() -> None:
    patience = Watchdog()
    steps(patience, [0, 1, 2, 5, 6])
    assert patience.deadline() == 60
    assert not patience.is_over(65)
    assert patience.is_over(66.1)


def test_never_more_than_ten_minutes() -> None:
    patience = Watchdog()
    steps(patience, [0, 100, 200])
    assert patience.deadline() == 600


def test_the_start_teaches_nothing() -> None:
    patience = Watchdog()
    steps(patience, [0, 250, 250.1, 250.2])
    assert patience.deadline() == 10


def test_a_resumed_run_has_not_made_a_step_yet() -> None:
    patience = Watchdog()
    patience.observe(0, RankStatus(1200, "starting", "", 0), 0)
    patience.observe(0, RankStatus(1200, "data", "", 1), 50)
    assert patience.deadline() == 300
    patience.observe(0, RankStatus(1201, "data", "", 2), 51)
    assert patience.deadline() == 10


def test_a_disk_may_be_slow() -> None:
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    for now in range(1, 63):
        patience.observe(0, RankStatus(2, "checkpoint", "", 2), now)
        patience.observe(1, RankStatus(2, "wait", "barrier 5", 2), now)
        assert patience.is_over(now) == (now > 60)


def test_waiting_for_one_that_moves_is_in_order() -> None:
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    for k in range(100):  # rank 0 evaluates, the other waits for it
        now = 1.0 + k
        patience.observe(0, RankStatus(2, "evaluation", "", 10 + k), now)
        patience.observe(1, RankStatus(2, "wait", "barrier 5", 3), now)
        assert not patience.is_over(now)


def test_who_was_asked_and_waits_is_in_order() -> None:
    """In whatever phase: rank 1 waits in a barrier of a checkpoint that rank 0 writes for long."""
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    for k in range(100):
        now = 1.0 + k
        patience.observe(0, RankStatus(2, "checkpoint", "", 10 + k), now)
        patience.observe(1, RankStatus(2, "checkpoint", "", 3), now)
        assert not patience.is_over(now, waiting={1})
    assert patience.is_over(now)
    assert patience.is_over(now + 601, waiting={1})  # now nobody moves


def test_one_that_does_not_wait_hangs_alone() -> None:
    """Where nobody waits for it, as in hogwild."""
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    for k in range(1, 60):
        now = 0.2 + 0.2 * k
        patience.observe(0, RankStatus(2 + k, "forward", "", 3 + k), now)
        patience.observe(1, RankStatus(2, "forward", "", 2), now)
        assert patience.is_over(now) == (k > 50)
    assert patience.still(1, 12.2) == 12.0
    assert patience.still(0, 12.2) < 0.3


def test_one_that_is_silent_hangs_although_it_last_waited() -> None:
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    patience.observe(1, RankStatus(2, "wait", "", 3), 0.3)
    for k in range(1, 60):
        now = 0.3 + 0.2 * k
        patience.observe(0, RankStatus(2 + k, "forward", "", 3 + k), now)
        assert patience.is_over(now) == (k > 50)
    assert patience.silent(1, 12.3) == 12.0


def test_a_given_timeout_replaces_all_of_it() -> None:
    patience = Watchdog(2.5)
    patience.observe(0, RankStatus(0, "checkpoint", "", 0), 0)
    assert not patience.is_over(2.4)
    assert patience.is_over(2.6)


def test_who_waited_for_one_that_is_gone_is_forgiven() -> None:
    """And what it waited says nothing about how long a step takes."""
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    patience.observe(0, RankStatus(2, "forward", "", 2), 11)
    patience.observe(1, RankStatus(2, "wait", "", 2), 11)
    assert patience.is_over(11.5)
    patience.release(0)
    patience.forgive(11.5)
    assert not patience.is_over(20)
    patience.observe(1, RankStatus(3, "forward", "", 4), 11.6)
    assert patience.deadline() == 10


def test_one_that_joins_has_time_to_start() -> None:
    patience = Watchdog()
    steps(patience, [0, 0.1, 0.2])
    for now in range(1, 200):
        patience.observe(0, RankStatus(now, "forward", "", now), now)
        patience.observe(1, RankStatus(2, "forward", "", now), now)
        patience.observe(2, RankStatus(0, "starting", "", 0), now)
        assert not patience.is_over(now)
    patience.observe(2, RankStatus(2, "forward", "", 1), 200)
    assert patience.deadline() == 20 * 1.0  # the others' pauses, not its own start


def test_the_observer_may_sleep() -> None:
    patience = Watchdog(1.0)
    patience.observe(0, RankStatus(0, "data", "", 0), 0)
    patience.excuse(100)
    assert not patience.is_over(100.9)
    assert patience.is_over(101.1)


def test_who_is_done_or_never_spoke_is_not_watched() -> None:
    patience = Watchdog(1.0)
    assert not patience.is_over(1000)
    patience.observe(0, RankStatus(), 0)
    patience.release(0)
    patience.release(1)
    assert not patience.is_over(1000)
