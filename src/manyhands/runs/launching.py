"""Launch a function on workers, with those objects of the spec that no name or file stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands.core.rank_info import RankInfo
from manyhands.launchers.base import Launcher
from manyhands.launchers.inline import InlineLauncher
from manyhands.launchers.local import LocalLauncher
from manyhands.records.spec import RunSpec

if TYPE_CHECKING:
    from manyhands.tasks.brought import Packed


def launch(
    launcher: Launcher, spec: RunSpec, function: Callable[..., Any], *arguments: Any, **options: Any
) -> list[Any]:
    """Call `function(info, *arguments)` at every rank of a spec, and return what each has returned."""
    if not spec.brought or isinstance(launcher, InlineLauncher):
        return launcher.launch(function, spec.ranks, *arguments, **options)
    from manyhands.tasks import brought

    with brought.packed(spec.brought, shared=isinstance(launcher, LocalLauncher)) as task:
        return launcher.launch(_with_task, spec.ranks, task, function, *arguments, **options)


def _with_task(info: RankInfo, task: Packed, function: Callable[..., Any], *arguments: Any) -> Any:
    from manyhands.tasks import brought

    brought.unpack(task)
    return function(info, *arguments)
