"""`make test-gpu`: whether all holds on a machine with GPUs. Its authors had none and never ran it.

Several workers need a GPU each (NCCL refuses to put two on one), so with one GPU only `single` is tried.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import manyhands as mh
from manyhands.core.errors import WorkerFailedError
from manyhands.devices.device import count
from manyhands.engine.fault_injection import faults
from manyhands.records.record import RunRecord
from manyhands.records.spec import RunSpec
from manyhands.runs import verify
from manyhands.runs.defaults import fill_in

GPUS, DEVICE = count(), "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="no CUDA device here"),
]
several = pytest.mark.skipif(
    GPUS < 2, reason="one CUDA device here, and workers need one each" if GPUS else "no CUDA device here"
)

TASK = "digits-mlp"
SETTINGS: dict[str, Any] = {"batch": 65, "epochs": 2, "device": DEVICE, "threads": 1, "quiet": True}
TOGETHER: dict[str, dict[str, Any]] = {  # strategies whose workers step together, and their options
    "allreduce": {},
    "average": {"every": 1},
    "layers": {},
    "pipeline": {"micro_batches": 4},
    "sharded": {},
}
FREE = ("server", "hogwild")
EVERY = ["single", *(pytest.param(name, marks=several) for name in TOGETHER)]
TOLERANCE = 1e-4  # float32, after some steps of sums in another order


def of(strategy: str) -> dict[str, Any]:
    """How a strategy is tried: two workers, or as many ranks as there are GPUs."""
    if strategy == "single":
        return {"strategy": "single", "workers": 1}
    workers = 1 if strategy == "server" else 2  # beside the one that serves
    return {"strategy": strategy, "workers": workers, "strategy_options": TOGETHER.get(strategy, {})}


def train(out: Path, strategy: str, **settings: Any) -> RunRecord:
    # what all workers of hogwild write into is main memory
    device = {"device": "auto"} if strategy == "hogwild" else {}
    return mh.train(TASK, out=out, **{**SETTINGS, **of(strategy), **device, **settings})


def difference(one: Path, other: Path) -> float:
    """The largest, of every tensor of two models."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())


def test_one_gpu_computes_what_the_host_computes(here: Path) -> None:
    ours, theirs = train(here / "gpu", "single"), train(here / "host", "single", device="cpu")
    assert ours.environment.device.startswith(DEVICE)
    assert theirs.environment.device == "cpu"
    assert difference(here / "gpu", here / "host") < 100 * TOLERANCE  # many steps, other kernels


@several
@pytest.mark.parametrize("strategy", TOGETHER)
def test_a_strategy_is_single_tensor_by_tensor(strategy: str, here: Path) -> None:
    settings = fill_in({**of(strategy), "device": DEVICE})
    spec = RunSpec.of(task=TASK, batch=65, threads=1, **settings)
    found = verify.compare(spec, 5, print)
    assert found.exact, found.to_dict()


@pytest.mark.parametrize("strategy", EVERY)
def test_a_run_goes_on_bit_by_bit(strategy: str, here: Path) -> None:
    whole = train(here / "whole", strategy)
    train(here / "halves", strategy, samples=65 * 20)
    found = train(here / "halves", strategy, resume=True, allow_changes=True)
    assert (found.steps, found.resumed, found.loss) == (whole.steps, 1, whole.loss)
    assert difference(here / "halves", here / "whole") == 0.0


def test_a_run_goes_on_on_another_kind_of_device(here: Path) -> None:
    train(here / "run", "single", samples=65 * 20)
    found = train(here / "run", "single", device="cpu", resume=True, allow_changes=True)
    assert (found.status, found.resumed) == ("finished", 1)


@several
@pytest.mark.parametrize("strategy", TOGETHER)
@pytest.mark.parametrize("fault", ["SIGKILL@1:8", "raise@1:8:data", "hang@1:8:data"])
def test_a_worker_that_fails_is_named_and_the_run_goes_on(
    strategy: str, fault: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.endswith(":data") and strategy in ("layers", "pipeline"):
        pytest.skip("only the first stage reads data")
    monkeypatch.setenv(faults.VARIABLE, fault)
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 "):
        train(here / "run", strategy, checkpoint_every=0, timeout=10.0)
    monkeypatch.delenv(faults.VARIABLE)
    assert train(here / "run", strategy, resume=True).status == "finished"


@pytest.mark.parametrize("strategy", [*EVERY, *(pytest.param(name, marks=several) for name in FREE)])
def test_its_speed_and_whose_time_and_memory_are_measured(strategy: str, here: Path) -> None:
    record = train(here / "run", strategy, epochs=4)
    device = record.environment.device
    times = record.worker_step_times
    assert record.status == "finished"
    assert record.loss is not None
    assert math.isfinite(record.loss)
    assert times is not None
    print(
        f"\n{strategy:<10} {device}: {record.throughput:,.0f} {record.unit}/s, {1000 * times.mean:.2f} ms"
        f", {times.synchronized_steps} of {times.steps} steps synchronized, {record.peak_memory:,} bytes"
    )
    if strategy == "hogwild":
        assert (device, record.memory_of) == ("cpu", "host")
        return
    assert device.startswith(DEVICE)
    assert record.memory_of == "device"
    assert record.peak_memory > 0
    assert record.host_memory
    assert times.sampled
