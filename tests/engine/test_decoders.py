"""Decoders of images last as long as the run that reads them, however many pieces it claims."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from manyhands.data import image_folder
from manyhands.records.run_folder import RunFolder
from pictures import write

TASK = """
from torch import nn
from torch.nn import functional

import manyhands as mh
from manyhands.data.image_folder import ImageFolder
from manyhands.data.transforms import CenterCrop, Resize, compose


class Scale(nn.Module):
    def forward(self, pixels):
        return pixels / 255


def opened(split):
    return ImageFolder.open("data", split, compose(Resize(8), CenterCrop(8)), 2)


def pictures() -> mh.Task:
    return mh.Task(
        name="pictures",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)),
        train=opened("train"),
        test=opened("test"),
        loss=functional.cross_entropy,
        target=2.0,
        preprocess=Scale(),
    )
"""


@pytest.fixture
def task(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MANYHANDS_CACHE", str(here / "cache"))
    for split in ("train", "test"):
        for name in ("ant", "cat"):
            for number in range(6):
                write(here / "data" / split / name / f"{number}.png", seed=len(split + name) + number)
    (here / "mine.py").write_text(TASK)
    return "mine.py:pictures"


def test_a_run_of_many_pieces_has_one_pool_for_each_data_set(
    here: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ThreadPoolExecutor] = []

    class Noted(ThreadPoolExecutor):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            pools.append(self)

    settings: dict[str, Any] = {"workers": 1, "batch": 4, "epochs": 4, "recipe": "constant", "quiet": True}
    mh.train(task, out=here / "single", **settings)
    monkeypatch.setattr(image_folder, "ThreadPoolExecutor", Noted)
    record = mh.train(task, out=here / "pieces", strategy="hogwild", **settings)
    assert record.steps == 12  # and four tests of twelve images
    assert len(pools) == 2  # the examination of the task is that of the first run
    assert not [each for each in threading.enumerate() if each.name.startswith("decoder")]
    expected, found = (load_file(RunFolder(here / name).model) for name in ("single", "pieces"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
