"""Optimizers of torch by name: in slices where each element counts by itself, else by whole parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.core.rank_info import RankInfo
from manyhands.engine.probe import Probe, probe
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.recipes.base import WHOLE
from manyhands.recipes.members import Plain, constant
from manyhands.recipes.optimizer_trials import find_traits
from manyhands.recipes.optimizers import build, for_model, set_lr
from manyhands.recipes.state_layout import state_layout
from manyhands.records.spec import RunSpec
from manyhands.runs import verify
from manyhands.runs.resolve import resolve

NAMES = get_args(Plain)
BY_ELEMENTS = [name for name in NAMES if name not in WHOLE]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_down_of_it_is_what_trying_it_shows(name: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    recipe = constant(optimizer=name, momentum=0.9 if name == "sgd" else 0.0)  # type: ignore[arg-type]
    traits = find_traits(for_model(recipe, model), name)
    assert traits.scope == recipe.scope
    assert traits.scalars.items() <= recipe.scalars.items()
    for name, kept in state_layout(recipe, model).items():
        assert kept.scalars.keys() <= recipe.scalars.keys(), name


def trained(name: str, parts: list[Tensor]) -> list[Tensor]:
    """After three steps with the same gradients, cut as the parameter is."""
    recipe = constant(optimizer=name, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = build(recipe, [(f"part {n}", part) for n, part in enumerate(parts)], ())
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        gradient = torch.randn(24, dtype=torch.float64, generator=generator)
        for part, piece in zip(parts, torch.split(gradient, [part.numel() for part in parts]), strict=True):
            part.grad = piece.view(part.shape)
        set_lr(optimizer, 0.01 * (step + 1))
        optimizer.step()
    return parts


@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_slices_are_updated_as_the_whole_is(name: str) -> None:
    values = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (whole,) = trained(name, [values.clone().view(4, 6)])
    pieces = trained(name, [part.clone() for part in torch.split(values, [7, 0, 17])])
    assert torch.equal(whole.flatten(), torch.cat(pieces))
    assert not torch.equal(whole.flatten(), values)


def probe_all(info: RankInfo, specs: list[RunSpec], steps: int) -> list[Probe | None]:
    return [probe(info, spec, steps) for spec in specs]


@pytest.mark.parametrize(
    ("strategy", "transport"), [("allreduce", "shm"), ("sharded", "torch"), ("pipeline", "shm")]
)
def test_workers_equal_one(strategy: str, transport: str) -> None:
    more: dict[str, Any] = {"strategy_options": {"micro_batches": 2}} if strategy == "pipeline" else {}
    specs = [
        resolve(
            RunSpec.of(
                task="digits-mlp",
                dtype="float64",
                batch=65,
                threads=1,
                recipe="constant",
                recipe_options={"optimizer": name, "lr": 0.01},
                strategy=strategy,
                transport=transport,
                workers=2,
                **more,
            )
        )
        for name in (BY_ELEMENTS if strategy == "sharded" else NAMES)
    ]
    patient = SupervisionOptions(timeout=200)  # several runs in one group: between them nobody steps
    found: list[Probe] = LocalLauncher().launch(probe_all, 2, specs, 4, supervision=patient)[0]
    for spec, ours in zip(specs, found, strict=True):
        theirs = InlineLauncher().launch(probe, 1, spec.alone(), 4)[0]
        comparison = verify._compare("float64", spec, theirs, ours, set())
        assert comparison.holds, (spec.recipe_options, comparison.largest)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("adadelta", "single", marks=pytest.mark.soak),
        pytest.param("adagrad", "average", marks=pytest.mark.soak),
        pytest.param("adamax", "single", marks=pytest.mark.soak),
        pytest.param("radam", "average", marks=pytest.mark.soak),
        pytest.param("rmsprop", "single", marks=pytest.mark.soak),
        ("nadam", "single"),
        ("asgd", "average"),
        pytest.param("rprop", "single", marks=pytest.mark.soak),
        ("adafactor", "average"),
        pytest.param("muon", "average", marks=pytest.mark.soak),
    ],
)
def test_its_state_is_resumed(name: str, strategy: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "recipe": "constant", "recipe_options": {"optimizer": name}, "batch": 256, "epochs": 2, "quiet": True,
        "strategy": strategy, "workers": 1,
    }  # fmt: skip
    mh.train("digits-mlp", out=tmp_path / "whole", **settings)
    mh.train("digits-mlp", out=tmp_path / "part", samples=1000, **settings)
    mh.train("digits-mlp", out=tmp_path / "part", resume=True, allow_changes=True, **settings)
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "part"))
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
