"""Asynchrony by script: the updates of a scripted schedule equal those computed by hand on the quadratic."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from manyhands.data.order import Order
from manyhands.recipes.members import constant
from manyhands.records.spec import RunSpec
from manyhands.strategies.asynchronous.hogwild import Hogwild
from manyhands.strategies.asynchronous.parameter_server import server
from manyhands.tasks.quadratic import points, quadratic, stiffness
from manyhands.testing.scripted import Played, Turn, play

N, DIMENSIONS, CONDITION, LR = 24, 3, 10.0, 0.1
A = points(N, DIMENSIONS)
H = stiffness(DIMENSIONS, CONDITION)
Array = npt.NDArray[np.float64]


def spec(strategy: str, workers: int, batch: int, **fields: Any) -> RunSpec:
    """A run over the quadratic's 24 points, evaluated only at its end."""
    return RunSpec(
        task="quadratic",
        strategy=strategy,
        workers=workers,
        batch=batch,
        epochs=fields.pop("epochs", 1),
        target=0.0,
        evaluate_every=100,
        **fields,
    )


def run(of: RunSpec, turns: list[Turn], lr: float = LR, **options: Any) -> Played:
    make = Hogwild if of.strategy == "hogwild" else server
    task = quadratic(n=N, dimensions=DIMENSIONS, condition=CONDITION)
    return play(make, task, constant(lr=lr, **options), of, turns)


def piece(of: RunSpec, number: int) -> Array:
    """The mean of the points in the piece of this number."""
    assert of.batch is not None
    order, start = Order(N, of.batch, of.seed), 0
    for _ in range(number):
        start = order.piece(start, of.workers)
    end = order.piece(start, of.workers)
    return A[order.samples(start, end - start).samples].mean(axis=0)


def by_hand(of: RunSpec, events: list[Turn], lr: float = LR) -> tuple[Array, list[int], list[int]]:
    """Hogwild by the formula: who reads when, who writes when; parameters, staleness and workers."""
    w, leased, version = np.zeros(DIMENSIONS), 0, 0
    mine: dict[int, int] = {}
    read: dict[int, tuple[Array, int]] = {}
    stale, workers = [], []
    for rank, event in events:
        if event == "start":
            mine[rank], leased = leased, leased + 1
        elif event == "forward":
            read[rank] = H * (w - piece(of, mine[rank])), version
        else:
            gradient, read_at = read[rank]
            w = w - lr * gradient
            stale.append(version - read_at)
            workers.append(rank)
            version += 1
            mine[rank], leased = leased, leased + 1
    return w, stale, workers


def check(played: Played, expected: tuple[Array, list[int], list[int]]) -> None:
    w, stale, workers = expected
    np.testing.assert_allclose(played.state["model/weight"].numpy(), w, rtol=0, atol=1e-14)
    assert [step.staleness for step in played.steps] == stale
    assert [step.worker for step in played.steps] == workers
    assert [step.step for step in played.steps] == list(range(1, len(stale) + 1))


class TestHogwild:
    START: tuple[Turn, ...] = ((0, "start"), (1, "start"))

    def test_in_turn_nothing_is_stale(self) -> None:
        of = spec("hogwild", 2, 8)
        turns = [*self.START, *((rank, what) for _ in range(3) for rank in (0, 1) for what in WRITES)]
        expected = by_hand(of, turns)
        assert expected[1] == [0] * 6
        check(run(of, turns), expected)

    def test_both_read_before_either_writes(self) -> None:
        of = spec("hogwild", 2, 8)
        once = [(0, "forward"), (1, "forward"), (1, "update"), (0, "update")]
        expected = by_hand(of, [*self.START, *once * 3])
        assert expected[1] == [0, 1] * 3
        check(run(of, [*self.START, *once * 3]), expected)

    def test_a_straggler_writes_what_it_read_four_updates_ago(self) -> None:
        of = spec("hogwild", 2, 8)
        fast = [(1, "forward"), (1, "update")]
        turns = [*self.START, (0, "forward"), *fast * 4, (0, "update"), *fast]
        expected = by_hand(of, turns)
        assert expected[1] == [0, 0, 0, 0, 4, 0]
        played = run(of, turns)
        check(played, expected)
        assert [share.samples for share in played.shares] == [4, 20]

    def test_a_dead_workers_piece_is_done_by_another(self) -> None:
        of = spec("hogwild", 3, 12)
        turns: list[Turn] = [*((rank, "start") for rank in range(3))]
        for rank in (0, 1):
            turns += [(rank, "forward"), (rank, "update")]
        turns += [(2, "die")]
        played = run(of, turns)
        assert sum(share.samples for share in played.shares) == N
        assert played.shares[2].samples == 0
        assert len(played.lost) == 1
        assert played.lost[0].startswith("worker 2 after")
        assert len(played.steps) == 6  # as many as there are pieces: none was lost, none was used twice


WRITES = ("forward", "update")


def served(
    of: RunSpec,
    ranks: list[int],
    lr: float = LR,
    aware: bool = False,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Array, list[int]]:
    """The server's updates by the formula: a worker pulls when it leases, and pushes at its next turn."""
    w, leased, version = np.zeros(DIMENSIONS), 0, 0
    v = np.zeros(DIMENSIONS)
    mine: dict[int, tuple[int, Array, int]] = {}
    stale: list[int] = []
    for rank in sorted(set(ranks)):
        mine[rank] = leased, w, version
        leased += 1
    for rank in ranks:
        number, pulled, at = mine[rank]
        staleness = version - at
        gradient = H * (pulled - piece(of, number)) + weight_decay * w
        gradient = gradient / (max(1, staleness) if aware else 1)
        v = momentum * v + gradient
        w = w - lr * (gradient + momentum * v if nesterov else v)
        version += 1
        stale.append(staleness)
        mine[rank] = leased, w, version
        leased += 1
    return w, stale


def turns_of(ranks: list[int]) -> list[Turn]:
    return [*((rank, "start") for rank in sorted(set(ranks))), *((rank, "forward") for rank in ranks)]


class TestServer:
    @pytest.mark.parametrize(
        ("ranks", "stale"),
        [
            ([1, 2, 1, 2, 1, 2], [0, 1, 1, 1, 1, 1]),
            ([1, 1, 1, 1, 2, 1], [0, 0, 0, 0, 4, 1]),
            ([2, 1, 1, 2, 2, 1], [0, 1, 0, 2, 0, 2]),
        ],
    )
    @pytest.mark.parametrize("aware", [False, True])
    def test_updates_are_those_computed_by_hand(
        self, ranks: list[int], stale: list[int], aware: bool
    ) -> None:
        of = spec("server", 2, 8, strategy_options={"staleness_aware": aware})
        w, expected = served(of, ranks, aware=aware)
        assert expected == stale
        played = run(of, turns_of(ranks))
        np.testing.assert_allclose(played.state["model/weight"].numpy(), w, rtol=0, atol=1e-14)
        assert [step.staleness for step in played.steps] == stale
        assert [step.worker for step in played.steps] == ranks

    @pytest.mark.parametrize("nesterov", [False, True])
    @pytest.mark.parametrize("servers", [1, 2])
    def test_a_stale_gradient_holds_back_no_velocity(self, servers: int, nesterov: bool) -> None:
        """The gradient that is four updates old counts a quarter; those of before keep their rate."""
        ranks = [servers + rank for rank in (0, 0, 0, 0, 1, 0)]
        of = spec("server", 2, 8, strategy_options={"servers": servers, "staleness_aware": True})
        recipe: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
        w, stale = served(of, ranks, aware=True, **recipe)
        assert stale == [0, 0, 0, 0, 4, 1]
        played = run(of, turns_of(ranks), **recipe)
        np.testing.assert_allclose(played.state["model/weight"].numpy(), w, rtol=0, atol=1e-14)

    def test_two_servers_hold_slices(self) -> None:
        ranks = [2, 3, 3, 2, 3, 2]
        of = spec("server", 2, 8, strategy_options={"servers": 2})
        w, stale = served(of, ranks)
        played = run(of, turns_of(ranks))
        np.testing.assert_allclose(played.state["model/weight"].numpy(), w, rtol=0, atol=1e-14)
        assert [step.staleness for step in played.steps] == stale

    def test_a_bound_makes_the_faster_one_wait(self) -> None:
        """Worker 1 is allowed one step ahead: its third turn comes only after worker 2's first."""
        of = spec("server", 2, 8, strategy_options={"bound": 1})
        played = run(of, turns_of([1, 1, 2, 1, 2, 1]))
        steps: dict[int, int] = {1: 0, 2: 0}
        for step in played.steps:
            assert step.worker is not None
            assert steps[step.worker] <= min(steps.values()) + 1
            steps[step.worker] += 1
        assert [step.worker for step in played.steps] == [1, 1, 2, 1, 2, 1]

    def test_a_dead_workers_piece_is_done_by_another(self) -> None:
        of = spec("server", 3, 12)
        turns = [*turns_of([1, 2, 3, 1, 2]), (3, "die")]
        played = run(of, turns)
        assert sum(share.samples for share in played.shares) == N
        assert [who.split(" after")[0] for who in played.lost] == ["worker 3"]
        assert len(played.steps) == 6

    def test_high_staleness_diverges_and_the_aware_rate_cures_it(self) -> None:
        """arXiv 1511.05950: a rate that is stable in turn diverges when gradients are eight updates old."""
        workers, epochs, lr = 8, 20, 0.5  # seven updates of delay are stable below 2 sin(pi / 30) = 0.21
        ranks = [1 + number % workers for number in range(epochs * N)]

        def excess(aware: bool) -> float:
            of = spec("server", workers, 8, epochs=epochs, strategy_options={"staleness_aware": aware})
            played = run(of, turns_of(ranks), lr=lr)
            assert max(step.staleness or 0 for step in played.steps) == workers - 1
            gap = played.state["model/weight"].numpy() - A.mean(axis=0)
            return float(0.5 * (H * gap**2).sum())

        start = float(0.5 * (H * A.mean(axis=0) ** 2).sum())
        assert excess(aware=False) > 1e3 * start
        assert excess(aware=True) < 0.3 * start
