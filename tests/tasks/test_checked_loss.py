"""A loss that is not the mean over its samples gave another result for every number of workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from manyhands.core.errors import UsageError
from manyhands.tasks import checked_loss
from manyhands.tasks.checked_loss import CheckedLoss, check

Loss = Callable[[Any, Any], Tensor]
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])


def classes(size: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(size, 3, dtype=dtype, generator=generator)
    return outputs, torch.randint(0, 3, (size,), generator=generator)


def two_tasks(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + 0.3 * outputs[1].square().mean()


def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.randn_like(outputs), targets)


def no_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    assert len(outputs) == 12
    return F.cross_entropy(outputs, targets, reduction="sum")


def writes_over(outputs: Tensor, targets: Tensor) -> Tensor:
    targets.fill_(0)
    return outputs.mul_(2.0).square().mean()


MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "a module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "with a constant": lambda o, t: F.cross_entropy(o, t) + 7.0,
    "weighted and then the mean": lambda o, t: F.cross_entropy(o, t, WEIGHTS, reduction="none").mean(),
    "sum over all by hand": lambda o, t: F.cross_entropy(o, t, reduction="sum") / len(t),
    "zero": lambda o, t: (o * 0).sum(),
    "of both signs": lambda o, t: (1e6 * (o - o.mean(1, keepdim=True))).sum(1).mean(),
    "noisy": noisy,
    "only for this size": no_parts,
    "writes over what it is given": writes_over,
}
OTHERS: dict[str, Loss] = {
    "sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "class weights": lambda o, t: F.cross_entropy(o, t, WEIGHTS),
    "ignore index": lambda o, t: F.cross_entropy(o, t, ignore_index=1),
    "per batch": lambda o, t: torch.logsumexp(o.flatten(), 0),
}


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "class weights": lambda o, t: (
        F.cross_entropy(o, t, WEIGHTS.to(o), reduction="sum"),
        WEIGHTS[t].sum(),
    ),
    "ignore index": lambda o, t: (F.cross_entropy(o, t, ignore_index=1, reduction="sum"), (t != 1).sum()),
    "a number": lambda o, t: [F.cross_entropy(o, t, reduction="sum"), float(len(t))],
    "none counts": lambda o, t: (F.cross_entropy(o, t, ignore_index=1, reduction="sum") * 0, 0),
}
NOT_SUMS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a mean": (
        lambda o, t: (F.cross_entropy(o, t), len(t)),
        "the loss returns the sum .*: both must be sums",
    ),
    "a weight that is a mean": (
        lambda o, t: (F.cross_entropy(o, t, reduction="sum"), WEIGHTS[t].mean()),
        "the loss returns the sum .*: both must be sums over samples, not means",
    ),
    "a weight below zero": (lambda o, t: (F.cross_entropy(o, t), -1), "a loss that returns two values must"),
    "a yes": (lambda o, t: (F.cross_entropy(o, t), True), "a loss that returns two values must .* not True"),
    "three": (lambda o, t: (o.sum(), 1, 2), "the loss must be a scalar, .* but is a tuple"),
    "a vector": (lambda o, t: (o.sum(1), len(t)), r"the loss must be a scalar, .* tensor of shape \(12,\)"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SUMS)
def test_sums_with_weights_pass(name: str, dtype: torch.dtype) -> None:
    outputs, targets = classes(dtype=dtype)
    loss = CheckedLoss(SUMS[name])
    total, weight = loss(outputs, targets)
    expected = SUMS[name](outputs, targets)
    assert (float(total), float(weight)) == (float(expected[0]), float(expected[1]))


@pytest.mark.parametrize("name", NOT_SUMS)
def test_what_is_not_a_sum_with_its_weight_is_refused(name: str) -> None:
    loss, sentence = NOT_SUMS[name]
    with pytest.raises(UsageError, match=f"^{sentence}"):
        check(loss, *classes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MEANS)
def test_means_pass(name: str, dtype: torch.dtype) -> None:
    outputs, targets = classes(dtype=dtype)
    if name != "weighted and then the mean" or dtype == torch.float32:  # its weights are
        assert check(MEANS[name], outputs, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str, dtype: torch.dtype) -> None:
    loss = OTHERS[name]
    if name == "class weights":
        loss = lambda o, t: F.cross_entropy(o, t, WEIGHTS.to(dtype))  # noqa: E731
    with pytest.raises(UsageError, match=r'^the loss is not the mean over its samples: .*reduction="mean"'):
        check(loss, *classes(dtype=dtype))


def test_one_that_is_ignored_among_many_is_seen() -> None:
    """The parts have nearly the same loss: only the gradients tell."""
    outputs, targets = torch.zeros(500, 3), torch.zeros(500, dtype=torch.long)
    targets[400] = -100
    with pytest.raises(UsageError, match="not the mean"):
        check(F.cross_entropy, outputs, targets)


def test_of_large_outputs_some_samples_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run needs at its peak must not grow by the look."""
    seen: list[int] = []

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(targets))
        return F.cross_entropy(outputs, targets, reduction="sum")

    monkeypatch.setattr(checked_loss, "MAX_COPY", 5 * 3 * 4)  # five samples of three float32
    with pytest.raises(UsageError, match=r"for 5 samples"):
        check(summed, *classes(500))
    assert max(seen) == 5
    monkeypatch.setattr(checked_loss, "MAX_COPY", 1)
    with pytest.raises(UsageError, match=r"for 2 samples"):
        check(summed, *classes(500))


def test_a_part_of_which_all_is_ignored_is_seen() -> None:
    outputs, targets = classes()
    targets[:5] = -100
    with pytest.raises(UsageError, match=r"but nan when computed"):
        check(F.cross_entropy, outputs, targets)


def test_what_is_no_number_says_what_it_is() -> None:
    with pytest.raises(UsageError, match=r"^the loss must be a scalar.* is a tensor of shape \(12,\): use"):
        check(lambda o, t: F.cross_entropy(o, t, reduction="none"), *classes())
    with pytest.raises(UsageError, match=r"^the loss must be a scalar.* is a float: use"):
        check(lambda o, t: F.cross_entropy(o, t).item(), *classes())  # type: ignore[arg-type, return-value]


def test_a_model_that_is_right_to_the_last_digit_is_not_blamed_on_the_loss() -> None:
    """What is left is rounding, and may differ between a batch and its parts."""
    outputs, targets = classes(33)
    outputs = 17.0 * F.one_hot(targets, 3).float() + 1e-3 * outputs
    assert check(F.cross_entropy, outputs, targets)
    assert check(F.mse_loss, outputs, outputs + 1e-7)


def test_several_outputs_are_cut_together_and_what_cannot_be_cut_is_not() -> None:
    outputs, targets = classes()
    assert check(two_tasks, (outputs, outputs), targets)
    with pytest.raises(UsageError, match="not the mean"):
        check(lambda o, t: two_tasks(o, t) + o[1].sum(), (outputs, outputs), targets)

    def of_a_dict(outputs: dict[str, Any], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["classes"], targets, reduction="sum")

    # what the loss does not use is no excuse: a language model returns its cache, others a scalar
    unused = (
        {},
        {"states": torch.zeros(2, 12)},
        {"name": "x"},
        {"aux": torch.tensor(2.0)},
        {"cache": object()},
    )
    for more in unused:
        with pytest.raises(UsageError, match="not the mean"):
            check(of_a_dict, {"classes": outputs, **more}, targets)
        assert check(lambda o, t: F.cross_entropy(o["classes"], t), {"classes": outputs, **more}, targets)

    def of_states(outputs: dict[str, Any], targets: Tensor) -> Tensor:
        return of_a_dict(outputs, targets) + outputs["states"].sum()

    assert check(of_states, {"classes": outputs, "states": torch.zeros(2, 12)}, targets)


def test_a_scalar_of_the_model_is_added_to_each_part() -> None:
    outputs, targets = classes()
    held = {"classes": outputs, "aux": torch.tensor(2.0)}
    assert check(lambda o, t: F.cross_entropy(o["classes"], t) + o["aux"], held, targets)


def test_one_sample_is_too_few_and_the_next_batch_is_looked_at() -> None:
    loss = CheckedLoss(OTHERS["sum"])
    outputs, targets = classes()
    assert loss(outputs[:1], targets[:1]) == F.cross_entropy(outputs[:1], targets[:1])
    with pytest.raises(UsageError, match="not the mean"):
        loss(outputs, targets)


class Remembers(nn.Module):
    """A loss with a memory of its own, which draws random numbers from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        drawn = torch.rand(()).item() + float(np.random.rand()) + random.random()
        return F.cross_entropy(outputs, targets) + drawn


def test_looking_changes_nothing() -> None:
    """Neither the model's gradients, nor what the loss keeps, nor the next random number."""
    loss = Remembers()
    outputs, targets = classes()
    outputs.requires_grad_()

    def drawn() -> list[float]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        return [torch.rand(()).item(), float(np.random.rand()), random.random()]

    expected = drawn()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert check(loss, outputs, targets)
    assert [torch.rand(()).item(), float(np.random.rand()), random.random()] == expected
    assert loss.calls == 0
    assert outputs.grad is None
    assert torch.equal(targets, classes()[1])


def test_it_is_looked_at_once_and_in_evaluation_too() -> None:
    calls: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(targets))
        return F.cross_entropy(outputs, targets)

    loss = CheckedLoss(counted)
    with torch.inference_mode():
        outputs = nn.Linear(3, 3)(classes()[0])
        found = [loss(outputs, classes()[1]) for _ in range(3)]
    assert calls == [12, 5, 7, 12, 12, 12]
    assert len({float(value) for value in found}) == 1
