"""Mixed precision: every strategy computes what one worker computes on the same parts, and skips together."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.core import environment
from manyhands.core.errors import DivergedError, UsageError
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.runs import instruction_limit
from manyhands.strategies.precision import FIRST_SCALE, GROW_AFTER, LARGEST_SCALE, Precision, Scaled
from runs import precise_tasks

FILE = Path(precise_tasks.__file__)
USUAL: dict[str, Any] = {
    "batch": 12, "epochs": 3, "recipe": "constant", "lr": 0.0005, "threads": 1, "quiet": True,
    "evaluate_every": 0,
}  # fmt: skip
# what divides a batch as two micro-batches of one worker do
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce", "workers": 2},
    "between hosts": {"strategy": "allreduce", "workers": 2, "transport": "torch"},
    "sharded": {"strategy": "sharded", "workers": 2},
    "pipeline": {"strategy": "pipeline", "workers": 2, "micro_batches": 2},
    "messages": {"strategy": "pipeline", "workers": 2, "micro_batches": 2, "transport": "torch"},
    "recomputed": {"strategy": "pipeline", "workers": 2, "micro_batches": 2, "recompute": True},
    "offload": {"accumulate": 2, "offload": "all"},
    "average": {"strategy": "average", "workers": 2, "every": 1},
}
FEW = ("allreduce", "sharded", "recomputed", "messages", "offload")


def trained(folder: Path, task: str = "steep", **settings: Any) -> RunRecord:
    return mh.train(f"{FILE}:{task}", out=folder, **USUAL | settings)


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("one") / "run"
    return trained(folder, precision=request.param, accumulate=2)


@pytest.mark.parametrize(
    "way", [way if way in FEW else pytest.param(way, marks=pytest.mark.soak) for way in WAYS]
)
def test_workers_compute_what_one_worker_does(one: RunRecord, way: str, tmp_path: Path) -> None:
    narrow = one.spec.precision
    if narrow == "fp16" and way == "average":
        pytest.skip("its workers skip for themselves, not together")
    record = trained(tmp_path / "run", precision=narrow, **WAYS[way])
    assert record.skipped_steps == one.skipped_steps
    ours, theirs = record.state_dict(), one.state_dict()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def test_steps_are_narrow_and_some_are_skipped(one: RunRecord, tmp_path: Path) -> None:
    full = trained(tmp_path / "full", accumulate=2)
    distance = max(
        float((tensor - full.state_dict()[name]).abs().max()) for name, tensor in one.state_dict().items()
    )
    assert 1e-5 < distance < 0.1
    assert (one.skipped_steps > 0) == (one.spec.precision == "fp16")
    assert full.skipped_steps == 0


@pytest.mark.parametrize(
    ("strategy", "options"), [("hogwild", {}), ("server", {}), ("server", {"backup": 1}), ("average", {})]
)
def test_workers_that_do_not_step_together_skip_for_themselves(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "workers": 2, "precision": "fp16", "epochs": 10}
    record = trained(tmp_path / "run", evaluate_every=1, **settings | options)
    assert record.skipped_steps >= 2
    losses = [point.test_loss for point in record.curve]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("settings", [{}, {"strategy": "allreduce", "workers": 2}])
def test_the_scale_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    more = {"precision": "fp16", "checkpoint_every": 0, **settings}
    whole = trained(tmp_path / "whole", **more)
    trained(tmp_path / "part", samples=60, **more)
    part = trained(tmp_path / "part", resume=True, allow_changes=True, **more)
    assert part.resumed == 1
    assert whole.skipped_steps == part.skipped_steps > 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_gradients_that_overflow_at_any_scale_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"gradients overflow in float16 even where the loss is scaled"):
        trained(tmp_path / "run", task="hopeless", precision="fp16", epochs=30)
    assert mh.load(tmp_path / "run").status == "diverged"


def test_the_scale_is_halved_and_doubled() -> None:
    scaled = Scaled(torch.device("cpu"), torch.float16)
    fine, large = torch.ones(2), torch.tensor([1.0, float("inf")])
    assert not scaled.overflows([fine, fine])
    assert not scaled.overflows([])
    assert scaled.overflows([fine, large])
    assert scaled.overflows([torch.tensor([float("nan")])])
    assert scaled.overflows([torch.sparse_coo_tensor([[0]], [float("inf")], (3,))])
    scaled.stepped(skipped=True)
    assert (scaled.scale, scaled.skipped) == (FIRST_SCALE / 2, 1)
    for _ in range(GROW_AFTER - 1):
        scaled.stepped(skipped=False)
    assert scaled.scale == FIRST_SCALE / 2
    again = Scaled(torch.device("cpu"), torch.float16)
    again.load_state(scaled.state())
    again.stepped(skipped=False)
    assert again.scale == FIRST_SCALE
    for _ in range(20 * GROW_AFTER):
        again.stepped(skipped=False)
    assert again.scale == LARGEST_SCALE


def test_full_precision_looks_at_nothing() -> None:
    def gradients() -> Any:
        raise AssertionError
        yield

    assert not Precision().overflows(gradients())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float64": (
        {"precision": "bf16", "dtype": "float64"},
        "--precision bf16 keeps parameters in float32, but dtype is float64: leave one of them out",
    ),
    "noise": (
        {"precision": "fp16", "noise_scale": True, "accumulate": 2},
        "--noise-scale compares gradients of steps, and with --precision fp16 they are scaled and some steps "
        "are skipped: use bf16",
    ),
    "a type": (
        {"precision": "int8"},
        "precision should be 'full', 'bf16' or 'fp16', got 'int8'",
    ),
    "offload": (
        {"compile": True, "offload": "all"},
        "--offload all moves what autograd saves of each layer, and --compile makes one of all layers: leave "
        "one of them out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_a_sentence(case: str) -> None:
    settings, sentence = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        mh.train("digits-mlp", quiet=True, **settings)
    assert str(caught.value) == sentence


def test_verify_has_precisions_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"^verify compares in float32 and float64, in which rounding"):
        mh.verify("digits-mlp", precision="bf16", quiet=True)


# ---- a CPU that does not execute what it says it has


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python on a CPU that dies of bf16, unless it is limited to older instructions."""
    script = tmp_path / "python"
    limits = "|".join(instruction_limit.LIMITS[2:])
    script.write_text(
        f'#!/bin/sh\ncase "${environment.LIMITS_INSTRUCTIONS}" in {limits}) exit 0;; *) kill -ILL $$;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.delenv(environment.LIMITS_INSTRUCTIONS, raising=False)
    instruction_limit.usable_limit.cache_clear()
    yield script  # type: ignore[misc]
    instruction_limit.usable_limit.cache_clear()


def test_fewer_instructions_are_tried(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    said: list[str] = []
    spec = instruction_limit.prepare(RunSpec(task="digits-mlp", precision="bf16"), said.append)
    assert os.environ[environment.LIMITS_INSTRUCTIONS] == "AVX512_CORE_BF16"
    assert said == [
        "this CPU says that it has instructions for bf16 which it does not execute: training without them "
        "(ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16)"
    ]
    assert spec.launcher == "local"  # torch is loaded in this process, which cannot be limited any more
    assert instruction_limit.prepare(spec, said.append) == spec
    assert len(said) == 1


def test_a_limit_of_the_user_is_kept_or_refused(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.LIMITS_INSTRUCTIONS, "AVX2")
    spec = RunSpec(task="digits-mlp", precision="fp16")
    assert instruction_limit.prepare(spec, print) == spec
    monkeypatch.setenv(environment.LIMITS_INSTRUCTIONS, "AVX512_CORE_AMX")
    with pytest.raises(UsageError) as caught:
        instruction_limit.prepare(spec, print)
    assert str(caught.value) == (
        "--precision fp16 does not work on this CPU with ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX: a trial of it "
        "was ended by SIGILL"
    )


def test_full_precision_tries_nothing(broken: Path) -> None:
    spec = RunSpec(task="digits-mlp")
    assert instruction_limit.prepare(spec, pytest.fail) is spec


def test_workers_have_what_was_set_before_torch_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another environment is another process to fork from: the first has loaded torch already."""
    from manyhands.launchers.local import LocalLauncher
    from manyhands.launchers.processes import local_processes

    name = environment.LIMITS_INSTRUCTIONS
    monkeypatch.delenv(name, raising=False)
    first = local_processes.fork_server(LocalLauncher()._preload)
    monkeypatch.setenv(name, "AVX2")
    second = local_processes.fork_server(LocalLauncher()._preload)
    assert second is not first
    assert f"{name}=AVX2".encode() in Path(f"/proc/{second.pid}/environ").read_bytes().split(b"\0")
    second.close()
