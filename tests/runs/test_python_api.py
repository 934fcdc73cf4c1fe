"""`mh.train`, `mh.verify`, `mh.study`, `mh.report` and `mh.doctor` from a script or a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.tasks import brought
from manyhands.tasks.fingerprint import fingerprint

X = torch.randn(600, 40, generator=torch.Generator().manual_seed(0))
Y = (X[:, :20].sum(1) > 0).long()
SETTINGS: dict[str, Any] = {"batch": 64, "epochs": 2, "recipe": "constant", "lr": 0.1, "quiet": True}


def mine(width: int = 8) -> mh.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(40, width), nn.ReLU(), nn.Linear(width, 2))

    return mh.Task(name="my task", model=model, train=(X, Y), test=(X, Y), loss=cross_entropy, target=0.9)


SCRIPT = """
import sys
import torch, manyhands as mh
from torch import nn

x = torch.randn(3000, 30, generator=torch.Generator().manual_seed(0))  # 360 KB: shared, not sent
y = (x.sum(1) > 0).long()
SCALE = 2.0

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(30, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.first(x).tanh() * SCALE)

def spirals(width=8):
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)
    return mh.Task(name="spirals", model=lambda: Net(width), train=(x, y), test=(x, y), loss=loss, target=1)

settings = dict(workers=int(sys.argv[2]), batch=100, lr=0.1, recipe="constant", quiet=True, out=sys.argv[1])
more = eval(sys.argv[3])
run = mh.train(spirals, options={"width": 16}, **settings | more)
print(run.spec.task, run.steps, repr(run.loss))
"""


def script(folder: Path, out: str, workers: int, **more: Any) -> str:
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, "script.py", out, str(workers), repr(more)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.soak
def test_a_script_resumes_with_the_same_task(tmp_path: Path) -> None:
    whole = script(tmp_path, "whole", 2, epochs=2)
    script(tmp_path, "part", 2, epochs=2, samples=3500)
    assert script(tmp_path, "part", 2, epochs=2, resume=True, allow_changes=True) == whole


def test_a_script_without_a_guard_trains_its_own_classes_with_workers(tmp_path: Path) -> None:
    name, steps, _ = script(tmp_path, "whole", 2, epochs=2).split()
    assert name.startswith("spirals@")
    assert steps == "60"
    texts = [file.read_bytes() for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    assert not any(b"SCALE" in text or b"cloudpickle" in text for text in texts)  # nothing of its code
    with pytest.raises(UsageError, match=r"^spirals@\w+ is a task of a Python program: continue it there"):
        mh.train(str(tmp_path / "whole"), resume=True, quiet=True, epochs=3, allow_changes=True)


def test_a_task_object_and_a_function_with_options(tmp_path: Path) -> None:
    one = mh.train(mine(), out=tmp_path / "object", **SETTINGS)
    two = mh.train(mine, out=tmp_path / "function", **SETTINGS)
    assert one.loss == two.loss
    assert one.folder == tmp_path / "object"
    wide = mh.train(mine, options={"width": "9"}, out=tmp_path / "wide", **SETTINGS)
    assert wide.parameters > one.parameters
    assert wide.spec.options == {"width": 9}
    with pytest.raises(UsageError, match=r"^mine@\w+ has no option 'widht' \(did you mean 'width'\?"):
        mh.train(mine, options={"widht": 9}, **SETTINGS)
    with pytest.raises(UsageError, match=r"^a task is a name, FILE.py:NAME, an mh.Task or a function that"):
        mh.train(3, **SETTINGS)  # type: ignore[arg-type]


def test_a_task_object_is_resumed_in_the_middle(tmp_path: Path) -> None:
    whole = mh.train(mine, out=tmp_path / "whole", **SETTINGS)
    mh.train(mine, out=tmp_path / "part", samples=700, **SETTINGS)
    again = mh.train(mine, out=tmp_path / "part", resume=True, allow_changes=True, **SETTINGS)
    assert (again.steps, again.loss, again.resumed) == (whole.steps, whole.loss, 1)


def test_what_is_not_given_stays_as_it_was(tmp_path: Path) -> None:
    """The page says `mh.train(mine, resume=True, out=FOLDER)`: it was refused, with other settings."""
    whole = mh.train(mine, out=tmp_path / "whole", **SETTINGS)
    again = mh.train(mine, resume=True, out=tmp_path / "whole", quiet=True)
    assert again.spec == whole.spec
    assert again.steps == whole.steps


def test_another_task_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    mh.train(mine(), out=tmp_path / "run", **SETTINGS)
    with pytest.raises(UsageError, match=r"with other settings \(.*task my-task@\w+ -> my-task@\w+\)"):
        mh.train(mine(9), out=tmp_path / "run", resume=True, **SETTINGS | {"epochs": 3})


def test_what_cannot_be_sent_is_a_sentence() -> None:
    import threading

    held = threading.Lock()
    task = mh.Task(
        name="held",
        model=lambda: nn.Linear(40, 2) if held else None,  # type: ignore[arg-type, return-value]
        train=(X, Y),
        test=(X, Y),
        loss=cross_entropy,
        target=1,
    )
    with pytest.raises(UsageError, match=r"^held cannot be sent to workers: .*lock.*; put it into a file"):
        mh.train(task, workers=2, **SETTINGS)


def test_large_arrays_are_shared_and_small_ones_sent() -> None:
    large, small = np.arange(100_000.0), np.arange(3)
    name = brought.bring(lambda: (large, small, torch.from_numpy(large)))  # type: ignore[arg-type, return-value]
    with brought.packed([name], shared=True) as packed:
        assert len(packed.pickled) < 5_000
        builder = brought._known.pop(name)
        brought.unpack(packed)
        assert brought._known[name] is not builder
        found: Any = brought._known[name]()
    assert (found[0] == large).all()  # also when the memory has no other owner
    assert found[1].tolist() == [0, 1, 2]
    assert torch.equal(found[2], torch.from_numpy(large))
    found[0][0] = 7.0
    assert large[0] == 0.0  # copied on write
    with brought.packed([name], shared=False) as packed:
        assert packed.memory is None
        assert len(packed.pickled) > 800_000


class TestFingerprints:
    def test_it_is_the_same_for_the_same_thing(self) -> None:
        assert fingerprint(mine()) == fingerprint(mine())
        assert fingerprint(mine) == fingerprint(mine)

    def test_it_changes_with_code_data_and_what_both_refer_to(self) -> None:
        def with_(text: str) -> str:
            space: dict[str, Any] = {"__name__": "__main__"}
            exec(text, space)  # noqa: S102
            return fingerprint(space["f"])

        base = "LIMIT = 1\ndef g(x): return x + LIMIT\ndef f(x, a=1): return [g(y) for y in x]\n"
        others = [
            base.replace("LIMIT = 1", "LIMIT = 2"),
            base.replace("x + LIMIT", "x - LIMIT"),
            base.replace("a=1", "a=2"),
            base.replace("g(y)", "g(g(y))"),
        ]
        found = [with_(text) for text in (base, *others)]
        assert len(set(found)) == len(found)
        assert with_("\n\n" + base) == found[0]  # lines do not count
        assert fingerprint(torch.ones(3)) != fingerprint(torch.ones(3).double())
        assert fingerprint({"a": [1, (2.0, None)]}) == fingerprint({"a": [1, (2.0, None)]})
        assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(torch.tensor([2.0, 1.0]))

    def test_things_that_refer_to_themselves_end(self) -> None:
        held: list[Any] = [1]
        held.append(held)
        assert fingerprint(held) == fingerprint(held)


def test_options_of_a_strategy_have_their_names(tmp_path: Path) -> None:
    run = mh.train("quadratic", strategy="average", every=4, out=tmp_path / "run", quiet=True, epochs=1)
    assert run.spec.strategy_options == {"every": 4}
    with pytest.raises(UsageError, match="evry"):
        mh.train("quadratic", strategy="average", evry=4, quiet=True)


def test_a_record_has_what_a_person_wants(tmp_path: Path) -> None:
    run = mh.train(mine, out=tmp_path / "run", **SETTINGS)
    assert repr(run).startswith("RunRecord(mine · finished · single, 1 worker, batch 64 · accuracy ")
    assert len(repr(run)) < 250
    html = run._repr_html_()
    assert "<b>mine</b> · finished" in html
    assert len(html) < 1500
    assert [step.step for step in run.history()] == list(range(1, run.steps + 1))
    assert list(run.frame()["samples"]) == [600, 1200]
    assert run.chart() is not None
    tensors = run.state_dict()
    assert set(tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    before = torch.get_rng_state()
    model = run.model()
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    correct = float((model(X).argmax(1) == Y).float().mean())
    assert run.metric == pytest.approx(correct)
    loaded = mh.load(tmp_path / "run")
    assert isinstance(loaded, mh.RunRecord)
    assert loaded.model().state_dict().keys() == tensors.keys()


def test_a_run_without_a_model_says_so(tmp_path: Path) -> None:
    run = mh.train(mine, out=tmp_path / "run", **SETTINGS)
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"has no trained model: the run has not ended, or model.safetensors was"
    ):
        run.state_dict()


def test_verify_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    found = mh.verify(mine, workers=2, steps=2, lr=0.1, quiet=True)
    assert found.exact
    assert (
        repr(found).splitlines()[-1].startswith("allreduce with 2 workers on shm equals single after 2 steps")
    )
    assert capsys.readouterr().err == ""


def test_study_and_report_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = {"task": "quadratic", "epochs": 1, "seed": [0, 1]}
    found = mh.study({"name": "two", "grid": [grid]}, quiet=True)
    assert len(found.records) == 2
    assert (tmp_path / "results" / "two").is_dir()
    assert len(mh.study({"name": "two", "grid": [grid]}, quiet=True).records) == 2  # nothing is run again
    page = mh.report("results/two", out="page", pictures=False)
    assert page == Path("page/report.html")
    assert page.is_file()
    with pytest.raises(UsageError, match=r"^two.*evry"):
        mh.study({"name": "two", "grid": [{**grid, "evry": 3}]}, quiet=True)


def test_the_doctor_from_python() -> None:
    found = mh.doctor()
    assert found[0].about == "torch"
    assert repr(found).startswith("manyhands ")


def test_a_room_and_a_function_of_the_same_name() -> None:
    """A program may import both, in any order."""
    code = (
        "import manyhands as mh\n"
        "import manyhands.study, manyhands.report\n"
        "from manyhands.study.grid import StudyFileError\n"
        "assert callable(mh.study) and callable(mh.report)\n"
        "from manyhands import study, report\n"
        "assert callable(study) and callable(report)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_editors_know_every_setting() -> None:
    """Written by a tool, and up to date."""
    from conftest import ROOT

    done = subprocess.run(
        [sys.executable, "tools/typed_settings.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == (ROOT / "src/manyhands/runs/settings.py").read_text()
