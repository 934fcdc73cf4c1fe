"""The noise of gradients: against gradients computed one by one, and nothing that is trained changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from conftest import Answer
from manyhands.data.base import Batch
from manyhands.engine.noise_meter import MeteredCompute, NoiseScaleMeter
from manyhands.strategies.base import Compute
from manyhands.transports.solo import SoloTransport


@given(
    gradient=st.floats(1e-3, 1e3),
    spread=st.floats(1e-3, 1e3),
    small=st.integers(1, 64),
    parts=st.integers(2, 16),
)
def test_the_expected_norms_give_both_terms_back(
    gradient: float, spread: float, small: int, parts: int
) -> None:
    big = small * parts
    noise_meter = NoiseScaleMeter()
    noise_meter.add(gradient + spread / small, 1 / small, gradient + spread / big, big)
    noise = noise_meter.noise
    assert noise is not None
    scale = max(gradient, spread)
    assert noise.gradient == pytest.approx(gradient, rel=1e-6, abs=1e-9 * scale)
    assert noise.spread == pytest.approx(spread, rel=1e-6, abs=1e-9 * scale)
    assert (noise.small, noise.big, noise.steps) == (pytest.approx(small), big, 1)


def test_it_finds_the_noise_of_gradients_whose_noise_is_known() -> None:
    """4,000 steps of normal gradients: |G|^2 = 4, one sample's covariance has trace 300."""
    draws, noise_meter = np.random.default_rng(0), NoiseScaleMeter()
    truth = np.full(100, 0.2)
    for _ in range(4000):
        parts = truth + draws.normal(size=(4, 100)) * np.sqrt(3.0 / 8)  # four means of 8 samples
        noise_meter.add(float((parts[0] ** 2).sum()), 1 / 8, float((parts.mean(0) ** 2).sum()), 32)
    assert noise_meter.noise is not None
    assert noise_meter.noise.gradient == pytest.approx(4.0, rel=0.03)
    assert noise_meter.noise.scale == pytest.approx(75.0, rel=0.04)


def test_where_nothing_is_smaller_nothing_is_learned() -> None:
    noise_meter = NoiseScaleMeter()
    noise_meter.add(1.0, 1 / 32, 1.0, 32)
    assert noise_meter.noise is None
    assert noise_meter.since() is None


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_run_that_diverges_keeps_what_it_knew(norm: float) -> None:
    """Its record had a noise that is no number, which no JSON holds, and could not be read back."""
    noise_meter = NoiseScaleMeter()
    noise_meter.add(1.0 + 10.0 / 4, 1 / 4, 1.0 + 10.0 / 8, 8)
    noise_meter.add(norm, 1 / 4, norm, 8)
    assert noise_meter.noise is not None
    assert (noise_meter.noise.steps, noise_meter.noise.gradient) == (1, pytest.approx(1.0))


def test_since_is_the_mean_of_what_came_after_the_last_question() -> None:
    noise_meter = NoiseScaleMeter()
    for gradient, spread in ((1.0, 10.0), (3.0, 20.0)):
        noise_meter.add(gradient + spread / 4, 1 / 4, gradient + spread / 8, 8)
        assert noise_meter.since() == (pytest.approx(gradient), pytest.approx(spread))
    assert noise_meter.noise is not None
    assert noise_meter.noise.gradient == pytest.approx(2.0)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_against_gradients_computed_one_by_one(clip: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    inputs, targets = torch.randn(12, 5).double(), torch.randint(0, 3, (12,))
    loss = nn.functional.cross_entropy

    def square(count: int) -> float:
        wanted = torch.autograd.grad(loss(model(inputs[:count]), targets[:count]), list(model.parameters()))
        return float(sum(gradient.square().sum() for gradient in wanted))

    noise_meter = NoiseScaleMeter()
    noise_meter.add(square(3), 1 / 3, square(12), 12)
    seen = NoiseScaleMeter()
    compute = MeteredCompute(Compute(loss), model, SoloTransport(), seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(0, 12, 3):
        part = Batch(inputs[first : first + 3], targets[first : first + 3])
        compute.backward(compute.forward(model, part, weight=3 / 12))
    if clip is not None:
        compute.clip(model.parameters(), clip)
    compute.update(optimizer)
    assert noise_meter.noise is not None
    assert seen.noise is not None
    assert seen.noise.gradient == pytest.approx(noise_meter.noise.gradient, rel=1e-9)
    assert seen.noise.spread == pytest.approx(noise_meter.noise.spread, rel=1e-9)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"workers": 2}], ids=["single", "allreduce"])
def test_looking_changes_no_result(here: Path, settings: dict[str, int]) -> None:
    runs = [
        mh.train(
            "digits-mlp", batch=64, epochs=1, quiet=True, out=f"run-{look}", noise_scale=look, **settings
        )
        for look in (False, True)
    ]
    assert runs[0].noise is None
    assert runs[1].noise is not None
    assert runs[1].noise.scale is not None
    assert (runs[1].noise.small, runs[1].noise.big) == (
        pytest.approx(32, rel=0.1),
        pytest.approx(64, rel=0.1),
    )
    assert runs[0].metric == runs[1].metric
    bits = [Path(f"run-{look}/model.safetensors").read_bytes() for look in (False, True)]
    assert bits[0][200:] == bits[1][200:]  # behind the header with its run's id


def test_accumulated_and_parallel_gradients_say_the_same(here: Path) -> None:
    """Alone only the first half's norm is seen, together both halves': one expectation, two samples of it."""
    common = {"batch": 64, "epochs": 1, "quiet": True, "noise_scale": True, "dtype": "float64"}
    alone = mh.train("digits-mlp", accumulate=2, **common).noise
    both = mh.train("digits-mlp", workers=2, **common).noise
    assert alone is not None
    assert both is not None
    assert alone.steps == both.steps
    assert both.scale == pytest.approx(alone.scale, rel=0.5)


def test_show_tells_the_pace_and_the_noise(typed: Callable[..., Answer]) -> None:
    common = ("train", "digits-mlp", "--batch", "64", "--epochs", "1", "--quiet", "--out", "run")
    assert typed(*common, "--accumulate", "2", "--noise-scale").code == 0
    lines = typed("show", "run").out.splitlines()
    pace = next(line for line in lines if line.startswith("step "))
    assert re.fullmatch(r"step       .* on average \(.* 8 of 10 steps\), without the first steps", pace)
    noise = next(line for line in lines if line.startswith("noise "))
    assert re.fullmatch(r"noise      scale [\d,]+: much larger batches gain little \(.*, 23 steps\)", noise)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "but here a batch is one part: use --accumulate 2, or more workers"),
        (("--workers", "2", "--strategy", "hogwild"), "which single and allreduce see, not hogwild"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    typed: Callable[..., Answer], words: tuple[str, ...], sentence: str
) -> None:
    answer = typed("train", "digits-mlp", "--noise-scale", *words)
    assert answer.code == 2
    assert "--noise-scale compares gradients of parts of a batch with the whole" in answer.err
    assert sentence in answer.err
