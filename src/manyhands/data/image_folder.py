"""A folder of images as a data set: threads decode ahead of the reader, in the order of its requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from manyhands.core import formatting
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.base import Batch, Request
from manyhands.data.image_files import find_classes, find_images, find_split, no_images
from manyhands.data.readable import UNREADABLE, unreadable
from manyhands.data.transforms import generator

ImageTransform = Callable[[Image.Image, np.random.Generator], Tensor]

MOST_AHEAD = 1024  # images; two batches ahead are enough, but two batches of 8192 would be gigabytes


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """The images of one split, with the index of their class as the target.

    An EXIF orientation is ignored, as in the published results on ImageNet. Only the first frame is used.
    Gray images get three equal channels, and alpha is dropped.
    """

    root: Path
    classes: tuple[str, ...]
    names: tuple[str, ...]
    targets: Tensor
    transform: ImageTransform
    decoders: int
    skipped: tuple[str, ...] = ()
    pool: ThreadPoolExecutor | None = None  # decodes for all streams; None: each stream has its own

    @classmethod
    def open(
        cls,
        folder: Path | str,
        split: str,
        transform: ImageTransform,
        decoders: int,
        *,
        classes: Sequence[str] | None = None,
        skip_unreadable: bool = False,
    ) -> ImageFolder:
        """List `folder/split/class/**` and check that every image can be read.

        `classes` are those that the split must have: for a test set, those of the training set.
        """
        if decoders < 1:
            raise UsageError(f"decoders must be at least 1, not {decoders}")
        root = Path(folder) / find_split(Path(folder), split)
        found = find_classes(root)
        if classes is not None:
            _same_classes(root, found, classes)
        images = find_images(root, found)
        bad = unreadable(root, images, decoders)
        if bad and not skip_unreadable:
            raise _unreadable_sentence(root, bad)
        left_out = set(bad)
        names = tuple(image.name for image in images if image.name not in left_out)
        targets = _targets(root, names, found)
        if bad:
            Console(stderr=True, soft_wrap=True).print(_skip_notice(root, bad), markup=False, highlight=False)
        return cls(root, found, names, targets, transform, decoders, tuple(bad))

    def __len__(self) -> int:
        return len(self.names)

    @contextmanager
    def pooled(self) -> Iterator[ImageFolder]:
        """The same data set, with one pool of threads for all streams while entered.

        Starting and joining the threads takes about as long as decoding an image, and asynchronous workers
        open a stream per batch.
        """
        with ThreadPoolExecutor(self.decoders, "decoder") as pool:
            try:
                yield replace(self, pool=pool)
            finally:
                # the reader may have stopped early
                pool.shutdown(wait=True, cancel_futures=True)

    def stream(self, requests: Iterable[Request], seed: int) -> Generator[Batch, None, None]:
        """Yield batches in order while the decoders work ahead: two requests, or a few images per decoder."""
        if self.pool is not None:
            yield from self._batches(self.pool, requests, seed)
            return
        with self.pooled() as own:
            yield from own.stream(requests, seed)

    def _batches(self, pool: ThreadPoolExecutor, requests: Iterable[Request], seed: int) -> Iterator[Batch]:
        begun: deque[Request] = deque()  # requests that have images in `decoding`, oldest first
        decoding: deque[Future[Tensor]] = deque()

        def submissions() -> Iterator[Future[Tensor]]:
            for request in requests:
                begun.append(request)
                for sample in request.samples:
                    yield pool.submit(self.read, int(sample), request.epoch, seed)

        ahead = submissions()
        most = 4 * self.decoders
        try:
            while True:
                decoding.extend(islice(ahead, most - len(decoding)))
                if not begun:
                    return
                request = begun.popleft()
                most = max(most, min(2 * len(request.samples), MOST_AHEAD))
                images = []
                for _ in request.samples:
                    decoding.extend(islice(ahead, most - len(decoding)))
                    images.append(decoding.popleft().result())
                inputs = torch.stack(images) if images else self._none()
                yield Batch(inputs, self.targets[torch.tensor(request.samples)])
        finally:
            for future in decoding:  # the reader stopped early; the next one must not wait for these
                future.cancel()

    def read(self, sample: int, epoch: int, seed: int) -> Tensor:
        """One transformed image: a pure function of these arguments."""
        path = self.root / self.names[sample]
        try:
            with Image.open(path) as image:
                return self.transform(image, generator(seed, epoch, sample))
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None) or error
            raise ManyhandsError(
                f"{path} could be read before training, but cannot be read now: {reason}"
            ) from error

    def _none(self) -> Tensor:
        """The inputs of an empty request, with the shape of the others."""
        shape = self.transform(Image.new("RGB", (1, 1)), generator(0, 0, 0)).shape
        return torch.empty((0, *shape), dtype=torch.uint8)


def _targets(root: Path, names: Sequence[str], classes: Sequence[str]) -> Tensor:
    number = {name: index for index, name in enumerate(classes)}
    targets = torch.tensor([number[name.partition("/")[0]] for name in names], dtype=torch.int64)
    counts = torch.bincount(targets, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]
    if empty:
        raise no_images(root, empty, "readable image")
    return targets


def _same_classes(root: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(set(found) - set(wanted))
    if missing or unknown:
        parts = [("missing", missing), ("unknown", unknown)]
        difference = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        raise UsageError(f"the classes of {root} differ from those of the training images ({difference})")


def _unreadable_sentence(root: Path, bad: Sequence[str]) -> UsageError:
    them = f"{len(bad):,} images of {root} cannot be read, the first is {bad[0]}"
    one = f"1 image of {root} cannot be read: {bad[0]}"
    advice = "use --set skip_unreadable=true to skip unreadable images"
    return UsageError(f"{one if len(bad) == 1 else them}; {advice}")


def _skip_notice(root: Path, bad: Sequence[str]) -> str:
    images = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
    return f"skipped {images} of {root} that cannot be read: {formatting.first_few(bad, 3)}"
