"""RunSpec: checked, frozen, the same everywhere it is written down."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from manyhands.core.errors import UsageError
from manyhands.records.spec import RunSpec

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
    assert RunSpec.of(task="mnist-cnn", batch=256, seed=1).id == "b162fe154483"


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
        (
            {"batch": 64, "strategy": "layers", "workers": 3},
            "batch 64 = 1 pipeline of 3 stages x 64 x 1 micro-batch",
        ),
        (
            {
                "batch": 100,
                "strategy": "pipeline",
                "workers": 4,
                "strategy_options": {"stages": 2, "micro_batches": 8},
            },
            "batch 100 = 2 pipelines of 2 stages x 6 or 7 x 8 micro-batches",
        ),
        (
            {
                "batch": 64,
                "strategy": "pipeline",
                "workers": 2,
                "strategy_options": {"stages": 1, "micro_batches": 4},
            },
            "batch 64 = 2 workers x 8 x 4 accumulated",
        ),
    ],
)
def test_one_line_says_how_the_batch_is_divided(fields: dict[str, Any], line: str) -> None:
    assert RunSpec.of(task="quadratic", **fields).division == line


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"workers": 4, "strategy": "allreduce", "accumulate": 3}, (1, 4, 3)),
        ({"workers": 4, "strategy": "layers"}, (4, 1, 1)),
        ({"workers": 4, "strategy": "pipeline"}, (4, 1, 1)),
        ({"workers": 4, "strategy": "pipeline", "strategy_options": {"stages": "2"}}, (2, 2, 1)),  # as text
        (
            {"workers": 6, "strategy": "pipeline", "strategy_options": {"stages": 3, "micro_batches": 8}},
            (3, 2, 8),
        ),
        ({"workers": 2, "strategy": "sharded"}, (1, 2, 1)),
        ({"strategy": "pipeline"}, (1, 1, 1)),
    ],
)
def test_stages_replicas_and_micro_batches(fields: dict[str, Any], numbers: tuple[int, int, int]) -> None:
    spec = RunSpec.of(task="quadratic", **fields)
    assert (spec.stages, spec.replicas, spec.micro_batches) == numbers


def test_one_worker_alone_is_the_null_member_of_every_axis() -> None:
    fields = {"workers": 4, "strategy": "server", "strategy_options": {"servers": 2}, "accumulate": 2}
    spec = RunSpec.of(task="quadratic", transport="shm", launcher="local", **fields)
    assert spec.alone(threads=1) == RunSpec.of(task="quadratic", accumulate=2, threads=1)


def test_a_strategy_of_another_version_is_one_rank_per_worker() -> None:
    spec = RunSpec.of(task="quadratic", strategy="gossip", workers=3, strategy_options={"servers": 2})
    assert (spec.ranks, spec.stages, spec.traits.exact) == (3, 1, False)


def test_who_computes_and_how_memory_is_spared_may_change_on_resume() -> None:
    before = RunSpec.of(
        task="quadratic", strategy="pipeline", workers=2, strategy_options={"micro_batches": 4}
    )
    after = before.replace(
        strategy="allreduce", strategy_options={}, offload="auto", memory="2GB", offload_to="/tmp"
    )
    assert before.differences(after) == []
    assert before.moves(after) == [
        "memory none -> 2000000000",
        "offload none -> auto",
        "strategy pipeline -> allreduce",
        "strategy.micro_batches 4 -> not set",
    ]
    assert after.replace(offload_to=None).id == after.id != before.id


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
        ({"memory": "2XB"}, "memory must be a size such as 2GB, 500MB or 1.5GiB, got '2XB'"),
        ({"memory": 0}, "memory must be at least 1 byte, got 0"),
        ({"memory": "0MB"}, "memory must be at least 1 byte, got 0"),
        ({"offload": "most"}, "offload should be 'none', 'all', 'conv' or 'auto', got 'most'"),
        ({"batch": "many"}, "batch should be a valid integer, got 'many'"),
        ({"bath": 3}, "a run has no setting 'bath' (did you mean 'batch'? known: task, options, strategy, "),
    ],
)
def test_bad_settings_are_answered_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunSpec.of(task="quadratic", **fields)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
