"""Made-up studies of steps to the target by batch, whose critical batch is known.

Each batch has a best learning rate that lies anywhere among those tried, steps grow with the distance from
it, seeds differ, and runs are evaluated now and then and given up at a limit, as in a real study.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.analysis.fit import Fit
from manyhands.records.record import Evaluation, RunRecord
from manyhands.testing.records import record

WORSE = 0.2  # of log steps, at a rate one step of the grid away from the best


class Simulated(NamedTuple):
    """What a study is like: its batches, how noisy its runs are, and how many there are."""

    truth: Fit = Fit(200.0, 400.0)
    batches: Sequence[int] = (16, 64, 256, 1024, 4096)
    noise: float = 0.1  # the standard deviation of log steps between seeds
    seeds: int = 1
    rates: int = 1
    limit: float = math.inf  # samples after which a run is given up
    spacing: float = 3000.0  # samples between two evaluations

    def records(self, chance: random.Random) -> list[RunRecord]:
        """The runs of one such study."""
        return [run for batch in self.batches for run in self._at(batch, chance)]

    def _at(self, batch: int, chance: random.Random) -> list[RunRecord]:
        made = record(batch=batch, epochs=1.0, stop_at_target=True)
        best = chance.uniform(-0.5, 0.5)  # where the best rate lies beside the middle of those tried
        found = []
        for number in range(self.rates):
            place = number - (self.rates - 1) / 2
            worse = WORSE * (place - best) ** 2 if self.rates > 1 else 0.0
            lr = 0.1 * 2.0**place
            for seed in range(self.seeds):
                steps = self.truth.steps(batch) * math.exp(worse + chance.gauss(0.0, self.noise))
                fields = self._learned(batch, steps)
                recipe = {"name": "constant", "scaling": "none", "lr": lr}
                fields |= {"recipe": recipe, "recipe_line": f"lr {lr:g}", "run": f"{batch}-{number}-{seed}"}
                found.append(made.model_copy(update=fields))
        return found

    def _learned(self, batch: int, steps: float) -> dict[str, object]:
        """What a run records that reaches its target after so many steps, between two evaluations."""
        every = max(1, round(self.spacing / batch))
        last = max(1, math.floor(min(1e15, self.limit) / batch))  # the step at which it is given up
        after = every * max(1, math.ceil(steps / every))
        ends = [step for step in (after - every, after) if 0 < step <= last]
        curve = [
            Evaluation(
                step=step,
                samples=step * batch,
                seconds=float(step),
                metric=0.97 + 0.02 * math.log(step / steps),
            )
            for step in ends
        ]
        reached = after <= last
        return {
            "curve": curve,
            "status": "target" if reached else "finished",
            "steps": after if reached else last,
            "samples": batch * (after if reached else last),
            "epochs": 1.0,
            "target_samples": after * batch if reached else None,
            "target_steps": after if reached else None,
            "target_seconds": float(after) if reached else None,
        }
