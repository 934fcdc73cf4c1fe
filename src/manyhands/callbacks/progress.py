"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from manyhands.callbacks.base import Callback
from manyhands.core import formatting
from manyhands.records.phases import training_phases
from manyhands.records.record import RunRecord, Start, StepRecord


def for_people() -> Callback:
    """A bar where standard error is a terminal, lines where it is a file or a pipe."""
    console = Console(stderr=True, highlight=False)
    return ProgressBar(console) if console.is_terminal else ProgressLines()


def headline(start: Start) -> list[str]:
    """The lines above the bar: what is learned, and how the work is divided."""
    spec = start.spec
    lines = [
        f"{spec.task} · {start.parameters:,} parameters · {start.train_samples:,} {start.unit} · target "
        f"{formatting.threshold(start.target, start.metric_name)} test {start.metric_name}",
        f"{spec.division} · {start.recipe_line} · {spec.strategy} on {spec.transport} · "
        f"{formatting.plural(start.threads, 'thread')} a worker"
        + (f" · {start.device}" if start.device != "cpu" else ""),
    ]
    if start.step:
        lines.append(f"resumed at step {start.step:,} ({formatting.count(start.samples, start.unit)} seen)")
    return lines


def outcome(record: RunRecord) -> str:
    """`reached 98.5 % after 98,304 images in 57 s`, or that it did not."""
    target = formatting.threshold(record.target, record.metric_name)
    if record.target_samples is None or record.target_seconds is None:
        return f"did not reach {target}"
    after = formatting.count(record.target_samples, record.unit)
    return f"reached {target} after {after} in {formatting.duration(record.target_seconds)}"


def summary(record: RunRecord) -> list[str]:
    """The lines below the bar: what came of it, where the time went, what to do next."""
    speed = formatting.rate(record.samples_per_second, record.unit)
    end = record.message or f"{formatting.score(record.metric, record.metric_name)} at the end"
    over = formatting.duration(record.training_seconds)
    return [
        f"{outcome(record)} · {end} · {speed} over {over} · {record.run}",
        f"where the time went: {formatting.where_the_time_went(training_phases(record.worker_phases))}"
        + (f" · staleness {stale:.2f}" if (stale := record.mean_staleness) is not None else ""),
        f"next: manyhands show {record.run}",
    ]


def efficiency(start: Start, rate: float) -> str:
    """`96 % of 2x` against the last one-worker run with as many threads a worker; else the plain ratio."""
    one = start.one_worker
    if one is None:
        return ""
    if one.threads != start.threads:
        return f"{rate / one.samples_per_second:.2f}x 1 worker of {formatting.plural(one.threads, 'thread')}"
    workers = start.spec.workers
    return f"{formatting.percent(rate / (workers * one.samples_per_second))} of {workers}x"


class _Rate:
    """Samples a training second of this sitting, what they compare to, and the time left at this pace."""

    def __init__(self, start: Start) -> None:
        self.start, self.began = start, time.monotonic()
        self._exchanging = self._all = 0.0

    def note(self, step: StepRecord) -> None:
        """Remember where a step's time went, where it is known."""
        if not step.synchronized:
            return
        phases = training_phases(step.phases)
        self._exchanging += phases.get("communication", 0.0) + phases.get("wait", 0.0)
        self._all += sum(phases.values())

    def facts(self, step: StepRecord, unit: str) -> list[str]:
        """Rate, efficiency where it is known, share of the exchange where there is any."""
        rate = self.per_second(step)
        found = [formatting.rate(rate, unit), efficiency(self.start, rate)]
        spec = self.start.spec
        if spec.workers > 1 and not spec.servers and self._all > 0:  # a server's time says nothing of theirs
            found.append(f"comm {formatting.percent(self._exchanging / self._all)}")
        return [fact for fact in found if fact]

    def per_second(self, step: StepRecord) -> float:
        return (step.samples - self.start.samples) / max(1e-9, step.seconds - self.start.seconds)

    def left(self, step: StepRecord) -> str:
        gone = max(1e-9, time.monotonic() - self.began)
        pace = (step.samples - self.start.samples) / gone
        seconds = max(0.0, self.start.horizon - step.samples) / max(1e-9, pace)
        if (budget := self.start.spec.seconds) is not None:
            seconds = min(seconds, max(0.0, budget - step.seconds))
        return formatting.duration(seconds)


class ProgressLines(Callback):
    """Plain lines on standard error: the headline, evaluations, one every half a minute, the summary."""

    name = "the progress on standard error"
    every = 30.0  # seconds
    least = 1.0  # seconds between two evaluations worth a line each

    def __init__(self) -> None:
        self._rate: _Rate | None = None
        self._told = 0.0

    def started(self, start: Start) -> None:
        """The headline."""
        self._rate, self._told = _Rate(start), time.monotonic()
        for line in headline(start):
            self.notice(line)

    def stepped(self, step: StepRecord) -> None:
        """A line when there is news."""
        assert self._rate is not None
        self._rate.note(step)
        if time.monotonic() - self._told < (self.every if step.metric is None else self.least):
            return
        self._told, start = time.monotonic(), self._rate.start
        parts = [
            f"epoch {step.samples / start.train_samples:.2f}",
            f"step {step.step:,}",
            f"loss {step.loss:.4f}",
            *self._rate.facts(step, start.unit),
            f"{self._rate.left(step)} left",
        ]
        if step.metric is not None:
            parts.insert(3, f"{start.metric_name} {formatting.score(step.metric, start.metric_name)}")
        self.notice(" · ".join(parts))

    def ended(self, record: RunRecord) -> None:
        """The summary."""
        if record.status in ("finished", "target"):
            for line in summary(record):
                self.notice(line)

    def notice(self, text: str) -> None:
        """One line."""
        print(formatting.printed(text), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class ProgressBar(Callback):
    """A rich progress bar with loss, metric, rate and time left."""

    name = "the progress bar"
    refresh = 0.1  # seconds; more often only costs the trainer time

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._rate: _Rate | None = None
        self._metric = ""
        self._shown = 0.0

    def started(self, start: Start) -> None:
        """The headline, then the bar; a second time where workers were started again."""
        self.close()
        for line in headline(start):
            self.notice(line)
        self._rate = _Rate(start)
        self._bar = Progress(
            TextColumn("{task.fields[epoch]}"),
            BarColumn(bar_width=30),
            _Share(table_column=Column(min_width=5, no_wrap=True)),  # where it is narrow, the bar gives way
            TextColumn("{task.fields[facts]}"),
            console=self._console,
            refresh_per_second=5,
            transient=True,
        )
        self._bar.add_task("", total=start.horizon, completed=start.samples, epoch="starting", facts="")
        self._bar.start()

    def stepped(self, step: StepRecord) -> None:
        """Move the bar, a few times a second."""
        assert self._bar is not None
        assert self._rate is not None
        start = self._rate.start
        self._rate.note(step)
        if step.metric is not None:
            self._metric = f"  {start.metric_name} {formatting.score(step.metric, start.metric_name)}"
        now = time.monotonic()
        if now - self._shown < self.refresh and step.samples < start.horizon:
            return
        self._shown = now
        epochs = start.spec.epochs or 0
        facts = "  ".join(self._rate.facts(step, "img" if start.unit == "images" else start.unit))
        self._bar.update(
            self._bar.task_ids[0],
            completed=step.samples,
            epoch=f"epoch {step.epoch + 1}/{epochs:g}",
            facts=f"loss {step.loss:.4f}{self._metric}  {facts}  {self._rate.left(step)} left",
        )

    def ended(self, record: RunRecord) -> None:
        """The bar makes room for the summary."""
        self.close()
        if record.status in ("finished", "target"):
            for line in summary(record):
                self.notice(line)

    def notice(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(formatting.printed(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Share(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(formatting.percent(task.completed / (task.total or 1)).rjust(5))
