"""Recomputed activations: the same bits, less kept, and nothing counted twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from manyhands.offload.recompute import recomputed


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, 2),
    ).double()


def images() -> Tensor:
    return torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def steps(model: nn.Module, recompute: bool, count: int = 2) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Two micro-batches forward, then both backward, as a stage does; then what the model is."""
    torch.manual_seed(7)
    held = []
    for number in range(count):
        inputs = (images() + number).requires_grad_()
        held.append((inputs, recomputed(model, inputs) if recompute else model(inputs)))
    for _, outputs in held:
        outputs.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return model.state_dict(), [*gradients, *(inputs.grad for inputs, _ in held), torch.rand(1)]


def test_the_same_bits() -> None:
    """Gradients, running statistics, their counts, dropout's masks and what is random next."""
    plain, again = network(), network()
    expected, gradients = steps(plain, recompute=False)
    found, others = steps(again, recompute=True)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    for one, other in zip(gradients, others, strict=True):
        assert torch.equal(one, other)
    assert found["1.num_batches_tracked"] == 2


def test_a_norm_that_is_not_trained_stays_so() -> None:
    """In its evaluation mode it looks at its statistics, also the second time."""
    models = [network(), network()]
    for model in models:
        model.insert(1, nn.InstanceNorm2d(4, track_running_stats=True).double())
        model[1].eval()
        model[2].eval()
    expected, gradients = steps(models[0], recompute=False)
    found, others = steps(models[1], recompute=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(one, other) for one, other in zip(gradients, others, strict=True))
    assert found["2.num_batches_tracked"] == 0


def test_only_the_inputs_are_kept() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    inputs = torch.randn(3, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputed(model, inputs)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    assert {each.data_ptr() for each in kept} - parameters <= {inputs.data_ptr()}


def test_a_failure_while_recomputing_leaves_the_statistics_as_they_are() -> None:
    class Once(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("no second time")
            return x.tanh()

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Once(), nn.Linear(4, 1))
    outputs = recomputed(model, torch.randn(3, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"^no second time$"):
        outputs.sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model[1].track_running_stats
    model[1](torch.randn(3, 4))
    assert model[1].num_batches_tracked == 2
