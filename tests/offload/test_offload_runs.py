"""Whole runs with less memory: the same model to the last bit, a limit that is kept, nothing left behind."""

import subprocess
import sys
import threading

import pytest
from safetensors.torch import load_file

import manyhands as mh
from manyhands.core.errors import ManyhandsError

TASK = """
import torch
from torch import nn
import manyhands as mh
from manyhands.data.arrays import ArrayData


def images() -> mh.Task:
    torch.manual_seed(0)
    inputs, targets = torch.randn(96, 3, 16, 16), torch.arange(96) % 4
    data = ArrayData(inputs, targets)

    def model():
        layers = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(3):
            layers += [nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 3, padding=1)]
        return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 4))

    loss = nn.functional.cross_entropy
    return mh.Task(name="images", model=model, train=data, test=data, loss=loss, target=0.9)
"""


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "images.py"
    path.write_text(TASK)
    return f"{path}:images"


def trained(task, out, **settings):
    record = mh.train(task, batch=32, epochs=2, threads=1, out=out, quiet=True, **settings)
    return record, load_file(out / "model.safetensors")


@pytest.mark.parametrize("offload", ["all", "conv", "auto"])
def test_a_run_ends_with_the_same_model(task, tmp_path, offload):
    before = threading.active_count()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    _, plain = trained(task, tmp_path / "plain")
    record, found = trained(task, tmp_path / offload, offload=offload, offload_to=str(scratch))
    assert {name: value.tolist() for name, value in plain.items()} == {
        name: value.tolist() for name, value in found.items()
    }
    assert record.choices["offload"]["mode"] == offload
    assert list(scratch.iterdir()) == []
    assert threading.active_count() == before


def test_a_budget_with_room_keeps_everything(task, tmp_path):
    _, plain = trained(task, tmp_path / "plain")
    record, found = trained(task, tmp_path / "run", offload="auto", memory="8GB")
    assert all((value == found[name]).all() for name, value in plain.items())
    assert record.choices["offload"]["moved_a_pass"] == 0
    assert record.choices["offload"]["units"]["recompute"] == 0


@pytest.mark.parametrize("offload", ["all", "auto"])
def test_a_pipeline_with_several_micro_batches_in_flight(task, tmp_path, offload):
    settings = {"strategy": "pipeline", "workers": 2, "strategy_options": {"micro_batches": 4}}
    _, plain = trained(task, tmp_path / "plain", **settings)
    _, found = trained(task, tmp_path / offload, offload=offload, **settings)
    assert all((value == found[name]).all() for name, value in plain.items())


def test_a_budget_that_is_too_small_ends_the_run_with_a_sentence(task, tmp_path):
    with pytest.raises(ManyhandsError, match=r"memory 100 MB is too small for one block.*at least"):
        trained(task, tmp_path / "run", offload="auto", memory="100MB")


LIMITED = """
import resource, sys
import torch
from torch import nn
from manyhands.core.allocator import returned_memory
from manyhands.offload.budget import held
from manyhands.offload.offloader import Offload

room, mode = 200_000_000, sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Conv2d(3, 32, 3, padding=1)]
for _ in range(12):
    layers += [nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
inputs = torch.randn(64, 3, 32, 32)
model(inputs[:2]).sum().backward()  # whatever is loaded by a first step is loaded
model.zero_grad()
with open("/proc/self/status") as status:
    mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (mapped + room, mapped + room))
offload = Offload(mode, held() + 150_000_000 if mode == "auto" else None)
with returned_memory():
    for _ in range(2):
        offload.run(model, inputs).sum().backward()
offload.close()
print("trained")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_network_that_cannot_train_under_a_limit_trains_with_a_budget():
    def child(mode):
        return subprocess.run(
            [sys.executable, "-c", LIMITED, mode], capture_output=True, text=True, check=False, timeout=120
        )

    plain, spared = child("none"), child("auto")
    assert plain.returncode != 0
    assert "memory" in plain.stderr
    assert spared.returncode == 0, spared.stderr
    assert spared.stdout == "trained\n"
