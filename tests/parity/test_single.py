"""`single` against what can be computed without it: by formula, and by a hand-written loop."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from manyhands import train
from manyhands.data.order import Order
from manyhands.records.run_folder import RunFolder
from manyhands.tasks import find
from manyhands.tasks.quadratic import points, sgd_iterates, stiffness


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("n", "batch"), [(50, 7), (50, 50), (64, 16)])
def test_every_iterate_of_the_quadratic_is_the_closed_form(
    here: Path, n: int, batch: int, momentum: float
) -> None:
    """Three epochs, stopped after each step in turn: the parameters are the formula's to the last digits."""
    order, h, data = Order(n, batch, seed=3), stiffness(4, 10.0), points(n, 4)
    steps = 3 * -(-n // batch)
    batches = [data[request.samples] for request in islice(order.batches(), steps)]
    path = sgd_iterates(batches, h, [0.1] * steps, momentum)
    seen = np.cumsum([len(part) for part in batches])
    for step in range(0, steps, max(1, steps // 5)):
        record = train(
            "quadratic",
            options={"n": n, "dimensions": 4},
            batch=batch,
            epochs=3,
            samples=int(seen[step]),
            seed=3,
            lr=0.1,
            recipe_options={"momentum": momentum},
            dtype="float64",
            out=here / f"{step}",
            quiet=True,
        )
        weight = load_file(RunFolder(Path(record.run)).model)["weight"].numpy()
        assert np.abs(weight - path[step]).max() < 1e-13
        excess = 0.5 * (h * (path[step] - data.mean(axis=0)) ** 2).sum()
        assert record.metric == pytest.approx(excess, rel=1e-9, abs=1e-13)


def test_digits_equal_a_hand_written_loop_bit_for_bit(here: Path) -> None:
    """Same seed, same order, same optimizer: the trainer adds nothing to the numbers."""
    record = train("digits-mlp", batch=50, epochs=2, seed=5, lr=0.2, threads=1, quiet=True)
    ours = load_file(RunFolder(Path(record.run)).model)

    task = find.build("digits-mlp", {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model, scale = task.model(), task.preprocess.float()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": 1e-4}, {"params": biases, "weight_decay": 0.0}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        fused=True,
    )
    n, samples = len(task.train), 0
    order = Order(n, 50, seed=5)
    while samples < 2 * n:
        request = next(order.batches(samples))
        (batch,) = task.train.stream([request], 5)
        # peak 0.2 * 50/256 is below 0.2: nothing to warm up to; cosine over the two epochs
        rate = 0.2 * 50 / 256 * 0.5 * (1 + np.cos(np.pi * samples / (2 * n)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = nn.functional.cross_entropy(model(scale(batch.inputs)), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += batch.size
    torch.set_num_threads(before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


@pytest.mark.parametrize("accumulate", [2, 3, 7])
def test_accumulation_changes_nothing_but_rounding(here: Path, accumulate: int) -> None:
    """Law 4: the gradient is the sum over the global batch divided by its size, however it is cut."""
    common = {"batch": 101, "epochs": 2, "dtype": "float64", "threads": 1, "quiet": True}
    whole, parts = (train("digits-mlp", accumulate=k, **common) for k in (1, accumulate))
    for name, tensor in load_file(RunFolder(Path(whole.run)).model).items():
        other = load_file(RunFolder(Path(parts.run)).model)[name]
        assert (tensor - other).abs().max().item() < 1e-10, name


def test_training_leaves_the_callers_random_state_alone(here: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train("quadratic", epochs=1, quiet=True)
    assert torch.equal(torch.rand(3), expected)
