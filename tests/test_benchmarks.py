"""The benchmarks run; what they show is read by people, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.mark.slow
def test_overhead_measures_all_three_sides() -> None:
    words = ["benchmarks/overhead/run.py", "--rounds", "2", "--seconds", "0.5", "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    if "cannot get mnist" in done.stderr:
        pytest.skip("MNIST cannot be had here")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["task"], row["batch"]) for row in rows] == [("mlp", 32), ("mlp", 128), ("cnn", 128)]
    for row in rows:
        assert row["of_kept"] == pytest.approx(row["trainer"] / row["kept"])
        assert row["trainer"] > 0.5 * row["bare"], "half the speed is no noise"


@pytest.mark.slow
def test_data_parallel_measures_all_sides() -> None:
    words = [
        "benchmarks/data_parallel/run.py",
        "--rounds",
        "1",
        "--seconds",
        "0.2",
        "--only",
        "mlp:32",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    if "cannot get mnist" in done.stderr:
        pytest.skip("MNIST cannot be had here")
    assert done.returncode == 0, done.stderr
    rows = {row["side"]: row for row in json.loads(done.stdout)}
    assert {"ours", "bare loop", "all threads", "ddp gloo", "bare loop kept"} <= rows.keys()
    for row in rows.values():
        assert row["ours"] == pytest.approx(rows["ours"]["samples_per_second"] / row["samples_per_second"])


@pytest.mark.slow
def test_collectives_measures_every_transport() -> None:
    words = ["benchmarks/data_parallel/collectives.py", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"copy", "reduce", "shm", "gloo"} <= found["seconds"].keys()
    assert all(len(times) == len(found["bytes"]) for times in found["seconds"].values())
