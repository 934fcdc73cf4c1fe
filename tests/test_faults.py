"""The script of a drill: what it says, and that it strikes once, there and then."""

from __future__ import annotations

import pytest

from manyhands import faults
from manyhands.errors import UsageError
from manyhands.faults import Fault, ScriptedError


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("SIGKILL@1:20", Fault("SIGKILL", 1, 20, "collective")),
        ("hang@0:5:data", Fault("hang", 0, 5, "data")),
        ("raise@12:0:backward", Fault("raise", 12, 0, "backward")),
    ],
)
def test_a_script_is_read(text: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fault.parse(text) == fault
    monkeypatch.setenv(faults.VARIABLE, text)
    assert faults.from_environment() == fault


@pytest.mark.parametrize(
    "text", ["", "boom@1:2", "hang", "hang@1", "hang@-1:2", "hang@1:2:lunch", "hang@1:2:"]
)
def test_a_wrong_script_is_answered(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^MANYHANDS_FAULT='{text}' is not KIND@RANK:STEP or "):
        Fault.parse(text)


def test_it_is_due_at_one_rank_step_and_place_only() -> None:
    fault = Fault("raise", 1, 5, "data")
    assert fault.due(1, 5, "data")
    assert not any(fault.due(*other) for other in [(0, 5, "data"), (1, 4, "data"), (1, 5, "backward")])
    with pytest.raises(ScriptedError, match=r"^raised by script at rank 1, step 5$"):
        fault.strike()


def test_nothing_happens_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.from_environment() is None
