"""Random damage, as a disk, a crash or a stranger may do it to a run's folder or a study's file.

Every choice is drawn from a generator that the caller seeds, so that each case can be repeated.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS = (-1, 0, 1, 3, 0.5, -0.5, 2**31, 2**63, 10**30, 1e18, 1e308, -1e308, 1e-320, True, False)
TEXTS = (
    "", "x", "\0", "\x1b[31m", "../../x", "/", "a" * 5000, "\ud800", "é\u202e", "none", "nan", "1", "1e9",
    "javascript:f()", "~nobody/x.py:y", "x.py:y", "allreduce", "pipeline", "server", "2GB", "'", '"', "\n",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], [None], {"": None}, {"cls": 1}, {"self": 1})
BYTES = (b"\0", b"\xff\xfe", b"\n", b"{", b"]", b'"', b"NaN", b"Infinity", b"9" * 5000, b"\xf0\x9f", b"\r")
LITERALS = (
    "0", "-1", "1", "3", "1e308", "-1e308", "nan", "inf", "9223372036854775807", "99999999999999999999", "''",
    "'x'", "'\\u0000'", '"\\u0000"', '"\\u001b[31m"', "[]", "[[]]", "{}", "true", "false", "1979-05-27",
    "[0]", "[-1, 'x']", "{a = 1}", "'quadratic'", "'allreduce'", "'pipeline'", "'server'", "'~nobody/a.py:b'",
    "'../x'", "'" + "a" * 3000 + "'", "[" * 500 + "]" * 500, "07", "0x7f", "'auto'", "'all'", "[1, [2, [3]]]",
    "[1, 1]",
)  # fmt: skip


def damaged_bytes(content: bytes, drawn: random.Random) -> bytes:
    """The content with some bytes flipped, lost, repeated or inserted."""
    at, other = sorted(drawn.randrange(len(content) + 1) for _ in range(2))
    kind = drawn.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[other:]
    if kind == 2:
        return content[:other] + content[at:]
    if kind == 3:
        return content[:at] + drawn.choice(BYTES) * drawn.choice((1, 1, 2, 5000)) + content[at:]
    if kind == 4 and content:
        flipped = bytearray(content)
        for _ in range(drawn.choice((1, 1, 5, 50))):
            flipped[drawn.randrange(len(flipped))] ^= 1 << drawn.randrange(8)
        return bytes(flipped)
    return drawn.randbytes(drawn.choice((0, 1, 100, 10_000)))


def damaged_json(value: Any, drawn: random.Random) -> Any:
    """The value with one or a few inner values replaced, lost, renamed, moved or nested."""
    value = copy.deepcopy(value)
    for _ in range(drawn.choice((1, 1, 1, 2, 5))):
        holder = [value]
        slots = list(_slots(holder, drawn))
        parent, key = drawn.choice(slots)
        _damage_value(parent, key, [slot[0][slot[1]] for slot in slots], drawn)
        value = holder[0] if holder else None
    return value


def _damage_value(parent: Any, key: Any, others: list[Any], drawn: random.Random) -> None:
    kind = drawn.randrange(8)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[drawn.choice(TEXTS)] = parent.pop(key)
    elif kind == 2:
        parent[key] = copy.deepcopy(drawn.choice(others))
    elif kind == 3:
        for _ in range(drawn.choice((1, 3, 50, 150))):
            parent[key] = [parent[key]] if drawn.random() < 0.5 else {"a": parent[key]}
    elif kind == 4 and isinstance(parent[key], list):
        parent[key] = parent[key] * drawn.choice((0, 2, 300))
    else:
        parent[key] = copy.deepcopy(drawn.choice(drawn.choice((NUMBERS, TEXTS, OTHERS))))


def _slots(value: Any, drawn: random.Random, depth: int = 0) -> list[tuple[Any, Any]]:
    """The containers and keys of all values; of long lists only some."""
    if depth > 20 or not isinstance(value, dict | list):
        return []
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    keys = drawn.sample(keys, 40) if len(keys) > 40 else keys
    found = [(value, key) for key in keys]
    return found + [slot for key in keys for slot in _slots(value[key], drawn, depth + 1)]


def damage_folder(folder: Path, outside: Path, drawn: random.Random) -> str:
    """Damage files of a folder, and return what was done; `outside` holds files that must not change."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    done = []
    for _ in range(drawn.choice((1, 1, 1, 2, 3))):
        name = drawn.choice([each for each in names if each.suffix in (".json", ".jsonl")] * 3 + names)
        kinds = (_bytes, _json, _json, _json, _link, _pipe, _directory, _missing, _hole, _swapped)
        kind, path = drawn.choice(kinds), folder / name
        if path.parent.is_symlink() or not path.parent.is_dir():  # damaged before
            continue
        kind(path, outside, drawn)
        done.append(f"{kind.__name__[1:]} {name}")
    return ", ".join(done)


def _bytes(path: Path, outside: Path, drawn: random.Random) -> None:
    if _is_plain(path):
        path.write_bytes(damaged_bytes(path.read_bytes(), drawn))


def _json(path: Path, outside: Path, drawn: random.Random) -> None:
    """Change the structure of a document, or of one of the lines."""
    if not _is_plain(path) or path.suffix not in (".json", ".jsonl"):
        return
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    number = drawn.randrange(len(lines)) if lines else 0
    try:
        changed = json.dumps(damaged_json(json.loads(lines[number]), drawn)).encode()
    except (ValueError, IndexError, RecursionError):  # damaged before
        return
    deep = b"[" * 5000 + b"]" * 5000  # deeper than `json` itself goes
    lines[number] = deep if drawn.random() < 0.03 else changed
    path.write_bytes(b"\n".join(lines) + b"\n")


def _is_plain(path: Path) -> bool:
    """Whether a file can be read and written: not a link, pipe or hole that an earlier damage has left."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 10**7


def _replaced(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(path: Path, outside: Path, drawn: random.Random) -> None:
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    path = drawn.choice([path, path, path, run / "checkpoints", run / "logs", run / ".lock"])
    _replaced(path)
    targets: list[Path | str] = [
        outside / "file",
        outside / "file.json",
        outside,
        "nowhere",
        path.name,
        "/dev/zero",
        "/dev/null",
    ]
    path.symlink_to(drawn.choice(targets))


def _pipe(path: Path, outside: Path, drawn: random.Random) -> None:
    _replaced(path)
    os.mkfifo(path)


def _directory(path: Path, outside: Path, drawn: random.Random) -> None:
    _replaced(path)
    path.mkdir()


def _missing(path: Path, outside: Path, drawn: random.Random) -> None:
    _replaced(drawn.choice([path, path, path.parent]) if path.parent.name == "checkpoints" else path)


def _hole(path: Path, outside: Path, drawn: random.Random) -> None:
    """A sparse file, larger than any memory."""
    _replaced(path)
    path.touch()
    os.truncate(path, drawn.choice((1, 10**6, 10**12)))


def _swapped(path: Path, outside: Path, drawn: random.Random) -> None:
    """Replace the content by that of another file."""
    others = sorted(each for each in path.parent.iterdir() if _is_plain(each))
    if others and (_is_plain(path) or not os.path.lexists(path)):
        path.write_bytes(drawn.choice(others).read_bytes())


def damage_checkpoint(path: Path, drawn: random.Random) -> str:
    """Change tensors or state of a checkpoint, with a correct checksum; return what was done."""
    import safetensors
    import torch

    from manyhands.engine.checkpoint.storage import Checkpoints

    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    state = json.loads(metadata["state"])
    name = drawn.choice(sorted(tensors))
    changes: dict[str, Callable[[], Any]] = {
        "state": lambda: damaged_json(state, drawn),
        "missing": lambda: tensors.pop(name),
        "renamed": lambda: tensors.update({f"{name}x": tensors.pop(name)}),
        "length": lambda: tensors.update({name: torch.ones(drawn.choice((0, 1, 64, 100_000)))}),
        "type": lambda: tensors.update({name: tensors[name].to(drawn.choice((torch.int8, torch.float64)))}),
        "not finite": lambda: tensors.update({name: torch.full(tensors[name].shape, float("nan"))}),
        "foreign": lambda: tensors.update(
            {drawn.choice(("model/x", "optimizer/x/y", "random/7/torch", "a")): tensors[name].clone()}
        ),
    }
    kind = drawn.choice(["state", "state", "state", *changes])
    outcome = changes[kind]()
    if kind == "state":
        state = outcome
    step = int(re.sub(r"\D", "", path.stem))
    Checkpoints(path.parent, metadata["run"], keep=100).save(step, tensors, state)
    return f"{kind} of {name} in {path.name}" if kind != "state" else f"state in {path.name}"


def damaged_study(text: str, drawn: random.Random) -> bytes:
    """A study's file with some lines changed, lost, repeated, moved or inserted, or with other bytes."""
    lines = text.splitlines()
    for _ in range(drawn.choice((1, 1, 2, 4))):
        at = drawn.randrange(len(lines)) if lines else 0
        key, equals, _ = lines[at].partition("=") if lines else ("", "", "")
        kind = drawn.randrange(8)
        if kind == 0:
            del lines[at : at + drawn.choice((1, 1, 3))]
        elif kind == 1 and lines:
            lines.insert(drawn.randrange(len(lines)), lines[at])
        elif kind == 2 and equals:
            lines[at] = f"{drawn.choice(KEYS)} = {lines[at].partition('=')[2]}"
        elif kind == 3:
            lines.insert(at, f"{drawn.choice(KEYS)} = {drawn.choice(LITERALS)}")
        elif kind == 4:
            lines.insert(
                at, drawn.choice(("[[grid]]", "[defaults]", "[[exclude]]", "[grid.options]", "[a]", "[[a]]"))
            )
        elif equals:
            lines[at] = f"{key}= {drawn.choice(LITERALS)}"
    content = ("\n".join(lines) + "\n").encode("utf-8", errors="surrogatepass")
    return damaged_bytes(content, drawn) if drawn.random() < 0.15 else content


KEYS = (
    "name", "title", "about", "fallback", "claim", "price", "currency", "budget", "repeats", "keep_models",
    "task", "strategy", "workers", "batch", "share", "lr", "epochs", "samples", "seconds", "seed", "threads",
    "options", "strategy_options", "recipe_options", "options.n", "strategy_options.every", "recipe", "timed",
    "transport", "launcher", "device", "dtype", "target", "stop_at_target", "evaluate_every", "keep", "x",
    "recipe_options.lr", "strategy_options.servers", "strategy_options.stages", "memory", "offload",
    "options.dimensions", "recipe_options.warmup", "accumulate", "noise_scale", "sync_batchnorm", "timeout",
    "''", "restarts",
)  # fmt: skip
