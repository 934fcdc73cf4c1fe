"""Training with less memory is the same training, to the last bit, in every mode; nothing is left behind."""

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.offload import budget, saved_tensors
from manyhands.offload.memory_plan import Speed
from manyhands.offload.offloader import Offload
from manyhands.offload.profile import sizes, units_of
from manyhands.offload.recompute import recomputed

MODES = ["all", "conv", "auto"]


@pytest.fixture(autouse=True)
def small_things_move(monkeypatch):
    monkeypatch.setattr(saved_tensors, "MIN_BYTES", 512)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    def forward(self, x):
        return torch.relu(x + self.body(x))


def make(layers: list[str], channels: int = 4) -> nn.Sequential:
    """A network of these layers on images of 8 x 8 pixels."""
    found: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    size = 8
    for name in layers:
        if name == "pool" and size < 4:
            continue
        found.append(
            {
                "conv": lambda: nn.Conv2d(channels, channels, 3, padding=1),
                "norm": lambda: nn.BatchNorm2d(channels),
                "relu": lambda: nn.ReLU(inplace=True),
                "gelu": nn.GELU,
                "drop": lambda: nn.Dropout(0.3),
                "pool": lambda: nn.MaxPool2d(2),
                "residual": lambda: Residual(channels),
                "nested": lambda: nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True)),
                "avoid": lambda: nn.Sequential(
                    nn.BatchNorm2d(channels), nn.Dropout(0.2), nn.ReLU(inplace=True)
                ),
            }[name]()
        )
        size //= 2 if name == "pool" else 1
    return nn.Sequential(*found, nn.Flatten(), nn.Linear(channels * size * size, 5))


def train(model, inputs, offload, steps=3, in_flight=1):
    """Losses and the state after a few steps; several graphs are in flight at a time."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        run = offload.run if offload is not None else lambda module, x: module(x)
        graphs = [run(model, inputs + number).square().mean() for number in range(in_flight)]
        for loss in graphs:
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def check(model, inputs, mode, memory=None, **more):
    twin = copy.deepcopy(model)
    losses, state = train(model, inputs, None, **more)
    choices: dict = {}
    offload = Offload(mode, memory, None, choices)
    try:
        others, found = train(twin, inputs, offload, **more)
    finally:
        offload.close()
    assert losses == others
    for name, value in state.items():
        assert torch.equal(value, found[name]), name
    return choices["offload"]


NAMES = ["conv", "norm", "relu", "gelu", "drop", "pool", "residual", "nested", "avoid"]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(NAMES), max_size=7),
    st.sampled_from(MODES),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 3),
)
def test_random_networks_train_as_without(layers, mode, dtype, in_flight):
    saved_tensors.MIN_BYTES, before = 512, saved_tensors.MIN_BYTES
    try:
        torch.manual_seed(len(layers))
        model, inputs = make(layers).to(dtype), torch.randn(6, 3, 8, 8, dtype=dtype)
        try:
            train(copy.deepcopy(model), inputs, None, steps=1)
        except RuntimeError:  # two in-place layers in a row: autograd refuses, and so do we
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                check(model, inputs, mode)
            return
        check(model, inputs, mode, steps=2, in_flight=in_flight)
    finally:
        saved_tensors.MIN_BYTES = before


@pytest.mark.parametrize("mode", MODES)
def test_what_is_moved_is_recorded(mode):
    torch.manual_seed(0)
    model = make(["norm", "relu", "conv", "norm", "relu", "pool", "residual", "drop"], channels=16)
    choices = check(model, torch.randn(16, 3, 8, 8), mode)
    assert choices["mode"] == mode
    assert choices["written_a_pass"] >= 0
    if mode != "auto":
        assert choices["written_a_pass"] > 10_000  # backward may come before all is written
    else:
        assert choices["predicted_peak"] < choices["predicted_peak_plain"]


@pytest.mark.parametrize("speed", [Speed(1e3, 1e3), Speed(1e8, 1e8, 1e-9), Speed(1e12, 1e12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whatever_is_chosen(monkeypatch, speed, dtype):
    monkeypatch.setattr(budget, "probe", lambda store: speed)
    torch.manual_seed(0)
    model = make(
        ["norm", "relu", "drop", "conv", "avoid", "conv", "norm", "relu", "pool", "residual"], channels=16
    )
    choices = check(model.to(dtype), torch.randn(16, 3, 8, 8, dtype=dtype), "auto", in_flight=2)
    if speed.write == 1e3:
        assert choices["units"]["recompute"] > 0
    elif speed.write == 1e12:
        assert choices["units"]["move"] > 0


def test_channels_last_and_a_model_that_cannot_be_cut():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)).flatten(1))

    for mode in MODES:
        torch.manual_seed(0)
        model = Whole().to(memory_format=torch.channels_last)
        check(model, torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last), mode)


def test_a_model_that_cannot_be_cut_is_moved_tensor_by_tensor():
    torch.manual_seed(0)
    layers = [
        layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)

        def forward(self, x):
            return self.body(x).mean((2, 3))

    choices = check(Whole(), torch.randn(16, 3, 8, 8), "auto")
    assert choices["units"] == {"keep": 0, "move": 1, "recompute": 0}


def test_a_model_that_asks_for_numbers_is_measured_instead():
    class Asking(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x * 3

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), Asking(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    assert sizes(units_of(model), torch.randn(64, 64)) is None
    for mode in MODES:
        check(copy.deepcopy(model), torch.randn(64, 64), mode)


def test_an_exception_in_forward_leaves_nothing(emptied):
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    before = threading.active_count()
    offload = Offload("all")
    with pytest.raises(ValueError, match="broken"):
        offload.run(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Broken()), torch.randn(4, 3, 8, 8))
    empty = emptied(offload._store)
    offload.close()
    assert empty
    assert threading.active_count() == before


def test_a_budget_that_cannot_hold_one_block_says_the_least_that_works():
    model = make(["conv", "relu"], channels=16)
    offload = Offload("auto", 1_000_000)
    with pytest.raises(UsageError, match=r"memory 1 MB is too small for one block .* at least [\d.]+ [MG]B"):
        offload.run(model, torch.randn(16, 3, 8, 8))
    offload.close()


def test_evaluation_is_left_alone():
    offload = Offload("all")
    with torch.no_grad():
        offload.run(make(["relu"]), torch.randn(2, 3, 8, 8))
    assert offload._store is None
    offload.close()


def test_what_would_be_saved_is_known_without_computing():
    model = make(["norm", "relu", "conv", "pool"], channels=8)
    units = units_of(model)
    known = sizes(units, torch.randn(4, 3, 8, 8))
    image = 4 * 8 * 8 * 8 * 4
    conv, norm, relu, again, pool = known[:5]
    assert (conv.saves_inputs, conv.saves_outputs, conv.inputs) == (True, False, 0)
    assert (norm.saves_inputs, norm.saves_outputs, norm.inputs) == (True, False, image)
    assert (relu.saves_outputs, relu.same) == (True, True)
    assert (again.saves_inputs, again.own) == (True, 0)
    assert pool.own == image // 4 * 2  # indices are int64


def test_recomputing_a_norm_counts_a_batch_once():
    """Statistics turned off saved fewer tensors the second time, and autograd refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    twin, inputs = copy.deepcopy(model), torch.randn(4, 3, 8, 8)
    model(inputs).sum().backward()
    recomputed(twin, inputs).sum().backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
