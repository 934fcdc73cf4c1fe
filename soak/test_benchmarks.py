"""Every benchmark runs, at a small size; what they show is read by people, on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import ROOT


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


def test_collectives_measures_every_transport() -> None:
    words = ["benchmarks/data_parallel/collectives.py", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"copy", "reduce", "shm", "gloo"} <= found["seconds"].keys()
    assert all(len(times) == len(found["bytes"]) for times in found["seconds"].values())


def test_asynchronous_measures_ours_and_what_is_written_by_hand() -> None:
    words = ["benchmarks/asynchronous/run.py", "--rounds", "1", "--seconds", "0.4", "--json"]
    words += ["--only", "sparse-logistic", "--sides", "hogwild,average every 4,hogwild by hand"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["side"]: row for row in json.loads(done.stdout)}
    assert {"one worker", "hogwild", "average every 4", "hogwild by hand"} == rows.keys()
    for row in rows.values():
        assert row["best"] == pytest.approx(
            row["samples_per_second"] / rows["one worker"]["samples_per_second"]
        )
    assert sum(rows["hogwild"]["staleness"].values()) > 0


def test_model_parallel_measures_all_sides() -> None:
    words = ["benchmarks/model_parallel/run.py", "--rounds", "1", "--steps", "1", "--json"]
    words += ["--only", "mlp:2", "--batch", "64"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["ideal"] == pytest.approx(4 / 3)
    assert row["speedup"] == pytest.approx(row["alone"] / row["ours"])
    assert row["of_ideal"] == pytest.approx(row["speedup"] / row["ideal"])
    assert 0 < row["idle"] < 1


def test_offload_counts_less_memory() -> None:
    words = ["benchmarks/offload/run.py", "--rounds", "1", "--threads", "1", "--json"]
    words += ["--only", "all", "--size", "32", "--batch", "32"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["side"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == {"plain", "plain, kept", "all"}
    assert rows["plain"]["activations"] == rows["plain, kept"]["activations"]
    assert rows["all"]["activations"] < rows["plain"]["activations"]
    assert rows["all"]["activations_of_plain"] == pytest.approx(
        rows["all"]["activations"] / rows["plain"]["activations"]
    )
