"""What is chosen where the user leaves it open."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UsageError
from manyhands.core.registry import transports
from manyhands.records.spec import RunSpec
from manyhands.runs import defaults
from manyhands.runs.defaults import fill_in, fill_in_resumed, leads

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
        ({"strategy": "hogwild"}, MPIRUN, (4, "hogwild", "mpi", "env")),  # which is refused, with its reason
        ({"strategy": "sharded", "workers": 2}, {}, (2, "sharded", "torch", "local")),
        ({"strategy": "sharded"}, MPIRUN, (4, "sharded", "torch", "env")),
        ({"strategy": "sharded"}, {}, (1, "sharded", "solo", "inline")),
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
    found = fill_in(settings, environ)
    names = ("workers", "strategy", "transport", "launcher")
    assert tuple(found.get(name, 1) for name in names) == chosen


def test_ranks_of_torchrun_must_be_as_many_as_asked_for() -> None:
    with pytest.raises(UsageError, match=r"^workers is 3, but torchrun started 2$"):
        fill_in({"workers": 3}, TORCHRUN)
    with pytest.raises(UsageError, match=r"^workers is 2 and servers is 1, but torchrun started 2$"):
        fill_in({"workers": 2, "strategy": "server"}, TORCHRUN)
    with pytest.raises(UsageError, match=r"started 2 and servers is 2: no rank is left for a worker$"):
        fill_in({"strategy": "server", "strategy_options": {"servers": 2}}, TORCHRUN)
    with pytest.raises(UsageError, match=r"^launcher env takes the processes that torchrun, mpirun or srun"):
        fill_in({"launcher": "env"}, {})


def test_one_rank_speaks() -> None:
    assert leads({})
    assert not leads(TORCHRUN)
    assert leads({**TORCHRUN, "RANK": "0"})


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
    found = fill_in_resumed(before, settings)
    assert tuple(found[name] for name in ("workers", "strategy", "transport", "launcher")) == chosen


def test_one_worker_becomes_several() -> None:
    found = fill_in_resumed(RunSpec.of(task="quadratic"), {"workers": 2})
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
    found = fill_in_resumed(before, {"strategy": "allreduce"})
    assert (found["workers"], found["transport"], found["strategy_options"]) == (2, "shm", {})
    found = fill_in_resumed(before, {"strategy": "single", "workers": 1})
    assert (found["transport"], found["launcher"], found["strategy_options"]) == ("solo", "inline", {})
    found = fill_in_resumed(before, {"strategy_options": {"bound": 2}})
    assert (found["transport"], found["strategy_options"]) == ("torch", {"servers": 2, "bound": 2})
    one = RunSpec.of(task="quadratic")
    found = fill_in_resumed(one, {"strategy": "server"})
    assert (found["workers"], found["transport"], found["launcher"]) == (1, "shm", "local")


def test_without_mpi4py_messages_between_hosts_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: None)
    assert fill_in({}, MPIRUN)["transport"] == "torch"
    assert fill_in({"strategy": "average"}, ONE_HOST)["transport"] == "torch"


@pytest.mark.parametrize(
    ("strategy", "transport"), [("allreduce", "torch"), ("server", "torch"), ("hogwild", "shm")]
)
def test_models_on_gpus_are_not_in_shared_memory(
    strategy: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "uses_cuda", lambda device: device != "cpu")
    assert fill_in({"workers": 2, "strategy": strategy}, {})["transport"] == transport
    assert fill_in({"workers": 2, "strategy": strategy, "device": "cpu"}, {})["transport"] == "shm"
