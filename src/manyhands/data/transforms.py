"""Image transforms: compute the crop as pure geometry, then decode and resample the image once."""

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
    """A crop of an image: a box in its own pixels, resampled to `width` x `height`, perhaps mirrored.

    The box is in pixels of the file, so that it is known before decoding. A JPEG can then be decoded at the
    coarsest scale that still has all pixels of the view.
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
        """The whole image, unchanged."""
        return cls(0.0, 0.0, width, height, width, height)


Step = Callable[[CropView, np.random.Generator], CropView]


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random crop of random area (as a fraction of the image) and aspect ratio, resampled to a square."""

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Draw a shape until it fits. After ten tries, take the center."""
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
    """Mirror with probability 1/2. `vertical` is for objects without an up and down, such as cells."""

    horizontal: bool = True
    vertical: bool = False

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Always draw two random numbers, so that later steps do not depend on the options."""
        across, down = random.random(2) < 0.5
        return replace(
            view,
            mirrored=view.mirrored != bool(self.horizontal and across),
            upside_down=view.upside_down != bool(self.vertical and down),
        )


@dataclass(frozen=True)
class Resize:
    """Resize so that the shorter side has `size` pixels."""

    size: int

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Scale both sides by the same factor."""
        scale = self.size / min(view.width, view.height)
        return replace(view, width=round(view.width * scale), height=round(view.height * scale))


@dataclass(frozen=True)
class CenterCrop:
    """The central `size` x `size` pixels. A smaller view is enlarged first; nothing is padded."""

    size: int

    def __call__(self, view: CropView, random: np.random.Generator) -> CropView:
        """Crop the same amount at both ends."""
        if min(view.width, view.height) < self.size:
            view = Resize(self.size)(view, random)
        wide = (view.right - view.left) * self.size / view.width
        high = (view.bottom - view.top) * self.size / view.height
        left = (view.left + view.right - wide) / 2
        top = (view.top + view.bottom - high) / 2
        return _box(view, left, top, wide, high, self.size)


@dataclass(frozen=True)
class Transform:
    """Turns an image into a uint8 tensor of 3 channels x height x width."""

    steps: tuple[Step, ...] = ()

    def view(self, width: int, height: int, random: np.random.Generator) -> CropView:
        """The crop of an image of this size."""
        view = CropView.whole(width, height)
        for step in self.steps:
            view = step(view, random)
        return view

    def __call__(self, image: Image.Image, random: np.random.Generator) -> Tensor:
        """Decode the image, no finer than necessary, and resample it."""
        return show(image, self.view(*image.size, random))


def compose(*steps: Step) -> Transform:
    """A transform of these steps, in order."""
    return Transform(steps)


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random generator of one sample in one epoch, the same for every worker and decoder (law 3)."""
    return np.random.Generator(np.random.Philox(key=key(seed, epoch, sample)))


def show(image: Image.Image, view: CropView) -> Tensor:
    """The pixels of a view, resampled once."""
    full_width, full_height = image.size
    # a JPEG can be decoded at 1/2, 1/4 or 1/8; draft() picks the coarsest that is at least this size
    needed_width = math.ceil(full_width * view.width / (view.right - view.left))
    needed_height = math.ceil(full_height * view.height / (view.bottom - view.top))
    drafted = image.draft("RGB", (needed_width, needed_height))
    # its result is exact (such as 45.25 pixels), but the decoded size is rounded up (46)
    scale = drafted[1][2] / full_width if drafted else 1.0
    image = colors(image)
    box = (view.left * scale, view.top * scale, view.right * scale, view.bottom * scale)
    image = image.resize((view.width, view.height), Image.Resampling.BILINEAR, box=_inside(box, image.size))
    if view.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if view.upside_down:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    # numpy, not torch: a torch operation would start its own threads in every decoder
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def colors(image: Image.Image) -> Image.Image:
    """An image as RGB. This decodes the file."""
    if image.mode.startswith("I;16"):
        # convert() would clip 16-bit grays to white: take their high byte
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known maximum")
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
    """Undo rounding at the edges: Pillow refuses a box outside of the image."""
    left, top, right, bottom = box
    return max(left, 0.0), max(top, 0.0), min(right, float(size[0])), min(bottom, float(size[1]))
