"""The hang detector, with made-up times."""

from __future__ import annotations

from manyhands.core.rank_info import RankStatus
from manyhands.launchers.supervision.watchdog import Watchdog


def steps(watchdog: Watchdog, times: list[float], ranks: int = 2, phase: str = "forward") -> None:
    """Every rank makes a step at each of these times."""
    for step, now in enumerate(times):
        for rank in range(ranks):
            watchdog.observe(rank, RankStatus(step, phase, "", step), now)


def test_the_first_step_may_take_longer() -> None:
    watchdog = Watchdog()
    for now in range(0, 300, 10):
        watchdog.observe(0, RankStatus(0, "data", "", 0), now)
        assert not watchdog.is_hung(now)
    assert watchdog.deadline() == 300
    assert watchdog.is_hung(301)


def test_the_deadline_is_at_least_ten_seconds() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0.1 * k for k in range(50)])
    assert watchdog.deadline() == 10
    last = 4.9
    watchdog.observe(0, RankStatus(49, "forward", "", 49), last + 9)
    watchdog.observe(1, RankStatus(49, "wait", "", 49), last + 9)
    assert not watchdog.is_hung(last + 9.9)
    assert watchdog.is_hung(last + 10.1)


def test_the_deadline_is_twenty_times_the_slowest_step() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 1, 2, 5, 6])
    assert watchdog.deadline() == 60
    assert not watchdog.is_hung(65)
    assert watchdog.is_hung(66.1)


def test_the_deadline_is_at_most_ten_minutes() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 100, 200])
    assert watchdog.deadline() == 600


def test_the_duration_of_the_start_is_not_learned() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 250, 250.1, 250.2])
    assert watchdog.deadline() == 10


def test_a_resumed_run_has_not_made_a_step_yet() -> None:
    watchdog = Watchdog()
    watchdog.observe(0, RankStatus(1200, "starting", "", 0), 0)
    watchdog.observe(0, RankStatus(1200, "data", "", 1), 50)
    assert watchdog.deadline() == 300
    watchdog.observe(0, RankStatus(1201, "data", "", 2), 51)
    assert watchdog.deadline() == 10


def test_a_disk_may_be_slow() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for now in range(1, 63):
        watchdog.observe(0, RankStatus(2, "checkpoint", "", 2), now)
        watchdog.observe(1, RankStatus(2, "wait", "barrier 5", 2), now)
        assert watchdog.is_hung(now) == (now > 60)


def test_waiting_for_a_worker_that_makes_progress_is_no_hang() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for k in range(100):  # rank 0 evaluates, the other waits for it
        now = 1.0 + k
        watchdog.observe(0, RankStatus(2, "evaluation", "", 10 + k), now)
        watchdog.observe(1, RankStatus(2, "wait", "barrier 5", 3), now)
        assert not watchdog.is_hung(now)


def test_a_worker_that_was_asked_and_waits_does_not_hang() -> None:
    """In any phase: rank 1 waits in a barrier of a checkpoint that rank 0 takes long to write."""
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for k in range(100):
        now = 1.0 + k
        watchdog.observe(0, RankStatus(2, "checkpoint", "", 10 + k), now)
        watchdog.observe(1, RankStatus(2, "checkpoint", "", 3), now)
        assert not watchdog.is_hung(now, waiting={1})
    assert watchdog.is_hung(now)
    assert watchdog.is_hung(now + 601, waiting={1})  # now no worker makes progress


def test_a_worker_that_does_not_wait_hangs_alone() -> None:
    """When no other waits for it, as in hogwild."""
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for k in range(1, 60):
        now = 0.2 + 0.2 * k
        watchdog.observe(0, RankStatus(2 + k, "forward", "", 3 + k), now)
        watchdog.observe(1, RankStatus(2, "forward", "", 2), now)
        assert watchdog.is_hung(now) == (k > 50)
    assert watchdog.stalled_for(1, 12.2) == 12.0
    assert watchdog.stalled_for(0, 12.2) < 0.3


def test_a_silent_worker_hangs_although_its_last_status_was_waiting() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    watchdog.observe(1, RankStatus(2, "wait", "", 3), 0.3)
    for k in range(1, 60):
        now = 0.3 + 0.2 * k
        watchdog.observe(0, RankStatus(2 + k, "forward", "", 3 + k), now)
        assert watchdog.is_hung(now) == (k > 50)
    assert watchdog.silent_for(1, 12.3) == 12.0


def test_a_given_timeout_replaces_the_deadline() -> None:
    watchdog = Watchdog(2.5)
    watchdog.observe(0, RankStatus(0, "checkpoint", "", 0), 0)
    assert not watchdog.is_hung(2.4)
    assert watchdog.is_hung(2.6)


def test_a_given_timeout_does_not_shorten_the_start() -> None:
    assert Watchdog(2.5).deadline(["starting"]) == 300
    assert Watchdog(900).deadline(["starting"]) == 900


def test_waiting_for_a_lost_worker_is_not_held_against_the_others() -> None:
    """And how long they waited says nothing about how long a step takes."""
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    watchdog.observe(0, RankStatus(2, "forward", "", 2), 11)
    watchdog.observe(1, RankStatus(2, "wait", "", 2), 11)
    assert watchdog.is_hung(11.5)
    watchdog.release(0)
    watchdog.restart_timers(11.5)
    assert not watchdog.is_hung(20)
    watchdog.observe(1, RankStatus(3, "forward", "", 4), 11.6)
    assert watchdog.deadline() == 10


def test_a_replacement_has_time_to_start() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for now in range(1, 200):
        watchdog.observe(0, RankStatus(now, "forward", "", now), now)
        watchdog.observe(1, RankStatus(2, "forward", "", now), now)
        watchdog.observe(2, RankStatus(0, "starting", "", 0), now)
        assert not watchdog.is_hung(now)
    watchdog.observe(2, RankStatus(2, "forward", "", 1), 200)
    assert watchdog.deadline() == 20 * 1.0  # the others' pauses, not its own start


def test_the_supervisor_may_be_suspended() -> None:
    watchdog = Watchdog(1.0)
    watchdog.observe(0, RankStatus(0, "data", "", 0), 0)
    watchdog.discount(100)
    assert not watchdog.is_hung(100.9)
    assert watchdog.is_hung(101.1)
    assert watchdog.silent_for(0, 100.5) == 0.5


def test_the_status_page_of_a_silent_worker_says_more_than_its_last_message() -> None:
    watchdog = Watchdog()
    steps(watchdog, [0, 0.1, 0.2])
    for tenth in range(3, 151):
        watchdog.observe(0, RankStatus(tenth, "forward", "", tenth), tenth / 10)
    assert watchdog.is_hung(15)  # worker 1 was in forward and is silent
    watchdog.correct(1, None)  # it has no page
    assert watchdog.is_hung(15)
    watchdog.correct(1, RankStatus(2, "checkpoint", "", 9))
    assert not watchdog.is_hung(15)  # a disk may be slow
    assert watchdog.stalled_for(1, 15) == 15 - 0.2  # and writing is no progress


def test_a_worker_that_is_done_or_sent_no_status_is_not_watched() -> None:
    watchdog = Watchdog(1.0)
    assert not watchdog.is_hung(1000)
    watchdog.observe(0, RankStatus(), 0)
    watchdog.release(0)
    watchdog.release(1)
    assert not watchdog.is_hung(1000)
