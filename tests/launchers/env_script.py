"""A script that another program starts once per rank: `python env_script.py WHAT SIZE`."""

from __future__ import annotations

import json
import os
import sys

from manyhands.core.errors import ManyhandsError
from manyhands.core.rank_info import RankInfo
from manyhands.launchers.base import SupervisionOptions
from manyhands.launchers.env.launcher import EnvLauncher
from manyhands.testing.worker_functions import (
    add_rank,
    chat,
    fail,
    hang_in_data,
    leave,
    lose_the_last,
    misuse,
    square,
)


def mine(info: RankInfo, number: int) -> tuple[str, int, int]:
    """Defined in the script itself, which every rank runs."""
    return "mine", info.rank, number


def kill_the_leader(info: RankInfo) -> None:
    if info.rank == 0:
        os.kill(os.getpid(), 9)
    info.channel.exchange(None)


def act(launcher: EnvLauncher, what: str, size: int) -> object:
    if what == "results":
        first = launcher.launch(mine, size, 40 if launcher.leads else "followers are not asked")
        messages: list[object] = []
        second = launcher.launch(chat, size, 100, supervision=SupervisionOptions(on_message=messages.append))
        return {"leads": launcher.leads, "first": first, "second": second, "messages": len(messages)}
    if what == "executor":
        with launcher.executor(size) as executor:
            squares = list(executor.map(square, range(6))) if launcher.leads else []
        return {"squares": squares, "then": launcher.launch(add_rank, size, 1)}
    if what.startswith("lose "):
        lost: list[str] = []
        supervision = SupervisionOptions(
            expendable=frozenset({1, 2}), max_replacements=3, on_lost=lambda rank, text: lost.append(text)
        )
        first = launcher.launch(lose_the_last, size, what.removeprefix("lose "), supervision=supervision)
        return {"during": [one and one["during"] for one in first], "lost": lost}
    functions = {"fail": fail, "misuse": misuse, "hang": hang_in_data, "leader": kill_the_leader}
    if what in functions:
        arguments = (1,) if what == "fail" else ()
        return launcher.launch(functions[what], size, *arguments, supervision=SupervisionOptions(timeout=1))
    return launcher.launch(leave, size, what, supervision=SupervisionOptions(timeout=1))


if __name__ == "__main__":
    try:
        print(json.dumps(act(EnvLauncher(timeout=10), sys.argv[1], int(sys.argv[2]))), flush=True)
    except ManyhandsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
