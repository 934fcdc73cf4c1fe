"""Sparse gradients: which parameters have them, which strategies refuse them, and their norm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from manyhands.core.errors import UsageError
from manyhands.recipes.optimizers import has_sparse_gradients


def sparse_parameters(model: nn.Module) -> set[str]:
    """The names of the trained parameters whose gradients are sparse, a tied one under each of its names."""
    found = {
        id(parameter)
        for module in model.modules()
        if has_sparse_gradients(module)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    everything = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in everything if id(parameter) in found}


def refuse(model: nn.Module, strategy: str) -> None:
    """Raise an error if the model has sparse gradients, which this strategy cannot use."""
    if names := sorted(sparse_parameters(model)):
        raise UsageError(
            f"strategy {strategy} exchanges dense gradients, but {names[0]} has sparse ones: "
            "use single, hogwild or average, or an embedding with sparse=False"
        )


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together, where some are sparse: a row that is listed twice is one row."""
    return get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
