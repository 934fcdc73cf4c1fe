"""A checkpoint with the right checksum is checked to the last tensor before anything is made of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor

import manyhands as mh
from manyhands.callbacks.base import Callback
from manyhands.core.errors import CheckpointError
from manyhands.engine.checkpoint import storage
from manyhands.engine.checkpoint.storage import Checkpoints
from manyhands.engine.session import how_to_continue
from manyhands.records.record import StepRecord
from manyhands.records.run_folder import RunFolder
from manyhands.runs.train import resume_folder

Tensors = dict[str, Tensor]
WEIGHT, MOMENTUM = "model/1.weight", "optimizer/momentum_buffer/1.weight"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was cut off after five of them; its whole is beside it."""
    folder = tmp_path_factory.mktemp("trust")
    settings = {"batch": 479, "epochs": 2, "threads": 1, "checkpoint_every": 0, "keep": 9, "quiet": True}
    mh.train("digits-mlp", out=folder / "whole", **settings)
    shutil.copytree(folder / "whole", folder / "stopped")
    (folder / "stopped/result.json").unlink()
    *_, last = Checkpoints(folder / "stopped/checkpoints", "").paths()
    last.unlink()
    return folder


class Run(NamedTuple):
    """A copy of the run to do harm to."""

    folder: Path
    whole: Path

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints/step-000000005.safetensors"

    def forge(self, harm: Callable[[Tensors, Any], Any], path: Path | None = None) -> None:
        """Change what the last checkpoint says, and give it the right checksum."""
        path = path or self.last
        run = RunFolder(self.folder).spec().id
        tensors, state = storage.load(path, frozenset({run}))
        tensors = dict(tensors)
        changed = harm(tensors, state)
        text = changed if isinstance(changed, str) else json.dumps(state)
        crc = storage._checksum(tensors, text)
        metadata = {"format": storage.FORMAT, "run": run, "state": text, "crc32": crc}
        path.write_bytes(safetensors.torch.save(tensors, metadata))

    def resume(self, **settings: Any) -> list[str]:
        """Go on, and return what was said."""
        said: list[str] = []

        class Hear(Callback):
            def on_notice(self, text: str) -> None:
                said.append(text)

        changes = bool(settings)
        resume_folder(self.folder, settings, allow_changes=changes, callbacks=[Hear()])
        return said

    def is_whole(self) -> bool:
        found, expected = (load_file(folder / "model.safetensors") for folder in (self.folder, self.whole))
        return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def harmed(stopped: Path, tmp_path: Path) -> Run:
    shutil.copytree(stopped / "stopped", tmp_path / "run")
    return Run(tmp_path / "run", stopped / "whole")


def tensor(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Any], None]:
    def harm(tensors: Tensors, state: Any) -> None:
        tensors[name] = make(tensors[name])

    return harm


def extra(name: str, value: Tensor) -> Callable[[Tensors, Any], None]:
    return lambda tensors, state: tensors.update({name: value})


def without(name: str) -> Callable[[Tensors, Any], None]:
    def harm(tensors: Tensors, state: Any) -> None:
        del tensors[name]

    return harm


def position(**fields: Any) -> Callable[[Tensors, Any], None]:
    return lambda tensors, state: state["position"].update(fields)


def said(text: str) -> Callable[[Tensors, Any], str]:
    return lambda tensors, state: text


def numbers(**fields: Any) -> Callable[[Tensors, Any], None]:
    return lambda tensors, state: state.update(fields)


def generator(which: str, make: Callable[[Any], Any]) -> Callable[[Tensors, Any], None]:
    def harm(tensors: Tensors, state: Any) -> None:
        state["random"][0][which] = make(state["random"][0][which])

    return harm


def with_first(first: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        made = tensor.clone()
        made.view(-1)[0] = first
        return made

    return make


OTHER = "the checkpoint is of another model: "
WRONG = "the checkpoint's position is wrong: "
RANDOM = "the checkpoint's random state is wrong: "
DEEP = '{"position": ' + "[" * 100_000 + "]" * 100_000 + "}"
HARM: dict[str, tuple[Callable[[Tensors, Any], Any], str]] = {
    # what corrupted memory: an optimizer writes past the end of what it is given
    "short momentum": (
        tensor(MOMENTUM, lambda t: torch.zeros(64)),
        f"{OTHER}{MOMENTUM} is (64,) instead of (64, 64)",
    ),
    "long momentum": (
        tensor(MOMENTUM, lambda t: torch.zeros(64, 65)),
        f"{OTHER}{MOMENTUM} is (64, 65) instead of (64, 64)",
    ),
    "wide momentum": (tensor(MOMENTUM, Tensor.double), f"{OTHER}{MOMENTUM} is float64 instead of float32"),
    # what was cast in silence
    "bytes for weights": (tensor(WEIGHT, Tensor.char), f"{OTHER}{WEIGHT} is int8 instead of float32"),
    "half precision": (tensor(WEIGHT, Tensor.half), f"{OTHER}{WEIGHT} is float16 instead of float32"),
    "nan weight": (
        tensor(WEIGHT, with_first(float("nan"))),
        f"the checkpoint holds numbers that are not finite in {WEIGHT}",
    ),
    "infinite momentum": (
        tensor(MOMENTUM, with_first(float("inf"))),
        f"the checkpoint holds numbers that are not finite in {MOMENTUM}",
    ),
    "no weight": (without(WEIGHT), f"{OTHER}{WEIGHT} is in only one of them"),
    "another weight": (
        extra("model/9.weight", torch.zeros(2)),
        f"{OTHER}model/9.weight is in only one of them",
    ),
    "odd optimizer tensor": (
        extra("optimizer/odd", torch.zeros(2)),
        "the checkpoint holds optimizer/odd, which no run writes",
    ),
    "odd memory": (
        extra("optimizer/exp_avg/1.weight", torch.zeros(64, 64)),
        f"{OTHER}optimizer/exp_avg/1.weight is in only one of them",
    ),
    "odd name": (
        extra("odd\x1b[2J", torch.zeros(2)),
        "the checkpoint holds 'odd\\x1b[2J', which no run writes",
    ),
    "rank 1 of one": (
        extra("rank/1/optimizer/momentum_buffer/1.weight", torch.zeros(64, 64)),
        "the checkpoint is of 1 workers, but holds rank/1/optimizer/momentum_buffer/1.weight",
    ),
    "short memory of a rank": (
        extra("rank/0/optimizer/momentum_buffer/1.weight", torch.zeros(64)),
        f"{OTHER}rank/0/optimizer/momentum_buffer/1.weight is (64,) instead of (64, 64)",
    ),
    # the numbers beside them
    "no position": (
        lambda tensors, state: state.pop("position") and None,
        f"{WRONG}position: field required",
    ),
    "extra key": (numbers(extra=1), f"{WRONG}extra: extra inputs are not permitted"),
    "extra in position": (position(extra=1), f"{WRONG}position.extra: unexpected keyword argument"),
    "string step": (position(step="5"), f"{WRONG}position.step: input should be a valid integer"),
    "negative samples": (
        position(samples=-1),
        f"{WRONG}position.samples: input should be greater than or equal to 0",
    ),
    "no end": (
        position(samples=10**30, step=10**30),
        f"{WRONG}position.step: input should be less than or equal to 9007199254740992",
    ),
    "beyond the end": (position(samples=10**6), f"{WRONG}1,000,000 samples of a run of 3,353"),
    "steps of nothing": (position(samples=0), f"{WRONG}position: 5 steps cannot have used 0 samples"),
    "samples of no step": (
        position(step=0, samples=64),
        f"{WRONG}position: 0 steps cannot have used 64 samples",
    ),
    "more steps than samples": (
        position(step=200, samples=64),
        f"{WRONG}position: 200 steps cannot have used 64 samples",
    ),
    "a target of later": (
        position(target_samples=10**5),
        f"{WRONG}position: the target cannot have been reached later than now",
    ),
    "bad curve": (position(curve=[{"step": 1}]), f"{WRONG}position: an evaluation of the curve is not one"),
    "bad clock": (numbers(clock={"data": "x"}), f"{WRONG}clock.data: input should be a valid number"),
    "negative clock": (
        numbers(clock={"data": -1.0}),
        f"{WRONG}clock.data: input should be greater than or equal to 0",
    ),
    "clock without end": (
        numbers(clock={"data": float("inf")}),
        f"{WRONG}clock.data: input should be a finite number",
    ),
    "unknown optimizer": (
        numbers(optimizer="odd"),
        f"{WRONG}optimizer: 'odd' is not the name of an optimizer",
    ),
    # generators
    "no generator of torch": (without("random/torch"), f"{RANDOM}worker 0 has none"),
    "short generator": (
        tensor("random/torch", lambda t: t[:100].clone()),
        f"{RANDOM}random/torch is not a generator's",
    ),
    "wild generator": (
        tensor("random/torch", lambda t: torch.full_like(t, 255)),
        f"{RANDOM}random/torch is not a generator's",
    ),
    "generator of a second worker": (
        extra("random/1/torch", torch.get_rng_state()),
        f"{RANDOM}there is no generator random/1/torch",
    ),
    "unknown generator": (extra("random/dice", torch.zeros(2)), f"{RANDOM}there is no generator random/dice"),
    "numpy reads elsewhere": (
        generator("numpy", lambda s: [s[0], s[1], 10**6, s[3], s[4]]),
        f"{WRONG}random.0.numpy: is not a state of numpy's generator",
    ),
    "python's is short": (
        generator("python", lambda s: [3, s[1][:5], None]),
        f"{WRONG}random.0.python: is not a state of python's generator",
    ),
    "no random state": (
        numbers(random=[]),
        f"{WRONG}random: list should have at least 1 item after validation, not 0",
    ),
}
UNREADABLE: dict[str, tuple[Callable[[Tensors, Any], Any], str]] = {
    "list": (said("[]"), "its position is not a JSON object"),
    "empty": (said(""), "its position is not JSON"),
    "deep": (said(DEEP), "its position is not JSON"),
}


@pytest.mark.parametrize("what", HARM)
def test_a_forged_checkpoint_is_passed_over_with_a_sentence(harmed: Run, what: str) -> None:
    harm, sentence = HARM[what]
    harmed.forge(harm)
    assert harmed.resume() == [f"{harmed.last}: {sentence}; trying the one before it"]
    assert harmed.is_whole()


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_position_that_cannot_be_read_is_damage(harmed: Run, what: str) -> None:
    harm, reason = UNREADABLE[what]
    harmed.forge(harm)
    assert harmed.resume() == [f"{harmed.last} is damaged ({reason}); trying the one before it"]
    assert harmed.is_whole()


def test_when_all_are_forged_the_error_says_why(harmed: Run) -> None:
    for path in Checkpoints(harmed.folder / "checkpoints", "").paths():
        harmed.forge(tensor(MOMENTUM, lambda t: torch.zeros(64)), path)
    before = {path: path.read_bytes() for path in harmed.folder.rglob("*.json*")}
    with pytest.raises(CheckpointError) as caught:
        harmed.resume()
    assert str(caught.value) == (
        f"{OTHER}{MOMENTUM} is (64,) instead of (64, 64); none of the 5 checkpoints in "
        f"{harmed.folder / 'checkpoints'} can be used: remove them to start this run from the beginning"
    )
    assert {path: path.read_bytes() for path in harmed.folder.rglob("*.json*")} == before


def test_a_resume_that_fails_leaves_the_spec_as_it_was(harmed: Run) -> None:
    """It was written before the first step found that the state is of no use."""
    for path in Checkpoints(harmed.folder / "checkpoints", "").paths():
        harmed.forge(tensor(MOMENTUM, Tensor.double), path)
    before = (harmed.folder / "spec.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"continue without the changed settings$"):
        harmed.resume(batch=100)
    assert (harmed.folder / "spec.json").read_bytes() == before


def test_nothing_is_written_before_all_ranks_have_loaded(
    harmed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may still fail: then the parent ends this one where it waits."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("manyhands.engine.session.all_loaded", ended)
    before = {path: path.read_bytes() for path in harmed.folder.rglob("*.*") if path.is_file()}
    with pytest.raises(KeyboardInterrupt):
        harmed.resume(batch=100)
    assert {path: path.read_bytes() for path in before} == before


def test_another_type_of_number_is_converted_and_said(harmed: Run) -> None:
    """It failed in the optimizer, and then plain --resume did, too."""
    notices = harmed.resume(dtype="float64")
    had = "the checkpoint is in float32: its model and optimizer state are converted to float64"
    assert notices == [had]
    assert load_file(harmed.folder / "model.safetensors")["1.weight"].dtype == torch.float64
    assert RunFolder(harmed.folder).spec().dtype == "float64"
    last = Checkpoints(harmed.folder / "checkpoints", "").paths()[-1]
    saved = load_file(last)
    assert {saved[WEIGHT].dtype, saved[MOMENTUM].dtype} == {torch.float64}
    last.unlink()
    (harmed.folder / "result.json").unlink()
    assert harmed.resume() == []


def test_a_state_of_0_1_0_is_still_read(harmed: Run) -> None:
    """It had one worker, whose generators stood there without a list."""

    def harm(tensors: Tensors, state: Any) -> None:
        [state["random"]] = state["random"]
        for field in ("target_steps", "curve"):  # came later
            del state["position"][field]

    harmed.forge(harm)
    assert harmed.resume() == []
    assert harmed.is_whole()


def test_a_ranks_own_memory_is_welcome(harmed: Run) -> None:
    """What local SGD keeps for each worker; who does not use it passes it by."""
    own = torch.ones(64, 64)
    harmed.forge(extra("rank/0/optimizer/momentum_buffer/1.weight", own))
    assert harmed.resume() == []
    assert harmed.is_whole()


LINKED = "it is a link, not a file"
ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "it is not a regular file"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "link": (lambda path: path.symlink_to(path.with_name("step-000000003.safetensors")), LINKED),
    "dangling link": (lambda path: path.symlink_to("nowhere"), LINKED),
    "ring": (lambda path: path.symlink_to(path.name), LINKED),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ODD)
def test_what_is_not_a_file_is_not_opened(harmed: Run, what: str) -> None:
    """A pipe hung for ever and ignored SIGTERM."""
    make, reason = ODD[what]
    odd = harmed.folder / "checkpoints/step-000000060.safetensors"
    make(odd)
    assert harmed.resume() == [f"{odd} cannot be read ({reason}); trying the one before it"]
    assert harmed.is_whole()
    assert how_to_continue(RunFolder(harmed.folder)) == (
        f"the last checkpoint is of step 6; continue with: manyhands train --resume {harmed.folder}"
    )


def test_a_hole_larger_than_memory_is_not_read(harmed: Run) -> None:
    """It takes no room on the disk, and would have taken all memory."""
    odd = harmed.folder / "checkpoints/step-000000060.safetensors"
    odd.touch()
    os.truncate(odd, 10**12)
    (said,) = harmed.resume()
    assert said.startswith(f"{odd} cannot be read (it is larger than ")
    assert harmed.is_whole()


def test_a_run_without_checkpoints_promises_nothing(harmed: Run) -> None:
    """A bug at the first step is not mended by going on."""
    shutil.rmtree(harmed.folder / "checkpoints")
    assert how_to_continue(RunFolder(harmed.folder)) == (
        "there is no checkpoint yet; once the cause is removed, start from the beginning with: "
        f"manyhands train --resume {harmed.folder}"
    )


def test_a_removed_folder_of_checkpoints_is_made_again(harmed: Run) -> None:
    """It trained to the end, and then could not save, each time."""
    shutil.rmtree(harmed.folder / "checkpoints")
    [notice] = harmed.resume()
    assert notice == f"{harmed.folder} has no checkpoint yet: starting from the beginning"
    assert harmed.is_whole()
    assert len(Checkpoints(harmed.folder / "checkpoints", "").paths()) == 6


def test_a_folder_of_checkpoints_may_go_while_it_trains(harmed: Run) -> None:
    class Vandal(Callback):
        def on_step(self, step: StepRecord) -> None:
            shutil.rmtree(harmed.folder / "checkpoints", ignore_errors=True)

    resume_folder(harmed.folder, {}, callbacks=[Vandal()])
    assert harmed.is_whole()


COMPILED = """
import torch
import manyhands as mh

def task() -> mh.Task:
    data = mh.ArrayData(torch.eye(8), torch.arange(8) % 2)
    return mh.Task(name="compiled", model=model, train=data, test=data, target=1.0,
                   loss=torch.nn.functional.cross_entropy)

def model():
    return torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 2)), backend="eager")
"""


def test_a_compiled_model_is_saved_under_plain_names(here: Path) -> None:
    """And what was saved with `_orig_mod.` in every name still goes on."""
    (here / "compiled.py").write_text(COMPILED)
    settings = {"threads": 1, "checkpoint_every": 0, "quiet": True, "batch": 4, "epochs": 2}
    mh.train("compiled.py:task", out=here / "whole", **settings, recipe_options={"momentum": 0.5})
    assert load_file("whole/model.safetensors").keys() == {"0.weight", "0.bias"}
    for prefix in ("", "_orig_mod."):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("whole", "run")
        (here / "run/result.json").unlink()
        run = Run(here / "run", here / "whole")
        before, last, final = Checkpoints(run.folder / "checkpoints", "").paths()
        final.unlink()
        assert {"model/0.weight", "optimizer/momentum_buffer/0.bias"} <= load_file(last).keys()
        run.forge(lambda tensors, state, prefix=prefix: renamed(tensors, prefix), last)
        before.unlink()
        assert [said for said in run.resume() if not said.startswith("importing ")] == []
        assert run.is_whole()


def renamed(tensors: Tensors, prefix: str) -> None:
    for name in list(tensors):
        kind, _, rest = name.rpartition("/")
        if kind != "random":
            tensors[f"{kind}/{prefix}{rest}"] = tensors.pop(name)
