"""The images of a folder, `folder/split/class/**/*`, in the same order on every machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from manyhands.core.errors import UsageError

EXTENSIONS = ("jpg", "jpeg", "png", "bmp", "gif", "webp", "tif", "tiff")


class Listed(NamedTuple):
    """An image file: its path inside the split (with slashes), its size, and its time of modification."""

    name: str
    size: int
    modified: int


def find_split(folder: Path, *names: str) -> str:
    """The first of these names that is a folder in `folder`. An error lists what is there instead."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    for name in names:
        if (folder / name).is_dir():
            return name
    wanted = " or ".join(repr(name) for name in names)
    found = ", ".join(_subfolders(folder)) or "no folders"
    raise UsageError(f"{folder} has no folder {wanted} (found: {found})")


def find_classes(root: Path) -> tuple[str, ...]:
    """The class folders of a split, sorted by name. The index of a class is its position."""
    classes = tuple(_subfolders(root))
    if not classes:
        raise UsageError(f"{root} has no classes: it needs one folder of images per class")
    return classes


def find_images(root: Path, classes: tuple[str, ...]) -> list[Listed]:
    """All images, sorted by class and path. A class without images is an error."""
    images = [sorted(_walk(root, root / name)) for name in classes]
    empty = [name for name, found in zip(classes, images, strict=True) if not found]
    if empty:
        raise no_images(root, empty, f"images ({', '.join(EXTENSIONS)})")
    return [image for found in images for image in found]


def no_images(root: Path, classes: list[str], what: str) -> UsageError:
    """The error for classes without images."""
    if len(classes) == 1:
        return UsageError(f"class {classes[0]!r} of {root} has no {what}")
    return UsageError(f"classes {', '.join(map(repr, classes))} of {root} have no {what}")


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if _shown(entry.name) and entry.is_dir())


def _walk(root: Path, folder: Path) -> list[Listed]:
    found: list[Listed] = []
    for parent, folders, files in os.walk(folder):
        folders[:] = filter(_shown, folders)
        found += [_listed(root, Path(parent, file)) for file in files if _shown(file) and _is_image(file)]
    return found


def _listed(root: Path, path: Path) -> Listed:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:
        # a broken link: listed, so that it is reported as unreadable
        return Listed(name, 0, 0)
    return Listed(name, status.st_size, status.st_mtime_ns)


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in EXTENSIONS


def _shown(name: str) -> bool:
    # macOS creates `._cell.jpg` beside `cell.jpg`, which is not an image
    return not name.startswith(".")
