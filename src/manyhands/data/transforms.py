"""A transform first decides where to look, as pure geometry, and then decodes and resamples an image once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from manyhands.data.order import key


@dataclass(frozen=True)
class CropView:
    """What is shown of an image: a box in its own pixels, drawn `width` x `height`, perhaps mirrored.

    The box is kept in the pixels of the file, so nothing is decoded to find it, and a JPEG can be decoded
    at the coarsest scale that still has every pixel the view needs.
    """

    left: float
    top: float
    right: float
    bottom: float
    width: int
    height: int
    mirrored: bool = False
    upside_down: bool = False

    @classmethod
    def whole(cls, width: int, height: int) -> CropView:
        """All of an image as it is."""
        return cls(0.0, 0.0, width, height, width, height)


Step = Callable[[CropView, np.random.Generator], CropView]


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of the image, of a random area (a share of the whole) and shape, drawn as a square."""

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Draw a shape until it fits; an image so narrow that ten did not fit gets its middle."""
        width, height = view.right - view.left, view.bottom - view.top
        for _ in range(10):
            area = random.uniform(*self.area) * width * height
            ratio = math.exp(random.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if wide <= width and high <= height:
                left = view.left + random.uniform(0.0, width - wide)
                top = view.top + random.uniform(0.0, height - high)
                return _box(view, left, top, wide, high, self.size)
        wide, high = min(width, height * self.ratio[1]), min(height, width / self.ratio[0])
        left, top = view.left + (width - wide) / 2, view.top + (height - high) / 2
        return _box(view, left, top, wide, high, self.size)


@dataclass(frozen=True)
class RandomFlip:
    """Mirrored half of the time; `vertical` as well for what has no up and down, such as a cell."""

    horizontal: bool = True
    vertical: bool = False

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Toss a coin a direction; both are always tossed, so what follows does not depend on the options."""
        across, down = random.random(2) < 0.5
        return replace(
            view,
            mirrored=view.mirrored != bool(self.horizontal and across),
            upside_down=view.upside_down != bool(self.vertical and down),
        )


@dataclass(frozen=True)
class Resize:
    """The whole view with its shorter side drawn `size` pixels long; nothing random."""

    size: int

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Scale both sides alike."""
        scale = self.size / min(view.width, view.height)
        return replace(view, width=round(view.width * scale), height=round(view.height * scale))


@dataclass(frozen=True)
class CenterCrop:
    """The middle `size` x `size` pixels; a smaller view is enlarged first: nothing is padded."""

    size: int

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Cut the same share off both ends."""
        if min(view.width, view.height) < self.size:
            view = Resize(self.size)(view, random)
        wide = (view.right - view.left) * self.size / view.width
        high = (view.bottom - view.top) * self.size / view.height
        left = (view.left + view.right - wide) / 2
        top = (view.top + view.bottom - high) / 2
        return _box(view, left, top, wide, high, self.size)


@dataclass(frozen=True)
class Transform:
    """Steps from an image to its pixels: a uint8 tensor of 3 channels x height x width."""

    steps: tuple[Step, ...] = ()

    def view(self, width: int, height: int, random: np.random.Generator) -> CropView:
        """Where to look in an image of this size."""
        view = CropView.whole(width, height)
        for step in self.steps:
            view = step(view, random)
        return view

    def __call__(self, image: Image.Image, random: np.random.Generator) -> Tensor:
        """Look there; the image may be freshly opened and is then decoded no finer than needed."""
        return show(image, self.view(*image.size, random))


def compose(*steps: Step) -> Transform:
    """Steps one after the other."""
    return Transform(steps)


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch: the same whoever decodes it, and when (law 3)."""
    return np.random.Generator(np.random.Philox(key=key(seed, epoch, sample)))


def show(image: Image.Image, view: CropView) -> Tensor:
    """The pixels of a view, resampled once."""
    full_width, full_height = image.size
    # a JPEG can be decoded at 1/2, 1/4 or 1/8; draft() picks the coarsest that is not below what is asked
    needed_width = math.ceil(full_width * view.width / (view.right - view.left))
    needed_height = math.ceil(full_height * view.height / (view.bottom - view.top))
    drafted = image.draft("RGB", (needed_width, needed_height))
    # its answer is exact, 45.25 pixels of 46 say, where the decoded size is rounded up
    scale = drafted[1][2] / full_width if drafted else 1.0
    image = colors(image)
    box = (view.left * scale, view.top * scale, view.right * scale, view.bottom * scale)
    image = image.resize((view.width, view.height), Image.Resampling.BILINEAR, box=_inside(box, image.size))
    if view.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if view.upside_down:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    # numpy, not torch, reorders: a torch operation would start its own team of threads in every decoder
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def colors(image: Image.Image) -> Image.Image:
    """Red, green and blue of whatever Pillow opened; this is where the file is decoded."""
    if image.mode.startswith("I;16"):
        # convert() would clip 16-bit grays to white; their high byte is the picture
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known brightest value")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def _box(view: CropView, left: float, top: float, wide: float, high: float, size: int) -> CropView:
    return replace(view, left=left, top=top, right=left + wide, bottom=top + high, width=size, height=size)


def _inside(
    box: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Undo rounding at the edges, which Pillow would refuse as outside the image."""
    left, top, right, bottom = box
    return max(left, 0.0), max(top, 0.0), min(right, float(size[0])), min(bottom, float(size[1]))
