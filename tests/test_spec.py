"""RunSpec: checked, frozen, the same everywhere it is written down."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from manyhands.errors import UsageError
from manyhands.spec import RunSpec

scalars = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8), st.none())
specs = st.builds(
    RunSpec.of,
    task=st.sampled_from(["quadratic", "mnist-cnn", "my.py:task"]),
    options=st.dictionaries(st.text(min_size=1, max_size=8), scalars, max_size=3),
    batch=st.none() | st.integers(1, 10**6),
    accumulate=st.integers(1, 64),
    epochs=st.none() | st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**63 - 1),
    recipe=st.none() | st.sampled_from(["constant", "large-batch"]),
    recipe_options=st.dictionaries(st.sampled_from(["lr", "momentum"]), st.floats(0.1, 1), max_size=2),
    stop_at_target=st.booleans(),
    checkpoint_every=st.floats(0, 1e3),
)


@given(specs)
def test_json_round_trip_is_exact(spec: RunSpec) -> None:
    again = RunSpec.from_json(spec.to_json())
    assert again == spec
    assert again.id == spec.id


@given(specs, specs)
def test_same_id_means_no_difference(one: RunSpec, other: RunSpec) -> None:
    assert (one.id == other.id) == (one.differences(other) == [])


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunSpec.of(task="quadratic").batch = 3


def test_how_often_a_run_is_saved_is_no_part_of_its_id() -> None:
    spec = RunSpec.of(task="quadratic", batch=10)
    assert spec.replace(checkpoint_every=0, keep=9).id == spec.id
    assert spec.replace(batch=11).id != spec.id


def test_the_id_of_this_version_is_the_id_of_every_version() -> None:
    """Folders are named by it: a field added later must not rename them."""
    assert RunSpec.of(task="mnist-cnn", batch=256, seed=1).id == "b162fe15"


def test_differences_name_each_setting_once() -> None:
    before = RunSpec.of(task="quadratic", batch=256, options={"n": 10}, recipe_options={"lr": 0.1})
    after = RunSpec.of(
        task="quadratic", batch=512, options={"n": 20}, recipe_options={"lr": 0.1, "clip": 1.0}
    )
    assert before.differences(after) == ["batch 256 -> 512", "option n 10 -> 20", "recipe.clip not set -> 1"]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"batch": 512, "workers": 2, "accumulate": 2}, "batch 512 = 2 workers x 128 x 2 accumulated"),
        ({"batch": 256}, "batch 256 = 1 worker x 256"),
        ({"batch": 100, "workers": 3}, "batch 100 = 3 workers x 33 or 34"),
    ],
)
def test_one_line_says_how_the_batch_is_divided(fields: dict[str, Any], line: str) -> None:
    assert RunSpec.of(task="quadratic", **fields).division == line


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": -3}, "batch must be at least 1, got -3"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be a number above 0, got 0"),
        ({"epochs": float("nan")}, "epochs must be a number above 0, got nan"),
        ({"seconds": -1}, "seconds must be a number above 0, got -1"),
        ({"checkpoint_every": -1}, "checkpoint_every must be 0 or more seconds, got -1"),
        ({"seed": -1}, "seed must be from 0 to 2**63 - 1, got -1"),
        ({"target": float("inf")}, "target must be a finite number, got inf"),
        ({"dtype": "float16"}, "dtype should be 'float32' or 'float64', got 'float16'"),
        ({"batch": "many"}, "batch should be a valid integer, got 'many'"),
        ({"bath": 3}, "a run has no setting 'bath' (did you mean 'batch'? known: task, options, strategy, "),
    ],
)
def test_bad_settings_are_answered_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunSpec.of(task="quadratic", **fields)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
