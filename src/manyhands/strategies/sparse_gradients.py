"""Sparse gradients: which strategies refuse them, and their norm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from manyhands.core.errors import UsageError
from manyhands.recipes.optimizers import sparse_parameters


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
