"""The run folder: which files a run has, and how they are written and read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core import file_locks
from manyhands.core.atomic_files import cannot_write, open_regular, write_atomically
from manyhands.core.environment import Environment
from manyhands.core.errors import UsageError
from manyhands.records import reading, signing
from manyhands.records.record import RunRecord, StepRecord
from manyhands.records.spec import RunSpec


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    It contains spec.json, environment.json, choices.json, result.json, steps.jsonl, model.safetensors and the
    folder checkpoints.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained parameters and buffers."""
        return self.path / "model.safetensors"

    @property
    def best(self) -> Path:
        """The parameters and buffers of the best evaluation, with --keep-best."""
        return self.path / "best.safetensors"

    @property
    def steps_file(self) -> Path:
        """The journal of the run: one line per step."""
        return self.path / "steps.jsonl"

    def check_links(self) -> None:
        """Raise a UsageError if a file or folder that a run writes to is a link or of another kind."""
        files = ["spec.json", "spec.sig", "result.json", "choices.json", "environment.json", "steps.jsonl"]
        logs = self.path / "logs"
        inside = sorted(logs.glob("*.log")) if logs.is_dir() and not logs.is_symlink() else []
        for path in [*(self.path / name for name in files), self.model, *inside]:
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                kind = "a link" if path.is_symlink() else "not a regular file"
                raise UsageError(f"{path} is {kind}, and a run writes to its own files only: remove it")
        for path in (self.checkpoints, logs, self.path / "tensorboard"):
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                kind = "a link" if path.is_symlink() else "not a folder"
                raise UsageError(f"{path} is {kind}, and a run writes to its own folder only: remove it")

    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "spec.json").is_file()

    def spec(self) -> RunSpec:
        """The spec of the run."""
        return self.spec_and_signature()[0]

    def spec_and_signature(self) -> tuple[RunSpec, bool]:
        """The spec of the run, and whether this account has signed it."""
        path = self.path / "spec.json"
        content = reading.spec_bytes(path)
        return reading.spec(path, content), signing.is_signed(content, self.path / "spec.sig")

    def record(self) -> RunRecord | None:
        """The result of the run, or None while it has none."""
        path = self.path / "result.json"
        return reading.record(path) if os.path.lexists(path) else None

    def environment(self) -> Environment | None:
        """The machine that the run was last started on."""
        path = self.path / "environment.json"
        return reading.environment(path) if os.path.lexists(path) else None

    def steps(self) -> list[StepRecord]:
        """The steps of the run, up to a line that a crash or a power failure has cut off."""
        return list(reading.steps(self.steps_file)) if os.path.lexists(self.steps_file) else []

    def create(self) -> None:
        """Create the folder of a new run."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write_spec(self, spec: RunSpec) -> None:
        """Write the spec and its signature, so that this account can resume the run without --trust."""
        content = (spec.to_json() + "\n").encode()
        path, signature = self.path / "spec.json", self.path / "spec.sig"
        before = reading.spec_bytes(path) if path.is_file() else None
        if before is not None and not signing.is_signed(before, signature):
            before = None
        if (signatures := signing.signatures(content, before)) is not None:
            write_atomically(signature, signatures)
        write_atomically(path, content)

    def sign(self) -> None:
        """Sign the spec in this folder, because the user trusts it."""
        signatures = signing.signatures(reading.spec_bytes(self.path / "spec.json"))
        if signatures is not None:
            write_atomically(self.path / "spec.sig", signatures)

    def write_environment(self, environment: Environment) -> None:
        """Write environment.json."""
        write_atomically(self.path / "environment.json", _pretty(environment.model_dump_json()))

    def choices(self) -> dict[str, Any]:
        """The options that the strategy chose when the run was last started; empty before that."""
        path = self.path / "choices.json"
        return reading.choices(path) if os.path.lexists(path) else {}

    def write_choices(self, choices: Mapping[str, Any]) -> None:
        """Write the choices, if there are any, for when the run is resumed."""
        if choices:
            write_atomically(self.path / "choices.json", _pretty(json.dumps(choices)))

    def reopen(self, spec: RunSpec, environment: Environment) -> None:
        """Begin a session: write the spec and the environment, delete the result of an earlier session."""
        self.write_spec(spec)
        self.write_environment(environment)
        (self.path / "result.json").unlink(missing_ok=True)

    def write_record(self, record: RunRecord) -> None:
        """Write result.json."""
        write_atomically(self.path / "result.json", _pretty(record.model_dump_json()))

    def keep_steps(self, last: int) -> None:
        """Truncate steps.jsonl after a step: a resumed run repeats and writes the later ones."""
        kept = [record.to_json() for record in self.steps() if record.step <= last]
        write_atomically(self.steps_file, "".join(f"{line}\n" for line in kept).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process; a UsageError names the process that holds the lock."""
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            path = path / ".lock"
            # the lock is written to, and a stranger's folder may contain a link to any file of ours
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise cannot_write(path, error) from error
        with os.fdopen(descriptor, "r+") as lock:
            if not file_locks.take(descriptor):
                holder = lock.read().strip() or "unknown"
                raise UsageError(f"{self.path} is being trained by another process (pid {holder})")
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    def remove_if_empty(self) -> None:
        """Remove the locked folder, if nothing was written to it."""
        with contextlib.suppress(OSError):  # it contains files, so it stays
            (self.path / ".lock").unlink()
            self.path.rmdir()


def _pretty(text: str) -> bytes:
    return (json.dumps(json.loads(text), indent=2) + "\n").encode()
