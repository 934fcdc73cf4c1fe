"""The temporary file of offloaded activations: without a name, allocated in advance, without page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path

from manyhands.core import formatting
from manyhands.core.errors import StorageError, UsageError

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_ADVICE = "choose a folder on another disk with --offload-to"


def file_system(folder: Path) -> str | None:
    """The type of a folder's file system, such as ext4, or None if the system does not say."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return None
    device = folder.stat().st_dev
    number, found = f"{os.major(device)}:{os.minor(device)}", None
    for line in table.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number:
            found = rest.split()[0]
    return found


def choose(wanted: str | None) -> Path:
    """The folder that the user chose, or the first usual one on a disk. A folder in memory is refused."""
    if wanted is not None:
        folder = Path(wanted)
        if not folder.is_dir():
            raise UsageError(
                f"offload_to {wanted} is not a folder: create it, or choose another with --offload-to"
            )
        kind = file_system(folder)
        if kind in _IN_MEMORY:
            raise UsageError(
                f"offload_to {wanted} is in memory ({kind}), so nothing would be saved: {_ADVICE}"
            )
        return folder
    usual = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for folder in usual:
        if folder.is_dir() and os.access(folder, os.W_OK) and file_system(folder) not in _IN_MEMORY:
            return folder
    raise UsageError(f"the folders for temporary files are in memory (tmpfs): {_ADVICE}")


class ScratchFile:
    """A file without a name, which disappears with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.nbytes = folder, 0
        try:
            self.fd, self.direct = _open(folder)
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"cannot open a file in {folder} ({reason}): {_ADVICE}") from None

    def grow(self, nbytes: int) -> None:
        """Allocate the file up to `nbytes`. A full disk is an error here, not at a later write."""
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(self.fd, self.nbytes)
            free = shutil.disk_usage(self._folder).free
            raise StorageError(
                f"offloaded activations need {formatting.size(nbytes)} in {self._folder}, which has "
                f"{formatting.size(free)} free ({error.strerror}): {_ADVICE}"
            ) from None
        self.nbytes = nbytes

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Write memory that begins at a page boundary."""
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        done = 0
        while done < nbytes:
            done += os.pwrite(self.fd, view[done:], offset + done)
        if not self.direct:  # the page cache would be memory that is not freed
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Read into memory that begins at a page boundary."""
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        done = 0
        while done < nbytes:
            count = os.preadv(self.fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "unexpected end of file")
            done += count
        if not self.direct:
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Free the disk."""
        os.close(self.fd)


def _open(folder: Path) -> tuple[int, bool]:
    """A file without a name, and whether it bypasses the page cache."""
    unnamed, direct = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    for extra in (direct, 0) if unnamed else ():
        try:
            return os.open(folder, os.O_RDWR | unnamed | extra, 0o600), bool(extra)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    fd, name = tempfile.mkstemp(prefix="manyhands-offload-", dir=folder)
    Path(name).unlink()
    return fd, False
