"""Every claim has a study that can be run and a line in the table of results; every study can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ROOT
from manyhands.claims import CLAIMS
from manyhands.study import study_file

STUDIES = sorted((ROOT / "studies").glob("*.toml"))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_settled_by_its_study(name: str) -> None:
    tested_by = CLAIMS[name].tested_by
    study = study_file.read(study_file.find(tested_by))
    assert study.claim == tested_by
    assert study.cells
    told = (ROOT / "docs/claims.md").read_text()
    assert f"`manyhands claims run {name}`" in told


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_is_well_formed(path: Path) -> None:
    study = study_file.read(path)
    assert study.name == path.stem
    assert study.about
    assert study.claim is None or study.claim == study.name
    assert len({cell.key for cell in study.cells}) == len(study.cells)


def test_the_default_study_has_what_it_promises() -> None:
    cells = [cell.spec for cell in study_file.read(ROOT / "studies/default.toml").cells]
    for task, workers in (("mnist-mlp", {1, 2, 4}), ("mnist-cnn", {1, 2})):
        mine = [spec for spec in cells if spec.task == task]
        strategies = {"single", "allreduce", "average", "server", "hogwild", "layers", "pipeline"}
        assert {spec.strategy for spec in mine} == strategies
        assert {spec.workers for spec in mine} == workers


def test_the_study_of_batches_has_several_rates_at_each() -> None:
    rates: dict[int | None, set[object]] = {}
    for cell in study_file.read(ROOT / "studies/batches.toml").cells:
        rates.setdefault(cell.spec.batch, set()).add(cell.spec.recipe_options.get("lr"))
    assert len(rates) >= 4
    assert all(len(tried) > 1 for tried in rates.values())
