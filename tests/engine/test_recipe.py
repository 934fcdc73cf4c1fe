"""A recipe that a strategy changes says so: in words, at the start, in the record and in `show`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Answer
from manyhands.engine.recipe import changes, make_recipe
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs.resolve import resolve
from manyhands.tasks import find


@pytest.mark.parametrize(
    ("strategy", "recipe", "options", "text"),
    [
        ("allreduce", "large-batch", {}, ""),
        ("hogwild", "large-batch", {}, "momentum 0 instead of 0.9, lr 4 instead of 0.4"),
        ("hogwild", "large-batch", {"lr": 0.05}, "momentum 0 instead of 0.9"),
        ("hogwild", "large-batch", {"momentum": 0.5}, ""),
        ("hogwild", "large-batch", {"optimizer": "adam"}, ""),  # which does not use it
        ("hogwild", "lars", {}, "momentum 0 instead of 0.9"),
        ("hogwild", "constant", {}, ""),  # which has none
        ("hogwild", "lamb", {}, ""),
    ],
)
def test_changes_are_those_that_matter(
    strategy: str, recipe: str, options: dict[str, Any], text: str
) -> None:
    spec = resolve(
        RunSpec.of(
            task="digits-mlp",
            strategy=strategy,
            workers=2,
            recipe=recipe,
            recipe_options=options,
            launcher="local",
            transport="shm",
        )
    )
    assert changes(spec, find.build(spec.task, spec.options)) == text


def test_the_text_says_what_is_trained() -> None:
    spec = resolve(
        RunSpec.of(task="digits-mlp", strategy="hogwild", workers=2, launcher="local", transport="shm")
    )
    made = make_recipe(spec, find.build(spec.task, spec.options))
    assert (made.momentum, made.nesterov, made.lr) == (0.0, False, 4.0)


def test_a_run_says_what_its_strategy_changed(tmp_path: Path, typed: Callable[..., Answer]) -> None:
    """It was `lr 4 -> 0.5`, without a word about the momentum that was gone."""
    words = ["--strategy", "hogwild", "--workers", "2", "--epochs", "1", "--out", "run"]
    answer = typed("train", "digits-mlp", *words)
    said = "momentum 0 instead of 0.9, lr 4 instead of 0.4"
    assert f"hogwild changes the recipe: {said} (what you set yourself is kept" in answer.err
    line = RunFolder(tmp_path / "run").record().recipe_line  # type: ignore[union-attr]
    assert line.startswith("sgd · lr 4 per 256 samples = 0.5 for each update of 32, cosine decay · ")
    assert line.endswith(f" · changed for hogwild: {said}")
    assert f"changed for hogwild: {said} · hogwild on shm" in typed("show", "run").out
    assert "changes the recipe" not in typed("train", "digits-mlp", "--epochs", "1").err
