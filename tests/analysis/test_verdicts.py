"""All rules together: the order, the word for a table, and what a study says as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.analysis.verdicts import RULES, Verdict, study_verdicts, verdicts, word
from manyhands.records.record import RunRecord
from manyhands.records.study_results import Cell, Results, Without
from manyhands.testing.records import record, repeated


def gang(workers: int = 2, **fields: object) -> RunRecord:
    return record(**({"strategy": "allreduce", "workers": workers, "batch": 256, "rate": 19_000.0} | fields))


def study(*records: RunRecord, **fields: object) -> Results:
    return Results(Path("results/test"), "test", "A test", records=list(records), **fields)


def texts(results: Results) -> dict[str, str]:
    return {verdict.rule: verdict.text for verdict in study_verdicts(results)}


def test_every_rule_has_its_own_name():
    names = [name for name, _ in RULES]
    assert len(set(names)) == len(names) == 20


def test_the_largest_loss_comes_first():
    phases = {"forward": 0.2, "backward": 0.3, "communication": 0.2, "data": 0.3}
    found = verdicts(gang(phases=phases), None)
    assert [verdict.rule for verdict in found] == ["data", "communication"]
    assert [verdict.lost for verdict in found] == pytest.approx([0.3, 0.2])


def test_a_good_run_of_one_worker_needs_no_verdict():
    assert verdicts(record(), None) == []


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], ""),
        (["near-the-limit"], "near the limit"),
        (["data", "oversubscribed", "near-the-limit"], "more workers than cores"),
        (["data", "communication"], "waits for data"),
        (["communication", "data", "threads-win"], "communication"),
        (["noisy", "threads-win", "slower-than-one"], "slower than one worker"),
        (["communication", "diverged"], "diverged"),
        (["aside"], ""),
    ],
)
def test_a_table_has_room_for_one_word(rules: list[str], expected: str):
    assert word([Verdict(rule, "", 0.0) for rule in rules]) == expected


def test_a_study_of_nothing_says_nothing():
    assert study_verdicts(study()) == []


def test_a_study_names_its_largest_loss_and_where_it_was():
    found = study_verdicts(study(record(), gang(), gang(4)))
    assert found[0] == Verdict(
        "oversubscribed",
        "Most is lost by mnist-mlp, allreduce · 4 workers · batch 256: 4 workers share 2 cores, so each "
        "waits up to 50 % of the time for its turn; with 4 cores the step could be up to 2.00x faster.",
        0.5,
    )


def test_a_study_says_so_when_plain_threads_win():
    slow = [record(rate=10_000), gang(rate=12_000)]
    assert "threads-win" not in texts(study(*slow, record(threads=2, rate=11_000)))
    threads = repeated(record(threads=2, rate=15_000), 9)
    several = repeated(gang(rate=12_000), 9)
    assert texts(study(*several, *threads))["threads-win"] == (
        "For mnist-mlp plain threads win in throughput: one worker with all 2 cores as threads is 1.25x as "
        "fast as the best of several workers (allreduce, 2 workers, batch 256)."
    )


def test_a_study_without_one_worker_says_that_its_speed_ups_have_no_baseline():
    assert "no-baseline" not in texts(study(record(), gang()))
    assert texts(study(gang()))["no-baseline"] == (
        "For mnist-mlp no run had one worker and one thread: its speed-ups have no baseline."
    )


def test_a_study_tells_its_fine_lines():
    cells = (record(batch=256), gang(), gang(4, rate=18_050.0))
    found = texts(study(*(again for run in cells for again in repeated(run, 9))))
    assert found["fine-line"] == (
        "mnist-mlp, allreduce, batch 256: More workers do not pay: 4 are 5 % slower than 2, for 4 workers "
        "share 2 cores."
    )


def test_a_study_counts_the_cells_that_never_arrived():
    late = gang(steps_to_target=None)
    assert "not-reached" not in texts(study(record(), gang()))
    assert texts(study(record(), late))["not-reached"] == (
        "For mnist-mlp 1 of 2 cells never reached 97 %: they count as slower than the time they ran."
    )
    assert texts(study(late))["not-reached"].startswith("For mnist-mlp no cell reached 97 %:")


def test_a_study_says_how_far_to_trust_it():
    noisy, lost = record(machine_noise=0.2), record(status="diverged", batch=4096)
    found = texts(study(noisy, lost, record(), repeated=[record()]))
    assert found["noisy"] == (
        "1 of 3 runs was measured while the machine was more than 15 % slower than at its best."
    )
    assert found["repeated"] == "1 run measured under heavy noise was repeated."
    assert found["diverged"] == "1 run diverged, single · 1 thread · batch 4096."


def test_a_study_says_what_is_missing():
    cell = Without(Cell(record().spec), "no time was left")
    found = texts(study(record(), failed=[cell._replace(reason="worker 1 died")], left=[cell, cell]))
    assert found["failed"] == "1 cell failed: worker 1 died."
    assert found["left"] == "2 cells have not been run, the first because: no time was left."


def test_a_fine_line_is_told_once_a_strategy():
    """A study of many batches told the same of each of them, in seventy remarks."""
    records = [
        record(strategy="allreduce", workers=workers, batch=batch, rate=rate)
        for batch in (128, 256, 512)
        for workers, rate in ((1, 10_000.0), (2, 19_000.0), (4, 9_000.0))
    ]
    told = [verdict.text for verdict in study_verdicts(study(*records)) if verdict.rule == "fine-line"]
    assert len(told) == 1
    assert told[0].startswith("mnist-mlp, allreduce, batch 128 (and at ")
