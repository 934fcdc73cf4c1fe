"""`manyhands show` on runs whose numbers are none: it says so and goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Answer
from manyhands.cli import show
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.testing.records import record

ODD = (math.nan, math.inf, -math.inf)


def an_averaged_run(path: Path, losses: list[float]) -> None:
    """Between two meetings, a worker of `average` may have a loss that is none: the others pull it back."""
    folder = RunFolder(path)
    folder.create()
    made = record(strategy="average", workers=2)
    folder.write_spec(made.spec)
    folder.write_record(made)
    steps = [StepRecord(k + 1, 0, 128 * (k + 1), loss, 0.1, 0.01 * (k + 1)) for k, loss in enumerate(losses)]
    folder.steps_file.write_text("".join(f"{step.to_json()}\n" for step in steps))


@pytest.mark.parametrize(
    ("losses", "row"),
    [
        ([2.0, math.inf, 1.0], "loss       2 █×▁ 1 (1 step without a finite loss)"),
        ([math.nan, 3.0], "loss       nan ×▁ 3 (1 step without a finite loss)"),
        ([math.nan, math.nan], "loss       nan ×× nan (2 steps without a finite loss)"),
        ([-1.7e308, 1.7e308], "loss       -1.7e+308 ▁█ 1.7e+308"),
        (
            [math.nan, *[4.0] * 50, *[2.0] * 49],
            f"loss       nan {'█' * 25 + '▅' + '▁' * 24} 2 (1 step without",
        ),
        ([math.inf, math.inf, *[4.0] * 98], f"loss       nan ×{'▁' * 49} 4 (2 steps without a finite loss)"),
    ],
)
def test_losses_that_are_no_numbers_are_crosses(
    losses: list[float], row: str, tmp_path: Path, typed: Callable[..., Answer]
) -> None:
    """It was `ValueError: cannot convert float NaN to integer`."""
    an_averaged_run(tmp_path / "run", losses)
    answer = typed("show", "run")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[2].startswith(row)


def numbers(made: RunRecord) -> list[str]:
    return [name for name, value in made if isinstance(value, float)]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("field", [*numbers(record(strategy="average", workers=2)), "bytes", "step_times"])
def test_every_number_of_a_record_may_be_none(field: str, odd: float) -> None:
    made = record(strategy="average", workers=2)
    if field == "bytes":
        changed = made.model_copy(update={"traffic": [{"all_reduce": {"bytes": odd}}] * 2})
    elif field == "step_times":
        assert made.step_times[0] is not None
        times = made.step_times[0].model_copy(update={"mean": odd, "low": odd, "high": odd})
        changed = made.model_copy(update={"step_times": [times] * 2})
    else:
        changed = made.model_copy(update={field: odd})
    lines, before = show._result(changed), show._result(made)
    assert len(lines) == len(before)
    assert all("inf" in line or "nan" in line or " -" in line for line in set(lines) - set(before))


def test_a_run_without_any_evaluation() -> None:
    nothing = {"metric": None, "best_metric": None, "loss": None, "target_seconds": None, "curve": []}
    lines = show._result(record().model_copy(update=nothing))
    assert lines[0] == "result     accuracy - (best -), did not reach 97 %"
