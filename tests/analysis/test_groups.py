"""How runs are named and put together."""

from __future__ import annotations

import pytest

from manyhands.analysis import groups
from manyhands.records.record import RunRecord
from manyhands.strategies import STRATEGIES, options
from manyhands.testing.records import record


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "single"),
        ({"strategy": "allreduce", "workers": 2}, "allreduce"),
        ({"strategy": "average", "workers": 2, "strategy_options": {"every": 16}}, "average"),
        ({"strategy": "average", "workers": 2, "strategy_options": {"every": 8}}, "average every=8"),
        ({"strategy": "average", "workers": 2, "strategy_options": {"every": "end"}}, "average every=end"),
        ({"strategy": "server", "workers": 2, "strategy_options": {"bound": 4}}, "server bound=4"),
        (
            {"strategy": "server", "workers": 2, "strategy_options": {"staleness_aware": True}},
            "server staleness_aware=yes",
        ),
        ({"strategy": "pipeline", "workers": 2, "strategy_options": {"stages": 2}}, "pipeline"),
        ({"strategy": "pipeline", "workers": 4, "strategy_options": {"stages": 2}}, "pipeline stages=2"),
        ({"strategy": "layers", "workers": 2, "strategy_options": {"cut": []}}, "layers"),
        ({"strategy": "hogwild", "workers": 2}, "hogwild"),
        ({"offload": "conv"}, "single offload=conv"),
        ({"accumulate": 4}, "single accumulate=4"),
        ({"strategy": "allreduce", "workers": 2, "transport": "mpi"}, "allreduce transport=mpi"),
    ],
)
def test_a_variant_names_what_is_not_usual(fields: dict, name: str):
    assert groups.variant(record(**fields)) == name


def test_what_a_strategy_chose_by_itself_is_no_variant():
    options = {"strategy": "pipeline", "workers": 2, "strategy_options": {"micro_batches": 8}}
    assert groups.variant(record(**options)) == "pipeline micro_batches=8"
    assert groups.variant(record(**options, choices={"micro_batches": 8})) == "pipeline"


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ({"scaling": "linear", "warmup": 5.0, "optimizer": "sgd"}, "linear + warm-up"),
        ({"scaling": "linear", "warmup": 0.0, "optimizer": "sgd"}, "linear, no warm-up"),
        ({"scaling": "none", "warmup": 0.0, "optimizer": "sgd"}, "no scaling"),
        ({"scaling": "none", "warmup": 5.0, "optimizer": "sgd"}, "no scaling"),
        ({"scaling": "sqrt", "warmup": 5.0, "optimizer": "lamb"}, "lamb, square root + warm-up"),
        ({}, "no scaling"),
    ],
)
def test_a_recipe_is_named_by_how_its_rate_follows_the_batch(recipe: dict, name: str):
    assert groups.recipe_variant(record().model_copy(update={"recipe": recipe})) == name


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        ({}, "single · 1 thread · batch 128"),
        ({"threads": 2}, "single · 2 threads · batch 128"),
        ({"strategy": "allreduce", "workers": 2, "batch": 256}, "allreduce · 2 workers · batch 256"),
        ({"strategy": "allreduce", "workers": 1, "batch": 256}, "allreduce · 1 worker · batch 256"),
        (
            {"strategy": "allreduce", "workers": 2, "threads": 2, "batch": 256},
            "allreduce · 2 workers x 2 threads · batch 256",
        ),
        ({"strategy": "server", "workers": 2}, "server · 2 workers + 1 server · batch 128"),
    ],
)
def test_a_title_says_who_works_on_what(fields: dict, title: str):
    assert groups.title(record(**fields)) == title


def test_tasks_come_in_order_of_appearance_with_their_options():
    records = [record(task="mnist-cnn"), record(), record(task="blood-vgg19", options={"size": 64}), record()]
    assert groups.tasks(records) == ["mnist-cnn", "mnist-mlp", "blood-vgg19 size=64"]
    assert groups.of_task(records, "mnist-mlp") == [records[1], records[3]]


def test_a_run_of_less_than_an_epoch_on_a_budget_only_measures_speed():
    run = record(steps_to_target=None)
    assert groups.attempted(run)
    budget = run.spec.replace(samples=8000)
    assert not groups.attempted(run.model_copy(update={"spec": budget, "epochs": 0.13}))
    assert groups.attempted(run.model_copy(update={"spec": budget, "epochs": 1.0}))


@pytest.mark.parametrize(
    ("status", "tried", "arrived"),
    [
        ("finished", True, True),
        ("target", True, True),
        ("diverged", True, False),
        ("interrupted", False, False),
    ],
)
def test_how_a_run_ended_decides_whether_it_counts(status: str, tried: bool, arrived: bool):
    run = record(status=status)
    assert (groups.attempted(run), groups.succeeded(run)) == (tried, arrived)


def test_seconds_count_only_of_runs_that_had_the_machine():
    assert groups.measured(record())
    assert not groups.measured(record(timed=False))
    assert not groups.measured(record(status="diverged", steady_samples_per_second=None))
    assert groups.measured(record(status="diverged"))


@pytest.mark.parametrize(
    ("fields", "crowded"),
    [
        ({"workers": 2, "strategy": "allreduce"}, False),
        ({"workers": 4, "strategy": "allreduce"}, True),
        ({"workers": 2, "strategy": "allreduce", "threads": 2}, True),
        ({"workers": 2, "strategy": "server"}, True),
        ({"workers": 4, "strategy": "allreduce", "hosts": ["a", "a", "b", "b"]}, False),
    ],
)
def test_a_machine_is_crowded_by_the_ranks_on_its_busiest_host(fields: dict, crowded: bool):
    assert groups.crowded(record(cores=2, **fields)) is crowded


@pytest.mark.parametrize("name", ["mse", "rmse", "mae", "wer", "accuracy", "excess loss"])
@pytest.mark.parametrize("higher", [True, False])
def test_which_way_a_metric_counts_is_what_its_task_says(name: str, higher: bool):
    """It was guessed from the name, and mse, rmse, mae and wer came out upside down."""
    assert groups.higher_is_better(record(metric_name=name, higher_is_better=higher)) is higher


def test_of_an_old_record_it_is_guessed():
    assert groups.higher_is_better(record(metric_name="accuracy"))
    assert not groups.higher_is_better(record(metric_name="excess loss"))
    assert not groups.higher_is_better(record(metric_name="top-1 error"))
    old = record().model_dump(mode="json")
    del old["higher_is_better"]
    assert RunRecord.model_validate(old).higher_is_better is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_goes_without_saying_is_the_default_of_the_strategy(strategy: str) -> None:
    defaults = {name: option.default for name, option in options.known(strategy).items()}
    assert groups.variant(record(strategy=strategy, strategy_options=defaults)) == strategy


def test_where_data_lies_is_no_part_of_a_task_s_name():
    here = record(task="blood-vgg19", options={"data": "/a/long/path", "size": 64})
    assert groups.task_name(here) == "blood-vgg19 size=64"
