"""The choice of what to keep, recompute and move, against trying every choice there is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MORE
from manyhands.offload.memory_plan import Speed, choose, cost_of, least, plain, steps
from manyhands.offload.profile import Unit

SPEEDS = [Speed(1.0, 1.0), Speed(4.0, 2.0, 0.05), Speed(0.1, 0.1), Speed(1e9, 1e9)]


@st.composite
def rows(draw):
    """Units that hand on what the next one is given, with sizes that a fine grid meets exactly."""
    size, units = draw(st.integers(0, 4)), []
    for _ in range(draw(st.integers(1, 5))):
        same = draw(st.booleans())
        outputs = size if same else draw(st.integers(1, 4))
        saves_outputs = draw(st.booleans())
        saves_inputs = draw(st.booleans()) and not same
        work = draw(st.integers(0, 4))
        seconds = draw(st.integers(1, 5))
        own = draw(st.integers(0, 3))
        units.append(
            Unit(size, outputs, own, saves_inputs, saves_outputs, same, work, seconds, 2 * seconds, not same)
        )
        size = outputs
    return units


def every_choice(units, ahead, speed):
    def onward(start, loose, chosen):
        if start == len(units):
            yield cost_of(units, chosen, speed, ahead)
            return
        for step in steps(units, start, loose, ahead, speed):
            yield from onward(step.segment.stop, step.loose, [*chosen, step])

    return list(onward(0, True, []))


@settings(max_examples=30 * MORE, deadline=None)
@given(rows(), st.integers(1, 25), st.sampled_from(SPEEDS), st.sampled_from([0, 2]))
def test_the_best_choice_is_found(units, budget, speed, ahead):
    allowed = [plan for plan in every_choice(units, ahead, speed) if plan.peak <= budget]
    found = choose(units, budget, speed, [ahead], levels=120)  # finer than any size: nothing is rounded
    assert (found is None) == (not allowed)
    if found is not None:
        assert found.peak <= budget
        assert abs(found.seconds - min(plan.seconds for plan in allowed)) < 1e-9


@settings(max_examples=40, deadline=None)
@given(rows(), st.sampled_from(SPEEDS))
def test_the_least_budget_and_the_plain_one(units, speed):
    bound = least(units)
    assert min(plan.peak for plan in every_choice(units, 0, speed)) == bound
    if bound:
        assert choose(units, bound, speed, levels=200) is not None
    everything = choose(units, plain(units), speed, [0], levels=120)
    assert everything is None or everything.seconds == 0


@settings(max_examples=30, deadline=None)
@given(rows(), st.integers(1, 25), st.integers(2, 10))
def test_a_coarse_grid_never_breaks_the_budget(units, budget, levels):
    found = choose(units, budget, SPEEDS[0], [0, 3], levels=levels)
    assert found is None or found.peak <= budget


def test_a_slow_disk_is_not_moved_to_and_a_fast_one_is():
    units = [Unit(100, 100, 0, True, False, False, 200, 0.1, 0.2) for _ in range(20)]
    slow, fast = choose(units, 900, Speed(1.0, 1.0)), choose(units, 900, Speed(1e9, 1e9))
    assert slow is not None
    assert fast is not None
    assert slow.moved == 0
    assert {segment.how for segment in slow.segments} >= {"recompute"}
    assert fast.seconds < 0.01
    assert not any(segment.how == "recompute" for segment in fast.segments)
