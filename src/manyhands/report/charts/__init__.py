"""The charts of a report, in the order of the page."""

from __future__ import annotations

from manyhands.report.charts import (
    asynchrony,
    generalization,
    learning,
    machine,
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
    "One bar per strategy, at the workers and batch where it is best. The thin line is the 95 % interval.",
    target.best_of_each,
)
CHARTS = (
    OPENING,
    Chart(
        "speed-up",
        "Speed-up and efficiency",
        "Up is faster; the dashed line is what ideal workers would bring. Bars: 95 % interval over repeats.",
        scaling.figure,
    ),
    Chart(
        "time-to-target",
        "Time to the target",
        "Dark is fast. Rows are strategies and workers, columns batches. A dash: not reached; "
        "a dot: reached, but not timed.",
        target.heat_map,
    ),
    Chart(
        "breakdown",
        "Where the time goes",
        "Blue and green are computing; red, orange and pink are communication, waiting and data.",
        step.breakdown,
    ),
    Chart(
        "steps-to-target",
        "Larger batches, fewer steps",
        "On the dashed line twice the batch halves the steps. Green: nearly so; orange: diminishing returns; "
        "pink: almost no gain. Hollow: target not reached within these steps.",
        regimes.figure,
    ),
    Chart(
        "noise-scale",
        "Gradient noise scale",
        "The batch at which noise and signal are equal; it should be near the measured critical batch.",
        regimes.noise,
    ),
    Chart(
        "accuracy-by-batch",
        "Accuracy against batch",
        "A line that falls pays for its large batch with accuracy. Bars: 95 % interval over seeds.",
        generalization.figure,
    ),
    Chart(
        "curves",
        "Learning curves",
        "One line per run, by samples seen and by seconds of training.",
        learning.figure,
    ),
    Chart(
        "staleness",
        "Staleness",
        "How many updates old the gradients were: the area of a circle is the share of updates.",
        asynchrony.figure,
    ),
    Chart("communication", "Communication", "What a worker exchanges with others.", step.communication),
    Chart("memory", "Memory", "The bar ends at the largest rank; each tick is one rank.", step.memory),
    Chart(
        "timeline",
        "Timeline of a step",
        "One row per rank; the numbers are micro-batches. Orange and red: waiting and communication.",
        timeline.figure,
    ),
    Chart(
        "machine-noise",
        "Machine noise",
        "The time of a fixed computation, repeated between the runs: a flat line is a quiet machine.",
        machine.figure,
    ),
)
