"""Checkpoints: atomic, checked to the last byte, executing nothing, the previous good one used."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from manyhands.core.errors import CheckpointError, StorageError
from manyhands.engine.checkpoint import storage
from manyhands.engine.checkpoint.storage import Checkpoints, random_state, restore_random_state


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path, "run-a", keep=3)
    for step in (1, 2, 3):
        made.save(step, {"model/w": torch.full((4,), float(step))}, {"step": step})
    return made


def latest(checkpoints: Checkpoints) -> tuple[int, list[str]]:
    said: list[str] = []
    found = checkpoints.latest(said.append)
    assert found is not None
    return found.state["step"], said


def test_round_trip_is_exact_for_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "model/a": torch.randn(3, 4, dtype=torch.float64),
        "model/b": torch.randn(5).bfloat16(),
        "model/scalar": torch.tensor(7, dtype=torch.int64),
        "model/empty": torch.zeros(0, 3),
        "model/transposed": torch.randn(3, 4).t(),
        "random/torch": torch.get_rng_state(),
    }
    made = Checkpoints(tmp_path, "r")
    made.save(12, tensors, {"nested": {"x": [1, 2.5, None]}})
    loaded = made.latest(pytest.fail)
    assert loaded is not None
    assert loaded.state == {"nested": {"x": [1, 2.5, None]}}
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name
        assert loaded.tensors[name].dtype == tensor.dtype


def test_tied_tensors_are_written_under_each_name(tmp_path: Path) -> None:
    shared = torch.randn(4)
    made = Checkpoints(tmp_path, "r")
    made.save(1, {"model/a": shared, "model/b": shared, "model/view": shared[:2]}, {})
    loaded = made.latest(pytest.fail)
    assert loaded is not None
    assert torch.equal(loaded.tensors["model/b"], shared)
    assert torch.equal(loaded.tensors["model/view"], shared[:2])


def test_the_last_k_are_kept(three: Checkpoints) -> None:
    three.save(10, {"model/w": torch.zeros(1)}, {"step": 10})
    assert [path.name for path in three.paths()] == [f"step-{step:09d}.safetensors" for step in (2, 3, 10)]


def test_none_at_all_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, "r").latest(pytest.fail) is None


@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_a_truncated_one_is_passed_over(three: Checkpoints, keep: int) -> None:
    path = three.paths()[-1]
    path.write_bytes(path.read_bytes()[:keep])
    step, said = latest(three)
    assert step == 2
    assert len(said) == 1
    assert said[0].startswith(f"{path} is damaged (")
    assert said[0].endswith("; trying the one before it")


def test_every_flipped_byte_is_noticed(three: Checkpoints) -> None:
    """Also one inside a tensor, which the format itself would not notice."""
    path = three.paths()[-1]
    whole = path.read_bytes()
    for position in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            storage.load(path, frozenset({"run-a"}))


def test_tensors_that_changed_names_are_noticed(tmp_path: Path) -> None:
    """All bytes of all tensors are there, in the same order, each under the other's name."""
    made = Checkpoints(tmp_path, "run-a")
    path = made.save(1, {"model/a": torch.zeros(2), "model/b": torch.ones(2)}, {})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"model/a", b"model/0").replace(b"model/b", b"model/1"))
    assert safetensors.torch.load(path.read_bytes()).keys() == {"model/0", "model/1"}
    with pytest.raises(CheckpointError):
        storage.load(path, frozenset({"run-a"}))


def test_one_of_another_run_is_passed_over(three: Checkpoints) -> None:
    Checkpoints(three.folder, "run-b").save(4, {"model/w": torch.zeros(4)}, {"step": 4})
    step, said = latest(three)
    assert step == 3
    path = three.folder / "step-000000004.safetensors"
    assert said == [f"{path} belongs to another run (run-b); trying the one before it"]


def test_a_file_of_someone_else_is_passed_over(three: Checkpoints) -> None:
    path = three.folder / "step-000000009.safetensors"
    path.write_bytes(safetensors.torch.save({"w": torch.zeros(2)}))
    step, said = latest(three)
    assert step == 3
    assert said == [f"{path} is not a checkpoint of manyhands; trying the one before it"]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def test_loading_executes_nothing(three: Checkpoints, here: Path) -> None:
    """Law 9: a pickle in a checkpoint's place is not opened."""
    (three.folder / "step-000000009.safetensors").write_bytes(pickle.dumps(Evil()))
    step, said = latest(three)
    assert step == 3
    assert "is damaged" in said[0]
    assert not (here / "executed").exists()


def test_when_none_can_be_used_it_says_what_to_do(three: Checkpoints) -> None:
    """With the newest one's reason: notices may have been switched off."""
    for path in three.paths():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        three.latest(lambda _: None)
    assert str(caught.value) == (
        f"{three.paths()[-1]} is damaged (error while deserializing: header too small); none of the 3 "
        f"checkpoints in {three.folder} can be used: remove them to start this run from the beginning"
    )


def test_a_full_disk_leaves_the_old_ones_whole(three: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError) as caught:
        three.save(4, {"model/w": torch.zeros(4)}, {"step": 4})
    assert str(caught.value) == (
        f"cannot write {three.folder / 'step-000000004.safetensors'}: no space left on device"
    )
    assert sorted(path.name for path in three.folder.iterdir()) == [path.name for path in three.paths()]
    assert latest(three) == (3, [])


def test_what_a_killed_writer_left_is_removed(three: Checkpoints) -> None:
    leftover = three.folder / ".step-000000004.safetensors.123.partial"
    leftover.write_bytes(b"half")
    latest(three)
    assert not leftover.exists()


def test_random_state_comes_back_everywhere() -> None:
    tensors, numbers = random_state()
    draw = lambda: (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), random.gauss(0, 1))  # noqa: E731
    first = draw()
    assert draw() != first
    restore_random_state(tensors, numbers)
    assert draw() == first


def test_one_number_of_any_stride_is_saved(tmp_path: Path) -> None:
    """Torch calls it contiguous, whatever its stride is."""
    odd = torch.arange(4.0).as_strided((1,), (3,), 1)
    checkpoints = Checkpoints(tmp_path, "run", keep=1)
    checkpoints.save(1, {"odd": odd}, {})
    found = checkpoints.latest(print)
    assert found is not None
    assert torch.equal(found.tensors["odd"], torch.tensor([1.0]))
