"""Under which starter a process runs: a table of environments; and the note that ranks of one host find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manyhands.errors import ManyhandsError, UsageError
from manyhands.launchers import rendezvous
from manyhands.launchers.rendezvous import Found, detect, nodes

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-25934@1",
}
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"}
SRUN = {
    **SBATCH,
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "3",
    "SLURM_PROCID": "7",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"PATH": "/bin", "RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),  # as our own workers have it: nowhere to meet
        (TORCHRUN | MASTER, Found("torchrun", 3, 4, 1, 2, "::10.0.0.1:29501", "10.0.0.1:29501")),
        (
            {"RANK": "0", "WORLD_SIZE": "1", **MASTER, "TORCHELASTIC_RUN_ID": "x"},
            Found("torchrun", 0, 1, 0, 0, "x::10.0.0.1:29501", "10.0.0.1:29501"),
        ),
        (
            {**TORCHRUN, "MANYHANDS_PORT": "40000"},
            Found("torchrun", 3, 4, 1, 2, "::127.0.0.1:40000", "127.0.0.1:40000"),
        ),
        (
            TORCHRUN | MASTER | {"MANYHANDS_PORT": "40000"},
            Found("torchrun", 3, 4, 1, 2, "::10.0.0.1:40000", "10.0.0.1:40000"),
        ),
        (OPEN_MPI, Found("mpirun", 1, 2, 1, 2, "prterun-vm-25934@1")),
        (SBATCH | OPEN_MPI, Found("mpirun", 1, 2, 1, 2, "prterun-vm-25934@1")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"},
            Found("mpirun", 1, 4, 1, 4, ""),
        ),
        (SBATCH, None),  # the shell of a batch job, however many tasks it may start
        (SBATCH | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN | {"MANYHANDS_PORT": "9"}, Found("slurm", 7, 8, 3, 0, "slurm-77.0", "n1:9")),
        (SRUN | {"SLURM_STEP_NODELIST": "n1"}, Found("slurm", 7, 8, 3, 8, "slurm-77.0", "")),
    ],
)
def test_starters(environ: dict[str, str], found: Found | None) -> None:
    assert detect(environ) == found


def test_slurm_ports_differ_by_job() -> None:
    ports = {detect(SRUN | {"SLURM_JOB_ID": str(job)}) for job in range(50)}
    numbers = {int(found.address.partition(":")[2]) for found in ports if found}
    assert len(numbers) > 45
    assert all(20_000 <= number < 30_000 for number in numbers)


def test_an_environment_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match=r"^RANK='first' in the environment is not a number$"):
        detect({"RANK": "first", "WORLD_SIZE": "2", **MASTER})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("node[01-03,07],x1", ["node01", "node02", "node03", "node07", "x1"]),
        ("gpu-[9-11]-ib", ["gpu-9-ib", "gpu-10-ib", "gpu-11-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert nodes(text) == hosts


def test_the_key_of_a_job_is_its_own() -> None:
    one, other = Found("torchrun", 0, 2, 0, 0, "a", "h:1"), Found("torchrun", 1, 2, 0, 0, "b", "h:1")
    assert rendezvous.key_of(one, {}) != rendezvous.key_of(other, {})
    assert rendezvous.key_of(one, {}) == rendezvous.key_of(one._replace(rank=1), {})
    secret = {"MANYHANDS_KEY": "secret"}
    assert rendezvous.key_of(one, secret) == rendezvous.key_of(other, secret)


def test_a_note_is_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "note"
    assert rendezvous.read_note(path) is None
    rendezvous.leave_note(path, "@here", b"key")
    assert path.stat().st_mode & 0o777 == 0o600
    assert rendezvous.read_note(path) == ("@here", b"key")
    assert rendezvous.await_note(path, 1) == ("@here", b"key")
    assert [entry.name for entry in tmp_path.iterdir()] == ["note"]
    path.chmod(0o666)
    assert rendezvous.read_note(path) is None  # anybody may have written it
    path.chmod(0o600)
    path.write_text("{}")
    assert rendezvous.read_note(path) is None
    with pytest.raises(ManyhandsError, match=rf"^worker 0 did not come to {path} within 0.1 s$"):
        rendezvous.await_note(path, 0.1)


def test_notes_of_two_jobs_do_not_meet() -> None:
    one = rendezvous.meeting_file(Found("mpirun", 0, 2, 0, 2, "prterun-vm-1@1"))
    other = rendezvous.meeting_file(Found("mpirun", 0, 2, 0, 2, "prterun-vm-2@1"))
    nameless = rendezvous.meeting_file(Found("mpirun", 0, 2, 0, 2, ""))
    assert len({one, other, nameless}) == 3
    assert str(os.getppid()) in nameless.name
