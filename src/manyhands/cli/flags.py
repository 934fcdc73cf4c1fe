"""Flags that are generated from the fields of a run's spec and from the options of each strategy.

    RunSpec.batch: int | None            ->  --batch <int>        in the group "Data and batch"
    AverageOptions.every: int | str      ->  --every <str>        in the group "Strategy average"

A command declares its own flags as usual and takes the others as keywords; `with_flags` adds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from manyhands.core import registry
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.records.spec import RunSpec

# the groups of `--help`, in order; those of strategies follow
RUN, BATCH, WHERE, MEMORY = "Run", "Data and batch", "Where it runs", "Memory"
OUTPUT = "Checkpoints and output"
GROUPS = (RUN, BATCH, WHERE, MEMORY, OUTPUT)

Function = Callable[..., None]


class Setting(NamedTuple):
    """How a field of RunSpec is shown on the command line."""

    group: str
    help: str
    default: str = ""  # shown in the help, if the field's own default does not say enough
    text: bool = False  # read as text, because more than the field's type is allowed
    flag: bool = True  # false: it has no flag of its own, or the command declares it


SETTINGS: dict[str, Setting] = {
    "task": Setting(RUN, "What is learned.", flag=False),
    "options": Setting(RUN, "Options of the task: --set KEY=VALUE.", flag=False),
    "recipe": Setting(
        RUN, "How a batch size becomes an optimizer and a schedule; or FILE.py:NAME, your own.", "the task's"
    ),
    "recipe_options": Setting(RUN, "Options of the recipe: --set recipe.KEY=VALUE.", flag=False),
    "lr_schedule": Setting(RUN, "Your own learning rate: FILE.py:NAME, a function of samples seen."),
    "epochs": Setting(RUN, "Length of the learning-rate schedule.", "the task's"),
    "samples": Setting(RUN, "Stop early, after this many samples."),
    "seconds": Setting(RUN, "Stop early, after this much training time."),
    "target": Setting(RUN, "The test metric that counts as trained.", "the task's"),
    "stop_at_target": Setting(RUN, "Stop when the target is reached."),
    "patience": Setting(RUN, "Stop after this many evaluations without a better metric."),
    "init": Setting(RUN, "Start from these weights: safetensors, or a state dict of torch.save."),
    "evaluate_every": Setting(RUN, "Epochs between evaluations; 0: never."),
    "seed": Setting(RUN, "Seed of parameters and sample order."),
    "dtype": Setting(RUN, "Type of parameters: float32 or float64."),
    "precision": Setting(RUN, "full, or mixed: bf16 or fp16 by autocast, parameters in float32."),
    "compile": Setting(RUN, "Compile the model with torch.compile; the first steps take longer."),
    "noise_scale": Setting(RUN, "Measure the gradient noise scale, which predicts the critical batch."),
    "batch": Setting(BATCH, "Samples per step, over all workers.", "the task's"),
    "accumulate": Setting(BATCH, "Micro-batches per worker and step."),
    "drop_last": Setting(BATCH, "Leave out the last, short batch of each epoch: its samples are not used."),
    "sync_batchnorm": Setting(BATCH, "Batch norm over the global batch, not each worker's share."),
    "strategy": Setting(WHERE, "How the work is divided.", "allreduce; single for one worker"),
    "strategy_options": Setting(WHERE, "Options of the strategy.", flag=False),
    "workers": Setting(WHERE, "Number of workers, or auto to measure and choose.", "1", text=True),
    "threads": Setting(WHERE, "Threads per worker.", "cores / ranks"),
    "device": Setting(WHERE, "Device: auto, cpu or cuda."),
    "transport": Setting(WHERE, "How workers exchange tensors.", "shm on one host"),
    "launcher": Setting(WHERE, "Who starts the workers.", "local; env under torchrun, mpirun, srun"),
    "timeout": Setting(WHERE, "Seconds without progress that count as a hang.", "adapts to the steps"),
    "restarts": Setting(WHERE, "Restarts from the last checkpoint after a worker fails."),
    "strict": Setting(WHERE, "End the run when a worker is lost, even if the others can continue."),
    "offload": Setting(MEMORY, "Activations kept elsewhere until backward: all, conv, auto, none."),
    "memory": Setting(MEMORY, "Memory per worker, such as 2GB; implies --offload auto.", text=True),
    "offload_to": Setting(MEMORY, "Folder for activations on disk.", "the temporary folder"),
    "checkpoint_every": Setting(OUTPUT, "Seconds between checkpoints; 0: after every step."),
    "keep_best": Setting(OUTPUT, "Write the model of the best evaluation to best.safetensors."),
    "keep": Setting(OUTPUT, "Number of checkpoints to keep."),
}


def settings(*names: str, defaults: Mapping[str, Any] | None = None) -> list[inspect.Parameter]:
    """Return a flag for each field of RunSpec (or the named ones); a command may have its own defaults."""
    made = []
    for name, setting in SETTINGS.items():
        if not setting.flag or (names and name not in names):
            continue
        field = RunSpec.model_fields[name]
        own = (defaults or {}).get(name)
        shown = str(own) if own is not None else setting.default or _shown(field.default)
        kind = str if setting.text else _kind(field.annotation)
        made.append(_parameter(name, kind, setting.help, shown, setting.group, own))
    return made


def strategy_flags() -> list[inspect.Parameter]:
    """Return a flag for each option of each strategy; an option of several strategies appears once."""
    made: dict[str, tuple[registry.Option, list[str]]] = {}
    for strategy, row in STRATEGIES.items():
        for option in registry.options(row.options).values():
            made.setdefault(option.name, (option, []))[1].append(strategy)
    return [
        _parameter(
            name,
            _kind(option.type),
            _first_sentence(option.description),
            _shown(option.default),
            f"Strategy {' and '.join(strategies)}",
        )
        for name, (option, strategies) in made.items()
    ]


def with_flags(*parameters: Iterable[inspect.Parameter]) -> Callable[[Function], Function]:
    """Add these flags to a command; it receives them as keywords, in addition to its own."""

    def decorate(function: Function) -> Function:
        own = inspect.signature(function, eval_str=True).parameters.values()
        kept = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [each for group in parameters for each in group]
        function.__signature__ = inspect.Signature([*kept, *made])  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in [*kept, *made]}
        return function

    return decorate


def given(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags that were given: those of the spec, and those of a strategy."""
    found = {name: value for name, value in flags.items() if value is not None}
    of_spec = {name: found.pop(name) for name in list(found) if name in SETTINGS}
    return of_spec, found


def _parameter(
    name: str, kind: Any, text: str, default: str, group: str, value: Any = None
) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        names = [flag]
    elif kind is NoneType:  # true, false or not given
        kind, names = bool, [f"{flag}/--no-{flag[2:]}"]
    else:
        names = [flag]
    text = f"{text} [default: {default}]" if default else text
    option = typer.Option(*names, help=text, rich_help_panel=group, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=Annotated[kind | None, option]
    )


def _kind(annotation: Any) -> Any:
    """The type that the command line parses; further limits are checked with all other settings."""
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = [each for each in members if each is not NoneType]
    if kinds == [bool]:
        return NoneType if NoneType in members else bool
    return kinds[0] if len(kinds) == 1 and kinds[0] in (int, float) else str


def _shown(default: Any) -> str:
    if default is None or isinstance(default, bool | tuple) or get_origin(default):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _first_sentence(text: str) -> str:
    return f"{text.split('. ')[0].rstrip('.')}."
