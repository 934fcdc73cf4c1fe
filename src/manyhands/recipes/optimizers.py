"""Build a torch optimizer from a recipe and named tensors, without weight decay for biases and norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from manyhands.core.errors import UsageError
from manyhands.recipes.base import SCALARS, Recipe
from manyhands.recipes.layerwise import Lamb, Lars, Norms, local_norms
from manyhands.recipes.own_recipe import AnyRecipe, OwnRecipe
from manyhands.recipes.several import Several

NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,  # batch, synchronized batch and instance normalization
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
FUSED_DEVICES = ("cpu", "cuda")  # one kernel for all tensors: twice as fast as torch's loop on a CPU


def has_sparse_gradients(module: nn.Module) -> bool:
    """Whether the parameters of this layer get sparse gradients: only the rows that it has read."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def undecayed(model: nn.Module) -> set[str]:
    """The names of all biases, of all parameters of normalization layers and of those with sparse gradients.

    With sparse gradients, a step should write only a few rows, but a decay would write to every row. These
    parameters are never decayed, even by strategies that make their gradients dense, so that all strategies
    learn the same.
    """
    exempt = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, NORMALIZATIONS) or has_sparse_gradients(module) or _is_bias(name)
    }
    return _named(model, exempt)


def embeddings(model: nn.Module) -> set[str]:
    """The names of the parameters of embedding layers, tied ones under each of their names."""
    held = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    return _named(model, held)


def sparse_parameters(model: nn.Module) -> set[str]:
    """The names of the trained parameters whose gradients are sparse, a tied one under each of its names."""
    found = {
        id(parameter)
        for module in model.modules()
        if has_sparse_gradients(module)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    return _named(model, found)


def _named(model: nn.Module, held: Collection[int]) -> set[str]:
    """All names of these parameters, which are given by identity: a tied one has several."""
    everything = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in everything if id(parameter) in held}


def build(
    recipe: AnyRecipe,
    named_parameters: Iterable[tuple[str, Tensor]],
    undecayed: Collection[str],
    norms: Norms = local_norms,
    sparse: Collection[str] = (),
    whole: Mapping[str, nn.Parameter] | None = None,
    embeddings: Collection[str] = (),
) -> Optimizer:
    """The recipe's optimizer for these tensors, with a decayed and an undecayed group (unless empty).

    Frozen parameters are left out, and tied ones appear once. Plain tensors are allowed: slices of a flat
    buffer need no autograd, only their `.grad`. A group has one of `names` for each of its `params`, and says
    in `scalars` what is kept once per parameter. The learning rate is the recipe's `lr` until `set_lr`
    changes it. Where a worker has some of the parameters, or slices, `whole` are all of them. `embeddings`
    are looked up by row, which Muon should not get.

    `sparse` names the parameters whose gradients are sparse. A step writes only to the rows of the gradient.
    So such parameters are never decayed, and the recipe must be plain SGD: momentum and the averages of adam
    would change every row at every step.
    """
    trained = _trained(named_parameters)
    if isinstance(recipe, OwnRecipe):
        return recipe.build(trained, _trained_parameters(trained) if whole is None else whole)
    sparse = [name for name in trained if name in sparse]
    groups = _groups(recipe, trained, {*undecayed, *sparse})
    if not groups:
        raise UsageError("there is nothing to train: the model has no parameter that requires a gradient")
    if sparse:
        _check_sparse(recipe, sparse)
        return SparseSgd(groups, recipe.lr)
    if recipe.optimizer == "muon":
        return _muon(recipe, groups, {*undecayed, *embeddings})
    return _plain(recipe, groups, norms)


def for_model(
    recipe: AnyRecipe,
    model: nn.Module,
    pieces: Mapping[str, Tensor] | None = None,
    *,
    norms: Norms = local_norms,
    sparse: bool = False,
) -> Optimizer:
    """The recipe's optimizer for a model, or for what a worker has of its trained parameters.

    With `sparse`, sparse gradients stay so; otherwise the strategy makes them dense.
    """
    whole = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return build(
        recipe,
        (whole if pieces is None else pieces).items(),
        undecayed(model),
        norms,
        sparse_parameters(model) if sparse else (),
        whole,
        embeddings(model),
    )


def _plain(recipe: Recipe, groups: list[dict[str, Any]], norms: Norms) -> Optimizer:
    """One optimizer for all groups."""
    betas = (recipe.beta1, recipe.beta2)
    match recipe.optimizer:
        case "sgd":
            return _sgd(recipe, groups)
        case "adam":
            return Adam(groups, lr=recipe.lr, betas=betas, fused=_fusable(groups))
        case "adamw":
            return AdamW(groups, lr=recipe.lr, betas=betas, fused=_fusable(groups))
        case "adadelta":
            return Adadelta(groups, lr=recipe.lr)
        case "adafactor":
            return Adafactor(groups, lr=recipe.lr)
        case "adagrad":
            return Adagrad(groups, lr=recipe.lr)
        case "adamax":
            return Adamax(groups, lr=recipe.lr, betas=betas)
        case "asgd":
            return ASGD(groups, lr=recipe.lr)
        case "nadam":
            return NAdam(groups, lr=recipe.lr, betas=betas)
        case "radam":
            return RAdam(groups, lr=recipe.lr, betas=betas)
        case "rmsprop":
            return RMSprop(groups, lr=recipe.lr)
        case "rprop":
            return Rprop(groups, lr=recipe.lr)
        case "lars":
            coefficient = recipe.coefficient
            return Lars(groups, recipe.lr, momentum=recipe.momentum, coefficient=coefficient, norms=norms)
        case "lamb":
            return Lamb(groups, recipe.lr, betas=betas, clamp=recipe.clamp, norms=norms)
        case "muon":
            raise AssertionError("two optimizers: see _muon")


def groups_of(optimizer: Optimizer) -> dict[str, int]:
    """The number of the group that each parameter is in, by name."""
    groups = enumerate(optimizer.param_groups)
    return {name: number for number, group in groups for name in group["names"]}


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Use this learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


@final
class SparseSgd(Optimizer):
    """Plain SGD, `w <- w - lr (g + decay w)`, that writes only the rows of a sparse gradient.

    torch's own SGD accepts sparse gradients too, but is not fused and adds them row by row. For rows of one
    element that takes 3 to 14 times as long as `index_add_` on the flat column. And torch reports each step
    to its profiler and hooks, which takes longer than to update a few hundred rows. This class does not.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the current gradients. Parameters without a gradient are skipped."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, dense = group["lr"], group["weight_decay"], []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight.grad.is_sparse:
                    _add_rows(weight, weight.grad, -lr)
                else:
                    dense.append(weight)
            if dense:
                if decay:
                    torch._foreach_mul_(dense, 1.0 - lr * decay)
                torch._foreach_add_(dense, [weight.grad for weight in dense], alpha=-lr)
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None


def _add_rows(weight: Tensor, gradient: Tensor, factor: float) -> None:
    """Add a sparse gradient. Rows that occur twice are added twice."""
    if weight.ndim == 2 and weight.shape[1] == 1 and gradient.sparse_dim() == 1:
        rows, values = gradient._indices()[0], gradient._values()
        weight.squeeze(1).index_add_(0, rows, values.squeeze(1), alpha=factor)
    else:
        weight.add_(gradient, alpha=factor)


def _check_sparse(recipe: Recipe, names: list[str]) -> None:
    got: str = recipe.optimizer
    if got == "sgd":
        if not recipe.momentum:
            return
        got = f"sgd with {'nesterov ' if recipe.nesterov else ''}momentum {recipe.momentum:g}"
    raise UsageError(f"sparse gradients ({', '.join(names)}) need plain sgd without momentum, got {got}")


def _is_bias(name: str) -> bool:
    # recurrent layers have bias_ih_l0, attention has in_proj_bias
    return name == "bias" or name.startswith("bias_") or name.endswith("_bias")


def _trained(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    added: set[int] = set()
    trained: dict[str, Tensor] = {}
    for name, tensor in named_parameters:
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if not frozen and id(tensor) not in added:
            added.add(id(tensor))
            trained[name] = tensor
    return trained


def _groups(recipe: Recipe, trained: dict[str, Tensor], undecayed: Collection[str]) -> list[dict[str, Any]]:
    decayed = [name for name in trained if name not in undecayed]
    exempt = [name for name in trained if name in undecayed]
    groups = [_group(trained, decayed, recipe.weight_decay), _group(trained, exempt, 0.0)]
    if recipe.optimizer in ("lars", "lamb"):
        for group, layerwise in zip(groups, (True, False), strict=True):
            group["layerwise"] = layerwise
    return [group for group in groups if group["params"]]


def _group(trained: dict[str, Tensor], names: list[str], weight_decay: float) -> dict[str, Any]:
    held = [trained[name] for name in names]
    return {"params": held, "names": names, "weight_decay": weight_decay, "scalars": SCALARS}


def _trained_parameters(trained: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in trained.items() if isinstance(tensor, nn.Parameter)}


def _fusable(groups: list[dict[str, Any]]) -> bool | None:
    tensors = [tensor for group in groups for tensor in group["params"]]
    fits = all(tensor.is_floating_point() and tensor.device.type in FUSED_DEVICES for tensor in tensors)
    return True if fits else None  # None lets torch choose


def _sgd(recipe: Recipe, groups: list[dict[str, Any]]) -> SGD:
    # torch's momentum buffer does not include the learning rate (v <- momentum v + g, w <- w - lr v), so
    # Goyal's momentum correction is built in
    optimizer = SGD(
        groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=_fusable(groups)
    )
    if recipe.momentum:
        # torch's fused kernel fails when a tensor gets its first gradient later than the others; starting
        # every buffer at zero is the same arithmetic
        for group in groups:
            for tensor in group["params"]:
                optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
    return optimizer


def _muon(recipe: Recipe, groups: list[dict[str, Any]], others: Collection[str]) -> Optimizer:
    """Muon for matrices, and AdamW for embeddings, biases, norms and all that is not a matrix.

    That is how its authors use it. With torch's `match_rms_adamw` one learning rate suits both.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"this torch, {torch.__version__}, has no optimizer muon: it needs 2.9 or newer")
    matrices: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        pairs = list(zip(group["names"], group["params"], strict=True))
        chosen = [name for name, tensor in pairs if tensor.ndim == 2 and name not in others]
        for names, target in ((chosen, matrices), ([n for n, _ in pairs if n not in chosen], rest)):
            if names:
                target.append(_group(dict(pairs), names, group["weight_decay"]))
    made: list[Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=recipe.lr, adjust_lr_fn="match_rms_adamw"))
    if rest:
        betas = (recipe.beta1, recipe.beta2)
        made.append(AdamW(rest, lr=recipe.lr, betas=betas, fused=_fusable(rest)))
    return made[0] if len(made) == 1 else Several(made)
