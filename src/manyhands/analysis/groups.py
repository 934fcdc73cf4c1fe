"""How records are grouped into tasks and cells, and how these are named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from manyhands.core import formatting
from manyhands.core.registry.strategies import STRATEGIES, UNKNOWN, StrategyEntry
from manyhands.core.registry.strategy_options import is_default
from manyhands.records.record import RunRecord
from manyhands.records.user_names import is_users, short_name

_SCALINGS = {"linear": "linear", "sqrt": "square root"}


class Key(NamedTuple):
    """What all repeats and seeds of one cell have in common."""

    variant: str
    workers: int
    threads: int
    batch: int


def variant(record: RunRecord) -> str:
    """The setting of the strategy with the label of the cell: `average every=8 (again)`."""
    return setting(record) + (f" ({record.label})" if record.label else "")


def setting(record: RunRecord) -> str:
    """The strategy with the settings that are not at their defaults: `average every=8`."""
    spec = record.spec
    options = {
        name: value for name, value in spec.strategy_options.items() if not _usual(name, value, record)
    }
    more: dict[str, Any] = {
        "accumulate": spec.accumulate if spec.accumulate > 1 else None,
        "offload": None if spec.offload == "none" else spec.offload,
        "memory": formatting.size(spec.memory) if spec.memory else None,
        "drop_last": spec.drop_last or None,
        "sync_batchnorm": spec.sync_batchnorm or None,
        "dtype": None if spec.dtype == "float32" else spec.dtype,
        "precision": None if spec.precision == "full" else spec.precision,
        "compile": spec.compile or None,
        "transport": spec.named_transport,
    }
    named = options | {name: value for name, value in more.items() if value is not None}
    return " ".join([spec.strategy, *_pairs(named)])


def one_plain_worker(variant: str, workers: int) -> bool:
    """Whether this is one worker without anybody to share with: the same work under any strategy's name."""
    traits = traits_of(variant)
    same = traits.exact or traits.averaging
    return workers == 1 and variant in STRATEGIES and same and not traits.serves


def traits_of(variant: str) -> StrategyEntry:
    """The registry entry of a variant's strategy."""
    return STRATEGIES.get(variant.split()[0], UNKNOWN)


def option(record: RunRecord, name: str) -> Any:
    """The value of an option of the strategy, or its default."""
    fields = record.spec.traits.options.model_fields
    return record.spec.strategy_options.get(name, fields[name].default if name in fields else None)


def recipe_variant(record: RunRecord) -> str:
    """How the learning rate follows the batch: `linear + warm-up`, `linear, no warm-up`, `no scaling`."""
    recipe = record.recipe
    scaling = _SCALINGS.get(str(recipe.get("scaling", "none")))
    warms = " + warm-up" if recipe.get("warmup") else ", no warm-up"
    lr = scaling + warms if scaling else "no scaling"
    optimizer = recipe.get("optimizer", "sgd")
    if schedule := recipe.get("schedule"):
        lr = f"lr from {short_name(str(schedule))}"
    if is_users(name := str(recipe.get("name", ""))):
        return f"{optimizer} of {short_name(name)}" + (f", {lr}" if schedule else "")
    return lr if optimizer == "sgd" else f"{optimizer}, {lr}"


def title(record: RunRecord) -> str:
    """The cell in one line: `allreduce · 2 workers · batch 256`, `single · 1 thread · batch 128`."""
    return " · ".join([variant(record), workers_text(record), f"batch {batch(record)}"])


def workers_text(record: RunRecord) -> str:
    """`2 workers`, `2 workers + 1 server`; for `single` the threads: `1 thread`."""
    spec, each = record.spec, threads(record)
    if spec.traits.one_worker:
        return formatting.plural(each, "thread")
    workers = formatting.plural(spec.workers, "worker")
    serving = f" + {formatting.plural(spec.servers, 'server')}" if spec.servers else ""
    return workers + serving + (f" x {each} threads" if each > 1 else "")


def task_name(record: RunRecord) -> str:
    """The task with its options, without the path of its data: `blood-vgg19 size=64`."""
    options = {name: value for name, value in record.spec.options.items() if name != "data"}
    return " ".join([record.spec.task, *_pairs(options)])


def tasks(records: Iterable[RunRecord]) -> list[str]:
    """The names of the tasks, in order of appearance."""
    return list(dict.fromkeys(map(task_name, records)))


def of_task(records: Iterable[RunRecord], task: str) -> list[RunRecord]:
    """The records of one task, in their order."""
    return [record for record in records if task_name(record) == task]


def threads(record: RunRecord) -> int:
    """Threads per worker."""
    return record.spec.threads or record.environment.threads


def batch(record: RunRecord) -> int:
    """Samples per optimizer step, over all workers."""
    return record.spec.batch or round(record.samples / max(1, record.steps))


def key(record: RunRecord) -> Key:
    """The cell of a record."""
    return Key(variant(record), record.spec.workers, threads(record), batch(record))


def cells(records: Iterable[RunRecord]) -> dict[Key, list[RunRecord]]:
    """Records by cell, in order of appearance."""
    found: dict[Key, list[RunRecord]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def recipe_key(record: RunRecord) -> str:
    """A text that is equal for runs with the same recipe and options."""
    return json.dumps(record.recipe, sort_keys=True, default=str)


def measured(record: RunRecord) -> bool:
    """Whether the times of a run count: it ran alone on the machine, and long enough."""
    whole = record.status in ("finished", "target") or record.steady_samples_per_second is not None
    return record.timed and record.throughput > 0 and whole


def attempted(record: RunRecord) -> bool:
    """Whether a run tried to reach the target.

    An interrupted run does not count. Neither does a run that only measures speed: a paired one, or one on a
    budget that made less than an epoch. If one of these diverged, it counts, because that can be known early.
    """
    if record.status == "interrupted" or (record.paired and record.status != "diverged"):
        return False
    budgeted = record.spec.seconds is not None or record.spec.samples is not None
    return record.reached or record.status == "diverged" or not budgeted or record.epochs >= 1


def succeeded(record: RunRecord) -> bool:
    """Whether a run reached the target and was neither interrupted nor diverged."""
    return record.reached and record.status in ("finished", "target")


def higher_is_better(record: RunRecord) -> bool:
    """As the task says; for an old record by name: losses, errors and distances are better when smaller."""
    if record.higher_is_better is not None:
        return record.higher_is_better
    name = record.metric_name.lower()
    return not any(word in name for word in ("loss", "error", "distance", "perplexity"))


def cores_held(record: RunRecord) -> int:
    """The cores or devices that are paid for: one core per thread, or one device per rank."""
    each = threads(record) if record.environment.device == "cpu" else 1
    return record.spec.ranks * each


def busiest_host(record: RunRecord) -> int:
    """The number of ranks on the host that has the most."""
    return max(Counter(record.hosts).values(), default=record.spec.ranks)


def crowding(record: RunRecord) -> float:
    """Computing threads per core on the busiest host; at 1 all cores are in use."""
    return busiest_host(record) * threads(record) / max(1, record.environment.cores)


def crowded(record: RunRecord) -> bool:
    """Whether there are more computing threads than cores; on a GPU the host has little to do."""
    return record.environment.device == "cpu" and crowding(record) > 1


def runs(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """The folders of the runs, so that every number can be traced to them."""
    return tuple(sorted(record.run for record in records))


def _usual(name: str, value: Any, record: RunRecord) -> bool:
    """Whether an option is not shown: it has its default, or the strategy chose it."""
    if name in record.choices or (name == "stages" and value == record.spec.workers):
        return True  # it may differ between repeats
    return is_default(record.spec.traits.options, name, value)


def _pairs(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_plain(value)}" for name, value in options.items()]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
