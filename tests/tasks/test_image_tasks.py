import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from manyhands.core.environment import cores
from manyhands.core.errors import UsageError
from manyhands.core.registry import options, parse
from manyhands.data.base import Request
from manyhands.data.order import Order
from manyhands.data.transforms import CropView, generator
from manyhands.tasks.image_folders import blood_vgg19, imagenet_resnet50

BUILDERS = {"blood-vgg19": blood_vgg19, "imagenet-resnet50": imagenet_resnet50}
BLOOD = Path(__file__).parents[3] / "shared/data/blood-cells"
SMALL = {"size": 32, "hidden": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for split, name, number in itertools.product(("train", "test"), ("ant", "bee", "cat"), range(2)):
        write(tmp_path / "data" / split / name / f"{number}.jpg", seed=number)
    return tmp_path / "data"


def write(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(("name", "split"), [("blood-vgg19", "test"), ("imagenet-resnet50", "val")])
def test_without_a_folder_the_sentence_says_which_layout_is_needed(name, split):
    with pytest.raises(UsageError) as error:
        BUILDERS[name]()
    assert str(error.value) == (
        f"{name} needs a folder of images: --set data=FOLDER with FOLDER/train/CLASS/* "
        f"and FOLDER/{split}/CLASS/*"
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_a_task_has_its_name_its_images_and_their_classes(name, folder):
    task = BUILDERS[name](data=str(folder), size=32)
    assert task.name == name
    assert task.unit == "images"
    assert task.metric.name == "accuracy"
    assert task.train.classes == task.test.classes == ("ant", "bee", "cat")
    assert (len(task.train), len(task.test)) == (6, 6)
    assert task.train.decoders == task.test.decoders == cores()
    assert BUILDERS[name](data=str(folder), size=32, decoders=3).train.decoders == 3


@pytest.mark.parametrize(("name", "more"), [("blood-vgg19", {"hidden": 8}), ("imagenet-resnet50", {})])
def test_a_batch_goes_through_preprocessing_and_model_to_a_loss(name, more, folder):
    task = BUILDERS[name](data=str(folder), size=32, **more)
    torch.manual_seed(0)
    model, preprocess = task.model(), task.preprocess.float()
    (batch,) = task.train.stream(itertools.islice(Order(6, 4, 0).batches(), 1), seed=0)
    assert batch.inputs.shape == (4, 3, 32, 32)
    outputs = model(preprocess(batch.inputs))
    assert outputs.shape == (4, 3)
    assert torch.isfinite(task.loss(outputs, batch.targets))
    assert task.metric.scores(outputs, batch.targets).shape == (4,)


def test_training_images_change_by_epoch_and_test_images_do_not(folder):
    task = blood_vgg19(data=str(folder), **SMALL)
    requests = [Request(epoch, np.arange(6)) for epoch in (0, 1)]
    first, second = task.train.stream(requests, seed=0)
    assert not torch.equal(first.inputs, second.inputs)
    first, second = task.test.stream(requests, seed=0)
    assert torch.equal(first.inputs, second.inputs)


def test_imagenet_is_trained_as_goyal_says(folder):
    task = imagenet_resnet50(data=str(folder))
    assert task.target == 0.75
    assert (task.defaults.batch, task.defaults.epochs, task.defaults.recipe) == (256, 90, "large-batch")
    expected = {"lr": 0.1, "warmup": 5.0, "decay": "step", "weight_decay": 1e-4}
    assert task.defaults.recipe_options == expected
    view = task.test.transform.view(512, 1024, generator(0, 0, 0))
    assert view == CropView(32, 288, 480, 736, 224, 224)  # 224 of 256 pixels
    pixels = torch.tensor([255, 0, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    scaled = task.preprocess(pixels).flatten().tolist()
    assert scaled == pytest.approx([(1 - 0.485) / 0.229, -0.456 / 0.224, (1 - 0.406) / 0.225])


def test_cells_are_turned_freely_and_cut_little(folder):
    task = blood_vgg19(data=str(folder), **SMALL)
    views = [task.train.transform.view(360, 363, generator(seed, 0, 0)) for seed in range(200)]
    assert {(view.mirrored, view.upside_down) for view in views} == set(
        itertools.product((False, True), repeat=2)
    )
    shares = [(view.right - view.left) * (view.bottom - view.top) / (360 * 363) for view in views]
    assert 0.6 <= min(shares) < 0.65
    assert 0.9 < max(shares) <= 1.0
    assert task.target == 0.80
    assert task.evaluation_batch == 32
    assert task.defaults.batch == 32


def test_imagenet_takes_val_before_test_and_says_when_there_is_neither(folder):
    assert imagenet_resnet50(data=str(folder), size=32).test.root == folder / "test"
    (folder / "test").rename(folder / "val")
    assert imagenet_resnet50(data=str(folder), size=32).test.root == folder / "val"
    (folder / "val").rename(folder / "valid")
    with pytest.raises(UsageError) as error:
        imagenet_resnet50(data=str(folder), size=32)
    assert str(error.value) == f"{folder} has no folder 'val' or 'test' (found: train, valid)"


def test_a_test_class_that_was_not_trained_is_named(folder):
    write(folder / "test/dog/0.jpg", seed=0)
    with pytest.raises(UsageError) as error:
        blood_vgg19(data=str(folder), **SMALL)
    where = f"{folder}/test"
    assert (
        str(error.value) == f"the classes of {where} differ from those of the training images (unknown: dog)"
    )


def test_unreadable_images_are_left_out_of_both_splits_on_request(folder, capsys):
    for split in ("train", "test"):
        (folder / split / "bee/0.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match=r"^1 image of .*/test cannot be read: bee/0.jpg; use --set skip_un"):
        blood_vgg19(data=str(folder), **SMALL)
    task = blood_vgg19(data=str(folder), skip_unreadable=True, **SMALL)
    assert (len(task.train), len(task.test)) == (5, 5)
    assert capsys.readouterr().err.count("skipped 1 image of") == 2


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        (
            "blood-vgg19",
            {"size": 100},
            "VGG-19 needs images whose size is a multiple of 32 and at least 32, not 100",
        ),
        ("blood-vgg19", {"dropout": 1.0}, "blood-vgg19: option dropout = 1.0 must be at least 0 and below 1"),
        ("blood-vgg19", {"hidden": 0}, "blood-vgg19: option hidden = 0 must be at least 1"),
        (
            "blood-vgg19",
            {"decoders": -1},
            "blood-vgg19: option decoders = -1 must be at least 0 (0: one per core)",
        ),
        ("imagenet-resnet50", {"size": 8}, "imagenet-resnet50: option size = 8 must be at least 32"),
    ],
)
def test_options_out_of_range_are_answered_before_anything_is_read(name, given, sentence):
    with pytest.raises(UsageError) as error:
        BUILDERS[name](data="/nowhere", **given)
    assert str(error.value) == sentence


def test_options_come_as_text_from_the_command_line():
    given = {"data": "cells", "size": "64", "norm": "false", "dropout": "0.1", "skip_unreadable": "true"}
    expected = {"data": "cells", "size": 64, "norm": False, "dropout": 0.1, "skip_unreadable": True}
    assert parse("blood-vgg19", blood_vgg19, given) == expected
    assert list(options(imagenet_resnet50)) == ["data", "size", "decoders", "skip_unreadable"]


def test_the_blood_cells_are_scaled_to_numbers_around_zero():
    if not BLOOD.is_dir():
        pytest.skip(f"the blood cells are not at {BLOOD}")
    task = blood_vgg19(data=str(BLOOD), **SMALL)
    assert (len(task.train), len(task.test)) == (960, 240)
    (batch,) = task.test.stream([Request(0, np.arange(0, 240, 4))], seed=0)
    scaled = task.preprocess(batch.inputs)
    assert scaled.mean(dim=(0, 2, 3)).abs().max() < 0.2
    assert (scaled.std(dim=(0, 2, 3)) - 1).abs().max() < 0.2
