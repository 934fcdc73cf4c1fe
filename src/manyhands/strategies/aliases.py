"""A parameter that a strategy does not train where a model may still reach it: who does so is refused.

FSDP puts shards in the place of a model's parameters, and a stage of a pipeline trains its own. A model that
keeps the very same parameters elsewhere too (in a list, in a closure) would go on computing with these: they
get gradients that nobody sums and updates that nobody makes, and the run would learn nothing in silence.
Wherever such a reference is kept, it shows in the first backward pass: a gradient arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from manyhands.errors import UsageError


def refuse_use(how: str, why: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """From now on, say of these parameters that a gradient has reached one, and why it must not."""
    for name, parameter in named:
        if parameter.requires_grad:
            parameter.register_hook(partial(_refuse, how, why, name))  # type: ignore[no-untyped-call]


def _refuse(how: str, why: str, name: str, gradient: Tensor) -> None:
    raise UsageError(
        f"this model cannot be trained {how}: it reaches the parameter {name} by another reference "
        f"than its module's (a list, a closure, another block), {why}: use it through its module, or take "
        "strategy allreduce"
    )
