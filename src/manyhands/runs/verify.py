"""Check that a strategy is exact: train the same steps with `single` and with it, compare tensors (law 4).

If batch norm looks at each worker's own share, one worker with the whole batch computes something else. Then
the reference is one worker that takes the same shares one after the other. Running statistics cannot be
compared in that case: one worker updates them share by share, several take the mean of their changes.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from manyhands.core import formatting, registry
from manyhands.core.errors import InterruptedRunError, ManyhandsError, UsageError, WorkerFailedError
from manyhands.core.registry import strategies
from manyhands.core.signals import StopRequest
from manyhands.data.order import sizes
from manyhands.launchers import LAUNCHERS
from manyhands.launchers.base import Launcher, SupervisionOptions
from manyhands.records.spec import RunSpec
from manyhands.runs.checks import check
from manyhands.runs.defaults import UNEVEN, fill_in
from manyhands.runs.launching import launch
from manyhands.runs.resolve import resolve
from manyhands.runs.settings import Settings
from manyhands.runs.train import given, named, with_lr, with_strategy_options
from manyhands.strategies import options
from manyhands.tasks import find
from manyhands.tasks.model_parts import STATISTICS

if TYPE_CHECKING:
    from torch import Tensor

    from manyhands.engine.probe import Probe
    from manyhands.tasks.base import Task

MICRO_BATCHES = 4  # default for a pipeline
# float32 rounds at 6e-8 of a value; a few steps with sums in another order stay far below this
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}


class Comparison(NamedTuple):
    """Result in one precision: each tensor's largest difference, relative to its largest value if above 1."""

    dtype: str
    reference: str
    tolerance: float
    tensors: dict[str, float]
    losses: float

    @property
    def largest(self) -> float:
        """The largest difference of all tensors and losses."""
        return max([self.losses, *self.tensors.values()])

    @property
    def holds(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.largest <= self.tolerance  # False for NaN


class Verification(NamedTuple):
    """What was compared, the results, and why some things are not comparable."""

    spec: RunSpec
    steps: int
    comparisons: list[Comparison]
    reasons: list[str]

    @property
    def deciding(self) -> Comparison:
        """The comparison in the highest precision.

        A difference in a lower one that is not there in a higher one is rounding: sums are made in another
        order, and batch norm over few samples can amplify what that changes.
        """
        return self.comparisons[-1]

    @property
    def exact(self) -> bool:
        """Whether the strategy computes what one worker does."""
        return self.deciding.holds and all(math.isfinite(each.largest) for each in self.comparisons)

    @property
    def rounding(self) -> list[str]:
        """What is said of differences that a higher precision does not have."""
        if not self.exact:
            return []
        return [
            f"{each.dtype}: rounding; {each.largest:.1e} is more than usual, but {self.deciding.dtype} "
            f"differs by {self.deciding.largest:.1e} only, so the strategy computes the same as one worker"
            for each in self.comparisons
            if not each.holds
        ]

    def lines(self) -> list[str]:
        """Return a table: one row per tensor, one column per precision; then the result and its notes."""
        comparisons = self.comparisons
        width = max(len(name) for name in [*comparisons[0].tensors, "largest of all"])

        def row(title: str, shown: Callable[[Comparison], str]) -> str:
            return f"{title:<{width}}" + "".join(f"  {shown(each):>9}" for each in comparisons)

        rows = [row("largest difference in", lambda each: each.dtype)]
        rows += [row(name, lambda each, n=name: f"{each.tensors[n]:.1e}") for name in comparisons[0].tensors]  # type: ignore[misc]
        rows.append(row("losses", lambda each: f"{each.losses:.1e}"))
        rows.append(row("largest of all", lambda each: f"{each.largest:.1e}"))
        rows.append(row("allowed", lambda each: f"{each.tolerance:.1e}"))
        return [*rows, *(f"note: {reason}" for reason in self.reasons), self.sentence]

    @property
    def sentence(self) -> str:
        """The result: `allreduce with 2 workers on shm equals single after 5 steps of 65 samples`."""
        spec, equal = self.spec, "equals" if self.exact else "DIFFERS FROM"
        return (
            f"{spec.strategy} with {spec.workers} workers on {spec.transport} {equal} "
            f"{self.comparisons[0].reference} after {self.steps} steps of {spec.batch} samples"
        )

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return the verification as data for JSON."""
        return {
            "task": self.spec.task,
            "strategy": self.spec.strategy,
            "transport": self.spec.transport,
            "workers": self.spec.workers,
            "batch": self.spec.batch,
            "steps": self.steps,
            "exact": self.exact,
            "comparisons": [
                {**comparison._asdict(), "largest": comparison.largest, "holds": comparison.holds}
                for comparison in self.comparisons
            ],
            "reasons": self.reasons,
        }


def verify(
    task: str | Task | Callable[..., Task],
    *,
    steps: int = 5,
    lr: float | None = None,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> Verification:
    """Train a few steps with one worker and with a strategy, and compare every tensor.

    >>> verify(task, strategy="pipeline", micro_batches=4).exact

    Settings are those of `mh.train`; by default two workers and a batch that they cannot share evenly.
    """
    usual = {"strategy": strategies.DATA_PARALLEL, "threads": 1, "workers": 2, "batch": UNEVEN}
    filled = fill_in(usual | with_strategy_options(with_lr(given(settings), lr)))
    spec = RunSpec.of(task=named(task), **filled)
    return compare(spec, steps, lambda text: None if quiet else print(text, file=sys.stderr))


def compare(spec: RunSpec, steps: int, notice: Callable[[str], None]) -> Verification:
    """Train some steps twice in each precision, and compare the results."""
    check(spec)
    _comparable(spec)
    spec = resolve(_with_micro_batches(spec))
    comparisons: list[Comparison] = []
    reasons: dict[str, None] = {}
    for dtype in TOLERANCES:
        notice(f"{dtype}: {steps} steps with single, {steps} with {spec.strategy} on {spec.transport}")
        try:
            comparison, found = _compare_in(dtype, spec, steps)
        except (RuntimeError, WorkerFailedError) as error:
            if not comparisons or (types := _mixed_types(str(error))) is None:
                raise
            found = [
                f"{dtype} is left out: the task holds float32 numbers that do not change their type with the "
                f'model, such as class weights that its loss has captured ("{types}")'
            ]
        else:
            comparisons.append(comparison)
        reasons |= dict.fromkeys(found)
    verification = Verification(spec, steps, comparisons, list(reasons))
    return verification._replace(reasons=[*reasons, *verification.rounding])


def _compare_in(dtype: str, spec: RunSpec, steps: int) -> tuple[Comparison, list[str]]:
    """Train the same steps twice in one precision; return the comparison, and what is not comparable."""
    ours = _probe(spec.replace(dtype=dtype), steps)
    parts = spec.replicas * spec.micro_batches
    by_share = ours.batch_norms > 0 and parts > spec.accumulate and not spec.sync_batchnorm
    if by_share:
        _check_shares(spec, steps)
    reference = spec.alone(
        dtype=dtype,
        threads=spec.threads or 1,
        accumulate=parts if by_share else spec.accumulate,
        sync_batchnorm=False,
        offload="none",
        memory=None,
    )
    theirs = _probe(reference, steps)
    # one replica takes its micro-batches one by one, as one worker does: then statistics are comparable too
    skipped = _statistics(theirs) if by_share and spec.replicas > 1 else set()
    named = _named(theirs, ours)
    reasons = _reasons(spec, ours, skipped)
    if any(name != other for name, other in named.items()):
        reasons.append(
            "each build of the model gives its tensors new numbers: they are compared in their order"
        )
    return _compare(dtype, reference, theirs, ours._replace(state=_renamed(ours, named)), skipped), reasons


def _mixed_types(text: str) -> str | None:
    """Return the line in which torch says that float32 meets float64, if there is one."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if "double" in line.lower() and "float" in line.lower()), None)


def _named(theirs: Probe, ours: Probe) -> dict[str, str]:
    """Map the name of each tensor of our model to the name of the tensor at the same place in theirs."""
    here, there = (
        {name: tensor.shape for name, tensor in each.state.items() if name.startswith("model/")}
        for each in (ours, theirs)
    )
    if here.keys() == there.keys():
        return {name: name for name in here}
    if list(here.values()) != list(there.values()):
        odd = min(here.keys() ^ there.keys()).removeprefix("model/")
        raise ManyhandsError(
            f"two builds of the model differ, not only in names: {odd} is in one of them only; for the same "
            "seed a task must build the same model"
        )
    return dict(zip(here, there, strict=True))


def _renamed(ours: Probe, named: dict[str, str]) -> dict[str, Tensor]:
    """Return our tensors under the reference's names; the optimizer's are named after their parameters."""
    found = {}
    for key, tensor in ours.state.items():
        *kind, name = key.split("/", 2 if key.startswith("optimizer/") else 1)
        other = named.get(f"model/{name}", f"model/{name}").removeprefix("model/")
        found["/".join([*kind, other])] = tensor
    return found


def _comparable(spec: RunSpec) -> None:
    """Refuse strategies and options that are not meant to equal one worker."""
    if spec.precision != "full":
        raise UsageError(
            "verify compares in float32 and float64, in which rounding can be told from an error: leave out "
            f"--precision {spec.precision}"
        )
    if spec.traits.asynchronous:
        raise UsageError(
            f"strategy {spec.strategy} is not single: its workers go at their own pace, and no two runs are "
            "alike; verify compares strategies that step together (allreduce, average with every 1)"
        )
    options.build(spec.strategy, spec.strategy_options).check_exact(spec.workers)


def _with_micro_batches(spec: RunSpec) -> RunSpec:
    """Return the spec with several micro-batches if none are given: one would not test the schedule."""
    if "micro_batches" not in options.known(spec.strategy) or spec.strategy_options.get("micro_batches"):
        return spec
    most = max(1, (spec.batch or MICRO_BATCHES) // max(1, spec.replicas))
    return spec.replace(strategy_options={**spec.strategy_options, "micro_batches": min(MICRO_BATCHES, most)})


def _check_shares(spec: RunSpec, steps: int) -> None:
    """Refuse a batch that one worker cannot divide into the same parts, if a norm looks at each part."""
    assert spec.batch is not None
    samples = len(find.build(spec.task, spec.options).train)
    full, ragged = divmod(samples, spec.batch)
    ragged = 0 if spec.drop_last else ragged
    for size in (spec.batch, ragged) if ragged and steps > full else (spec.batch,):
        parts = [part for share in sizes(size, spec.replicas) for part in sizes(share, spec.micro_batches)]
        # parts without a sample are not computed
        if [part for part in parts if part] != [part for part in sizes(size, len(parts)) if part]:
            raise UsageError(
                f"verify compares batch norm with one worker that takes the same {len(parts)} parts of a "
                f"batch, and {size} samples are divided unevenly: use a batch that {len(parts)} divides"
                + (", or fewer steps" if size == ragged else "")
            )


def _probe(spec: RunSpec, steps: int) -> Probe:
    from manyhands.engine.probe import probe

    launcher: Launcher = registry.member("launcher", LAUNCHERS, spec.launcher)()
    with StopRequest() as stop:
        found: Probe = launch(
            launcher, spec, probe, spec, steps, supervision=SupervisionOptions(timeout=spec.timeout)
        )[0]
    if stop.signal is not None:  # the steps of this probe were finished, and no more are started
        name = signal.Signals(stop.signal).name
        raise InterruptedRunError(f"interrupted by {name} while steps were compared", stop.signal)
    return found


def _statistics(result: Probe) -> set[str]:
    return {name for name in result.state if name.endswith(STATISTICS)}


def _reasons(spec: RunSpec, ours: Probe, skipped: set[str]) -> list[str]:
    reasons = []
    parts = spec.replicas * spec.micro_batches
    norms = formatting.plural(ours.batch_norms, "batch norm") + (
        " looks" if ours.batch_norms == 1 else " look"
    )
    if ours.batch_norms and spec.stages > 1 and parts > 1:
        left_out = ", and running statistics are left out" if skipped else ""
        reasons.append(
            f"{norms} at one micro-batch at a time, so one worker with the whole "
            f"batch computes something else; the reference takes the same {parts} parts one by one{left_out}"
        )
    elif skipped:
        synchronized = " (with --sync-batchnorm all of it is comparable)" * spec.traits.sync_batchnorm
        reasons.append(
            f"{norms} at each worker's own share, so one worker with the whole "
            f"batch computes something else; the reference takes the same {spec.workers} shares one by "
            f"one, and running statistics are left out{synchronized}"
        )
    if ours.dropouts or ours.called_dropout:
        which = [formatting.plural(ours.dropouts, "dropout")] if ours.dropouts else []
        which += ["dropout that the model calls as a function"] if ours.called_dropout else []
        were = "was" if ours.dropouts <= 1 and len(which) == 1 else "were"
        reasons.append(
            f"{' and '.join(which)} {were} switched off: every worker draws masks of its own for its samples"
        )
    if ours.drew:
        reasons.append(
            "the model draws random numbers in training, and every worker draws its own: a difference may "
            "come from there"
        )
    return reasons


def _compare(dtype: str, reference: RunSpec, theirs: Probe, ours: Probe, skipped: set[str]) -> Comparison:
    names = [name for name in theirs.state if name not in skipped]
    # without the strategy's own state
    learned = {name for name in ours.state if name.startswith(("model/", "optimizer/"))}
    if missing := theirs.state.keys() ^ learned:
        raise AssertionError(f"the strategies keep different tensors: {sorted(missing)}")
    differences = {name: _difference(theirs.state[name], ours.state[name]) for name in names}
    losses = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(theirs.losses, ours.losses, strict=True))
    described = "single" + (f" in {reference.accumulate} shares" if reference.accumulate > 1 else "")
    return Comparison(dtype, described, TOLERANCES[dtype], differences, losses)


def _difference(reference: Any, other: Any) -> float:
    if reference.numel() == 0:
        return 0.0
    reference, other = reference.double().cpu(), other.double().cpu()
    return float((reference - other).abs().max() / max(1.0, float(reference.abs().max())))
