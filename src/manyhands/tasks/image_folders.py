"""Two tasks on folders of images: white blood cells with VGG-19, ImageNet with ResNet-50."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from annotated_types import Le
from torch.nn import functional

from manyhands.core.environment import cores
from manyhands.core.errors import UsageError
from manyhands.core.registry import Count, Fraction
from manyhands.data.image_files import find_classes, find_split
from manyhands.data.image_folder import ImageFolder
from manyhands.data.transforms import (
    CenterCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    Transform,
    compose,
)
from manyhands.tasks.base import Defaults, Scale, Task
from manyhands.tasks.models import resnet, vgg

Size = Annotated[int, Le(8_192)]  # pixels
Threads = Annotated[int, Le(1_024)]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BLOOD_MEAN, BLOOD_STD = (0.85, 0.72, 0.71), (0.17, 0.20, 0.08)


def blood_vgg19(
    *,
    data: str = "",
    size: Size = 224,
    norm: bool = True,
    dropout: Fraction = 0.5,
    hidden: Count = 4096,
    decoders: Threads = 0,
    skip_unreadable: bool = False,
) -> Task:
    """Classify photographs of single white blood cells with VGG-19."""
    name = "blood-vgg19"
    vgg.check_size(size)
    if not 0.0 <= dropout < 1.0:
        raise UsageError(f"{name}: option dropout = {dropout} must be at least 0 and below 1")
    if hidden < 1:
        raise UsageError(f"{name}: option hidden = {hidden} must be at least 1")
    # a cell is in the center and its size tells its type: crop and stretch little, flip freely
    crop = RandomResizedCrop(size, area=(0.6, 1.0), ratio=(0.85, 1 / 0.85))
    augment = compose(crop, RandomFlip(horizontal=True, vertical=True))
    train, test = _splits(name, data, ("test",), augment, _plain(size), decoders, skip_unreadable)
    return Task(
        name=name,
        model=partial(vgg.vgg19, len(train.classes), size=size, norm=norm, hidden=hidden, dropout=dropout),
        train=train,
        test=test,
        loss=functional.cross_entropy,
        target=0.80,
        preprocess=Scale(BLOOD_MEAN, BLOOD_STD),
        unit="images",
        evaluation_batch=32,
        defaults=Defaults(
            batch=32,
            epochs=10,
            recipe_options={"lr": 0.04, "warmup": 1.0, "decay": "cosine", "weight_decay": 5e-4},
        ),
    )


def imagenet_resnet50(
    *, data: str = "", size: Size = 224, decoders: Threads = 0, skip_unreadable: bool = False
) -> Task:
    """ImageNet with ResNet-50, trained as in Goyal et al. (2017)."""
    name = "imagenet-resnet50"
    if size < 32:
        raise UsageError(f"{name}: option size = {size} must be at least 32")
    augment = compose(RandomResizedCrop(size), RandomFlip())
    train, test = _splits(name, data, ("val", "test"), augment, _plain(size), decoders, skip_unreadable)
    return Task(
        name=name,
        model=partial(resnet.resnet50, classes=len(train.classes)),
        train=train,
        test=test,
        loss=functional.cross_entropy,
        target=0.75,
        preprocess=Scale(IMAGENET_MEAN, IMAGENET_STD),
        unit="images",
        evaluation_batch=100,
        defaults=Defaults(
            batch=256,
            epochs=90,
            recipe_options={"lr": 0.1, "warmup": 5.0, "decay": "step", "weight_decay": 1e-4},
        ),
    )


def _plain(size: int) -> Transform:
    """The transform of test images: the center, 224 of 256 pixels for size 224."""
    return compose(Resize(round(size * 256 / 224)), CenterCrop(size))


def _splits(
    name: str,
    data: str,
    tests: tuple[str, ...],
    augment: Transform,
    plain: Transform,
    decoders: int,
    skip_unreadable: bool,
) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images, which must have the same classes."""
    if not data:
        raise UsageError(
            f"{name} needs a folder of images: --set data=FOLDER with FOLDER/train/CLASS/* "
            f"and FOLDER/{tests[0]}/CLASS/*"
        )
    if decoders < 0:
        raise UsageError(f"{name}: option decoders = {decoders} must be at least 0 (0: one per core)")
    folder, threads = Path(data).expanduser(), decoders or cores()
    classes = find_classes(folder / find_split(folder, "train"))
    held_out = find_split(folder, *tests)
    # the smaller split first, so that wrong classes are found before a million images are checked
    test = ImageFolder.open(
        folder, held_out, plain, threads, classes=classes, skip_unreadable=skip_unreadable
    )
    train = ImageFolder.open(folder, "train", augment, threads, skip_unreadable=skip_unreadable)
    return train, test
