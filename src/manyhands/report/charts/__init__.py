"""The charts of a report, in the order of the page."""

from __future__ import annotations

from manyhands.report.charts import (
    asynchrony,
    best,
    generalization,
    learning,
    machine,
    pairs,
    regimes,
    scaling,
    step,
    target,
    timeline,
)
from manyhands.report.figure import Chart

OPENING = Chart(
    "answer",
    "Each strategy at its best",
    "One bar per strategy, with the number of workers and the batch at which it is best.",
    best.figure,
)
CURVES = Chart(
    "curves",
    "Learning curves",
    "One line per run. Early points far below the target may lie outside of the chart.",
    learning.figure,
)
CHARTS = (
    OPENING,
    Chart(
        "speed-up",
        "Speed-up and efficiency",
        "How much faster several workers process samples than one does. Higher is better.",
        scaling.figure,
    ),
    Chart(
        "time-to-target",
        "Time to the target",
        "The darker a cell, the sooner the target was reached. – not reached, · not timed, × diverged.",
        target.figure,
    ),
    Chart(
        "how-sure",
        "How sure",
        "Each round measured a cell and the baseline next to each other, so that their ratio does not drift.",
        pairs.figure,
    ),
    Chart(
        "breakdown",
        "Where the time goes",
        "Forward, backward and optimizer are work; communication, wait, data and other are lost time.",
        step.breakdown,
    ),
    Chart(
        "steps-to-target",
        "Larger batches, fewer steps",
        "Each point is a batch size. An open triangle: the target was not reached within these steps.",
        regimes.figure,
    ),
    Chart(
        "noise-scale",
        "Gradient noise scale",
        "The batch at which a gradient is as much noise as signal: the critical batch should be near it.",
        regimes.noise,
    ),
    Chart(
        "accuracy-by-batch",
        "Accuracy against batch",
        "The metric of runs that trained to their end. Bars: 95 % intervals, where there are several seeds.",
        generalization.figure,
    ),
    CURVES,
    Chart(
        "staleness",
        "Staleness",
        "How many updates old the gradients were: the area of a circle is the share of updates.",
        asynchrony.figure,
    ),
    Chart("communication", "Communication", "What one worker sends and receives.", step.communication),
    Chart("memory", "Memory", "The bar ends at the largest process; each tick is one process.", step.memory),
    Chart(
        "timeline",
        "Timeline of a step",
        "One row per process. Numbers in the bars count micro-batches.",
        timeline.figure,
    ),
    Chart(
        "machine-noise",
        "Machine noise",
        "The time of a fixed computation, repeated between the runs. A flat line is a quiet machine.",
        machine.figure,
    ),
)
