"""The plain state of a checkpoint, checked against its schema before it is used."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from manyhands.engine.checkpoint.storage import MismatchError
from manyhands.engine.position import Position, Seconds
from manyhands.recipes.base import OptimizerName
from manyhands.records.record import Evaluation
from manyhands.strategies.precision import LARGEST_SCALE, SMALLEST_SCALE

MAX_RANKS = 2**16
_WORDS = 624  # of a Mersenne twister
_OWN = re.compile(r"own: [\w .+]{1,200}")
_RANDOM = re.compile(r"random/(?:(0|[1-9][0-9]{0,5})/)?(torch|cuda(?:/[0-9]{1,4})?)")


def _numpy(state: list[Any]) -> list[Any]:
    """Check a state of numpy's legacy generator; numpy itself does not check the position."""
    kind, words, position, has_gauss, gauss = state
    integers = all(type(each) is int for each in (*words, position, has_gauss))
    if kind != "MT19937" or not integers or len(words) != _WORDS or not 0 <= position <= _WORDS:
        raise ValueError("is not a state of numpy's generator")
    if not all(0 <= word < 2**32 for word in words) or not math.isfinite(gauss):
        raise ValueError("is not a state of numpy's generator")
    np.random.RandomState().set_state(("MT19937", np.array(words, np.uint32), position, has_gauss, gauss))
    return state


def _python(state: list[Any]) -> list[Any]:
    version, words, gauss = state
    random.Random().setstate((version, tuple(words), gauss))  # it checks everything
    return state


class Generators(BaseModel):
    """The states of numpy's and Python's generators; torch's are tensors."""

    model_config = ConfigDict(strict=True, extra="forbid")

    numpy: list[Any]
    python: list[Any]

    @field_validator("numpy", "python")
    @classmethod
    def _usable(cls, value: list[Any], info: Any) -> list[Any]:
        try:
            return _numpy(value) if info.field_name == "numpy" else _python(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"is not a state of {info.field_name}'s generator") from None


class ScaleState(BaseModel):
    """How a rank scales its loss, with --precision fp16."""

    model_config = ConfigDict(strict=True, extra="forbid")

    scale: Annotated[float, Field(ge=SMALLEST_SCALE, le=LARGEST_SCALE)]
    good: Annotated[int, Field(ge=0, le=2**31)]
    skipped: Annotated[int, Field(ge=0, le=2**53)]


class SavedState(BaseModel):
    """What a checkpoint holds beside the tensors."""

    model_config = ConfigDict(strict=True, extra="forbid")

    position: Position
    clock: Annotated[dict[Annotated[str, Field(pattern="^[a-z_]{1,32}$")], Seconds], Field(max_length=64)]
    random: Annotated[list[Generators], Field(min_length=1, max_length=MAX_RANKS)]  # by rank
    optimizer: str  # its name in manyhands, or `own: CLASS`
    precision: Annotated[list[ScaleState], Field(max_length=MAX_RANKS)] = []  # by rank, if a loss is scaled

    def precision_of(self, rank: int) -> dict[str, float]:
        """How a rank scaled its loss; a rank that was not there begins like the first one."""
        if not self.precision:
            return {}
        return self.precision[rank if rank < len(self.precision) else 0].model_dump()

    @field_validator("position")
    @classmethod
    def _possible(cls, value: Position) -> Position:
        _check_position(value)
        return value

    @field_validator("optimizer")
    @classmethod
    def _named(cls, value: str) -> str:
        if value not in get_args(OptimizerName) and not _OWN.fullmatch(value):
            raise ValueError(f"{value[:40]!r} is not the name of an optimizer")
        return value

    @field_validator("random", mode="before")
    @classmethod
    def _of_one_worker(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value  # 0.1.0 had one worker


def read(state: Mapping[str, Any], limit: int | None = None) -> SavedState:
    """The state, if it fits a run of at most `limit` samples; a MismatchError says what is wrong."""
    try:
        found = SavedState.model_validate_json(json.dumps(state))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        reason = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
        raise MismatchError(f"the checkpoint's position is wrong: {where}: {reason}") from None
    except RecursionError:
        raise MismatchError("the checkpoint's position is wrong: it is nested too deeply") from None
    if limit is not None and found.position.samples > limit:
        raise MismatchError(
            f"the checkpoint's position is wrong: {found.position.samples:,} samples of a run of {limit:,}"
        )
    return found


def check_generators(tensors: Mapping[str, Tensor], ranks: int) -> None:
    """Check the states of torch's generators for this number of ranks."""
    found: set[int] = set()
    for name, tensor in tensors.items():
        if not name.startswith("random/"):
            continue
        parts = _RANDOM.fullmatch(name)
        if parts is None or int(parts[1] or 0) >= ranks:
            raise MismatchError(f"the checkpoint's random state is wrong: there is no generator {name[:80]}")
        if not (_is_torch_state(tensor) if parts[2] == "torch" else _is_device_state(tensor)):
            raise MismatchError(f"the checkpoint's random state is wrong: {name[:80]} is not a generator's")
        if parts[2] == "torch":
            found.add(int(parts[1] or 0))
    if missing := set(range(ranks)) - found:
        raise MismatchError(f"the checkpoint's random state is wrong: worker {min(missing)} has none")


def _is_torch_state(tensor: Tensor) -> bool:
    if tensor.dtype != torch.uint8 or tensor.shape != torch.get_rng_state().shape:
        return False
    try:
        torch.Generator().set_state(tensor)  # it checks the content
    except RuntimeError:
        return False
    return True


def _is_device_state(tensor: Tensor) -> bool:
    """A seed and an offset; it cannot be tried where there is no such device."""
    return tensor.dtype == torch.uint8 and tensor.shape == (16,)


def _check_position(position: Position) -> None:
    """Check that the numbers of a position do not contradict each other."""
    if (position.step == 0) != (position.samples == 0) or position.step > 2 * position.samples:
        # an update has at least one sample, or is the second part of one that had
        raise ValueError(f"{position.step} steps cannot have used {position.samples} samples")
    if (position.target_samples or 0) > position.samples or (position.target_steps or 0) > position.step:
        raise ValueError("the target cannot have been reached later than now")
    for point in position.curve:
        _check_point(point, position)


def _check_point(point: Mapping[str, Any], position: Position) -> None:
    """Check an evaluation of the curve, as the record will need it."""
    try:
        found = Evaluation.model_validate_json(json.dumps(point), strict=True)
    except ValidationError:
        raise ValueError("an evaluation of the curve is not one") from None
    numbers = (found.seconds, found.loss, found.metric, found.test_loss, *(found.noise or ()))
    if (
        point.keys() - Evaluation.model_fields.keys()
        or not 0 <= found.step <= position.step
        or not 0 <= found.samples <= position.samples
        or not all(math.isfinite(number) for number in numbers if number is not None)
    ):
        raise ValueError("an evaluation of the curve is not one")
