"""The recipes: each is a function from the user's options to a `Recipe`."""

from __future__ import annotations

from typing import Literal

from manyhands.recipes.base import Recipe, Scaling
from manyhands.recipes.lr_schedule import Decay

Plain = Literal[
    "sgd", "adam", "adamw", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "muon", "nadam", "radam",
    "rmsprop", "rprop",
]  # fmt: skip

# Learning rates at a batch of 256.
# sgd: Goyal et al. 2017. adam, adamw: Kingma and Ba 2015, and torch's own default.
# lars: a peak of 10 at batch 8192, as MLPerf's ResNet-50 has it, is 0.31 at 256; SimCLR uses 0.3 * batch/256.
# lamb: You et al. 2019 train ResNet-50 at 4/(2^3 * 100) at batch 512 and scale by the square root.
# The others have torch's own defaults.
LEARNING_RATES = {
    "sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "lars": 0.3, "lamb": 0.0035,
    "adadelta": 1.0, "adafactor": 0.01, "adagrad": 0.01, "adamax": 2e-3, "asgd": 0.01, "muon": 1e-3,
    "nadam": 2e-3, "radam": 1e-3, "rmsprop": 0.01, "rprop": 0.01,
}  # fmt: skip

GOYAL = (1 / 3, 2 / 3, 8 / 9)  # epochs 30, 60 and 80 of 90


def constant(
    *,
    optimizer: Plain = "sgd",
    lr: float | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    clip: float | None = None,
) -> Recipe:
    """The null member: the learning rate as given, without scaling, warm-up or decay."""
    return Recipe(
        name="constant",
        optimizer=optimizer,
        lr=_lr(optimizer, lr),
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        clip=clip,
    )


def large_batch(
    *,
    optimizer: Plain = "sgd",
    lr: float | None = None,
    scaling: Scaling = "linear",
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 1e-4,
    warmup: float = 5.0,
    decay: Decay = "step",
    milestones: tuple[float, ...] = GOYAL,
    factor: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.999,
    clip: float | None = None,
) -> Recipe:
    """Goyal et al. 2017: k times the batch, k times the learning rate, reached gradually."""
    return Recipe(
        name="large-batch",
        optimizer=optimizer,
        lr=_lr(optimizer, lr),
        scaling=scaling,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        warmup=warmup,
        decay=decay,
        milestones=milestones,
        factor=factor,
        beta1=beta1,
        beta2=beta2,
        clip=clip,
    )


# LARS and LAMB warm up from zero, as published, not from the reference learning rate. A layer's step is a
# share of the norm of its weights, however small the gradient is, so only zero is a gentle start. The papers
# use a polynomial decay to zero; the cosine is the closest of the decays here.


def lars(
    *,
    lr: float | None = None,
    scaling: Scaling = "linear",
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    coefficient: float = 0.001,
    warmup: float = 5.0,
    decay: Decay = "cosine",
    milestones: tuple[float, ...] = GOYAL,
    factor: float = 0.1,
    clip: float | None = None,
) -> Recipe:
    """You, Gitman and Ginsburg 2017: a layer's step is `coefficient` times the norm of its weights."""
    return Recipe(
        name="lars",
        optimizer="lars",
        lr=_lr("lars", lr),
        scaling=scaling,
        momentum=momentum,
        weight_decay=weight_decay,
        coefficient=coefficient,
        warmup=warmup,
        warmup_from="zero",
        decay=decay,
        milestones=milestones,
        factor=factor,
        clip=clip,
    )


def lamb(
    *,
    lr: float | None = None,
    scaling: Scaling = "sqrt",
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    clamp: float | None = None,
    warmup: float = 5.0,
    decay: Decay = "cosine",
    milestones: tuple[float, ...] = GOYAL,
    factor: float = 0.1,
    clip: float | None = None,
) -> Recipe:
    """You et al. 2019: Adam's direction, scaled to the norm of a layer's weights, at most `clamp`."""
    return Recipe(
        name="lamb",
        optimizer="lamb",
        lr=_lr("lamb", lr),
        scaling=scaling,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        clamp=clamp,
        warmup=warmup,
        warmup_from="zero",
        decay=decay,
        milestones=milestones,
        factor=factor,
        clip=clip,
    )


def _lr(optimizer: str, lr: float | None) -> float:
    # Recipe refuses an unknown optimizer and lists the known ones
    return LEARNING_RATES.get(optimizer, 1.0) if lr is None else lr
