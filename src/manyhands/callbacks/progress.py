"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from manyhands.callbacks.base import Callback
from manyhands.core import environment, formatting, plausible
from manyhands.core.registry.launchers import LAUNCHERS
from manyhands.core.statistics import measured, ratio
from manyhands.records.phases import training_phases
from manyhands.records.record import RunRecord, Start, StepRecord
from manyhands.records.spec import RunSpec


def for_people() -> Callback:
    """A bar where standard error is a terminal, lines where it is a file or a pipe."""
    console = Console(stderr=True, highlight=False)
    return ProgressBar(console) if console.is_terminal else ProgressLines()


def headline(start: Start) -> list[str]:
    """The lines above the bar: the task, and how the work is divided."""
    spec = start.spec
    lines = [
        f"{spec.task} · {start.parameters:,} parameters · {start.train_samples:,} {start.unit} · target "
        f"{formatting.threshold(start.target, start.metric_name)} test {start.metric_name}",
        f"{spec.division} · {start.recipe_line} · {spec.strategy} on {spec.transport} · "
        f"{formatting.plural(start.threads, 'thread')} per worker"
        + (f" · {start.device}" if start.device != "cpu" else "")
        + "".join(f" · {each}" for each in computed(spec)),
    ]
    if start.recipe_changes:
        lines.append(
            f"{spec.strategy} changes the recipe: {start.recipe_changes} (what you set yourself is kept: "
            "--lr, --set recipe.momentum=...)"
        )
    if start.step:
        lines.append(f"resumed at step {start.step:,} ({formatting.count(start.samples, start.unit)} seen)")
    return lines


def computed(spec: RunSpec) -> list[str]:
    """How a model is computed, where that is not the usual way: `mixed bf16`, `compiled`."""
    mixed = [] if spec.precision == "full" else [f"mixed {spec.precision}"]
    return mixed + (["compiled"] if spec.compile else [])


def outcome(record: RunRecord) -> str:
    """`reached 98.5 % after 98,304 images in 57 s`, or `did not reach 98.5 %`."""
    target = formatting.threshold(record.target, record.metric_name)
    if not record.spec.evaluate_every:
        return "never evaluated"
    if record.target_samples is None or record.target_seconds is None:
        return f"did not reach {target}"
    after = formatting.count(record.target_samples, record.unit)
    return f"reached {target} after {after} in {formatting.duration(record.target_seconds)}"


def summary(record: RunRecord) -> list[str]:
    """The lines below the bar: the result, where the time went, what to do next."""
    speed = formatting.rate(record.samples_per_second, record.unit)
    end = record.message
    if not end and record.spec.evaluate_every:
        end = f"{formatting.score(record.metric, record.metric_name)} at the end"
    over = formatting.duration(record.training_seconds)
    return [
        " · ".join(filter(None, [outcome(record), end, f"{speed} over {over}", record.run])),
        f"where the time went: {formatting.where_the_time_went(training_phases(record.worker_phases))}"
        + (f" · staleness {stale:.2f}" if (stale := record.mean_staleness) is not None else "")
        + skipped(record),
        f"next: manyhands show {record.run}",
    ]


def skipped(record: RunRecord) -> str:
    """` · 3 of 900 steps skipped`, if there were some."""
    if not record.skipped_steps:
        return ""
    return f" · {record.skipped_steps:,} of {record.steps:,} steps skipped (gradients too large for float16)"


def efficiency(start: Start, rate: float, cores: int | None = None) -> str:
    """`96 % of 2x`, against the last run of one worker with as many threads; else the plain ratio.

    That run may be of a day on which the machine was busy: what is more than the cores can give is not shown.
    """
    one = start.one_worker
    if one is None or min(rate, one.samples_per_second) <= 0:
        return ""
    speed_up = ratio(measured([rate]), measured([one.samples_per_second]))
    limit = plausible.limit(start.spec.workers, start.threads, cores=cores, device=start.device)
    if plausible.implausible(speed_up, limit):
        return plausible.SLOW_BASELINE
    if one.threads != start.threads:
        return f"{speed_up.median:.2f}x one worker with {formatting.plural(one.threads, 'thread')}"
    workers = start.spec.workers
    return f"{formatting.percent(speed_up.median / workers)} of {workers}x"


def _cores(start: Start) -> int | None:
    """The cores that all workers share; None if some may be on other machines, whose cores nobody counted."""
    row = LAUNCHERS.get(start.spec.launcher)
    return environment.cores() if row is not None and (row.one_machine or row.in_process) else None


def share(start: Start, now: Start | StepRecord) -> float:
    """How much of a run is done, by the limit that it will reach first: samples or seconds."""
    return min(1.0, max(_shares(start, now)))


def where(start: Start, step: StepRecord) -> str:
    """`epoch 2/3`, or `12/60 s` where the limit of seconds will be reached first."""
    by_samples, by_seconds = _shares(start, step)
    if (budget := start.spec.seconds) is not None and by_seconds >= by_samples:
        limit = f"{budget:g}"
        return f"{min(step.seconds, budget):{len(limit)}.0f}/{limit} s"
    return f"epoch {step.epoch + 1}/{start.spec.epochs or 0:g}"


def _shares(start: Start, now: Start | StepRecord) -> tuple[float, float]:
    """The shares of the samples and of the seconds that are done."""
    budget = start.spec.seconds
    return now.samples / max(1, start.horizon), now.seconds / budget if budget else 0.0


class _Rate:
    """Samples per second of training in this session, the efficiency, and the time left at this rate."""

    def __init__(self, start: Start) -> None:
        self.start, self.began = start, time.monotonic()
        self._cores = _cores(start)
        self._exchanging = self._all = 0.0

    def note(self, step: StepRecord) -> None:
        """Add up where the time of a step went, if its phases were timed."""
        if not step.synchronized:
            return
        phases = training_phases(step.phases)
        self._exchanging += phases.get("communication", 0.0) + phases.get("wait", 0.0)
        self._all += sum(phases.values())

    def facts(self, step: StepRecord, unit: str) -> list[str]:
        """The rate; the efficiency and the share of communication, where there are any."""
        rate = self.per_second(step)
        found = [formatting.rate(rate, unit), efficiency(self.start, rate, self._cores)]
        spec = self.start.spec
        if spec.workers > 1 and not spec.servers and self._all > 0:  # a server's time says nothing of theirs
            found.append(f"comm {formatting.percent(self._exchanging / self._all)}")
        return [fact for fact in found if fact]

    def per_second(self, step: StepRecord) -> float:
        return (step.samples - self.start.samples) / max(1e-9, step.seconds - self.start.seconds)

    def left(self, step: StepRecord) -> str:
        """The time until the first limit of the run, at the pace so far, evaluations included."""
        elapsed = max(1e-9, time.monotonic() - self.began)
        start = self.start
        seconds = _at_this_pace(elapsed, start.horizon - step.samples, step.samples - start.samples)
        if (budget := start.spec.seconds) is not None:
            by_clock = _at_this_pace(elapsed, budget - step.seconds, step.seconds - start.seconds)
            seconds = min(seconds, by_clock)
        return formatting.duration(seconds)


def _at_this_pace(elapsed: float, left: float, done: float) -> float:
    return elapsed * max(0.0, left) / max(1e-9, done)


class ProgressLines(Callback):
    """Plain lines on standard error: the headline, evaluations, a line every 30 seconds, the summary."""

    name = "the progress on standard error"
    every = 30.0  # seconds
    least = 1.0  # seconds between the lines of two evaluations

    def __init__(self) -> None:
        self._rate: _Rate | None = None
        self._last_line = 0.0

    def on_start(self, start: Start) -> None:
        self._rate, self._last_line = _Rate(start), time.monotonic()
        for line in headline(start):
            self.on_notice(line)

    def on_step(self, step: StepRecord) -> None:
        """Print a line after an evaluation, or when the last line is 30 seconds old."""
        assert self._rate is not None
        self._rate.note(step)
        if time.monotonic() - self._last_line < (self.every if step.metric is None else self.least):
            return
        self._last_line, start = time.monotonic(), self._rate.start
        parts = [
            f"epoch {step.samples / start.train_samples:.2f}",
            f"step {step.step:,}",
            f"loss {step.loss:.4f}",
            *self._rate.facts(step, start.unit),
            f"{self._rate.left(step)} left",
        ]
        if step.metric is not None:
            parts.insert(3, f"{start.metric_name} {formatting.score(step.metric, start.metric_name)}")
        self.on_notice(" · ".join(parts))

    def on_end(self, record: RunRecord) -> None:
        if record.status in ("finished", "target"):
            for line in summary(record):
                self.on_notice(line)

    def on_notice(self, text: str) -> None:
        print(formatting.printed(text), file=sys.stderr, flush=True)


class ProgressBar(Callback):
    """A rich progress bar with loss, metric, rate and time left."""

    name = "the progress bar"
    refresh = 0.1  # seconds; more often only costs the trainer time

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: Live | None = None
        self._bar: Progress | None = None
        self._rate: _Rate | None = None
        self._metric = ""
        self._shown = 0.0

    def on_waiting(self, text: str) -> None:
        """Show a line that disappears when the run starts, or fails."""
        self.close()
        shown = Text(formatting.line(text), no_wrap=True, overflow="ellipsis")
        self._waiting = Live(shown, console=self._console, auto_refresh=False, transient=True)
        self._waiting.start(refresh=True)

    def on_start(self, start: Start) -> None:
        """Print the headline and start the bar; a second time where workers were restarted."""
        self.close()
        for line in headline(start):
            self.on_notice(line)
        self._rate = _Rate(start)
        self._bar = Progress(
            TextColumn("{task.fields[where]}"),
            BarColumn(bar_width=30),
            _Share(table_column=Column(min_width=5, no_wrap=True)),  # where it is narrow, the bar gives way
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            refresh_per_second=5,
            transient=True,
        )
        task = self._bar.add_task("", total=1.0, where="starting", facts="")
        self._bar.update(task, completed=share(start, start))
        self._bar.start()

    def on_step(self, step: StepRecord) -> None:
        """Move the bar, a few times per second."""
        assert self._bar is not None
        assert self._rate is not None
        start = self._rate.start
        self._rate.note(step)
        if step.metric is not None:
            self._metric = f"  {start.metric_name} {formatting.score(step.metric, start.metric_name)}"
        now = time.monotonic()
        if now - self._shown < self.refresh and share(start, step) < 1:
            return
        self._shown = now
        facts = "  ".join(self._rate.facts(step, "img" if start.unit == "images" else start.unit))
        self._bar.update(
            self._bar.task_ids[0],
            completed=share(start, step),
            where=where(start, step),
            facts=f"loss {step.loss:.4f}{self._metric}  {facts}  {self._rate.left(step)} left",
        )

    def on_end(self, record: RunRecord) -> None:
        """Remove the bar and print the summary."""
        self.close()
        if record.status in ("finished", "target"):
            for line in summary(record):
                self.on_notice(line)

    def on_notice(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(formatting.printed(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar, or the line in its place."""
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Share(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(formatting.percent(task.completed / (task.total or 1)).rjust(5))
