"""Combinations that cannot work are refused in one sentence before anything starts (law 10)."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UsageError
from manyhands.records.spec import RunSpec
from manyhands.runs import checks, defaults
from manyhands.runs.checks import check_combination


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"workers": 2}, "strategy single has one worker, but workers is 2"),
        (
            {"strategy": "allreduce", "workers": 2, "launcher": "local"},
            "transport solo has one rank, but workers is 2: use shm, torch or mpi",
        ),
        (
            {"strategy": "allreduce", "workers": 2, "transport": "shm"},
            "launcher inline runs one rank, but workers is 2: use local",
        ),
        (
            {"strategy": "allreduce", "workers": 2, "transport": "mpi", "launcher": "local"},
            "transport mpi needs workers that mpirun started: use --launcher mpi, or mpirun -n 2 manyhands "
            "train ...",
        ),
        (
            {"transport": "threads"},
            "transport threads joins workers inside one process, for tests; between processes use shm, torch "
            "or mpi",
        ),
        (
            {"restarts": 1},
            "--restarts starts workers again, which launcher inline cannot do: use local or mpi (torchrun "
            "has --max-restarts)",
        ),
        (
            {
                "strategy": "allreduce",
                "workers": 2,
                "transport": "shm",
                "launcher": "local",
                "device": "cuda",
            },
            "transport shm shares main memory, not a GPU's: use torch, or --device cpu",
        ),
        (
            {"strategy": "server", "workers": 2, "transport": "mpi", "launcher": "local"},
            "transport mpi needs workers that mpirun started: use --launcher mpi, or mpirun -n 3 manyhands "
            "train ...",
        ),
        (
            {"strategy": "server", "transport": "shm"},
            "launcher inline runs one rank, but workers is 1 and servers is 1: use local",
        ),
        (
            {"strategy": "hogwild", "workers": 2, "transport": "torch", "launcher": "local"},
            "strategy hogwild writes into memory that all workers share, which transport torch has not: use "
            "shm, or strategy server between hosts",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_combination(RunSpec.of(task="quadratic", **fields))
    assert str(caught.value) == sentence


def test_mpi_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    spec = RunSpec.of(task="quadratic", strategy="allreduce", workers=2, transport="mpi", launcher="mpi")
    with pytest.raises(UsageError) as caught:
        check_combination(spec)
    assert str(caught.value) == (
        "MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'"
    )


def test_shared_memory_is_refused_where_a_gpu_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device auto it was not, and workers went on without ever summing a gradient."""
    monkeypatch.setattr(defaults, "uses_cuda", lambda device: device != "cpu")
    two: dict[str, Any] = {"task": "quadratic", "workers": 2, "transport": "shm", "launcher": "local"}
    with pytest.raises(UsageError, match="not a GPU's: use torch, or --device cpu"):
        check_combination(RunSpec.of(**two, strategy="allreduce"))
    check_combination(RunSpec.of(**two, strategy="allreduce", device="cpu"))
    check_combination(RunSpec.of(**two, strategy="hogwild"))
