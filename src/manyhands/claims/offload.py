"""How much memory offloading activations saves, and how much time it costs."""

from __future__ import annotations

from manyhands.analysis import groups
from manyhands.claims.base import Claim, Finding, Row, together, unsettled
from manyhands.core import formatting
from manyhands.core.statistics import summary
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Results

LESS = 0.3  # share of a worker's memory, including parameters, that must be saved
SLOWER = 0.25  # at most; vDNN: 18 % for a network that would not fit at all


def _judge(results: Results) -> Finding:
    runs = [record for record in results.records if groups.measured(record)]
    parts: list[tuple[bool, str]] = []
    table: list[Row] = []
    for task in groups.tasks(runs):
        modes: dict[str, list[RunRecord]] = {}
        for record in groups.of_task(runs, task):
            modes.setdefault(record.spec.offload, []).append(record)
        if "none" not in modes or len(modes) < 2:
            continue
        rows = {mode: (_memory(records), _seconds(records)) for mode, records in modes.items()}
        memory, seconds = rows["none"]
        table += [
            {
                "task": task,
                "offload": mode,
                "memory per worker": formatting.size(taken),
                "less": formatting.percent(1 - taken / memory),
                "step": formatting.duration(step),
                "slower": formatting.percent(step / seconds - 1),
            }
            for mode, (taken, step) in rows.items()
        ]
        moved = {mode: row for mode, row in rows.items() if mode != "none"}
        smallest = min(moved, key=lambda mode: moved[mode][0])
        fast = [mode for mode, (_, step) in moved.items() if step / seconds - 1 <= SLOWER]
        best = min(fast or [smallest], key=lambda mode: moved[mode][0])
        taken, step = moved[best]
        parts.append(
            (
                1 - taken / memory >= LESS and step / seconds - 1 <= SLOWER,
                f"{task}: offload {best} takes {formatting.percent(1 - taken / memory)} off a worker's "
                f"memory ({formatting.size(memory)} to {formatting.size(taken)}, including parameters) for "
                f"{formatting.percent(step / seconds - 1)} more time",
            )
        )
        if smallest != best:
            least, longest = moved[smallest]
            parts.append(
                (
                    True,
                    f"the least memory, {formatting.size(least)} with offload {smallest}, takes "
                    f"{formatting.percent(longest / seconds - 1)} more time",
                )
            )
    if not parts:
        return unsettled("this needs timed runs with offload none and with another mode")
    return together(parts, table)


def _memory(records: list[RunRecord]) -> float:
    return summary([float(max(record.memory or [record.peak_memory])) for record in records]).median


def _seconds(records: list[RunRecord]) -> float:
    return summary([(record.spec.batch or 1) / record.throughput for record in records]).median


OFFLOAD = Claim(
    "offload",
    "A network whose activations do not fit trains all the same if they are moved out between forward and "
    "backward, a little slower.",
    "vDNN, Rhu et al. 2016: VGG-16 at batch 256, a 28 GB job, on 12 GB, 18 % slower",
    _judge,
)
