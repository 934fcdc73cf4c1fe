"""The charts of a report, in the order in which they explain it."""

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
        "Dark is quick. Rows are strategies and workers, columns batches. A dash: not reached; "
        "a dot: reached, but not timed.",
        target.heat_map,
    ),
    Chart(
        "breakdown",
        "Where the time goes",
        "Blue and green are work; orange, red and pink are lost to others.",
        step.breakdown,
    ),
    Chart(
        "steps-to-target",
        "Larger batches, fewer steps",
        "Along the dashed line twice the batch halves the steps. Green: nearly so; orange: less and less; "
        "pink: hardly any more. Hollow: not reached by then.",
        regimes.figure,
    ),
    Chart(
        "noise-scale",
        "Gradient noise scale",
        "The batch at which noise and signal are alike; it should be near the measured critical batch.",
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
        "One line per run: by samples, what learning costs; by seconds, how long you wait.",
        learning.figure,
    ),
    Chart(
        "staleness",
        "Staleness",
        "How many updates behind the gradients were: a circle's area is the share of the updates.",
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
        "The same piece of work between the runs: flat is quiet.",
        machine.figure,
    ),
)
