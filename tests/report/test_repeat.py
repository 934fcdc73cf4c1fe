"""The command of a run repeats that run, with every setting that changes what it computes."""

from __future__ import annotations

from manyhands.report import repeat
from manyhands.testing.records import record


def test_settings_that_change_the_result_are_in_the_command() -> None:
    made = record()
    spec = made.spec.replace(drop_last=True, sync_batchnorm=True, patience=3, init="a b.pt", dtype="float64")
    words = repeat.train(made.model_copy(update={"spec": spec}))
    for part in ("--drop-last", "--sync-batchnorm", "--patience 3", "--init 'a b.pt'", "--dtype float64"):
        assert part in words
    assert "--drop-last" not in repeat.train(made)
