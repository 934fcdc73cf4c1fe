"""Optimizers from recipes: who is decayed, momentum correction, groups, slices of a flat buffer."""

import pytest
import torch
from torch import nn

from manyhands.core.errors import UsageError
from manyhands.recipes.members import constant, lamb, large_batch, lars
from manyhands.recipes.optimizers import build, set_lr, undecayed

EVERY = [
    large_batch(),
    large_batch(optimizer="adam"),
    large_batch(optimizer="adamw"),
    lars(),
    lamb(),
]
by_optimizer = pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: recipe.optimizer)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 8, bias=False),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )


def test_undecayed_are_biases_and_normalization():
    assert undecayed(network()) == {"0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "5.bias"}


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_normalization_layer_is_spared_entirely(layer):
    assert undecayed(layer) == {name for name, _ in layer.named_parameters()} != set()


def test_biases_under_other_names():
    assert undecayed(nn.LSTM(2, 2)) == {"bias_ih_l0", "bias_hh_l0"}
    assert undecayed(nn.MultiheadAttention(2, 1)) == {"in_proj_bias", "out_proj.bias"}


def test_tied_normalization_is_spared_under_each_name():
    model = nn.Module()
    model.shared = nn.Linear(3, 3)
    model.norm = nn.LayerNorm(3)
    model.shared.gain = model.norm.weight
    assert {"shared.gain", "norm.weight"} <= undecayed(model)


@pytest.mark.parametrize(
    "recipe",
    [
        large_batch(weight_decay=0.1),
        large_batch(optimizer="adam", weight_decay=0.1),
        large_batch(optimizer="adamw", weight_decay=0.1),
        lars(weight_decay=0.1),
        lamb(weight_decay=0.1),
    ],
    ids=lambda recipe: recipe.optimizer,
)
def test_weight_decay_touches_weights_only(recipe):
    """Goyal: no decay on batch norm. With gradients of zero only decay moves anything: see whom."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build(recipe, model.named_parameters(), undecayed(model)).step()
    after = dict(model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"0.weight", "3.weight", "5.weight"}
    assert all((after[name] < before[name]).all() for name in moved)


@by_optimizer
def test_groups(recipe):
    model = network()
    decayed, spared = build(recipe, model.named_parameters(), undecayed(model)).param_groups
    parameters = dict(model.named_parameters())
    assert decayed["names"] == ["0.weight", "3.weight", "5.weight"]
    assert spared["names"] == ["0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "5.bias"]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (recipe.weight_decay, 0)
    for group in (decayed, spared):
        assert group["lr"] == recipe.lr
        for name, tensor in zip(group["names"], group["params"], strict=True):
            assert tensor is parameters[name]


@by_optimizer
def test_empty_group_is_left_out(recipe):
    weights = [("weight", nn.Parameter(torch.ones(2)))]
    assert [group["names"] for group in build(recipe, weights, set()).param_groups] == [["weight"]]
    (spared,) = build(recipe, weights, {"weight"}).param_groups
    assert spared["weight_decay"] == 0


@by_optimizer
def test_frozen_parameters_are_left_out_and_tied_ones_taken_once(recipe):
    model = network()
    model[0].requires_grad_(False)
    model.again = model[3]
    named = model.named_parameters(remove_duplicate=False)
    groups = build(recipe, named, undecayed(model)).param_groups
    assert groups[0]["names"] == ["3.weight", "5.weight"]
    assert groups[1]["names"] == ["1.weight", "1.bias", "4.weight", "4.bias", "5.bias"]


def test_nothing_to_train():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(
        UsageError, match=r"^there is nothing to train: the model has no parameter that requires"
    ):
        build(constant(), frozen.named_parameters(), set())


@by_optimizer
def test_set_lr_reaches_every_group(recipe):
    model = network()
    optimizer = build(recipe, model.named_parameters(), undecayed(model))
    set_lr(optimizer, 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_own_optimizers_are_fused(optimizer, dtype):
    model = nn.Linear(2, 2).to(dtype)
    built = build(large_batch(optimizer=optimizer), model.named_parameters(), undecayed(model))
    assert all(group["fused"] for group in built.param_groups)


@by_optimizer
def test_gradient_that_comes_late(recipe):
    """torch's fused SGD raises a TypeError when a tensor gets its first gradient after the others."""
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = build(recipe, [("early", early), ("late", late)], set())
    early.grad = torch.ones(2)
    optimizer.step()
    late.grad = torch.ones(2)
    optimizer.step()
    assert (late < 1).all()
    assert (early < late).all()


@by_optimizer
def test_resumed_state_continues_identically(recipe):
    def start():
        torch.manual_seed(0)
        model = network()
        return model, build(recipe, model.named_parameters(), undecayed(model))

    def run(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

    whole, optimizer = start()
    run(whole, optimizer, range(6))
    half, optimizer = start()
    run(half, optimizer, range(3))
    resumed, fresh = start()
    resumed.load_state_dict(half.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    run(resumed, fresh, range(3, 6))
    for expected, actual in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("recipe", EVERY[:3], ids=lambda recipe: recipe.optimizer)
def test_slices_of_a_flat_buffer_follow_the_whole(recipe):
    """A sharded optimizer updates plain slices, some of them empty, and gets the very same numbers."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(10, dtype=torch.float64))
    flat, gradient = whole.detach().clone(), torch.zeros(10, dtype=torch.float64)
    slices = [(flat[a:b], gradient[a:b]) for a, b in [(0, 4), (4, 4), (4, 10)]]
    for tensor, part in slices:
        tensor.grad = part
    sharded = build(recipe, [(f"slice{i}", tensor) for i, (tensor, _) in enumerate(slices)], set())
    single = build(recipe, [("whole", whole)], set())
    for _ in range(4):
        gradient.copy_(torch.randn(10, dtype=torch.float64))
        whole.grad = gradient.clone()
        single.step()
        sharded.step()
    torch.testing.assert_close(flat, whole.detach(), rtol=1e-14, atol=0)


def folded(weight, rates, gradients, *, nesterov, corrected, m=0.9):
    """Goyal's equation (10), the rate folded into v, with or without the correction of remark 2."""
    v, old = torch.zeros_like(weight), rates[0]
    for lr, g in zip(rates, gradients, strict=True):
        v = m * (lr / old if corrected else 1.0) * v + lr * g
        weight = weight - (m * v + lr * g if nesterov else v)
        old = lr
    return weight


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction(nesterov):
    """Goyal remark 2: under a changing rate we follow the corrected form and not the uncorrected one."""
    torch.manual_seed(0)
    recipe = large_batch(nesterov=nesterov, weight_decay=0.0, warmup=1)
    schedule = recipe.schedule(8192, 81_920, 10 * 81_920)
    rates = [schedule(step * 8192) for step in range(50)]
    assert len(set(rates)) > 10
    start = torch.randn(5, dtype=torch.float64)
    gradients = list(torch.randn(50, 5, dtype=torch.float64))

    ours = nn.Parameter(start.clone())
    optimizer = build(recipe, [("weight", ours)], set())
    for lr, gradient in zip(rates, gradients, strict=True):
        set_lr(optimizer, lr)
        ours.grad = gradient
        optimizer.step()

    right = folded(start, rates, gradients, nesterov=nesterov, corrected=True)
    wrong = folded(start, rates, gradients, nesterov=nesterov, corrected=False)
    torch.testing.assert_close(ours.detach(), right, rtol=1e-12, atol=1e-12)
    assert (ours.detach() - wrong).abs().max() > 0.1
