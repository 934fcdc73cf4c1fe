"""How long steps take and the picture of one: from a clock that tests move by hand."""

from __future__ import annotations

import pytest

from manyhands.engine.timing import clock as clocks
from manyhands.engine.timing.clock import Clock
from manyhands.engine.timing.step_timer import EVERY, TRACED, WARM_UP, StepTimer, timeline
from manyhands.records.phases import Span


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is."""
    time = [0.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: time[0])
    return time


def _step(clock: Clock, now: list[float], forward: float, backward: float, evaluation: float = 0.0) -> None:
    for phase, seconds in (("forward", forward), ("backward", backward), ("evaluation", evaluation)):
        with clock.phase(phase):
            now[0] += seconds


def test_the_first_steps_do_not_count_and_phases_add_up(now: list[float]) -> None:
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(40):
        slow = 10.0 if number < WARM_UP else 1.0
        _step(clock, now, slow, 2 * slow, evaluation=100.0 if number % 8 == 0 else 0.0)
        step_timer.stepped(32 * (number + 1))
    times = step_timer.step_times
    assert times is not None
    assert times.steps == 40 - WARM_UP
    assert times.mean == pytest.approx(3.0)
    assert times.phases == {"forward": pytest.approx(1.0), "backward": pytest.approx(2.0)}
    assert (times.low, times.median, times.high) == (pytest.approx(3.0),) * 3
    assert step_timer.samples_per_second == pytest.approx(32 / 3)


def test_a_short_session_leaves_fewer_out(now: list[float]) -> None:
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(100)
    assert step_timer.step_times is None
    assert step_timer.samples_per_second is None
    for number, seconds in enumerate((7.0, 1.0, 1.0, 1.0), 1):
        _step(clock, now, seconds, 0.0)
        step_timer.stepped(100 + 10 * number)
    assert step_timer.step_times is not None
    assert (step_timer.step_times.steps, step_timer.step_times.mean) == (3, pytest.approx(1.0))
    assert step_timer.samples_per_second == pytest.approx(10.0)


def test_of_few_steps_none_was_quicker_than_the_quickest(now: list[float]) -> None:
    """Of steps of 1 s and 30 s, one in ten was said to take less than -19.3 s."""
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number, seconds in enumerate((1.0, 30.0), 1):
        _step(clock, now, seconds, 0.0)
        step_timer.stepped(number)
    assert step_timer.step_times is not None
    assert (
        1.0 <= step_timer.step_times.low <= step_timer.step_times.median <= step_timer.step_times.high <= 30.0
    )


def test_a_resumed_clock_does_not_count_what_was_before(now: list[float]) -> None:
    clock = Clock()
    clock.start({"forward": 1000.0})
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(8):
        _step(clock, now, 1.0, 0.0)
        step_timer.stepped(number + 1)
    assert step_timer.step_times is not None
    assert step_timer.step_times.phases == {"forward": pytest.approx(1.0)}


def test_some_steps_are_traced_and_looking_at_the_clock_leaves_no_trace(now: list[float]) -> None:
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(WARM_UP + TRACED + 5):
        with clock.phase("forward"):
            now[0] += 1.0
            clock.switch("forward")
            now[0] += 1.0
        _step(clock, now, 0.0, 3.0)
        step_timer.stepped(number)
    assert clock.trace is None
    assert len(step_timer.traced) == TRACED
    begin = 5.0 * WARM_UP
    assert step_timer.traced[0] == [
        Span("forward", begin, begin + 2.0),
        Span("backward", begin + 2.0, begin + 5.0),
    ]


class Gpu:
    """Works through its queue asynchronously; synchronizing waits until it is done."""

    def __init__(self, now: list[float]) -> None:
        self._now, self._done, self.waits = now, 0.0, 0

    def launch(self, seconds: float) -> None:
        self._done = max(self._done, self._now[0]) + seconds

    def read(self) -> None:
        self._now[0] = max(self._now[0], self._done)

    def synchronize(self) -> None:
        self.waits += 1
        self.read()

    def step(self, clock: Clock) -> None:
        """The host reads data while the GPU is still at the last update."""
        with clock.phase("data"):
            self._now[0] += 4.0
        with clock.phase("forward"):
            self.launch(10.0)
        with clock.phase("backward"):
            self.launch(20.0)
        self.read()  # the loss
        with clock.phase("optimizer"):
            self.launch(3.0)


def test_a_device_runs_free_but_for_some_steps_whose_phases_count(now: list[float]) -> None:
    """Each step was stopped a dozen times, so that nothing overlapped and a step took too long."""
    gpu = Gpu(now)
    clock = Clock(gpu.synchronize)
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    waits, exact = [], []
    for number in range(1, 10 * EVERY + 1):
        before = gpu.waits
        exact.append(clock.exact)
        gpu.step(clock)
        step_timer.stepped(number)
        waits.append(gpu.waits - before)
    first = WARM_UP + TRACED
    assert exact == [n <= first or n % EVERY == 0 for n in range(1, len(exact) + 1)]
    assert [count for count, timed in zip(waits[first:], exact[first:], strict=True) if timed] == [9] * 10
    free = [count for count, timed in zip(waits[first:], exact[first:], strict=True) if not timed]
    assert sorted(free) == [0] * (len(free) - 10) + [1] * 10  # once before each that is timed
    times = step_timer.step_times
    assert times is not None
    assert times.phases == {"data": 4.0, "forward": 10.0, "backward": 20.0, "optimizer": 3.0}
    assert (times.steps, times.synchronized_steps) == (10 * EVERY - WARM_UP, TRACED + 10)
    assert times.median == 34.0  # the update beside the reading
    assert times.mean == pytest.approx(34.0, abs=0.2)
    assert step_timer.samples_per_second == pytest.approx(1 / times.mean)
    clock.wait()
    assert sum(clock.stopped().values()) == now[0]
    assert all(step[-1].end - step[0].begin == 37.0 for step in step_timer.traced)


@pytest.mark.parametrize("steps", [1, 3, 7, 10, 11, 16])
def test_a_short_session_on_a_device_has_step_times_too(now: list[float], steps: int) -> None:
    gpu = Gpu(now)
    clock = Clock(gpu.synchronize)
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(1, steps + 1):
        gpu.step(clock)
        step_timer.stepped(8 * number)
    assert step_timer.step_times is not None
    assert sum(step_timer.step_times.phases.values()) == 37.0
    assert step_timer.step_times.sampled == (steps > WARM_UP + TRACED)
    assert step_timer.samples_per_second == pytest.approx(8 / step_timer.step_times.mean)


def test_evaluations_begin_and_end_with_the_device_done(now: list[float]) -> None:
    """Else the last steps' work would be no training, and the last evaluation's would be."""
    gpu = Gpu(now)
    clock = Clock(gpu.synchronize)
    clock.start()
    clock.exact = False
    with clock.phase("forward"):
        gpu.launch(5.0)
    with clock.phase("evaluation"):
        gpu.launch(7.0)
    gpu.launch(1.0)
    with clock.phase("checkpoint"):
        pass
    assert clock.training_seconds == 6.0
    assert clock.totals["evaluation"] == 7.0


def test_on_a_cpu_every_step_is_exact(now: list[float]) -> None:
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(3 * EVERY):
        _step(clock, now, 1.0, 2.0)
        step_timer.stepped(number + 1)
        assert clock.exact
    assert step_timer.step_times is not None
    assert step_timer.step_times.synchronized_steps == step_timer.step_times.steps == 3 * EVERY - WARM_UP
    assert not step_timer.step_times.sampled


def _spans(begin: float, length: float) -> list[Span]:
    return [Span("forward", begin, begin + length)]


def test_of_steps_made_together_the_one_of_median_length_is_shown() -> None:
    first = [_spans(10.0, 3.0), _spans(20.0, 1.0), _spans(30.0, 2.0)]
    other = [_spans(10.5, 1.0), _spans(20.5, 1.0), _spans(30.5, 1.0)]
    shown = timeline([first, other], ["a", "a"], together=True)
    assert shown == [[Span("forward", 0.0, 2.0)], [Span("forward", 0.5, 1.5)]]


def test_clocks_of_two_hosts_begin_together() -> None:
    shown = timeline([[_spans(10.0, 2.0)], [_spans(7000.0, 1.0)]], ["a", "b"], together=True)
    assert shown == [[Span("forward", 0.0, 2.0)], [Span("forward", 0.0, 1.0)]]


def test_of_free_workers_all_is_shown_and_a_server_does_no_steps() -> None:
    shown = timeline(
        [[], [_spans(1.0, 1.0), _spans(2.0, 1.0)], [_spans(1.5, 1.0)]], ["a"] * 3, together=False
    )
    assert [len(spans) for spans in shown] == [0, 2, 1]
    assert shown[2][0].begin == 0.5
    assert timeline([[], []], ["a", "a"], together=True) == []


def test_a_pause_is_no_part_of_a_timeline(now: list[float]) -> None:
    """A pause of 12 s between two blocks of a measurement was once drawn as 12 s of "other"."""
    clock = Clock()
    clock.start()
    step_timer = StepTimer(clock)
    step_timer.begin(0)
    for number in range(WARM_UP + TRACED):
        _step(clock, now, 1.0, 2.0)
        step_timer.stepped(number + 1)
        if number == WARM_UP:  # between the first two traced steps
            with clock.phase("paused"):
                now[0] += 12.0
    steps = step_timer.traced
    assert [step[-1].end - step[0].begin for step in steps] == [3.0] * TRACED
    assert {span.phase for step in steps for span in step} == {"forward", "backward"}
    (together,), (alone,) = (timeline([steps], ["a"], together=each) for each in (True, False))
    assert together[-1].end == 3.0
    assert alone[-1].end == 3.0 * (TRACED - 1)
    assert len(alone) == 2 * (TRACED - 1)
