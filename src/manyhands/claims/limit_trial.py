"""What became of training under a memory limit of the system's: a small file in the folder of a study."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.atomic_files import write_atomically
from manyhands.core.errors import UsageError

NAME = "limit.json"
LARGEST = 1_000_000  # bytes of the file


class LimitedSide(BaseModel):
    """How one side ended."""

    model_config = ConfigDict(frozen=True)

    exit: int  # 0 if it trained; negative: the signal that ended it
    said: str = ""  # the last line that it printed
    killed: bool = False  # whether the system ended it, or a process of its own, because of the limit

    @property
    def trained(self) -> bool:
        """Whether it made all of its steps."""
        return self.exit == 0 and not self.killed


class LimitTrial(BaseModel):
    """The same training twice under the same limit: with all activations kept, and with offload."""

    model_config = ConfigDict(frozen=True)

    limit: int = 0  # bytes
    enforced_by: str = ""
    plain: LimitedSide | None = None
    offloaded: LimitedSide | None = None
    problem: str = ""  # why there was no trial

    @property
    def plain_failed(self) -> bool:
        """Whether the limit ended it; any other failure says nothing about memory."""
        return self.plain is not None and self.plain.killed

    @property
    def offloaded_trained(self) -> bool:
        """Whether it made all of its steps."""
        return self.offloaded is not None and self.offloaded.trained


class _Trials(BaseModel):
    trials: list[LimitTrial]


def read(folder: Path) -> list[LimitTrial]:
    """The trials in a study's folder; none if there are none."""
    path = folder / NAME
    if not path.is_file():
        return []
    if path.stat().st_size > LARGEST:
        raise UsageError(f"{path} is not a list of trials: it is larger than {LARGEST:,} bytes")
    try:
        return _Trials.model_validate_json(path.read_bytes()).trials
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path} is not a list of trials: {where}: {first['msg'].lower()}") from None


def write(folder: Path, trials: list[LimitTrial]) -> None:
    """Write the trials into a study's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NAME, _Trials(trials=trials).model_dump_json(indent=2).encode())
