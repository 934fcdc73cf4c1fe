"""What is chosen where the user leaves it open, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UsageError
from manyhands.records.spec import RunSpec
from manyhands.runs import defaults as module
from manyhands.runs.defaults import arrange, check_arrangement, leads, rearrange

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


ONE_HOST = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("settings", "environ", "chosen"),
    [
        ({}, {}, (1, "single", "solo", "inline")),
        ({"workers": 2}, {}, (2, "allreduce", "shm", "local")),
        ({"workers": 1, "strategy": "allreduce"}, {}, (1, "allreduce", "solo", "inline")),
        ({"workers": 3, "transport": "torch"}, {}, (3, "allreduce", "torch", "local")),
        ({"workers": 2, "transport": "mpi"}, {}, (2, "allreduce", "mpi", "mpi")),
        ({"workers": 2, "launcher": "mpi"}, {}, (2, "allreduce", "mpi", "mpi")),
        ({"workers": 2, "launcher": "mpi", "transport": "shm"}, {}, (2, "allreduce", "shm", "mpi")),
        ({}, TORCHRUN, (2, "allreduce", "shm", "env")),
        ({"workers": 2, "transport": "torch"}, TORCHRUN, (2, "allreduce", "torch", "env")),
        ({}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, (2, "allreduce", "torch", "env")),
        ({}, MPIRUN, (4, "allreduce", "mpi", "env")),
        ({"workers": 2, "launcher": "local"}, TORCHRUN, (2, "allreduce", "shm", "local")),
        # a server is a rank beside the workers
        ({"strategy": "server"}, {}, (1, "server", "shm", "local")),
        ({"strategy": "server"}, TORCHRUN, (1, "server", "shm", "env")),
        ({"strategy": "server"}, MPIRUN, (3, "server", "mpi", "env")),
        ({"strategy": "server"}, ONE_HOST, (3, "server", "shm", "env")),
        ({"strategy": "server", "strategy_options": {"servers": "2"}}, MPIRUN, (2, "server", "mpi", "env")),
        ({"strategy": "server", "workers": 2, "transport": "mpi"}, {}, (2, "server", "mpi", "mpi")),
        ({"strategy": "hogwild"}, {}, (1, "hogwild", "solo", "inline")),
        ({"strategy": "hogwild", "restarts": 1}, {}, (1, "hogwild", "solo", "local")),
        ({"strategy": "hogwild", "workers": 2}, {}, (2, "hogwild", "shm", "local")),
        ({"strategy": "hogwild"}, ONE_HOST, (4, "hogwild", "shm", "env")),
        # weights are averaged by messages where MPI is at home
        ({"strategy": "average", "workers": 2}, {}, (2, "average", "shm", "local")),
        ({"strategy": "average"}, ONE_HOST, (4, "average", "mpi", "env")),
        ({"strategy": "average"}, MPIRUN, (4, "average", "mpi", "env")),
        ({"strategy": "average"}, TORCHRUN, (2, "average", "shm", "env")),
    ],
)
def test_what_is_open_is_filled_in(
    settings: dict[str, Any], environ: dict[str, str], chosen: tuple[Any, ...]
) -> None:
    found = arrange(settings, environ)
    names = ("workers", "strategy", "transport", "launcher")
    assert tuple(found.get(name, 1) for name in names) == chosen


def test_ranks_of_torchrun_must_be_as_many_as_asked_for() -> None:
    with pytest.raises(UsageError, match=r"^workers is 3, but torchrun started 2$"):
        arrange({"workers": 3}, TORCHRUN)
    with pytest.raises(UsageError, match=r"^workers is 2 and servers is 1, but torchrun started 2$"):
        arrange({"workers": 2, "strategy": "server"}, TORCHRUN)
    nobody = "started 2 and servers is 2: nobody would be left to work$"
    with pytest.raises(UsageError, match=nobody):
        arrange({"strategy": "server", "strategy_options": {"servers": 2}}, TORCHRUN)
    with pytest.raises(UsageError, match=r"^launcher env takes the processes that torchrun, mpirun or srun"):
        arrange({"launcher": "env"}, {})


def test_one_rank_speaks() -> None:
    assert leads({})
    assert not leads(TORCHRUN)
    assert leads({**TORCHRUN, "RANK": "0"})


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
            "--restarts starts workers again, which launcher inline cannot: use local or mpi (torchrun has "
            "--max-restarts)",
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
        check_arrangement(RunSpec.of(task="quadratic", **fields))
    assert str(caught.value) == sentence


def test_mpi_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    spec = RunSpec.of(task="quadratic", strategy="allreduce", workers=2, transport="mpi", launcher="mpi")
    with pytest.raises(UsageError) as caught:
        check_arrangement(spec)
    assert str(caught.value) == (
        "MPI needs mpi4py and mpirun, which are not installed: pip install 'manyhands[mpi]'"
    )


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, (4, "allreduce", "torch", "local")),
        ({"workers": 4}, (4, "allreduce", "torch", "local")),
        ({"workers": 2}, (2, "allreduce", "shm", "local")),
        ({"workers": 1}, (1, "allreduce", "solo", "inline")),
        ({"workers": 2, "transport": "mpi"}, (2, "allreduce", "mpi", "mpi")),
    ],
)
def test_a_run_that_goes_on_is_arranged_anew_where_its_workers_change(
    settings: dict[str, Any], chosen: tuple[Any, ...]
) -> None:
    before = RunSpec.of(
        task="quadratic", strategy="allreduce", workers=4, transport="torch", launcher="local"
    )
    found = rearrange(before, settings)
    assert tuple(found[name] for name in ("workers", "strategy", "transport", "launcher")) == chosen


def test_one_worker_becomes_several() -> None:
    found = rearrange(RunSpec.of(task="quadratic"), {"workers": 2})
    assert (found["strategy"], found["transport"], found["launcher"]) == ("allreduce", "shm", "local")


def test_another_strategy_is_arranged_anew_and_keeps_no_options() -> None:
    before = RunSpec.of(
        task="quadratic",
        strategy="server",
        strategy_options={"servers": 2},
        workers=2,
        transport="torch",
        launcher="local",
    )
    found = rearrange(before, {"strategy": "allreduce"})
    assert (found["workers"], found["transport"], found["strategy_options"]) == (2, "shm", {})
    found = rearrange(before, {"strategy": "single", "workers": 1})
    assert (found["transport"], found["launcher"], found["strategy_options"]) == ("solo", "inline", {})
    found = rearrange(before, {"strategy_options": {"bound": 2}})
    assert (found["transport"], found["strategy_options"]) == ("torch", {"servers": 2, "bound": 2})
    one = RunSpec.of(task="quadratic")
    found = rearrange(one, {"strategy": "server"})
    assert (found["workers"], found["transport"], found["launcher"]) == (1, "shm", "local")


def test_shared_memory_is_refused_where_a_gpu_would_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device auto it was not, and workers went on without ever summing a gradient."""
    monkeypatch.setattr(module, "_cuda", lambda device: device != "cpu")
    two: dict[str, Any] = {"task": "quadratic", "workers": 2, "transport": "shm", "launcher": "local"}
    with pytest.raises(UsageError, match="not a GPU's: use torch, or --device cpu"):
        check_arrangement(RunSpec.of(**two, strategy="allreduce"))
    check_arrangement(RunSpec.of(**two, strategy="allreduce", device="cpu"))
    check_arrangement(RunSpec.of(**two, strategy="hogwild"))
