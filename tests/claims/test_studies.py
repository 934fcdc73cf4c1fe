"""Every claim has a study that can be run and a line in the table of results; every study can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import ROOT
from manyhands.claims import CLAIMS
from manyhands.study import study_file

STUDIES = sorted((ROOT / "studies").glob("*.toml"))


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_settled_by_the_study_of_its_name(name: str) -> None:
    study = study_file.read(study_file.find(name))
    assert study.claim == name
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
    for task in ("mnist-mlp", "mnist-cnn"):
        mine = [spec for spec in cells if spec.task == task]
        strategies = {"single", "allreduce", "average", "server", "hogwild", "layers", "pipeline"}
        assert {spec.strategy for spec in mine} == strategies
        assert {spec.workers for spec in mine} == {1, 2, 4}
    swept = {spec.batch for spec in cells if spec.task == "mnist-mlp" and spec.strategy == "allreduce"}
    assert len(swept) >= 6
