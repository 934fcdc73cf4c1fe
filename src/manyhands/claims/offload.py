"""A network that does not fit trains all the same if activations are moved out; what that saves and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from manyhands.analysis import groups
from manyhands.claims import limit_trial, published
from manyhands.claims.base import SEEDS, Claim, Finding, Part, Row, together, unsettled
from manyhands.claims.limit_trial import LimitTrial
from manyhands.claims.plots import Dot, Line, Plot
from manyhands.claims.rounds import compare
from manyhands.core import formatting
from manyhands.core.statistics import USUAL_FREEDOM, Estimate, moderated, summary
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

SAVED = 0.5  # of the activations' memory, at least
SLOWER = 4 / 3  # at most: recomputing all activations would cost a third of the time
DOMINANT = 0.5  # of a worker's memory must be activations, or saving all of them would not show
KEPT = "none"
NOISE = 0.02  # relative: the peak memory of two equal runs differs by about this much


def judge(results: Results) -> Finding:
    """First whether it trains where it does not fit, then the memory that is saved, and the time."""
    trials = limit_trial.read(results.folder)
    runs = [record for record in results.records if groups.measured(record)]
    parts: list[Part] = [_fits(trials)] if trials else []
    table: list[Row] = []
    plots: list[Plot] = []
    for task in groups.tasks(runs):
        modes: dict[str, list[RunRecord]] = {}
        for record in groups.of_task(runs, task):
            modes.setdefault(record.spec.offload, []).append(record)
        if KEPT not in modes or len(modes) < 2:
            continue
        activations = _activations(groups.of_task(runs, task))
        best = min((mode for mode in modes if mode != KEPT), key=lambda mode: _memory(modes[mode]))
        parts += [
            _saved(task, modes[KEPT], modes[best], activations),
            _slower(results, task, modes[KEPT], modes[best]),
        ]
        table += [_row(results, task, modes[KEPT], mode, found) for mode, found in modes.items()]
        plots += _plots(task, modes, activations)
    if not parts:
        return unsettled("this needs timed runs with offload none and with another mode")
    if not trials:
        parts.insert(0, _untried())
    beside = (
        "Published (Rhu et al. 2016): 89 to 95 % less memory on average, and VGG-16 at batch 256, a 28 GB "
        "job, on 12 GB, 18 % slower."
    )
    return together(parts, table, beside, plots)


_FITS = "it does not fit, and trains all the same"


def _untried() -> Part:
    text = "no run was tried under a limit of the system's"
    settles = "`manyhands claims run offload` does, in a minute or two, where it may make a memory cgroup"
    return Part(_FITS, Estimate(math.nan, -math.inf, math.inf), 1.0, True, text, doubt=text, settles=settles)


def _fits(trials: Sequence[LimitTrial]) -> Part:
    """In which share of the trials plain training was ended by the limit and offloaded training was not."""
    last = trials[-1]
    if last.problem:
        return _untried()._replace(text=last.problem, doubt=last.problem)
    shares = [float(trial.plain_failed and trial.offloaded_trained) for trial in trials]
    found = Estimate(sum(shares) / len(shares), min(shares), max(shares))
    text = (
        f"under a limit of {formatting.size(last.limit)} ({last.enforced_by}), training with all activations "
        f"kept {'is ended by the system' if last.plain_failed else 'goes on'}, and with offload "
        f"{'it trains' if last.offloaded_trained else 'it does not train, either'} "
        f"({sum(map(int, shares))} of {formatting.plural(len(shares), 'trial')})"
    )
    weak = "" if all(trial.plain_failed for trial in trials) else "the limit was too wide: it fits"
    return Part(_FITS, found, 1.0, True, text, weak)


def _activations(records: Sequence[RunRecord]) -> float | None:
    """Bytes of activations if all are kept, as planning found them."""
    plans = [record.choices.get("offload") for record in records]
    found = [plan["predicted_peak_plain"] for plan in plans if plan and "predicted_peak_plain" in plan]
    return summary(found).median if found else None


def _saved(
    task: str, plain: Sequence[RunRecord], moved: Sequence[RunRecord], activations: float | None
) -> Part:
    name = f"{task}: activations' memory saved"
    mode, before, after = moved[0].spec.offload, _memory(plain), _memory(moved)
    less = f"{formatting.size(before)} to {formatting.size(after)} per worker"
    if activations is None:
        text = f"{task}: offload {mode} needs {less}; the size of the activations is not known"
        unknown = Estimate(math.nan, -math.inf, math.inf)
        doubt = "no run with offload auto has measured them"
        return Part(name, unknown, SAVED, True, text, doubt=doubt, unit="%")
    found = _share(_paired(plain, moved), activations)
    of_them = f"of the {formatting.size(activations)} of activations"
    if found.low == 1:  # they take freed memory with them, which the process would keep
        text = f"{task}: offload {mode} saves all {of_them}, and what the process kept beside them ({less})"
    else:
        value, low, high = map(formatting.percent, found)
        text = f"{task}: offload {mode} saves {value} ({low} to {high}) {of_them} ({less})"
    small = f"activations are only {formatting.percent(activations / before)} of the memory"
    weak = small if activations < DOMINANT * before else ""
    return Part(name, found, SAVED, True, text, weak, unit="%")


def _slower(results: Results, task: str, plain: Sequence[RunRecord], moved: Sequence[RunRecord]) -> Part:
    name, mode = f"{task}: time, relative to keeping all", moved[0].spec.offload
    seen = compare(results, plain[0], moved[0])
    if seen is None:
        unknown = Estimate(math.nan, -math.inf, math.inf)
        text = f"offload {mode} was not timed next to {KEPT}"
        return Part(name, unknown, SLOWER, False, text, doubt="they share no rounds", unit="x")
    found = Estimate(seen.ratio.median, seen.ratio.low, seen.ratio.high)
    text = (
        f"it takes {found.value:.2f}x ({found.low:.2f}x to {found.high:.2f}x) the time "
        f"({formatting.plural(seen.rounds, 'round')}; recomputing everything would take {SLOWER:.2f}x)"
    )
    weak = "" if seen.rounds >= SEEDS else f"{formatting.plural(seen.rounds, 'paired round')} of {SEEDS}"
    return Part(name, found, SLOWER, False, text, weak, settles="more rounds would settle it", unit="x")


def _paired(plain: Sequence[RunRecord], moved: Sequence[RunRecord]) -> list[tuple[float, float]]:
    """The memory of both sides in the repeats and seeds that they share."""
    one, other = ({(r.repeat, r.spec.seed): _held(r) for r in side} for side in (plain, moved))
    return [(one[key], other[key]) for key in sorted(one.keys() & other.keys())]


def _share(held: Sequence[tuple[float, float]], activations: float) -> Estimate:
    """The share of the activations that is saved, at most all; one measurement varies by a few percent."""
    if not held:
        return Estimate(math.nan, -math.inf, math.inf)
    shares = [(one - other) / activations for one, other in held]
    varies = [NOISE * math.hypot(one, other) / activations for one, other in held]
    reach = moderated(shares, max(varies) ** 2, USUAL_FREEDOM)
    center = math.fsum(shares) / len(shares)
    return Estimate(*(min(1.0, end) for end in (center, center - reach, center + reach)))


def _held(record: RunRecord) -> float:
    return float(max(record.memory or [record.peak_memory]))


def _memory(records: Sequence[RunRecord]) -> float:
    return summary([_held(record) for record in records]).median


def _seconds(records: Sequence[RunRecord]) -> float:
    return summary([(record.spec.batch or 1) / record.throughput for record in records]).median


def _row(
    results: Results, task: str, plain: Sequence[RunRecord], mode: str, records: Sequence[RunRecord]
) -> Row:
    memory, seen = _memory(records), compare(results, plain[0], records[0])
    timed = f"{seen.ratio.median:.2f}x" if seen is not None and mode != KEPT else "1"
    rounds = max(seen.rounds if seen else 0, len(records))
    return {
        "task": task,
        "offload": mode,
        "memory per worker": formatting.size(memory),
        "less": formatting.percent(1 - memory / _memory(plain)),
        "step": formatting.duration(_seconds(records)),
        "time": timed,
        "rounds": rounds,
    }


def _plots(task: str, modes: dict[str, list[RunRecord]], activations: float | None) -> list[Plot]:
    before = _memory(modes[KEPT])
    here = [
        Dot(mode, min(1.0, (before - _memory(records)) / (activations or before)))
        for mode, records in modes.items()
        if mode != KEPT
    ]
    share = "of the activations" if activations else "of the memory"
    said = [Dot(network, saved) for network, saved in published.VDNN_SAVED.items()]
    return [
        Plot(
            f"{task}, here",
            "offload",
            f"share {share} saved",
            [Line("here", here, joined=False)],
            percent=True,
            zero=True,
        ),
        Plot(
            "vDNN, published (average GPU memory)",
            "network",
            "share of the memory saved",
            [Line("published", said, joined=False)],
            percent=True,
            zero=True,
        ),
    ]


OFFLOAD = Claim(
    "offload",
    "A network whose activations do not fit trains all the same if they are moved out between forward and "
    "backward, a little slower.",
    "vDNN, Rhu et al. 2016: VGG-16 at batch 256, a 28 GB job, on 12 GB, 18 % slower",
    judge,
    "30 min",
    [
        "The limit is a memory cgroup between what training needs with all activations kept and with "
        "offload. Each side is a process of its own; one that the system ends is an outcome like any other.",
        "What is saved is judged relative to the activations, not to the whole process, and only where they "
        "are at least half of its memory: parameters cannot be moved out.",
        f"A little slower means less than {SLOWER:.2f} times the time: that is what computing all "
        "activations a second time would cost.",
    ],
)
