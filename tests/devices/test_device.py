"""Which device is set, waited for, seeded and measured by whom: there is no GPU here, so a fake stands in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recording
from manyhands import cli
from manyhands.core.rank_info import RankInfo
from manyhands.devices import device
from manyhands.devices.device import HOST, Cuda
from manyhands.engine.checkpoint.storage import Checkpoints, random_state, restore_random_state
from manyhands.engine.job import Job
from manyhands.engine.probe import measure
from manyhands.engine.session import work
from manyhands.engine.timing.step_timer import EVERY
from manyhands.launchers.local import LocalLauncher
from manyhands.offload.pinned_store import PinnedStore
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs import train
from manyhands.runs.resolve import resolve


class Second(RankInfo):
    """The second worker of its host, of whom there is no first."""

    @property
    def local_rank(self) -> int:
        return 1


def quadratic(**settings: Any) -> RunSpec:
    return RunSpec.of(task="quadratic", epochs=3, **settings)


def job(folder: Path, **settings: Any) -> Job:
    """For workers that no parent has prepared a folder for."""
    spec = resolve(quadratic(**settings))
    RunFolder(folder).create()
    return Job(spec, folder)


def saved(folder: Path) -> dict[str, Tensor]:
    found = Checkpoints(folder / "checkpoints", RunFolder(folder).spec().id, keep=2).latest(print)
    assert found is not None
    return found.tensors


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Two fake GPUs, and what they are asked."""
    return recording.install(monkeypatch)


def test_the_seed_of_the_host_is_torchs() -> None:
    torch.manual_seed(2**62 + 5)
    expected = torch.rand(3)
    HOST.seed(2**62 + 5)
    assert torch.equal(torch.rand(3), expected)


class TestEachRank:
    def test_its_own_gpu_is_taken_first_and_no_other_is_asked(
        self, gpus: list[tuple[int, str]], here: Path
    ) -> None:
        """The GPU was never set, and every rank waited for the first one."""
        record = work(Second(), job(here / "run", device="cuda"))
        assert record is not None
        assert gpus[0] == (1, "taken")
        assert gpus[-1] == (1, "left")
        assert {number for number, _ in gpus} == {1}
        assert {"synchronize", "seed", "random_state", "most"} <= {what for _, what in gpus}

    def test_ranks_of_a_host_have_one_each(self, here: Path) -> None:
        two = job(here / "run", workers=2, strategy="allreduce", transport="shm", launcher="local")
        results = LocalLauncher().launch(recording.fake_work, 2, two)
        for rank, (_, asked) in enumerate(results):
            assert asked[0] == (rank, "taken")
            assert {number for number, _ in asked} == {rank}
            assert (rank, "synchronize") in asked
        record = results[0][0]
        assert record.memory == [recording.MOST] * 2
        assert [times.synchronized_steps < times.steps for times in record.step_times] == [True, True]
        assert {
            name: saved(here / "run")[name][:1].tolist() for name in ("random/cuda", "random/1/cuda")
        } == {
            "random/cuda": [40],
            "random/1/cuda": [41],
        }

    def test_more_ranks_than_gpus_share_them(self, gpus: list[tuple[int, str]]) -> None:
        assert [getattr(device.choose("auto", rank), "index", None) for rank in range(4)] == [0, 1, 0, 1]
        assert device.choose("cpu", 1) is HOST

    def test_memory_of_a_run_is_its_gpus(self, gpus: list[tuple[int, str]], here: Path) -> None:
        """It was the host's, whatever the model was trained on."""
        record = train.run(quadratic(device="cuda"), out=here / "run")
        assert (record.peak_memory, record.memory) == (recording.MOST, [recording.MOST])
        assert record.memory_of == "device"
        assert record.host_memory is not None
        assert record.host_memory not in (0, recording.MOST)

    def test_its_budget_is_its_gpus(self, gpus: list[tuple[int, str]], here: Path) -> None:
        spec = quadratic(device="cuda", offload="auto", memory=500_000_000)
        assert train.run(spec, out=here / "run").status == "finished"
        assert {(0, "held"), (0, "on side")} <= set(gpus)

    def test_measuring_does_not_wait_at_every_phase(self, gpus: list[tuple[int, str]]) -> None:
        assert measure(RankInfo(), resolve(quadratic(device="cuda")), 0.01)
        assert gpus.count((0, "synchronize")) < 7  # steps, each of which has several phases

    def test_the_record_says_which_steps_were_synchronized(
        self, gpus: list[tuple[int, str]], here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        record = train.run(quadratic(device="cuda"), out=here / "run")
        (times,) = record.step_times
        assert times is not None
        free = [step.step for step in RunFolder(here / "run").steps() if not step.synchronized]
        assert free == [number for number in range(11, 31) if number != EVERY]
        assert (times.steps, times.synchronized_steps, times.sampled) == (25, 25 - len(free), True)
        phases = record.phases_of(0)
        assert sum(phases.values()) == pytest.approx(record.seconds)
        ratio = times.phases["backward"] / times.phases["forward"]
        assert phases["backward"] / phases["forward"] == pytest.approx(ratio)
        assert cli.answer(["show", str(here / "run")]) == 0
        assert "123 MB of the GPU at most, " in capsys.readouterr().out

    def test_on_a_cpu_all_were(self, here: Path) -> None:
        record = train.run(quadratic(), out=here / "run")
        (times,) = record.step_times
        assert times is not None
        assert times.synchronized_steps == times.steps == 25
        assert record.phases_of(0) == record.phases[0]
        assert "synchronized" not in (here / "run/steps.jsonl").read_text()


class TestGoingOn:
    """A checkpoint is read on any kind of device."""

    def test_from_the_host_on_a_gpu_and_back(
        self, monkeypatch: pytest.MonkeyPatch, here: Path, tmp_path: Path
    ) -> None:
        train.run(quadratic(samples=100), out=here / "run")
        with pytest.MonkeyPatch.context() as patch:
            asked = recording.install(patch)
            train.resume_folder(here / "run", {"samples": 200, "device": "cuda"}, allow_changes=True)
            assert (0, "restore nothing") in asked
        assert saved(here / "run")["random/cuda"].tolist() == [40] * 16
        train.resume_folder(here / "run", {"samples": 300, "device": "cpu"}, allow_changes=True)
        assert "random/cuda" not in saved(here / "run")

    def test_a_gpu_finds_its_generator_again(self, gpus: list[tuple[int, str]], here: Path) -> None:
        train.run(quadratic(device="cuda", samples=100), out=here / "run")
        gpus.clear()
        train.resume_folder(here / "run", {"samples": 200}, allow_changes=True)
        assert (0, "restore [40]") in gpus


class Asked:
    """What torch.cuda was asked: the names of functions and which device they were given."""

    def __init__(self, patch: pytest.MonkeyPatch, initialized: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        answers = {
            "is_initialized": initialized,
            "current_device": 3,
            "get_rng_state": torch.zeros(1),
            "memory_reserved": 5,
            "max_memory_reserved": 7,
        }
        for name in (
            *answers, "init", "set_device", "reset_peak_memory_stats", "synchronize", "manual_seed",
            "set_rng_state",
        ):  # fmt: skip
            patch.setattr(torch.cuda, name, self._asked(name, answers.get(name)))

    def _asked(self, name: str, answer: object) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            return answer

        return call


class TestCuda:
    """What the member says to torch, by name: it never ran here."""

    def test_it_names_its_gpu_in_every_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, gpu, here = Asked(monkeypatch, False), Cuda(1), torch.device("cuda", 1)
        with gpu.taken():
            gpu.synchronize()
            state = gpu.random_state()
            gpu.restore_random_state(state)
            assert (gpu.held(), gpu.most()) == (5, 7)
        (generator,) = state.values()
        assert asked.calls == [
            ("is_initialized",),
            ("set_device", here),
            ("init",),
            ("reset_peak_memory_stats", here),
            ("synchronize", here),
            ("get_rng_state", here),
            ("set_rng_state", generator, here),
            ("memory_reserved", here),
            ("max_memory_reserved", here),
        ]

    def test_whose_process_it_is_has_its_own_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        asked, rules = Asked(monkeypatch, True), torch.utils.deterministic
        with Cuda(1).taken():
            assert torch.backends.cudnn.deterministic
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert not rules.fill_uninitialized_memory
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.deterministic
        assert not torch.are_deterministic_algorithms_enabled()
        assert rules.fill_uninitialized_memory
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert asked.calls[-1] == ("set_device", 3)

    def test_what_a_user_chose_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        Asked(monkeypatch, False)
        torch.use_deterministic_algorithms(True)
        try:
            with Cuda(0).taken():
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

    def test_it_reads_what_0_1_0_saved_of_all_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = Asked(monkeypatch, False)
        tensors, numbers = random_state()
        old = {f"random/cuda/{number}": torch.tensor([number]) for number in range(3)}
        restore_random_state({**tensors, **old}, numbers, Cuda(1))
        assert asked.calls == [("set_rng_state", old["random/cuda/1"], torch.device("cuda", 1))]

    def test_a_rank_without_a_saved_generator_keeps_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = Asked(monkeypatch, False)
        restore_random_state(*random_state(), Cuda(1))
        assert asked.calls == []


@contextmanager
def _stored(source: Tensor) -> Iterator[tuple[PinnedStore, Any]]:
    store = PinnedStore(recording.Recording(1))
    yield store, store.send(source)
    store.close()


def test_activations_are_copied_beside_the_computing_and_never_too_early() -> None:
    """Out after what made them, back before what needs them; memory is not used again meanwhile."""
    recording.calls.clear()
    source = torch.arange(64, dtype=torch.uint8)
    with _stored(source) as (store, item):
        loaded = store.load(item)
        assert torch.equal(loaded, source)
        store.drop(item)
    assert recording.calls == [
        (1, "pinned"),
        (1, "side waits for computing"),
        (1, "on side"),
        (1, "keep for side"),
        (1, "on side"),
        (1, "computing waits for event of side"),
        (1, "keep for computing"),
        (1, "synchronize side"),
    ]
