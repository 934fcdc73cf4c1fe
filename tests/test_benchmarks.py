"""The benchmarks start, and one tiny round of some of them ends; soak/test_benchmarks.py runs them all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from children import Child
from conftest import ROOT

SCRIPTS = sorted(
    path for path in (ROOT / "benchmarks").glob("*/*.py") if "ArgumentParser" in path.read_text()
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_starts(script: Path, tmp_path: Path) -> None:
    """Whatever it imports from the package is there; its types are checked by `make lint`."""
    child = Child(str(script), "--help", folder=tmp_path)
    assert child.end() == 0, child.output
    assert child.output.startswith("usage: ")


@pytest.mark.parametrize(
    "words",
    [
        "overhead/run.py --rounds 1 --seconds 0.01",
        "data_parallel/run.py --rounds 1 --seconds 0.01 --only mlp:32",
        "asynchronous/run.py --rounds 1 --seconds 0.05 --only sparse-logistic --sides hogwild",
        "model_parallel/run.py --rounds 1 --steps 1 --only mlp:2 --batch 64",
    ],
)
def test_a_tiny_round(words: str, tmp_path: Path) -> None:
    script, *rest = words.split()
    child = Child(str(ROOT / "benchmarks" / script), *rest, "--json", folder=tmp_path)
    code = child.end()
    if "cannot get mnist" in child.output:
        pytest.skip("MNIST cannot be had here")
    assert code == 0, child.output
    rows = json.loads(child.output[child.output.index("[") :])
    assert rows
    assert all(value > 0 for row in rows for name, value in row.items() if name == "samples_per_second")


def test_the_chart_says_in_words_what_it_shows() -> None:
    path = ROOT / "benchmarks/asynchronous/chart.py"
    found = importlib.util.spec_from_file_location("chart", path)
    assert found is not None
    assert found.loader is not None
    chart = importlib.util.module_from_spec(found)
    found.loader.exec_module(chart)
    drawn = chart.bars("a <title>", "axis", [("one", 1.0), ("two & more", 0.5)], 1.25)
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-label"] == "a <title>: one 1.00, two & more 0.50; ideal 1.25"
    widths = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=1e-3)
