"""Every image is decoded once before training, and the answer is remembered until a file changes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import PIL
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import StorageError
from manyhands.data.image_files import Listed
from manyhands.data.transforms import colors

# what Pillow raises for files that are damaged, empty, of another kind or dangerously large
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)

MANY = 2000  # below this the check is over before a progress bar could be read


def unreadable(root: Path, images: Sequence[Listed], decoders: int) -> list[str]:
    """The names of the images that cannot be decoded; quick if these same files were checked before."""
    memory = _memory(images)
    known = _recall(memory)
    if known is not None:
        # asked again, because what made them unreadable (permissions, a network) may be over
        return _check(root, known, decoders)
    bad = _check(root, [image.name for image in images], decoders)
    _remember(memory, bad)
    return bad


def can_read(path: Path) -> bool:
    """Whether an image can be decoded to its end; a JPEG at an eighth of its size, which is quick."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))
            colors(image)
    except UNREADABLE:
        return False
    return True


def _check(root: Path, names: Sequence[str], decoders: int) -> list[str]:
    bad = []
    console = Console(stderr=True)
    quiet = len(names) <= MANY or not console.is_terminal
    with ThreadPoolExecutor(decoders, "check") as pool, Progress(console=console, disable=quiet) as progress:
        bar = progress.add_task(f"checking {len(names):,} images", total=len(names))
        for part in _parts(names, 1000):
            good = pool.map(can_read, [root / name for name in part])
            bad += [name for name, readable in zip(part, good, strict=True) if not readable]
            progress.advance(bar, len(part))
    return bad


def _parts(names: Iterable[str], size: int) -> Iterator[list[str]]:
    rest = iter(names)
    while part := list(islice(rest, size)):
        yield part


def _memory(images: Sequence[Listed]) -> Path:
    """Where the answer for exactly these files, and this Pillow, is kept."""
    # imported here because only a check needs a cache
    from manyhands.data.download import cache_folder

    text = json.dumps([PIL.__version__, images])
    return cache_folder() / "checked-images" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _recall(memory: Path) -> list[str] | None:
    try:
        known = json.loads(memory.read_text())["unreadable"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never checked, or an answer that cannot be used: check again
    return known if isinstance(known, list) and all(isinstance(name, str) for name in known) else None


def _remember(memory: Path, bad: list[str]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memory, json.dumps({"unreadable": bad}).encode())
    except (OSError, StorageError) as error:
        # a cache that cannot be written costs time, not the run
        Console(stderr=True).print(f"the check of the images will be repeated next time: {error}")
