"""Which program started a process, by its environment; and the file by which ranks of one host connect."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from launchers.listening import listening
from launchers.test_env import free_port
from manyhands.core import addresses
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.launchers.env import rendezvous
from manyhands.launchers.env.follower import EnvFollower
from manyhands.launchers.env.launcher import EnvLauncher
from manyhands.launchers.env.leader import EnvLeader
from manyhands.launchers.env.rendezvous import ClusterEnvironment, detect, nodes

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
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),  # as our own workers have it: no address
        (TORCHRUN | MASTER, ClusterEnvironment("torchrun", 3, 4, 1, 2, "::10.0.0.1:29501", "10.0.0.1:29501")),
        (
            {"RANK": "0", "WORLD_SIZE": "1", **MASTER, "TORCHELASTIC_RUN_ID": "x"},
            ClusterEnvironment("torchrun", 0, 1, 0, 0, "x::10.0.0.1:29501", "10.0.0.1:29501"),
        ),
        (
            {**TORCHRUN, "MANYHANDS_PORT": "40000"},
            ClusterEnvironment("torchrun", 3, 4, 1, 2, "::127.0.0.1:40000", "127.0.0.1:40000"),
        ),
        (
            TORCHRUN | MASTER | {"MANYHANDS_PORT": "40000"},
            ClusterEnvironment("torchrun", 3, 4, 1, 2, "::10.0.0.1:40000", "10.0.0.1:40000"),
        ),
        (OPEN_MPI, ClusterEnvironment("mpirun", 1, 2, 1, 2, "prterun-vm-25934@1")),
        (SBATCH | OPEN_MPI, ClusterEnvironment("mpirun", 1, 2, 1, 2, "prterun-vm-25934@1")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"},
            ClusterEnvironment("mpirun", 1, 4, 1, 4, ""),
        ),
        (SBATCH, None),  # the shell of a batch job, whatever its number of tasks
        (SBATCH | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SRUN | {"MANYHANDS_PORT": "9"}, ClusterEnvironment("slurm", 7, 8, 3, 0, "slurm-77.0", "n1:9")),
        (
            SRUN | {"MANYHANDS_PORT": "9", "MASTER_ADDR": "ib1"},
            ClusterEnvironment("slurm", 7, 8, 3, 0, "slurm-77.0", "ib1:9"),
        ),
        (SRUN | {"SLURM_STEP_NODELIST": "n1"}, ClusterEnvironment("slurm", 7, 8, 3, 8, "slurm-77.0", "")),
    ],
)
def test_starters(environ: dict[str, str], found: ClusterEnvironment | None) -> None:
    assert detect(environ) == found


def test_slurm_ports_differ_by_job() -> None:
    ports = {detect(SRUN | {"SLURM_JOB_ID": str(job)}) for job in range(50)}
    numbers = {int(found.address.partition(":")[2]) for found in ports if found}
    assert len(numbers) > 45
    assert all(20_000 <= number < 30_000 for number in numbers)


def test_a_variable_that_is_not_a_number() -> None:
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


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("::1:1", True),
        ("10.0.0.1:1", False),
        ("node1:1", False),
    ],
)
def test_a_loopback_address_leads_to_no_other_host(address: str, here: bool) -> None:
    """Whatever the number of workers: two torchruns on one host are as private as one."""
    assert ClusterEnvironment("torchrun", 0, 2, 0, 1, "job", address).meets_here == here
    assert ClusterEnvironment("torchrun", 0, 2, 0, 2, "job", address).meets_here
    assert not ClusterEnvironment("mpirun", 0, 2, 0, 0, "job").meets_here


def test_between_hosts_a_secret_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: what all users can know is no secret; checked before anything listens, and at every rank."""
    for name, value in {**TORCHRUN, **MASTER}.items():
        monkeypatch.setenv(name, value)
    command = r"\(python -c 'import secrets; print\(secrets.token_hex\(32\)\)'\)"
    how = f"set it to the same value on every host {command}$"
    need = r"^workers on several hosts need a shared secret of at least 16 characters, and MANYHANDS_KEY "
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("MANYHANDS_KEY", raising=False)
        with pytest.raises(UsageError, match=f"{need}is not set: {how}"):
            EnvLauncher()
        monkeypatch.setenv("MANYHANDS_KEY", "fifteen letters")
        with pytest.raises(UsageError, match=f"{need}has 15 characters: {how}"):
            EnvLauncher()
        monkeypatch.setenv("MANYHANDS_KEY", "sixteen letters.")
        assert EnvLauncher().leads == (rank == "0")
    keys = [rendezvous.key_of({"MANYHANDS_KEY": letter * 64}) for letter in "aab"]
    assert keys[0] == keys[1] != keys[2]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MANYHANDS_KEY")
    assert EnvLauncher()  # no other rank


def test_a_rendezvous_file_is_for_its_user_only(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    assert rendezvous.read_file(path) is None
    rendezvous.write_file(path, "@here", b"key")
    assert path.stat().st_mode & 0o777 == 0o600
    assert rendezvous.read_file(path) == ("@here", b"key")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    path.chmod(0o666)
    assert rendezvous.read_file(path) is None  # any user may have written it
    path.chmod(0o600)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert rendezvous.read_file(path) is None  # any user may have put it there
    path.unlink()
    for text in ("{}", "[]", '{"address": "@here", "key": 3}', "x"):
        path.write_text(text)
        path.chmod(0o600)
        assert rendezvous.read_file(path) is None


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, without a folder of the login session."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


JOB = ClusterEnvironment("torchrun", 0, 2, 0, 2, "none:0:127.0.0.1:29501", "127.0.0.1:29501")


def test_rendezvous_files_are_in_a_private_folder(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rendezvous.write_rendezvous(JOB, "@here", b"key")
    assert path.parent == temp / f"manyhands-{os.getuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    assert rendezvous.rendezvous_file(JOB) == path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    rendezvous.remove_file(path, "@another leader's")
    assert path.exists()
    rendezvous.remove_file(path, "@here")
    assert list(temp.iterdir()) == []
    session = temp / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    path = rendezvous.write_rendezvous(JOB, "@here", b"key")
    assert path.parent == session
    rendezvous.remove_file(path, "@here")
    assert list(session.iterdir()) == []
    session.chmod(0o755)
    assert rendezvous.rendezvous_file(JOB).parent != session  # not private, whatever it is called


def test_a_folder_that_another_user_made_first_is_refused(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can create any name in /tmp: every rank says so at once, and does not wait."""
    user = os.getuid() + 1
    folder = temp / f"manyhands-{user}"
    folder.mkdir()
    monkeypatch.setattr(rendezvous.os, "getuid", lambda: user)
    sentence = rf"^workers cannot find each other safely: {folder} is not a folder of this user .*set TMPDIR"
    for act in (lambda: EnvLeader(JOB), lambda: EnvFollower(JOB._replace(rank=1), 60)):
        with pytest.raises(UsageError, match=sentence):
            act()
    folder.rmdir()
    folder.symlink_to(temp)
    with pytest.raises(UsageError, match=sentence):
        EnvLeader(JOB)


def test_a_file_that_a_killed_run_left_is_harmless(temp: Path) -> None:
    """torchrun's job ids repeat: a worker that is early finds the old file, and reads it again later."""
    squatter = socket.socket(socket.AF_UNIX)
    squatter.bind(f"\0manyhands-stale-{os.getpid()}")
    squatter.listen()
    squatter.settimeout(5)
    path = rendezvous.rendezvous_file(JOB)
    rendezvous.write_file(path, f"@manyhands-stale-{os.getpid()}", b"old key")
    followers: list[EnvFollower] = []
    early = threading.Thread(target=lambda: followers.append(EnvFollower(JOB._replace(rank=1), 20)))
    with squatter:
        early.start()
        visitor, _ = squatter.accept()  # it has read the old file
        visitor.close()
    leader = EnvLeader(JOB)
    try:
        leader.executor(1, 20).shutdown()
        early.join(5)
        assert len(followers) == 1
        assert not path.exists()
        assert list(temp.iterdir()) == []
    finally:
        leader._close()


def test_a_leader_that_does_not_start(temp: Path) -> None:
    path = rendezvous.rendezvous_file(JOB)
    with pytest.raises(ManyhandsError, match=rf"^worker 0 was not found through {path} within 0.1 s$"):
        EnvFollower(JOB._replace(rank=1), 0.1)


@pytest.fixture
def as_if_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the loopback as an address of another host: tests must not use a real network."""
    monkeypatch.setattr(rendezvous, "is_loopback", lambda host: False, raising=False)
    monkeypatch.setattr(addresses, "is_loopback", lambda host: False)
    monkeypatch.setenv("MANYHANDS_KEY", "k" * 64)
    monkeypatch.delenv("MANYHANDS_PORT", raising=False)


def far(port: int, host: str = "127.0.0.1") -> ClusterEnvironment:
    return ClusterEnvironment("torchrun", 0, 2, 0, 1, "job", f"{host}:{port}")


@pytest.mark.usefixtures("as_if_far")
def test_between_hosts_workers_connect_to_the_address_of_the_starter() -> None:
    port = free_port()
    before = listening()
    leader = EnvLeader(far(port))
    try:
        assert listening() - before == {f"127.0.0.1:{port}"}
        followers: list[EnvFollower] = []
        thread = threading.Thread(
            target=lambda: followers.append(EnvFollower(far(port)._replace(rank=1), 20))
        )
        thread.start()
        leader.executor(1, 20).shutdown()
        thread.join(5)
        assert len(followers) == 1
        assert listening() == before
    finally:
        leader._close()


@pytest.mark.usefixtures("as_if_far")
@pytest.mark.parametrize(("hosts", "opened"), [(["far"], {"127.0.0.1"}), ([socket.gethostname()], set())])
def test_under_mpirun_worker_0_listens_where_the_others_reach_it(
    hosts: list[str], opened: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first version listened on every interface."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(rendezvous, "broadcast", lambda open_to: open_to([socket.gethostname(), *hosts]))
    before = listening()
    leader = EnvLeader(ClusterEnvironment("mpirun", 0, 2, 0, 0, "job"))
    try:
        assert {address.rpartition(":")[0] for address in listening() - before} == opened
    finally:
        leader._close()


@pytest.mark.usefixtures("as_if_far")
def test_worker_0_listens_at_that_address_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version listened on all interfaces if the address was not its own."""
    before = listening()
    own = "MASTER_ADDR must be an address of the host of worker 0, here "
    with pytest.raises(UsageError, match=rf"^worker 0 cannot listen at 192.0.2.1:4711: .*; {own}"):
        EnvLeader(far(4711, "192.0.2.1"))
    with pytest.raises(UsageError, match=r"^worker 0 cannot listen at 0.0.0.0:4711: 0.0.0.0 means every"):
        EnvLeader(far(4711, "0.0.0.0"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = rf"^port {port} on 127.0.0.1 is in use "
        with pytest.raises(
            UsageError, match=taken + r"\(MASTER_PORT \+ 1\): choose another MASTER_PORT, or set"
        ):
            EnvLeader(far(port))
        monkeypatch.setenv("MANYHANDS_PORT", str(port))
        with pytest.raises(UsageError, match=taken + r"\(MANYHANDS_PORT\): choose another MANYHANDS_PORT$"):
            EnvLeader(far(port))
    assert listening() == before


def test_a_name_that_is_the_loopback_on_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Debian's /etc/hosts; other hosts would have tried for five minutes."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 4711))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setenv("MANYHANDS_KEY", "k" * 64)
    sentence = r"^MASTER_ADDR=node1 is 127.0.1.1 on this host, so other hosts cannot reach worker 0: use an"
    with pytest.raises(UsageError, match=sentence):
        EnvLeader(far(4711, "node1"))


def test_two_jobs_have_two_files(temp: Path) -> None:
    one = rendezvous.rendezvous_file(ClusterEnvironment("mpirun", 0, 2, 0, 2, "prterun-vm-1@1"))
    other = rendezvous.rendezvous_file(ClusterEnvironment("mpirun", 0, 2, 0, 2, "prterun-vm-2@1"))
    nameless = rendezvous.rendezvous_file(ClusterEnvironment("mpirun", 0, 2, 0, 2, ""))
    assert len({one, other, nameless}) == 3
    assert str(os.getppid()) in nameless.name
