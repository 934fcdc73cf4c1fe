"""Recipes that are functions of the user's: every strategy computes what one worker does, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.engine.probe import Probe, probe
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.records.spec import RunSpec
from manyhands.runs import verify
from manyhands.runs.resolve import resolve
from manyhands.tasks import find
from recipes import own_recipes

FILE = Path(own_recipes.__file__)
BY_ELEMENTS = ("by_nadam", "in_groups", "by_signs")
BY_PARAMETERS = ("by_muon", "by_adafactor")
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce", "transport": "shm", "workers": 3},
    "between hosts": {"strategy": "allreduce", "transport": "torch", "workers": 2},
    "average": {"strategy": "average", "transport": "shm", "workers": 1, "launcher": "local"},
    "sharded": {"strategy": "sharded", "transport": "torch", "workers": 2},
    "pipeline": {
        "strategy": "pipeline", "transport": "shm", "workers": 2, "strategy_options": {"micro_batches": 2},
    },
    "messages": {"strategy": "layers", "transport": "torch", "workers": 2},
}  # fmt: skip


def spec_of(recipe: str, **settings: Any) -> RunSpec:
    usual = {"task": "digits-mlp", "batch": 65, "threads": 1, "dtype": "float64"}
    return resolve(RunSpec.of(**usual | {"recipe": f"{FILE}:{recipe}"} | settings))


def probe_all(info: RankInfo, specs: list[RunSpec], steps: int) -> list[Probe | None]:
    return [probe(info, spec, steps) for spec in specs]


@pytest.mark.parametrize("way", WAYS)
def test_workers_equal_one(way: str) -> None:
    settings = WAYS[way]
    names = BY_ELEMENTS if way == "sharded" else (*BY_ELEMENTS, *BY_PARAMETERS)
    specs = [spec_of(name, **settings) for name in names]
    specs.append(spec_of("in_groups", lr_schedule=f"{FILE}:warm", **settings))
    patient = SupervisionOptions(timeout=200)  # several runs in one group: between them nobody steps
    found: list[Probe] = LocalLauncher().launch(
        probe_all, settings["workers"], specs, 4, supervision=patient
    )[0]
    for spec, ours in zip(specs, found, strict=True):
        theirs = InlineLauncher().launch(probe, 1, spec.alone(), 4)[0]
        comparison = verify._compare("float64", spec, theirs, ours, set())
        assert comparison.holds, (spec.recipe, comparison.largest)


def test_it_is_a_loop_written_by_hand() -> None:
    spec = spec_of("in_groups", lr_schedule=f"{FILE}:warm", recipe_options={"clip": 0.1})
    found = InlineLauncher().launch(probe, 1, spec, 3)[0]
    task = find.build("digits-mlp", {})
    torch.manual_seed(0)
    model = task.model().double()
    optimizer = own_recipes.in_groups(model.named_parameters(), 65)
    order = list(mh_batches(spec, 3))
    for step, (inputs, targets) in enumerate(order):
        optimizer.zero_grad()
        task.loss(model(task.preprocess.double()(inputs)), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        lr = own_recipes.warm(step * 65)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = lr, 10 * lr
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state[f"model/{name}"], tensor), name


def mh_batches(spec: RunSpec, steps: int) -> list[tuple[Tensor, Tensor]]:
    from manyhands.data.order import Order

    task = find.build(spec.task, {})
    order = Order.of(len(task.train), 65, 0)
    requests = [request for request, _ in zip(order.batches(0), range(steps), strict=False)]
    return [(batch.inputs, batch.targets) for batch in task.train.stream(requests, 0)]


def trained(folder: Path, recipe: str | Callable[..., Any], **settings: Any) -> dict[str, Tensor]:
    usual: dict[str, Any] = {"batch": 256, "epochs": 2, "quiet": True, "threads": 1}
    mh.train(
        "digits-mlp",
        recipe=f"{FILE}:{recipe}" if isinstance(recipe, str) else recipe,
        out=folder,
        **usual | settings,
    )
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("recipe", "strategy", "workers"),
    [
        ("by_muon", "allreduce", 2),
        pytest.param("by_signs", "allreduce", 2, marks=pytest.mark.soak),
        ("by_adafactor", "average", 2),
        pytest.param("by_signs", "average", 2, marks=pytest.mark.soak),
        pytest.param("by_muon", "pipeline", 2, marks=pytest.mark.soak),
        ("by_nadam", "sharded", 2),
        ("by_signs", "single", 1),
    ],
)
def test_its_state_is_resumed(recipe: str, strategy: str, workers: int, tmp_path: Path) -> None:
    more: dict[str, Any] = {"strategy": strategy, "workers": workers}
    more |= {"every": 2} if strategy == "average" else {}
    more |= {"micro_batches": 2} if strategy == "pipeline" else {}
    whole = trained(tmp_path / "whole", recipe, **more)
    trained(tmp_path / "part", recipe, samples=1024, **more)
    part = trained(tmp_path / "part", recipe, resume=True, allow_changes=True, **more)
    assert all(torch.equal(tensor, part[name]) for name, tensor in whole.items())


def test_its_state_is_the_same_for_any_strategy(tmp_path: Path) -> None:
    """Begun with two workers, continued with one: only rounding differs, in float64."""
    more: dict[str, Any] = {"dtype": "float64", "allow_changes": True}
    whole = trained(tmp_path / "whole", "by_muon", **more)
    trained(tmp_path / "part", "by_muon", workers=2, strategy="allreduce", samples=1000, **more)
    part = trained(
        tmp_path / "part", "by_muon", workers=1, strategy="single", resume=True, samples=10**6, **more
    )
    assert all(torch.allclose(tensor, part[name], atol=1e-9) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("recipe", "strategy", "options"),
    [
        ("together", "average", {"every": 4}),
        ("together", "hogwild", {}),
        ("together", "server", {}),
        ("by_muon", "server", {}),
        ("by_nadam", "server", {"servers": 2}),
        ("by_adafactor", "hogwild", {}),
    ],
)
def test_strategies_that_give_an_optimizer_all_it_needs(
    recipe: str, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "workers": 2, "batch": 64, "epochs": 4, **options}
    record = mh.train("digits-mlp", recipe=f"{FILE}:{recipe}", out=tmp_path / "run", quiet=True, **settings)
    losses = [point.test_loss for point in record.curve]
    assert losses[-1] < losses[0]


def sentence(**settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(RunSpec.of(**{"task": "digits-mlp", "batch": 65} | settings))
    return str(caught.value).replace(str(FILE), "FILE")


TAKES = "must take (named_parameters, batch), and everything else with a default, but takes"
RETURNS = "must return a torch.optim.Optimizer, or a list of them, but returns"
REFUSED = {
    "one_argument": f"the recipe FILE:one_argument {TAKES} (named_parameters)",
    "three_arguments": f"the recipe FILE:three_arguments {TAKES} (named_parameters, batch, more)",
    "nothing": f"the recipe FILE:nothing {RETURNS} None",
    "with_scheduler": f"the recipe FILE:with_scheduler {RETURNS} a StepLR; a schedule is a function of "
    "samples: lr_schedule=... or --lr-schedule",
    "fails": "the recipe FILE:fails fails: KeyError: 'no.such'",
    "by_lbfgs": "the optimizer of FILE:by_lbfgs, LBFGS, cannot make a step with gradients alone, as "
    "manyhands asks it to: TypeError: LBFGS.step() missing 1 required positional argument: 'closure'",
    "strangers": "the optimizer of FILE:strangers has a tensor of shape (3,) that is not among the "
    "parameters it was called with: use those",
    "counts_in_groups": "the optimizer of FILE:counts_in_groups, Counting, changes k of its parameter groups "
    "in a step, which checkpoints do not hold: its state must be kept for each parameter, in optimizer.state",
    "keeps_lists": "the optimizer of FILE:keeps_lists, Listing, keeps a list as past of each parameter, "
    "which checkpoints cannot hold: only tensors and numbers can be saved",
    "zero": "the optimizer of FILE:zero, SGD, has a learning rate of 0 in its first group: it must be above "
    "0",
    "misdeclared": "the scope of FILE:misdeclared is 'rows', which is not one (known: elements, parameters, "
    "model)",
    "A_NUMBER": "FILE:A_NUMBER is an int, not a function (known: by_nadam, by_muon, ...)",
    "by_nadm": "FILE has no recipe 'by_nadm' (did you mean 'by_nadam'? known: ...)",
}


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_cannot_be_a_recipe_is_a_sentence(recipe: str) -> None:
    found, (begin, _, rest) = sentence(recipe=f"{FILE}:{recipe}"), REFUSED[recipe].partition("...")
    if rest == ")":
        assert found.startswith(begin)
    else:
        assert found == REFUSED[recipe]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"recipe": f"{FILE}:together", "strategy": "allreduce", "workers": 2, "transport": "shm"},
            "Normalized needs all parameters together for an update, and strategy allreduce with 2 workers "
            "gives each some of the parameters: use average or hogwild",
        ),
        (
            {"recipe": f"{FILE}:by_muon", "strategy": "sharded", "workers": 2, "transport": "torch"},
            "Muon + NAdam needs whole parameters for an update, and strategy sharded with 2 workers gives "
            "each slices of parameters: use allreduce, average, hogwild, layers or pipeline",
        ),
        (
            {
                "recipe_options": {"optimizer": "muon"},
                "strategy": "server",
                "workers": 2,
                "strategy_options": {"servers": 2},
            },
            "muon needs whole parameters for an update, and each of 2 servers has slices of parameters: use "
            "one server, or allreduce, average, hogwild, layers or pipeline",
        ),
        (
            {"recipe": f"{FILE}:declared", "strategy": "allreduce", "workers": 2, "transport": "shm"},
            "SGD needs all parameters together for an update, and strategy allreduce with 2 workers gives "
            "each some of the parameters: use average or hogwild",
        ),
        (
            {"lr_schedule": f"{FILE}:warm", "recipe_options": {"lr": 0.1}},
            "the schedule FILE:warm decides the learning rate, so lr of the recipe would have no effect: "
            "leave one of them out",
        ),
        (
            {"recipe": f"{FILE}:by_nadam", "recipe_options": {"decy": 0.1}},
            "recipe FILE:by_nadam has no option 'decy' (did you mean 'decay'? known: decay)",
        ),
        (
            {"recipe": f"{FILE}:by_nadam", "recipe_options": {"clip": -1}},
            "clip must be a positive number or none, got -1.0",
        ),
        (
            {"lr_schedule": f"{FILE}:negative"},
            "the schedule FILE:negative returns -1.0 after 0 samples, not a learning rate: it must be a "
            "number of at least 0",
        ),
        (
            {"lr_schedule": f"{FILE}:by_nadam"},
            "the schedule FILE:by_nadam fails: TypeError: by_nadam() missing 1 required positional argument: "
            "'batch'",
        ),
        (
            {"lr_schedule": f"{FILE}:number_as_text"},
            "the schedule FILE:number_as_text returns '0.1' after 0 samples, not a learning rate: it must be "
            "a number of at least 0",
        ),
        (
            {"recipe": f"{FILE}:by_nadam", "lr_schedule": f"{FILE}:text"},
            "the schedule FILE:text returns 'fast' after 0 samples, not a learning rate: it must be a number "
            "of at least 0",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(settings: dict[str, Any], expected: str) -> None:
    assert sentence(**settings) == expected


def test_functions_of_a_program_reach_workers_and_are_needed_to_resume(tmp_path: Path) -> None:
    def mine(named_parameters: Any, batch: int) -> Any:
        return torch.optim.RMSprop([p for _, p in named_parameters], lr=1e-3)

    more: dict[str, Any] = {"workers": 2, "lr_schedule": lambda samples: 1e-3 if samples < 2000 else 1e-4}
    whole = trained(tmp_path / "whole", mine, **more)
    trained(tmp_path / "part", mine, samples=1000, **more)
    part = trained(tmp_path / "part", mine, resume=True, allow_changes=True, **more)
    assert all(torch.equal(tensor, part[name]) for name, tensor in whole.items())
    record = mh.load(tmp_path / "whole")
    assert record.recipe_line.startswith("RMSprop of mine · lr from lr_schedule, 0.001 at the start")
    steps = record.history()
    assert {step.lr for step in steps} == {1e-3, 1e-4}
    assert record.spec.recipe is not None
    assert record.spec.recipe.startswith("mine@")


def test_parameters_that_it_leaves_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mh.train("digits-mlp", recipe=f"{FILE}:all_but_one", epochs=1, out=tmp_path / "run")
    said = " ".join(capsys.readouterr().err.split())
    assert "the optimizer of the recipe does not get 1 parameter, which will not change: " in said
