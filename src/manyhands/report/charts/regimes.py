"""Steps to the target by batch with three regimes, and the noise scale that should predict them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import altair as alt

from manyhands.analysis.noise_scale import NoiseScale
from manyhands.analysis.regimes import Regimes, about, curve, edge_sentence, recipe_phrase
from manyhands.core import formatting
from manyhands.core.statistics import Estimate
from manyhands.report.charts import common
from manyhands.report.figure import Figure, Panel, Row, limited, tidy
from manyhands.report.findings import Findings

MOST = 6  # panels
ZONES = {"perfect scaling": "#009e73", "diminishing returns": "#e69f00", "maximal parallelism": "#cc79a7"}


def figure(findings: Findings) -> Figure | None:
    """One panel per fit: measured steps, the curve, and the three regimes."""
    some = [fit for fit in findings.regimes if sum(p.steps is not None for p in fit.points) >= 2]
    found = [fit for fit in some if fit.b_crit] or some
    if not found:
        return None
    panels = [_panel(fit) for fit in found[:MOST]]
    sentences = common.sentence([_sentence(fit) for fit in found[:MOST]])
    without = [f"{_name(fit)} has no fit: {fit.problem}." for fit in some if fit not in found and fit.problem]
    return Figure(sentences, panels, " ".join([*without[:4], limited(len(found) - MOST, "curve")]).strip())


def _name(fit: Regimes) -> str:
    return f"{fit.task} · {fit.label}" if fit.label else fit.task


def _round(value: float) -> str:
    """The value with two digits, as precise as a fit is."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _sentence(fit: Regimes) -> str:
    """Say up to which batch doubling it halves the steps, or that this is outside of what was run."""
    if fit.b_crit is None or fit.perfect_until is None:
        return f"{_name(fit)}: no fit, {fit.problem or 'too few batches reached the target'}."
    phrase = recipe_phrase(fit)  # where the rate was not tuned for each batch, this is about the recipe
    name = f"{_name(fit)}: {phrase[0].lower()}{phrase[1:]}," if phrase else f"{_name(fit)}:"
    return " ".join(
        filter(None, [_curve_sentence(fit, name, fit.b_crit, fit.perfect_until), edge_sentence(fit)])
    )


def _curve_sentence(fit: Regimes, name: str, b_crit: Estimate, perfect_until: Estimate) -> str:
    batches = [point.batch for point in fit.points if point.steps is not None]
    least, most = min(batches), max(batches)
    if perfect_until.value >= most:
        return (
            f"{name} up to batch {most:,}, the largest that reached the target, doubling the batch "
            f"nearly halves the steps; the critical batch lies beyond, at {_round(b_crit.low)} or more."
        )
    if perfect_until.value < least:
        text = f"from batch {least:,}, the smallest that was run, doubling the batch does not halve the steps"
    else:
        text = f"doubling the batch nearly halves the steps up to about {_round(perfect_until.value)}"
    text = f"{name} the critical batch is {about(b_crit)}; {text}"
    if fit.maximal_from is not None and fit.maximal_from.value <= 4 * most:
        text += f" and saves almost none from {_round(fit.maximal_from.value)} on"
    return text + "."


def _panel(fit: Regimes) -> Panel:
    measured: list[Row] = [
        {
            "batch": point.batch,
            "steps": tidy(point.steps if point.steps is not None else point.bound),
            "low": tidy(point.low if point.low is not None else point.steps),
            "high": tidy(point.high if point.high is not None else point.steps),
            "kind": "measured" if point.steps is not None else "not reached within",
            "reached": f"{point.reached} of {point.of}",
        }
        for point in fit.points
        if point.steps is not None or point.bound is not None
    ]
    batches = [point.batch for point in fit.points]
    low, high = min(batches) / 1.25, max(batches) * 1.25
    data: dict[str, list[Row]] = {"rows": measured}
    layers: list[alt.Chart] = []
    x = common.batch_axis(batches)
    x["scale"] = alt.Scale(type="log", base=2, nice=False, domain=[low, high])
    if fit.b_crit is not None and fit.s_min is not None:
        data |= _fitted(fit, low, high)
        layers += _drawn_fit(data["critical"], x)
    base = common.rows().encode(x=x)
    y = alt.Y(
        "steps:Q",
        title=_axis(fit),
        scale=alt.Scale(type="log", nice=False, padding=16),
        axis=alt.Axis(tickCount=5, format="~s"),
    )
    tip = common.tips(
        ("batch:Q", "batch", ",d"),
        ("kind:N", ""),
        ("steps:Q", "steps", ",.0f"),
        ("low:Q", "from", ",.0f"),
        ("high:Q", "to", ",.0f"),
        ("reached:N", "runs that reached it"),
    )
    arrived = base.transform_filter("datum.kind == 'measured'")
    layers += [
        arrived.mark_rule(style="ink", strokeWidth=1.4).encode(y=y, y2="high:Q").encode(y=alt.Y("low:Q")),
        arrived.mark_point(style="ink", size=70).encode(y=y, tooltip=tip),
    ]
    if any(row["kind"] != "measured" for row in measured):
        missed = base.transform_filter("datum.kind != 'measured'")
        hollow = missed.mark_point(style="ink", shape="triangle-up", filled=False, size=80)
        layers.append(hollow.encode(y="steps:Q", tooltip=tip))
    lines = [f"Dotted: {row['name']}." for row in data.get("critical", [])]
    lines = ["Dashed: twice the batch, half the steps.", *lines] if "ideal" in data else lines
    text = f"Steps to the target by batch. {_sentence(fit)}"
    return Panel(_name(fit), common.layered(*layers), data, text, 320, note=" ".join(lines))


def _axis(fit: Regimes) -> str:
    return f"steps to {formatting.threshold(fit.target, fit.metric_name)} {fit.metric_name}"


def _fitted(fit: Regimes, low: float, high: float) -> dict[str, list[Row]]:
    assert fit.b_crit is not None
    assert fit.s_min is not None
    grid = [low * (high / low) ** (k / 40) for k in range(41)]
    line: list[Row] = [
        {"batch": tidy(batch), "fit": tidy(steps), "ideal": tidy(fit.s_min.value * fit.b_crit.value / batch)}
        for batch, steps in zip(grid, curve(fit, grid), strict=True)
    ]
    least = min(float(row["fit"]) for row in line)
    ideal = [row for row in line if float(row["ideal"]) >= 0.55 * least]
    first = fit.perfect_until.value if fit.perfect_until else fit.b_crit.value / 5
    last = fit.maximal_from.value if fit.maximal_from else fit.b_crit.value * 5
    zones: list[Row] = []
    for name, from_, to in zip(ZONES, (low, first, last), (first, last, high), strict=True):
        begin, end = max(low, from_), min(high, to)
        if end > begin:
            middle = math.sqrt(begin * end)
            room = math.log(end / begin) / math.log(high / low)
            label = name if room > 0.3 else name.split()[0] if room > 0.14 else ""
            zones.append(
                {"zone": name, "label": label, "begin": tidy(begin), "end": tidy(end), "middle": tidy(middle)}
            )
    return {"fit": line, "ideal": ideal, "zones": zones, "critical": _critical(fit.b_crit, low, high)}


def _critical(b_crit: Estimate, low: float, high: float) -> list[Row]:
    if not low < b_crit.value < high:
        return []
    return [
        {
            "batch": tidy(b_crit.value),
            "low": tidy(max(low, b_crit.low)),
            "high": tidy(min(high, b_crit.high)),
            "name": f"critical batch {b_crit.value:,.0f}",
        }
    ]


def _drawn_fit(critical: list[Row], x: alt.X) -> list[alt.Chart]:
    zones = common.rows("zones")
    scale = alt.Scale(domain=list(ZONES), range=list(ZONES.values()))
    bands = zones.mark_rect(opacity=0.12).encode(
        x=alt.X("begin:Q").scale(x["scale"]), x2="end:Q", color=alt.Color("zone:N", scale=scale, legend=None)
    )
    labels = zones.mark_text(style="note", y=10, baseline="middle").encode(x="middle:Q", text="label:N")
    drawn = [
        bands,
        labels,
        common.rows("ideal").mark_line(style="guide").encode(x="batch:Q", y="ideal:Q"),
        common.rows("fit").mark_line(strokeWidth=2, color="#0072b2").encode(x=x, y="fit:Q"),
    ]
    if critical:
        level = common.rows("critical").encode(x="batch:Q")
        drawn.append(level.mark_rule(style="second-guide").encode(y=alt.value(20), y2=alt.value("height")))
    return drawn


def noise(findings: Findings) -> Figure | None:
    """The gradient noise scale during training, and the critical batch that was measured."""
    found = [each for each in findings.noise_scales if each.task in findings.tasks and each.by_samples]
    if not found:
        return None
    return Figure(
        common.sentence([_noise_sentence(each) for each in found]), [_noise_panel(each) for each in found]
    )


def _noise_sentence(each: NoiseScale) -> str:
    name = f"{each.task} · {each.label}" if each.label else each.task
    if each.scale is None:
        return f"{name}: no noise scale, because {each.problem}."
    text = f"{name}: the noise scale over training is {about(each.scale)}{_noise_range(each)}"
    if each.critical is None:
        return text + ", and no critical batch was measured to compare it with."
    ratio = f"; the noise scale is {each.ratio:.2g} times it" if each.ratio is not None else ""
    return f"{text}; the measured critical batch is {about(each.critical)}{ratio}."


def _noise_range(each: NoiseScale) -> str:
    """Where it was measured: it rises with the batch."""
    if len(each.batches) < 2:
        return f" at batch {each.batches[0].batch:,}" if each.batches else ""
    where = "the critical batch" if each.critical else "the middle of the batches"
    low, high = (f"{_round(end.scale.value)} at {end.batch:,}" for end in (each.batches[0], each.batches[-1]))
    return f" at {where} ({low}, {high})"


def _binned(points: list[tuple[int, float]], most: int = 24) -> list[Row]:
    """The median of each interval of training: runs evaluate at different times, which would zigzag."""
    if not points:
        return []
    end = max(samples for samples, _ in points)
    bins: dict[int, list[tuple[int, float]]] = {}
    for samples, scale in points:
        bins.setdefault(min(most - 1, most * samples // max(1, end)), []).append((samples, scale))
    return [
        {
            "samples": round(statistics.median(samples for samples, _ in mine)),
            "scale": tidy(statistics.median(scale for _, scale in mine)),
            "points": len(mine),
        }
        for _, mine in sorted(bins.items())
    ]


def _noise_panel(each: NoiseScale) -> Panel:
    line = _binned([(point.samples, point.scale) for point in each.by_samples if point.scale > 0])
    band: list[Any] = []
    if each.critical is not None:
        c = each.critical
        band = [
            {
                "low": tidy(c.low),
                "value": tidy(c.value),
                "high": tidy(c.high),
                "name": "measured critical batch",
            }
        ]
    y = alt.Y(
        "scale:Q",
        title="noise scale (samples)",
        scale=alt.Scale(type="log", nice=False, padding=20),
        axis=alt.Axis(format="~s", tickCount=5),
    )
    base = common.rows().encode(x=common.many("samples seen", "samples"), y=y)
    tip = common.tips(("samples:Q", "samples", ",d"), ("scale:Q", "noise scale", ",.0f"))
    layers: list[alt.Chart] = []
    if band:
        level = common.rows("critical")
        layers = [
            level.mark_rect(opacity=0.15, color="#009e73").encode(y=alt.Y("low:Q"), y2="high:Q"),
            level.mark_rule(style="guide").encode(y="value:Q"),
        ]
    layers += [base.mark_line(color="#0072b2"), base.mark_point(color="#0072b2", size=40).encode(tooltip=tip)]
    data: dict[str, list[Row]] = {"rows": line} | ({"critical": band} if band else {})
    note = "Dashed: the measured critical batch, with its interval." if band else ""
    text = f"Noise scale by samples. {_noise_sentence(each)}"
    return Panel(each.task, common.layered(*layers), data, text, note=note)
