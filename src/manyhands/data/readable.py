"""Check before training that every image can be decoded, and cache the result until a file changes."""

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

# what Pillow raises for files that are damaged, empty, not images or dangerously large
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)

PROGRESS_FROM = 2000  # images; fewer are checked so fast that a progress bar is not needed


def unreadable(root: Path, images: Sequence[Listed], decoders: int) -> list[str]:
    """The names of the images that cannot be decoded. Fast if these files were checked before."""
    cache = _cache_file(images)
    cached = _load(cache)
    if cached is not None:
        # checked again, because the reason (permissions, a network) may be gone
        return _check(root, cached, decoders)
    bad = _check(root, [image.name for image in images], decoders)
    _store(cache, bad)
    return bad


def can_read(path: Path) -> bool:
    """Whether an image can be decoded completely. A JPEG is decoded at 1/8 of its size, which is fast."""
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
    quiet = len(names) <= PROGRESS_FROM or not console.is_terminal
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


def _cache_file(images: Sequence[Listed]) -> Path:
    """The cache file for exactly these files and this version of Pillow."""
    # imported here because only this check needs the cache folder
    from manyhands.data.download import cache_folder

    text = json.dumps([PIL.__version__, images])
    return cache_folder() / "checked-images" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _load(cache: Path) -> list[str] | None:
    try:
        names = json.loads(cache.read_text())["unreadable"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never checked, or a damaged cache file
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _store(cache: Path, bad: list[str]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps({"unreadable": bad}).encode())
    except (OSError, StorageError) as error:
        # a cache that cannot be written only costs time
        Console(stderr=True).print(f"the result of the image check cannot be cached: {error}")
