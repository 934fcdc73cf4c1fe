"""A model as a sequence of blocks: which there are, what they cost, and what is said where there are none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.offload.blocks import Cost, blocks_of, joined, measure


class Named(nn.Module):
    """Not a sequence, but it says what it consists of."""

    def __init__(self, named: Callable[[Named], Any] = lambda self: [self.trunk, self.head]) -> None:
        super().__init__()
        self.head, self.trunk = nn.Linear(4, 2), nn.Linear(3, 4)
        self._named = named

    def blocks(self) -> Any:
        return self._named(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x))
        return out


class Twins(nn.Module):
    """Gives two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class TestBlocks:
    def test_a_sequence_is_its_members(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Tanh())
        assert blocks_of(model) == list(model)

    def test_an_only_child_is_looked_into(self) -> None:
        inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        assert blocks_of(nn.Sequential(nn.Sequential(inner))) == list(inner)

    def test_an_only_child_that_is_no_sequence_is_one_block(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4))
        assert blocks_of(model) == [model[0]]

    def test_a_model_may_name_them(self) -> None:
        model = Named()
        assert blocks_of(model) == [model.trunk, model.head]

    def test_a_part_that_is_called_blocks_is_no_method(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        model.blocks = nn.Identity()  # a module can be called as well
        assert blocks_of(model) == list(model)

    @pytest.mark.parametrize(
        ("named", "got"), [(lambda _: [], r"\[\]"), (lambda _: [nn.Tanh(), "head"], r"\[Tanh\(\), 'head'\]")]
    )
    def test_wrong_names(self, named: Callable[[Named], Any], got: str) -> None:
        sentence = rf"^Named\.blocks\(\) must return modules in order, got {got}$"
        with pytest.raises(UsageError, match=sentence):
            blocks_of(Named(named))

    @pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Sequential()], ids=["Linear", "Sequential"])
    def test_what_cannot_be_cut(self, model: nn.Module) -> None:
        sentence = (
            f"^the model, a {type(model).__name__}, cannot be divided into blocks: it is not an "
            r"nn.Sequential and has no method blocks\(\) that returns its modules in order$"
        )
        if isinstance(model, nn.Sequential):
            sentence = r"^an empty nn\.Sequential cannot be divided into blocks$"
        with pytest.raises(UsageError, match=sentence):
            blocks_of(model)


class TestJoined:
    def test_blocks_without_a_common_parameter_are_free(self) -> None:
        assert joined([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]) == set()

    def test_all_between_those_that_share_one_stay_together(self) -> None:
        blocks = [nn.Linear(3, 3) for _ in range(5)]
        blocks[3].weight = blocks[1].weight
        assert joined(blocks) == {2, 3}

    def test_a_block_twice_shares_with_itself(self) -> None:
        one = nn.Linear(3, 3)
        assert joined([one, nn.Tanh(), one, nn.Tanh()]) == {1, 2}

    def test_two_shared_parameters(self) -> None:
        blocks = [nn.Linear(3, 3) for _ in range(6)]
        blocks[1].weight = blocks[0].weight
        blocks[5].bias = blocks[3].bias
        assert joined(blocks) == {1, 4, 5}


def inputs(size: int = 6, features: int = 3) -> Tensor:
    return torch.randn(size, features, generator=torch.Generator().manual_seed(0))


class TestMeasure:
    def test_numbers_and_bytes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))
        first, second, third = costs = measure(model, inputs())
        assert [cost.name for cost in costs] == ["0 Linear", "1 Tanh", "2 Linear"]
        assert [cost.parameters for cost in costs] == [20, 0, 10]
        assert [cost.outputs for cost in costs] == [6 * 5 * 4, 6 * 5 * 4, 6 * 2 * 4]
        # a linear layer keeps its inputs, a tangent its outputs; parameters lie where they are
        assert [cost.saved for cost in costs] == [6 * 3 * 4, 6 * 5 * 4, 6 * 5 * 4]
        assert all(cost.alone and cost.forward > 0 and cost.copying > 0 for cost in costs)
        assert third.seconds == third.forward + third.backward > 0
        assert first.backward > 0
        assert second.backward > 0

    def test_nothing_changes(self) -> None:
        """Neither parameters, gradients, running statistics, modes nor what is random next."""
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
        model[1].eval()  # a frozen norm
        model[0].weight.grad = torch.ones(5, 3)
        before = copy.deepcopy(model.state_dict())
        data, generator = inputs(), torch.get_rng_state()
        kept = data.clone()
        measure(model, data)
        assert torch.equal(torch.get_rng_state(), generator)
        assert torch.equal(data, kept)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(model[0].weight.grad, torch.ones(5, 3))
        assert [parameter.grad is None for parameter in model.parameters()] == [False] + [True] * 5
        assert [module.training for module in model] == [True, False, True, True]
        assert model.training

    def test_a_block_that_writes_over_its_inputs_does_not_begin_a_stage(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU())
        assert [cost.alone for cost in measure(model, inputs())] == [True, False, True, True]

    def test_a_first_one_neither_and_the_data_stay(self) -> None:
        """They once did not, and were doubled twice where blocks were compared with the model."""

        class Doubled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mul_(2)

        model, data = nn.Sequential(Doubled(), nn.Linear(3, 5)), inputs()
        before = data.clone()
        assert [cost.alone for cost in measure(model, data)] == [False, True]
        assert torch.equal(data, before)

    def test_a_view_that_is_written_over_behind_does_not_begin_a_stage_either(self) -> None:
        """It once did, and the stage failed at its first micro-batch."""
        model = nn.Sequential(
            nn.Linear(3, 4), nn.Unflatten(1, (2, 2)), nn.Identity(), nn.ReLU(inplace=True), nn.Flatten()
        )
        assert [cost.alone for cost in measure(model, inputs())] == [True, False, False, False, True]

    def test_a_frozen_first_block_has_no_backward(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        model[0].requires_grad_(False)
        costs = measure(model, inputs())
        assert costs[0].backward == costs[1].backward == 0
        assert costs[2].backward > 0

    def test_whole_numbers_go_in(self) -> None:
        model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
        costs = measure(model, torch.arange(6).view(3, 2))
        assert [cost.outputs for cost in costs] == [3 * 6 * 4, 3 * 6 * 4, 3 * 2 * 4]

    def test_one_sample_is_enough(self) -> None:
        assert len(measure(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), inputs(1))) == 2

    def test_blocks_that_are_not_the_model(self) -> None:
        class Scaled(Named):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        sentence = r"^the blocks of Scaled in sequence do not give the outputs of the model$"
        with pytest.raises(UsageError, match=sentence):
            measure(Scaled(), inputs())
        with pytest.raises(UsageError, match=sentence.replace("Scaled", "Named")):
            measure(Named(lambda self: [self.trunk]), inputs())

    def test_a_block_that_gives_two_tensors(self) -> None:
        costs = measure(nn.Sequential(nn.Linear(3, 3), Twins(), Sum()), inputs())
        assert costs[1].layout is not None
        assert costs[1].layout.structure == {"tuple": ["tensor", "tensor"]}
        assert costs[1].outputs == 2 * costs[0].outputs == sum(costs[1].layout.sizes)

    def test_a_block_that_gives_no_tensor(self) -> None:
        sentence = r"^block 1 \(Nothing\) returns None: blocks must return tensors$"
        with pytest.raises(UsageError, match=sentence):
            measure(nn.Sequential(nn.Linear(3, 3), Nothing()), inputs())

    def test_a_failure_leaves_the_model_in_its_mode(self) -> None:
        model = Named(lambda self: [self.trunk]).train()
        with pytest.raises(UsageError):
            measure(model, inputs())
        assert model.training

    def test_a_cost_is_forward_and_backward(self) -> None:
        assert Cost("0 Linear", 1.0, 2.0, 0, 0, 0.0, 0, True).seconds == 3.0
