"""What people bring works with every strategy that should take it, exactly as with one worker.

One group of workers per strategy makes a few steps of every row; each is compared with `single`, tensor by
tensor, in float64.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from bring.rows import ROWS, N
from conftest import ROOT
from manyhands.core.rank_info import RankInfo
from manyhands.engine.probe import Probe, probe
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.records.spec import RunSpec
from manyhands.runs import verify
from manyhands.runs.resolve import resolve

FILE = Path(__file__).with_name("rows.py")
STEPS = 6  # an epoch of 37 samples at batch 8 has five, the last of five samples
WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {"strategy": "single", "accumulate": 3},
    "offload": {"strategy": "single", "offload": "all"},
    "allreduce": {"strategy": "allreduce", "workers": 2, "transport": "shm"},
    "noise scale": {"strategy": "allreduce", "workers": 2, "transport": "shm", "noise_scale": True},
    "average": {
        "strategy": "average", "workers": 2, "transport": "shm", "strategy_options": {"every": 1},
    },
    "sharded": {"strategy": "sharded", "workers": 2, "transport": "torch"},
    "pipeline": {
        "strategy": "pipeline", "workers": 2, "transport": "shm", "strategy_options": {"micro_batches": 3},
    },
    "layers": {"strategy": "layers", "workers": 2, "transport": "shm"},
    "messages": {
        "strategy": "pipeline", "workers": 2, "transport": "torch", "strategy_options": {"micro_batches": 2},
    },
}  # fmt: skip
STAGED = ("pipeline", "layers", "messages")


def spec_of(row: str, **settings: Any) -> RunSpec:
    given = {"batch": 8, "recipe": "constant", "recipe_options": {"lr": 0.1, "momentum": 0.0}, "threads": 1}
    return resolve(RunSpec.of(task=f"{FILE}:{row}", dtype="float64", **given | ROWS[row].settings | settings))


def rows_of(way: str) -> list[str]:
    """The rows that a strategy should take, where their packages are installed."""
    return [
        name
        for name, row in ROWS.items()
        if (not row.needs or importlib.util.find_spec(row.needs)) and (row.staged or way not in STAGED)
    ]


def some_of(way: str) -> list[str]:
    """Every third row, beginning elsewhere for each strategy; what is new for all strategies always.

    Importing Hugging Face's packages takes seconds per process, so one worker alone does it.
    """
    always = {"trees_between_blocks", "padded_language_model", "dataclasses_in_and_out"}
    slow = {name for name, row in ROWS.items() if row.needs}
    first = list(WAYS).index(way) % 3
    if way == "accumulated":
        always |= slow
    several = way not in ("offload", "noise scale", "sharded")  # what matters to them is in all of `always`
    some = [name for at, name in enumerate(rows_of(way)) if several and at % 3 == first and name not in slow]
    return [name for name in rows_of(way) if name in always or name in some]


def probe_all(info: RankInfo, specs: list[RunSpec], steps: int) -> list[Probe | None]:
    return [probe(info, spec, steps) for spec in specs]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("layers", "messages")])
def test_some_rows_equal_one_worker(way: str) -> None:
    check(way, some_of(way))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_every_row_equals_one_worker(way: str) -> None:
    check(way, rows_of(way))


def test_between_them_the_strategies_take_every_row() -> None:
    taken = {name for way in WAYS for name in some_of(way)}
    assert taken == {name for way in WAYS for name in rows_of(way)}


def test_the_page_lists_every_row() -> None:
    page = (ROOT / "docs/bring-your-own.md").read_text()
    listed = re.findall(r"^\| (?:data|trees|losses|models) \| .* \| `(\w+)` \|$", page, re.MULTILINE)
    assert sorted(listed) == sorted(ROWS)


def check(way: str, names: list[str]) -> None:
    settings = WAYS[way]
    specs = [spec_of(name, **settings) for name in names]
    workers = settings.get("workers", 1)
    launcher = LocalLauncher() if workers > 1 else InlineLauncher()
    patient = SupervisionOptions(timeout=200)  # a row may import a package in the middle
    found: list[Probe] = launcher.launch(probe_all, workers, specs, STEPS, supervision=patient)[0]
    far = {}
    for name, spec, ours in zip(names, specs, found, strict=True):
        parts = spec.replicas * spec.micro_batches
        shares = parts if ours.batch_norms else spec.accumulate
        reference = spec.alone(accumulate=shares, offload="none", noise_scale=False)
        theirs = InlineLauncher().launch(probe, 1, reference, STEPS)[0]
        skipped = verify._statistics(theirs) if ours.batch_norms else set()
        comparison = verify._compare("float64", reference, theirs, ours, skipped)
        if not comparison.holds:
            far[name] = comparison.largest
        assert len({round(loss, 9) for loss in ours.losses}) > 1, f"{name} learns nothing"
    assert far == {}


FEW = {"hogwild": "trees_between_blocks", "server": "padded_language_model"}  # the others with `make soak`
ASYNCHRONOUS = [
    pytest.param(strategy, row, marks=[] if few else [pytest.mark.soak])
    for strategy in ("hogwild", "server")
    for row, few in {name: name == FEW[strategy] for name in ROWS}.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "row"), ASYNCHRONOUS)
def test_asynchronous_strategies_take_it(strategy: str, row: str, tmp_path: Path) -> None:
    needs = ROWS[row].needs
    if needs and not importlib.util.find_spec(needs):
        pytest.skip(f"{needs} is not installed")
    settings = {"epochs": 6, "batch": 8, "recipe": "constant", "lr": 0.05, **ROWS[row].settings}
    record = mh.train(
        f"{FILE}:{row}", strategy=strategy, workers=2, out=tmp_path / "run", quiet=True, **settings
    )
    per_epoch = N - N % 8 if ROWS[row].settings.get("drop_last") else record.train_samples
    assert record.status == "finished"
    assert record.samples == 6 * per_epoch
    losses = [point.test_loss for point in record.curve]
    assert losses[-1] < losses[0]
