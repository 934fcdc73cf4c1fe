"""A user's own file: which of its functions are tasks, and what becomes of one that ends the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import manyhands as mh
from conftest import Answer
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.tasks import find

FILE = """
import sys, os, signal
import torch
from torch import nn
import manyhands as mh
from manyhands import ArrayData

def task(model=lambda: nn.Linear(4, 2)):
    data = ArrayData(torch.zeros(8, 4), torch.zeros(8).long())
    loss = nn.functional.cross_entropy
    return mh.Task(name="mine", model=model, train=data, test=data, loss=loss, target=2.0)

def said() -> "mh.Task":
    return task()

def _hidden():
    return task()

def network() -> nn.Module:
    return nn.Linear(4, 2)

def points(n):
    return n

def wrong():
    return {"model": network}

class Network(nn.Linear):
    pass

number = 3
ready = task()

def in_the_builder(*, code: int = 0) -> mh.Task:
    sys.exit(code)

def in_the_model() -> mh.Task:
    return task(lambda: sys.exit("no model today"))

def in_forward() -> mh.Task:
    class Leaves(nn.Linear):
        def forward(self, x):
            sys.exit(4)
    return task(lambda: Leaves(4, 2))

def interrupted() -> mh.Task:
    raise KeyboardInterrupt
"""


@pytest.fixture
def mine(here: Path) -> Path:
    (here / "mine.py").write_text(FILE)
    return here


def test_a_file_may_import_what_lies_next_to_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = here / "tasks"
    folder.mkdir()
    (folder / "shapes_of_mine.py").write_text("WIDTH = 4\n")
    (folder / "mine.py").write_text("from shapes_of_mine import WIDTH\n" + FILE)
    assert find.build("tasks/mine.py:task", {}).name == "mine"


def test_random_data_are_the_same_whenever_they_are_drawn(here: Path) -> None:
    """Each worker drew its own data, where the file did not seed."""
    drawn = "X = torch.randn(8, 4)\n\ndef drawn():\n    made = task()\n"
    drawn += "    data = ArrayData(X, torch.randint(0, 2, (8,)))\n"
    drawn += (
        "    return mh.Task(name='d', model=made.model, train=data, test=data, loss=made.loss, target=2.0)\n"
    )
    (here / "drawn.py").write_text(FILE + drawn)
    found: list[mh.ArrayData] = []
    for _ in range(2):  # as another process would
        find._import.cache_clear()
        find._build.cache_clear()
        torch.rand(1)
        before = torch.get_rng_state()
        found.append(find.build("drawn.py:drawn", {}).train)  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0].inputs, found[1].inputs)
    assert torch.equal(found[0].targets, found[1].targets)


@pytest.mark.parametrize("name", ["task", "said", "_hidden", "ready"])
def test_a_function_needs_no_annotation(name: str, mine: Path) -> None:
    """`def net(): return mh.Task(...)` was refused: "no task 'net' (known: none)"."""
    assert find.build(f"mine.py:{name}", {}).name == "mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nett",
            r"^mine.py has no task 'nett' \(known: task, said, wrong, ready, in_the_builder, in_the_model, ",
        ),
        ("wrong", r"^mine.py:wrong returned a dict, not a manyhands Task$"),
        ("network", r"^mine.py:network returned a Linear, not a manyhands Task$"),
        (
            "number",
            r"^mine.py:number is an int, not a task or a function that returns one \(known: task, said, ",
        ),
        ("points", r"^mine.py:points needs n: give every parameter of a task a default$"),
        ("Network", r"^mine.py:Network needs in_features and out_features: give"),
    ],
)
def test_what_is_no_task_says_what_it_is(name: str, says: str, mine: Path) -> None:
    with pytest.raises(UsageError, match=says):
        find.build(f"mine.py:{name}", {})


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("in_the_builder", 2, "mine.py:in_the_builder ended the process with sys.exit(0) (line 35 of"),
        ("in_the_builder --set code=3", 2, "ended the process with sys.exit(3) (line 35 of mine.py)"),
        ("in_the_model", 2, "in_the_model ended the process with sys.exit('no model today') (line 38 of"),
        ("in_forward", 2, "mine.py:in_forward ended the process with sys.exit(4) (line 43 of mine.py): "),
        ("in_forward --workers 2 --batch 4", 2, "ended the process with sys.exit(4) (line 43 of mine.py)"),
    ],
)
def test_sys_exit_is_an_error(
    words: str, code: int, says: str, mine: Path, typed: Callable[..., Answer]
) -> None:
    """It was success, or an exit code without a word."""
    found = typed("train", *f"mine.py:{words}".split(), "--quiet", cwd=mine)
    assert found.code == code, found.err
    assert says in found.err
    assert found.err.startswith("error: ")


def test_sys_exit_where_a_file_is_imported(here: Path, typed: Callable[..., Answer]) -> None:
    (here / "e.py").write_text("import sys\nsys.exit()\n")
    found = typed("train", "e.py:t", "--quiet", cwd=here)
    assert (found.code, found.err) == (
        2,
        "error: e.py ended the process with sys.exit() (line 2 of e.py): raise an exception there instead\n",
    )


def test_in_a_script_too(mine: Path) -> None:
    """The caller of `train` goes on."""
    with pytest.raises(ManyhandsError, match=r"ended the process with sys.exit\(4\)"):
        mh.train("mine.py:in_forward", quiet=True)


def test_verify_says_it(mine: Path, typed: Callable[..., Answer]) -> None:
    found = typed("verify", "mine.py:in_forward", "--workers", "1", "--batch", "4", cwd=mine)
    assert found.code == 2
    assert "ended the process with sys.exit(4)" in found.err


def test_ctrl_c_in_a_builder_has_a_sentence(mine: Path, typed: Callable[..., Answer]) -> None:
    found = typed("train", "mine.py:interrupted", "--quiet", cwd=mine)
    assert (found.code, found.err) == (130, "error: interrupted\n")
