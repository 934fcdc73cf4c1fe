"""The three rules that combine the workers' copies: mean, nesterov (DiLoCo) and elastic (EASGD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, final

import torch
from torch import Tensor

from manyhands.strategies.local_sgd.replica import Replica, Rows, UpTo
from manyhands.strategies.options import AverageOptions
from manyhands.transports.base import Transport

ELASTICITY = 0.9  # of all workers together, as in Zhang, Choromanska and LeCun


class OuterUpdate(Protocol):
    """A rule that combines the workers' copies."""

    replicas_differ: bool  # whether copies differ even after they were synchronized

    def synchronize(self, weight: float) -> None:
        """Exchange copies and headers, and let every worker continue from the result."""

    def consolidate(self, rows: Rows, weight: float, *, optimizer_state: bool) -> None:
        """Make rows, which may be a copy, what all workers have learned together; do not synchronize."""

    def state(self) -> dict[str, Tensor]:
        """What the rule keeps from one synchronization to the next."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a state, which the replica has loaded already."""


@final
class Mean:
    """All workers take the mean: the null member."""

    replicas_differ = False

    def __init__(self, replica: Replica, averages_optimizer: bool) -> None:
        self._replica, self._averages_optimizer = replica, averages_optimizer

    def synchronize(self, weight: float) -> None:
        """Average in place, with one message per dtype."""
        upto: UpTo = "optimizer_state" if self._averages_optimizer else "header"
        self._replica.average(self._replica.rows, weight, upto=upto)
        self._replica.mark_synced(optimizer_state=self._averages_optimizer)

    def consolidate(self, rows: Rows, weight: float, *, optimizer_state: bool) -> None:
        self._replica.average(rows, weight, upto="optimizer_state" if optimizer_state else "buffers")

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing: the mean keeps no state."""


@final
class Nesterov:
    """DiLoCo: the distance from the mean to the anchor is a gradient, with which all workers take one step.

    g = anchor - mean,   v <- momentum v + g,   anchor <- anchor - lr (g + momentum v)
    """

    replicas_differ = False

    def __init__(self, replica: Replica, lr: float, momentum: float, averages_optimizer: bool) -> None:
        self._replica, self._lr, self._momentum = replica, lr, momentum
        self._averages_optimizer = averages_optimizer
        self._anchors = [bucket.row[bucket.weights].clone() for bucket in replica.buckets]
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]

    def synchronize(self, weight: float) -> None:
        """Take the mean, then a step from the anchor towards it and beyond."""
        upto: UpTo = "optimizer_state" if self._averages_optimizer else "header"
        self._replica.average(self._replica.rows, weight, upto=upto)
        for bucket, anchor, velocity in zip(
            self._replica.buckets, self._anchors, self._velocities, strict=True
        ):
            here = bucket.row[bucket.weights]
            gradient = torch.sub(anchor, here, out=here)
            velocity.mul_(self._momentum).add_(gradient)
            anchor.sub_(gradient, alpha=self._lr).sub_(velocity, alpha=self._lr * self._momentum)
            here.copy_(anchor)
        self._replica.mark_synced(optimizer_state=self._averages_optimizer)

    def consolidate(self, rows: Rows, weight: float, *, optimizer_state: bool) -> None:
        """Take the mean: within a round there is no outer step."""
        self._replica.average(rows, weight, upto="optimizer_state" if optimizer_state else "buffers")

    def state(self) -> dict[str, Tensor]:
        """The anchor and its momentum."""
        named = {"anchor": self._anchors, "momentum": self._velocities}
        return {
            f"{kind}/{n}": t for kind, rows in named.items() for n, t in self._replica.weights(rows).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load anchor and momentum; without them, start from the model with no momentum."""
        here = self._replica.weights(self._replica.rows)
        for name, anchor in self._replica.weights(self._anchors).items():
            anchor.copy_(tensors.get(f"average/anchor/{name}", here[name]))
        for name, velocity in self._replica.weights(self._velocities).items():
            velocity.copy_(tensors.get(f"average/momentum/{name}", torch.zeros_like(velocity)))


@final
class Elastic:
    """EASGD: workers and a center pull each other; the center is what is learned.

    x_i <- x_i - a (x_i - c),   c <- c + a sum over i of (x_i - c)
    """

    replicas_differ = True

    def __init__(self, replica: Replica, transport: Transport, elasticity: float | None) -> None:
        self._replica, self._transport = replica, transport
        self._elasticity = ELASTICITY / transport.size if elasticity is None else elasticity
        self._centers = [bucket.row[bucket.weights].clone() for bucket in replica.buckets]

    def synchronize(self, weight: float) -> None:
        """Let all workers pull at once; each keeps its own optimizer state."""
        for bucket, center in zip(self._replica.buckets, self._centers, strict=True):
            message = bucket.row[: bucket.header.stop].clone()
            pull, changes = message[bucket.weights], message[bucket.buffers]
            pull.sub_(center).mul_(self._elasticity)
            changes.sub_(bucket.synced_buffers).mul_(weight)
            bucket.row[bucket.weights].sub_(pull)
            if message.numel():
                self._transport.all_reduce(message)
            center.add_(pull)
            bucket.row[bucket.buffers].copy_(bucket.synced_buffers.add_(changes))
            bucket.row[bucket.header].copy_(message[bucket.header])

    def consolidate(self, rows: Rows, weight: float, *, optimizer_state: bool) -> None:
        """Take the center, which all workers have, and the mean of buffers and optimizer state."""
        upto: UpTo = "optimizer_state" if optimizer_state else "buffers"
        self._replica.average(rows, weight, weights=False, upto=upto)
        for bucket, row, center in zip(self._replica.buckets, rows, self._centers, strict=True):
            row[bucket.weights].copy_(center)

    def state(self) -> dict[str, Tensor]:
        """Return nothing: the center is the model that is saved."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the center from the model that was saved."""
        for name, center in self._replica.weights(self._centers).items():
            center.copy_(tensors[f"model/{name}"])


def build(options: AverageOptions, replica: Replica, transport: Transport) -> OuterUpdate:
    """The rule that the options name."""
    match options.outer:
        case "mean":
            return Mean(replica, options.averages_optimizer)
        case "nesterov":
            return Nesterov(replica, options.outer_lr, options.outer_momentum, options.averages_optimizer)
        case "elastic":
            return Elastic(replica, transport, options.elasticity)
