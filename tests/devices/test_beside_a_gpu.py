"""With GPUs that torch pretends to see: a run on the CPU does not use them, a rank uses only its own."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import manyhands
from manyhands.core.rank_info import NullChannel, RankInfo, RankStatus
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.job import Job
from manyhands.engine.session import work
from manyhands.offload import budget
from manyhands.records.spec import RunSpec
from manyhands.runs import train
from manyhands.runs.resolve import resolve


def quadratic(**settings: Any) -> RunSpec:
    return RunSpec.of(task="quadratic", epochs=1, device="cpu", **settings)


@pytest.fixture
def touchy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that must not be used: every other call of CUDA raises."""

    def refuse(name: str) -> Callable[..., None]:
        def touched(*arguments: object, **named: object) -> None:
            raise AssertionError(f"torch.cuda.{name} was called")

        return touched

    for name, function in vars(torch.cuda).items():
        if isinstance(function, FunctionType) and not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, refuse(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_every_device_call_goes_through_one_module() -> None:
    """Five modules asked torch.cuda by themselves, most of them without saying which GPU."""
    root = Path(manyhands.__file__).parent
    found = {
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        if "cud" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.cuda", "torch.backends.cudnn")
    }
    assert {info for info in found if not info.startswith("devices/device.py:")} == set()
    assert found


@pytest.mark.usefixtures("touchy")
def test_a_run_on_the_cpu_touches_no_gpu(here: Path) -> None:
    """It saved the generators of all GPUs, which opened CUDA, and then planned with the GPU's memory."""
    spec = quadratic(offload="auto", memory=8_000_000_000, checkpoint_every=0)
    record = train.run(spec, out=here / "run")
    assert (record.status, record.memory_of, record.host_memory) == ("finished", "host", None)
    saved = Checkpoints(here / "run/checkpoints", record.id, keep=2).latest(print)
    assert saved is not None
    assert [name for name in saved.tensors if name.startswith("random/")] == ["random/torch"]
    assert train.run(quadratic(), out=here / "other").loss == record.loss


def test_its_budget_is_main_memory_whatever_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA open, 0 bytes of the GPU were taken for what the process holds."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: 0)
    assert budget.held() > 50_000_000
    assert budget.most() > 50_000_000


def test_the_caller_keeps_the_generators_of_its_gpus(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """A run on the CPU seeded them, and put only the host's back."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    train.run(quadratic(), out=here / "run")
    assert seeded == []


class SeenError(Exception):
    """Seen enough: what comes next would need a GPU."""


class Watching(NullChannel):
    """Changes the phase of a rank's clock as soon as there is one, and ends it there."""

    def watch(self, status: Callable[[], RankStatus]) -> None:
        status.__self__.clock.switch("forward")  # type: ignore[attr-defined]
        raise SeenError


def test_a_rank_sets_its_own_gpu_first_and_waits_for_that_one(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """No rank selected its GPU, and the clock of every rank synchronized the first one."""
    asked: list[tuple[str, tuple[object, ...]]] = []

    def note(name: str, answer: object) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            asked.append((name, arguments))
            return answer

        return call

    state = torch.zeros(1, dtype=torch.uint8)
    answers = {
        "init": None,
        "set_device": None,
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "set_rng_state": None,
    }
    for name, answer in {**answers, "get_rng_state": state, "get_rng_state_all": [state, state]}.items():
        monkeypatch.setattr(torch.cuda, name, note(name, answer))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec = resolve(RunSpec.of(task="quadratic", device="cuda"))
    info = RankInfo(1, ("here", "here"), Watching())
    with pytest.raises(SeenError):
        work(info, Job(spec, here))
    gpu = torch.device("cuda", 1)
    assert asked[0] == ("set_device", (gpu,))
    assert [arguments for name, arguments in asked if name == "synchronize"] == [(gpu,)]
    assert ("get_rng_state", (gpu,)) in asked
    assert "get_rng_state_all" not in dict(asked)
