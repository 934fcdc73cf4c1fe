"""A few steps without a run folder: to compare strategies tensor by tensor, and to measure speed."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from manyhands.core.errors import InterruptedRunError
from manyhands.core.rank_info import RankInfo
from manyhands.core.signals import StopRequest
from manyhands.data.generators import RandomStates
from manyhands.devices.device import choose
from manyhands.engine.context import RankContext, own_state, threads_of
from manyhands.records.spec import RunSpec
from manyhands.strategies.base import Votes
from manyhands.tasks import find
from manyhands.tasks.model_parts import batch_norms, switch_off_dropout

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
WARM_UP = 3  # steps that do not count: memory is allocated, kernels are chosen


class Probe(NamedTuple):
    """The result of a few steps: tensors, losses, and what makes models hard to compare."""

    state: dict[str, Tensor]
    losses: list[float]
    batch_norms: int
    dropouts: int  # modules, which were switched off
    called_dropout: bool = False  # also as a function, which was switched off too
    drew: bool = False  # random numbers were drawn all the same


def probe(info: RankInfo, spec: RunSpec, steps: int) -> Probe | None:
    """Make some steps without dropout; rank 0 returns the result."""
    with _context(info, spec) as context:
        model = context.worker.model
        dropouts, norms = switch_off_dropout(model), batch_norms(model)
        losses = []
        context.begin()
        before = RandomStates.now()
        with closing(context.feed.read(0)) as reader, _without_dropout() as called:
            for _ in range(steps):
                batch = next(reader)
                lr = context.schedule(context.position.samples)
                losses.append(context.worker.step(batch.micro_batches, batch.size, lr).loss)
                context.position.step += 1
                context.position.samples += batch.size
        # on the host, because the parent process may not have this device
        state = {n: tensor.detach().to("cpu", copy=True) for n, tensor in context.worker.state().items()}
        if info.rank:
            return None
        return Probe(state, losses, len(norms), dropouts, bool(called), not before.unchanged)


@contextmanager
def _without_dropout() -> Iterator[list[str]]:
    """Let torch's functions for dropout drop nothing; inside, the list gets the names of those in use."""
    called: list[str] = []

    def kept(name: str) -> Callable[..., Tensor]:
        def function(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if p and training:
                called.append(name)
            return input

        return function

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        if dropout_p:
            called.append("scaled_dot_product_attention")
        plain = own["scaled_dot_product_attention"]
        found: Tensor = plain(query, key, value, attn_mask, 0.0, *rest, **more)
        return found

    replaced: dict[str, Any] = {name: kept(name) for name in _DROPOUTS}
    replaced["scaled_dot_product_attention"] = attention
    own = {name: getattr(functional, name) for name in replaced}
    for name, function in replaced.items():
        setattr(functional, name, function)
    try:
        yield called
    finally:
        for name, function in own.items():
            setattr(functional, name, function)


@contextmanager
def _context(info: RankInfo, spec: RunSpec) -> Iterator[RankContext]:
    """A rank context with its own threads and random state; a task that calls sys.exit is an error."""
    with (
        own_state(threads_of(spec, info), choose(spec.device, info.local_rank)),
        find.no_exit(spec.task),
        closing(RankContext(info, spec)) as context,
    ):
        yield context


def measure(info: RankInfo, spec: RunSpec, seconds: float) -> float | None:
    """Samples per second, from the median step of about this many seconds.

    If all ranks were asked to stop, rank 0 raises an InterruptedRunError and the others return None.
    """
    leads = info.rank == 0
    with StopRequest() as stop, _context(info, spec) as context:
        times: list[float] = []

        def asked() -> int | None:
            # the parent's request may reach another rank first, and then rank 0 could not name the signal
            return stop.signal or (info.channel.stop if leads else None)

        def votes() -> Votes:
            over = leads and len(times) > 2 * WARM_UP and time.perf_counter() - began >= seconds
            return Votes(stop=asked() is not None, over=over)

        context.begin()
        context.clock.exact = False  # phases are not needed, and synchronizing a device takes time
        with closing(context.feed.read(0)) as reader:
            began = before = time.perf_counter()
            over = False
            while not over:
                batch = next(reader)
                # learning rate 0, so that nothing can diverge
                step = context.worker.step(batch.micro_batches, batch.size, 0.0, votes)
                if step.votes.stop:
                    if leads:
                        raise interrupted(asked() or signal.SIGTERM)
                    return None
                now = time.perf_counter()
                times.append(now - before)
                before, over = now, step.votes.over
                context.position.step += 1
        assert spec.batch is not None
        return spec.batch / statistics.median(times[WARM_UP:])


def measure_each(info: RankInfo, specs: list[RunSpec], rounds: int, seconds: float) -> list[float] | None:
    """The best of several rounds for each of several specs, in turn, by the same workers."""
    best = [0.0] * len(specs)
    for _ in range(rounds):
        for number, spec in enumerate(specs):
            rate = measure(info, spec, seconds)
            if rate is None:
                return None
            best[number] = max(best[number], rate)
    return best


def interrupted(number: int) -> InterruptedRunError:
    """The error for a signal during a measurement."""
    name = signal.Signals(number).name
    return InterruptedRunError(
        f"interrupted by {name} while speeds were measured, before the run began", number
    )
