"""Resuming: rank 0 chooses and checks a checkpoint, and every rank gets the same one before a step.

Ranks may see other files than rank 0: a folder that is not shared or lags behind, a file that only some may
read. So the other ranks read nothing. Rank 0 broadcasts what it has chosen, all ranks compare what they have
got, and nothing is written before all have loaded it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from manyhands.core.errors import CheckpointError
from manyhands.core.rank_info import RankInfo
from manyhands.data.order import key
from manyhands.engine.checkpoint.saved_state import SavedState, check_generators, read
from manyhands.engine.checkpoint.storage import Checkpoint, Checkpoints, restore_random_state
from manyhands.engine.checkpoint.tensor_checks import Checking, without_optimizer
from manyhands.engine.context import RankContext, seed
from manyhands.records.run_folder import RunFolder
from manyhands.transports.base import Collectives
from manyhands.transports.broadcast import broadcast_tensors


def choose(
    context: RankContext,
    folder: RunFolder,
    checkpoints: Checkpoints,
    accept: frozenset[str],
    say: Callable[[str], None],
) -> Checkpoint | None:
    """The newest good checkpoint among rank 0's files, at every rank; None if rank 0 has none."""
    mine = None
    if context.info.rank == 0:
        converts = getattr(torch, folder.spec().dtype) if accept else None
        # a run whose settings were changed may be longer than the new settings say
        limit = None if accept else context.horizon + context.feed.order.batch
        mine = checkpoints.latest(say, accept, lambda saved: _checked(saved, context, converts, limit, say))
    return agree(context.info, context.transport, mine)


def agree(info: RankInfo, transport: Collectives, mine: Checkpoint | None) -> Checkpoint | None:
    """Rank 0's checkpoint, at every rank; all ranks compare its step and checksum."""
    if info.size == 1:
        return mine
    offered: tuple[int, str] | None = info.channel.exchange(_mark(mine))[0]
    if offered is None:
        return None
    tensors, text = broadcast_tensors(
        transport, mine.tensors if mine else None, json.dumps(mine.state) if mine else ""
    )
    got = mine or Checkpoint(tensors, json.loads(text))
    for rank, mark in enumerate(info.channel.exchange(_mark(got))):
        if mark is not None and mark != offered:  # None: the rank is lost
            raise CheckpointError(
                f"worker {rank} ({info.hosts[rank]}) got another checkpoint than worker 0 sent: step "
                f"{mark[0]:,} ({mark[1]}) instead of step {offered[0]:,} ({offered[1]}); try again"
            )
    return got


def all_loaded(info: RankInfo, step: int) -> None:
    """Wait until every rank has loaded the checkpoint; nothing is written before."""
    if info.size > 1:
        info.channel.exchange(step)


def restore_generators(saved: Checkpoint, state: SavedState, context: RankContext) -> None:
    """Restore this rank's random generators; seed them anew if the checkpoint has none for this rank."""
    rank, hardware = context.info.rank, context.hardware
    if rank >= len(state.random):
        seed(key(context.spec.seed, rank, state.position.step), hardware)
        return
    mark = random_name("random/", rank)
    own = {
        name.replace(mark, "random/", 1): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(mark)
    }
    restore_random_state(own, state.random[rank].model_dump(), hardware)


def random_name(name: str, rank: int) -> str:
    """The name of a rank's generator; rank 0's is unchanged, as in a checkpoint of one worker."""
    return name if rank == 0 else name.replace("random/", f"random/{rank}/", 1)


def how_to_continue(folder: RunFolder) -> str:
    """What a user can do after a run has ended early."""
    steps = [int(path.stem.removeprefix("step-")) for path in Checkpoints(folder.checkpoints, "").paths()]
    command = f"manyhands train --resume {folder.path}"
    if steps:
        return f"the last checkpoint is of step {steps[-1]:,}; continue with: {command}"
    return f"there is no checkpoint yet; once the cause is removed, start from the beginning with: {command}"


def _mark(saved: Checkpoint | None) -> tuple[int, str] | None:
    """The step and the checksum, by which checkpoints are compared."""
    return (saved.state["position"]["step"], saved.checksum) if saved else None


def _checked(
    saved: Checkpoint,
    context: RankContext,
    converts: Any,
    limit: int | None,
    say: Callable[[str], None],
) -> Checkpoint:
    """The checkpoint, if every number and every tensor is as this run would have written it."""
    state = read(saved.state, limit)
    ranks = len(state.random)
    check_generators(saved.tensors, ranks)
    before, now = state.optimizer, context.recipe.saved_as
    tensors = saved.tensors if before == now else without_optimizer(saved.tensors)
    checking = Checking(context.worker.model, context.recipe, ranks, converts)
    tensors = checking.check(tensors)
    if before != now:
        say(f"the optimizer was {before} and is {now}: it starts without state")
    if checking.converted:
        had, has = str(converts).removeprefix("torch."), context.spec.dtype
        say(f"the checkpoint is in {had}: its model and optimizer state are converted to {has}")
    return Checkpoint(tensors, saved.state)
