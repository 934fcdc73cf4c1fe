"""Shared by all tests: a folder of one's own, and the command line called as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from manyhands import cli
from manyhands.core import environment
from manyhands.launchers import local

# How many times as many examples as `make test` draws: `make soak` asks for more.
MORE = int(os.environ.get("MANYHANDS_EXAMPLES", "1"))
# Examples on a shared machine take as long as they take.
settings.register_profile(
    "manyhands", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=30 * MORE
)
settings.load_profile("manyhands")

# Most workers train digits: what they are forked from has scikit-learn, too, which takes as long as torch.
local.PRELOAD = tuple(dict.fromkeys((*local.PRELOAD, "sklearn.datasets")))  # this file is imported twice
local.LocalLauncher.__init__.__defaults__ = (None, local.PRELOAD)

ROOT = Path(__file__).parents[1]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # what mpirun wants to hear
SHARED = ROOT.parent / "shared"


# What must not run beside other tests, because it compares times or looks for anything of Open MPI in the
# host's shared memory: whole files, or the tests whose names begin like this. Launchers, transports and
# faults, whose deadlines are seconds, passed two at a time on two cores with a load of 10 to 25.
ALONE: dict[str, tuple[str, ...]] = {
    "cli/test_commands.py": ("test_help_is_quick",),
    "core/test_allocator.py": ("test_a_block_is_not_faulted",),
    "faults/test_lost_workers.py": (),
    "faults/test_matrix.py": (
        "test_a_fault_ends_the_run[SIGSEGV-mpi]",
        "test_a_fault_ends_the_run[hang:data-mpi]",
        "test_a_fault_under_a_starter[hang:data-mpirun]",
    ),
    "faults/test_worker_groups.py": ("test_a_second_run",),
    "launchers/test_local.py": ("test_the_second_launch",),
    "launchers/test_mpi.py": ("test_ranks_can_use_mpi",),
    "runs/test_async_runs.py": ("test_a_straggler", "test_all_wait_for_a_straggler", "test_a_worker_far"),
}
# What `make test` leaves to `make soak`, which CI runs as well: tests of many seconds that have a shorter
# sibling here, by the beginnings of their names; an empty tuple is a whole file.
SOAK: dict[str, tuple[str, ...]] = {
    "analysis/test_regimes.py": ("test_the_interval_of_a_study_holds_the_truth[large end",),
    "callbacks/test_background.py": ("test_a_full_pipe",),
    "faults/test_asynchronous.py": (
        "test_the_others_continue[exit:data-",
        "test_the_others_continue[raise:backward-hogwild",
        "test_the_others_continue[SIGKILL-server",
        "test_the_others_continue[hang:data-",
        "test_the_others_continue_with_any_server_option[{'backup': 0}]",
        "test_the_others_continue_with_any_server_option[{'bound': 0}]",
        "test_the_others_continue_with_any_server_option[{'push_every': 2}]",
        "test_a_lost_worker_is_replaced[raise",
        "test_strict_ends_the_run[SIGKILL",
        "test_a_worker_lost_twice",
    ),
    "faults/test_average.py": ("test_any_transport_gives_the_same_bits[mpi]", "test_diloco_killed"),
    "faults/test_hosts.py": ("test_torchrun_over_two_hosts",),
    "faults/test_kill_and_resume.py": (
        "test_killed_several_times_it_ends_with_the_same_bits[adamw]",
        "test_killed_several_times_it_ends_with_the_same_bits[lamb]",
    ),
    "faults/test_resume_agreement.py": (
        "test_a_rank_without_a_checkpoint_resumes_from_rank_0s[sharded]",
        "test_a_rank_without_a_checkpoint_resumes_from_rank_0s[memory]",
        "test_a_rank_without_a_checkpoint_resumes_from_rank_0s[average]",
        "test_a_rank_without_a_checkpoint_resumes_from_rank_0s[server]",
    ),
    "faults/test_worker_groups.py": ("test_every_starter_gives_the_same_bits",),
    "launchers/test_listening.py": ("test_mpi",),
    "offload/test_offload_runs.py": ("test_a_network_that_cannot_train_under_a_limit",),
    "parity/test_pipeline.py": ("test_processes_that_send_messages_equal_one_worker[no common",),
    "offload/test_saved_tensors.py": ("test_views_and_kinds[float32",),
    "report/test_charts.py": (
        "test_odd_records_are_drawn_too[a lost rank",
        "test_odd_records_are_drawn_too[fresh only",
        "test_odd_records_are_drawn_too[no curve",
        "test_odd_records_are_drawn_too[no memory",
        "test_odd_records_are_drawn_too[no step times",
    ),
    "report/test_page.py": ("test_many_runs_are_drawn_in_time_and_small",),
    "runs/test_async_runs.py": ("test_a_server_is_a_rank_of_mpirun",),
    "runs/test_sharded_runs.py": ("test_a_run_goes_on_with_any_strategy",),
    "strategies/test_stage_link.py": ("test_messages_of_mpi",),
    "study/test_memory_limit.py": ("test_a_side_that_fails",),
    "study/test_paired.py": (
        "test_a_run_in_blocks_makes_the_steps_of_a_run_in_one_piece[average]",
        "test_a_run_in_blocks_makes_the_steps_of_a_run_in_one_piece[hogwild]",
        "test_a_run_in_blocks_makes_the_steps_of_a_run_in_one_piece[pipeline]",
        "test_a_run_in_blocks_makes_the_steps_of_a_run_in_one_piece[sharded]",
    ),
    "study/test_stopped.py": ("test_killed_three_times",),
    "tasks/test_sparse_logistic.py": ("test_the_defaults_reach",),
    "test_benchmarks.py": ("test_a_tiny_round",),
    "test_portability.py": ("test_without_what_windows_lacks",),
    "test_wheel.py": (),
    "transports/test_members.py": ("TestMpiBetweenHosts", "TestTorchBetweenHosts"),
    "transports/test_properties.py": ("test_collectives_of_anything[shm]",),
}
# Files that take long begin first, so that no core is idle at the end.
FIRST = (
    "test_docs.py",
    "transports/test_members.py",
    "faults/test_asynchronous.py",
    "faults/test_worker_groups.py",
    "runs/test_async_runs.py",
    "launchers/test_members.py",
    "faults/test_average.py",
    "browser/test_report.py",
    "faults/test_matrix.py",
    "runs/test_pipeline_runs.py",
    "study/test_execute.py",
    "report/test_page.py",
    "launchers/test_worker_failures.py",
    "launchers/test_env.py",
    "study/test_stopped.py",
    "runs/test_verify.py",
    "report/test_notebook.py",
    "test_fuzz.py",
    "faults/test_hosts.py",
    "launchers/test_torchrun.py",
    "test_benchmarks.py",
    "offload/test_offload_runs.py",
    "runs/test_sharded_runs.py",
    "faults/test_kill_and_resume.py",
    "faults/test_pipeline.py",
    "faults/test_resume_agreement.py",
    "engine/test_noise_meter.py",
    "test_portability.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`, do not even import the files without such tests."""
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    alone = config.option.markexpr == "alone" and name.endswith(".py")
    return True if alone and name not in ALONE else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark those that `make test` runs one by one; the others share the cores, the long ones first.

    Those marked `soak` are left out unless they are asked for (`-m soak`, as `make soak` does) or named.
    """
    tests = Path(__file__).parent

    def name(item: pytest.Item) -> str:
        return item.path.relative_to(tests).as_posix()

    def listed(item: pytest.Item, table: dict[str, tuple[str, ...]]) -> bool:
        starts = table.get(name(item))
        own = item.nodeid.partition("::")[2]
        return starts is not None and own.startswith(starts or "")

    for item in items:
        if listed(item, SOAK):
            item.add_marker("soak")
    if "soak" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    ranks = {name: rank for rank, name in enumerate(FIRST)}
    for item in items:
        if listed(item, ALONE):
            item.add_marker("alone")
    items.sort(key=lambda item: ranks.get(name(item), len(ranks)))


class Answer:
    """What a command line answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def called(command: Sequence[str | Path], cwd: Path, **environment: str) -> Answer:
    """Run any command in a folder."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def manyhands(tmp_path: Path) -> Callable[..., Answer]:
    """Run `manyhands ...` in a child, in an empty folder."""

    def call(*words: str, cwd: Path = tmp_path, **environment: str) -> Answer:
        return called([sys.executable, "-m", "manyhands", *words], cwd, **environment)

    return call


@pytest.fixture(scope="session", autouse=True)
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of these tests' own: nothing is written to the real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_memory_of_mpi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two at a time, Open MPI's files are not in /dev/shm, where the other process looks for what is left."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path_factory.mktemp("mpi")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Of torch, in this process, outside of runs: small tensors that several threads play with at once."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread where nothing is said: two wait long for each other where others work as well."""
    monkeypatch.setattr(environment, "cores", lambda: 1)


@pytest.fixture
def typed(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_core: None) -> Callable[..., Answer]:
    """Run `manyhands ...` in this process, in an empty folder: a child imports torch for seconds."""

    def call(*words: str, cwd: Path = tmp_path, **environment: str) -> Answer:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            for name, value in environment.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = cli.answer(list(words))
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
