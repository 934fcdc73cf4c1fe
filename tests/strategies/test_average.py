"""What local SGD promises: when workers meet and talk, what they tell, what is saved, how they go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data.base import Batch
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, lars
from manyhands.strategies import options
from manyhands.strategies.base import Compute, Outcome, SynchronousSetup, Votes, Worker
from manyhands.strategies.data_parallel.allreduce import AllReduce
from manyhands.strategies.local_sgd.average import EXCHANGE_EVERY, Average, AveragePlan
from manyhands.strategies.options import AverageOptions
from manyhands.strategies.single import Single
from manyhands.strategies.state import pack
from manyhands.testing.strategies import StrategySuite
from manyhands.transports.base import Transport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup

State = dict[str, Tensor]
FEATURES, CLASSES = 5, 3
SGD = constant(lr=0.1)
MOMENTUM = constant(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
RECIPES = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "adamw": constant(optimizer="adamw", lr=0.01, weight_decay=0.1),
    "lars": lars(lr=0.5),
    "lamb": lamb(lr=0.05),
}
MEAN = AverageOptions(every=4)
NESTEROV = AverageOptions(every=4, outer="nesterov")
ELASTIC = AverageOptions(every=4, outer="elastic")
OUTERS = {"mean": MEAN, "nesterov": NESTEROV, "elastic": ELASTIC}


@pytest.fixture(params=OUTERS)
def _outer(request: pytest.FixtureRequest) -> None:
    request.instance.options = OUTERS[request.param]


@pytest.mark.usefixtures("_outer")
class TestAverage(StrategySuite):
    options: AverageOptions

    def worker(self, model: nn.Module, recipe: Recipe) -> Worker:
        setup = SynchronousSetup(
            model=model,
            recipe=recipe,
            compute=Compute(nn.functional.cross_entropy),
            transport=SoloTransport(),
            options=self.options,
        )
        return Average(setup)


# ---- workers in threads


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, CLASSES))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


class Part(NamedTuple):
    """One step: a share for each worker."""

    shares: list[Batch]
    lr: float

    @property
    def total(self) -> int:
        return sum(share.size for share in self.shares)


def parts(workers: int, sizes: Sequence[Sequence[int]], seed: int = 0) -> list[Part]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, step in enumerate(sizes):
        shares = [
            Batch(
                torch.randn(size, FEATURES, dtype=torch.float64, generator=generator),
                torch.randint(0, CLASSES, (size,), generator=generator),
            )
            for size in step
        ]
        assert len(shares) == workers
        made.append(Part(shares, 0.1 / (1 + number)))
    return made


def even(workers: int, count: int, seed: int = 0) -> list[Part]:
    return parts(workers, [[3] * workers] * count, seed)


def uneven(count: int) -> list[Part]:
    """Three workers; the last one has no sample in every third step."""
    return parts(3, [[4, 2, 3 if number % 3 else 0] for number in range(count)])


def group_of(
    workers: int,
    work: Callable[[Any, int], Any],
    chosen: AverageOptions = MEAN,
    recipe: Recipe = MOMENTUM,
    model: Callable[[], nn.Module] = normed,
    strategy: Any = Average,
    epoch: int = 0,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
) -> list[Any]:
    """Models are built one after the other (threads share torch's generator), then all work at once."""
    group = ThreadGroup(workers, timeout=20)
    setups = []
    for rank in range(workers):
        torch.manual_seed(3)
        setup = SynchronousSetup(
            model=model().double(),
            recipe=recipe,
            compute=Compute(nn.functional.cross_entropy),
            transport=wrap(group.transport(rank)),
            options=chosen,
            epoch=epoch,
        )
        setups.append(setup)
    return group.run(lambda transport: work(strategy(setups[transport.rank]), transport.rank))


def step(worker: Any, part: Part, rank: int, votes: Callable[[], Votes] = Votes) -> Outcome:
    share = part.shares[rank]
    outcome: Outcome = worker.step([share] if share.size else [], part.total, part.lr, votes)
    return outcome


def own(worker: Any) -> State:
    """What a worker trains."""
    return {name: tensor.detach().clone() for name, tensor in worker.model.state_dict().items()}


def kept(worker: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in worker.state().items()}


def same(first: State, second: State, skip: str = "\0") -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert skip in name or torch.equal(tensor, second[name]), name


# ---- when


def test_they_meet_every_so_many_steps() -> None:
    plan = AveragePlan(every=3)
    met = []
    for _ in range(7):
        met.append(plan.step(10, 0.1))
        if met[-1]:
            plan.begin_round()
    assert met == [False, False, True, False, False, True, False]
    assert (plan.samples_seen, plan.round_steps, plan.round_samples) == (70, 1, 10)


def test_workers_average_where_an_epoch_ends_whatever_the_batch() -> None:
    plan = AveragePlan(every="epoch", epoch=25)
    assert [plan.step(size, 0.1) for size in (10, 10, 5, 10, 10, 5, 60)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        True,
    ]


def test_until_the_rate_first_falls() -> None:
    plan = AveragePlan(every="end", post_local=True)
    lrs = [0.1, 0.2, 0.2, 0.19, 0.3, 0.1]
    assert [plan.step(10, lr) for lr in lrs] == [True, True, True, False, False, False]
    assert AveragePlan(every=1, post_local=True).step(1, 0.0)  # a warm-up may begin at an lr of 0


@pytest.mark.parametrize(
    ("every", "talks"),
    [(16, [16, 32, 48, 64]), (40, [32, 40, 72, 80]), ("end", [32, 64])],
)
def test_they_talk_at_every_average_and_at_least_every_32_steps(every: int | str, talks: list[int]) -> None:
    steps = even(2, max(talks))

    def work(worker: Any, rank: int) -> tuple[list[int], int]:
        asked = 0

        def votes() -> Votes:
            nonlocal asked
            asked += 1
            return Votes()

        shared = [n for n, part in enumerate(steps, 1) if step(worker, part, rank, votes).shared]
        return shared, asked

    assert EXCHANGE_EVERY == 32
    for shared, asked in group_of(2, work, AverageOptions(every=every), model=plain):
        assert shared == talks
        assert asked == len(talks)  # votes are asked for only when they are exchanged


def test_one_worker_always_talks_to_itself() -> None:
    def work(worker: Any, rank: int) -> list[Outcome]:
        return [step(worker, part, rank, lambda: Votes(save=True)) for part in even(1, 3)]

    [outcomes] = group_of(1, work)
    assert all(outcome.shared and outcome.votes.save for outcome in outcomes)


# ---- what


def test_what_any_worker_votes_for_happens_at_all() -> None:
    def work(worker: Any, rank: int) -> list[Outcome]:
        votes = Votes(stop=rank == 2, save=rank == 0)
        return [step(worker, part, rank, lambda: votes) for part in even(3, 4)]

    for *silent, last in group_of(3, work):
        assert [(outcome.shared, outcome.votes) for outcome in silent] == [(False, Votes())] * 3
        assert last.votes == Votes(stop=True, over=False, save=True)


@pytest.mark.parametrize("chosen", [MEAN, ELASTIC, AverageOptions(every="end")], ids=str)
def test_the_loss_is_the_mean_over_all_samples_since_the_last_talk(chosen: AverageOptions) -> None:
    count = EXCHANGE_EVERY if chosen.every == "end" else 4
    sizes = [[1 + number % 4, 2, number % 2] for number in range(count)]
    steps = parts(3, sizes)

    def work(worker: Any, rank: int) -> list[Outcome]:
        return [step(worker, part, rank) for part in steps]

    outcomes = group_of(3, work, chosen, model=plain)
    total = sum(map(sum, sizes))
    apart = [[(each[n].loss, sizes[n][rank]) for n in range(count - 1)] for rank, each in enumerate(outcomes)]
    last = [each[-1] for each in outcomes]
    assert len({outcome.loss for outcome in last}) == 1
    # the last step's own losses are not returned: found with a reference that has the same copies
    so_far = sum(loss * size for rank in apart for loss, size in rank if size)
    assert last[0].loss == pytest.approx((so_far + _last_losses(steps, chosen)) / total, abs=1e-12)
    # who had no sample knows no better than the last time; in the first step nothing at all
    assert math.isnan(outcomes[2][0].loss)
    assert outcomes[2][2].loss == outcomes[2][1].loss


def _last_losses(steps: list[Part], chosen: AverageOptions) -> float:
    """The sum of the losses of the last step, at copies that have made all steps but that."""

    def work(worker: Any, rank: int) -> float:
        for part in steps[:-1]:
            step(worker, part, rank)
        share = steps[-1].shares[rank]
        if not share.size:
            return 0.0
        return nn.functional.cross_entropy(worker.model(share.inputs), share.targets).item() * share.size

    return sum(group_of(3, work, chosen, model=plain))


@pytest.mark.parametrize("chosen", [MEAN, AverageOptions(every="end")], ids=str)
def test_a_worker_that_diverges_says_nothing_until_all_hear_it(chosen: AverageOptions) -> None:
    count = EXCHANGE_EVERY if chosen.every == "end" else 4
    steps = even(3, count)
    steps[1].shares[1].inputs[0, 0] = math.nan

    def work(worker: Any, rank: int) -> list[Outcome]:
        return [step(worker, part, rank) for part in steps]

    for rank, outcomes in enumerate(group_of(3, work, chosen, model=plain)):
        assert math.isfinite(outcomes[1].loss) == (rank != 1)
        assert not any(outcome.shared for outcome in outcomes[:-1])
        assert outcomes[-1].shared
        assert not math.isfinite(outcomes[-1].loss)


def test_an_average_is_one_message() -> None:
    counted: list[CountingTransport] = []

    def wrap(transport: Transport) -> Transport:
        counted.append(CountingTransport(transport))
        return counted[-1]

    def work(worker: Any, rank: int) -> None:
        for part in even(2, 8):
            step(worker, part, rank)
        with worker.consolidated():
            pass
        worker.finalize()

    group_of(2, work, wrap=wrap)
    for transport in counted:
        assert transport.traffic["all_reduce"].calls == 2  # after steps 4 and 8: then all are equal
        weights = FEATURES * 7 + 7 + 7 + 7 + 7 * CLASSES + CLASSES
        least = 2 * 8 * (2 * weights + 14)
        assert least <= transport.traffic["all_reduce"].bytes < least + 2 * 8 * 16 * 20  # and cache lines


@pytest.mark.parametrize(
    ("outer", "recipe", "copies"),
    [
        ("nesterov", "momentum", 1),
        ("nesterov", "adamw", 1),
        ("elastic", "adamw", 1),
        ("mean", "sgd", 1),
        ("mean", "momentum", 2),
        ("mean", "adamw", 3),
    ],
)
def test_what_an_average_exchanges(outer: str, recipe: str, copies: int) -> None:
    """DiLoCo sends the parameters alone; the mean of the optimizers' states is one or two copies more."""
    counted: list[CountingTransport] = []

    def wrap(transport: Transport) -> Transport:
        counted.append(CountingTransport(transport))
        return counted[-1]

    def work(worker: Any, rank: int) -> None:
        for part in even(2, 4):
            step(worker, part, rank)

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 700), nn.Tanh(), nn.Linear(700, CLASSES))

    group_of(2, work, OUTERS[outer], RECIPES[recipe], wide, wrap=wrap)
    parameters = 8 * (700 * (FEATURES + 1) + CLASSES * 701)
    for transport in counted:
        traffic = transport.traffic["all_reduce"]
        assert traffic.calls == 1
        assert copies <= traffic.bytes / parameters < copies + 0.05  # the header, and cache lines


# ---- consolidated, and finalized


@pytest.mark.parametrize("outer", OUTERS)
def test_consolidating_changes_nothing(outer: str) -> None:
    steps = uneven(10)

    def train(look: bool) -> list[Any]:
        def work(worker: Any, rank: int) -> tuple[State, State]:
            for part in steps:
                step(worker, part, rank)
                before = own(worker)
                if look:
                    with worker.consolidated():
                        inside = own(worker)
                    same(own(worker), before)
                    assert any(not torch.equal(before[name], inside[name]) for name in before) == (
                        outer == "elastic" or worker._plan.round_steps > 0
                    )
            return own(worker), kept(worker)

        return group_of(3, work, OUTERS[outer])

    for (looked, state), (blind, other) in zip(train(True), train(False), strict=True):
        same(looked, blind)
        same(state, other)


@pytest.mark.parametrize("outer", OUTERS)
def test_the_final_model_is_the_consolidated_one_and_is_saved(outer: str) -> None:
    def work(worker: Any, rank: int) -> tuple[State, State]:
        for part in uneven(6):
            step(worker, part, rank)
        before = kept(worker)
        with worker.consolidated():
            inside = own(worker)
        worker.finalize()
        same(own(worker), inside)
        after = kept(worker)
        assert not any(name.startswith("workers/") for name in after)
        # optimizers that are not averaged stay each worker's own, and their mean is of the next round
        alike = ("model/",) if outer == "nesterov" else ("model/", "optimizer/")
        for name, tensor in after.items():
            if name.startswith(("rank/", *alike)):
                assert torch.equal(before[name], tensor), name
        return own(worker), {name: t for name, t in after.items() if not name.startswith("rank/")}

    (first, state), *rest = group_of(3, work, OUTERS[outer])
    for final, other in rest:
        same(first, final, "num_batches_tracked")
        same(state, other, "num_batches_tracked")


# ---- saved, and going on


def trained(
    workers: int,
    steps: list[Part],
    chosen: AverageOptions,
    recipe: Recipe = MOMENTUM,
    state: State | None = None,
    strategy: Any = Average,
    epoch: int = 0,
) -> list[tuple[State, State, list[Outcome]]]:
    """By rank: the state saved after these steps, the worker's own model, and every outcome."""

    def work(worker: Any, rank: int) -> tuple[State, State, list[Outcome]]:
        if state is not None:
            worker.load_state(state)
        outcomes = [step(worker, part, rank) for part in steps]
        return kept(worker), own(worker), outcomes

    return group_of(workers, work, chosen, recipe, strategy=strategy, epoch=epoch)


@pytest.mark.parametrize("at", [4, 6])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("outer", OUTERS)
def test_the_same_workers_go_on_bit_for_bit(outer: str, recipe: str, at: int) -> None:
    """Also in the middle of a round, where each has its own model, memory, buffers and counters."""
    steps, chosen = uneven(11), OUTERS[outer]
    whole = trained(3, steps, chosen, RECIPES[recipe])
    [(state, _, _), *_] = trained(3, steps[:at], chosen, RECIPES[recipe])
    assert any(name.startswith("workers/") for name in state) == (at == 6 or outer == "elastic")
    rest = trained(3, steps[at:], chosen, RECIPES[recipe], state)
    # integers stay each worker's own; where all else is equal, what is saved is rank 0's
    skip = "\0" if any(name.startswith("workers/") for name in state) else "num_batches_tracked"
    for (state, model, outcomes), (other, expected, all_outcomes) in zip(rest, whole, strict=True):
        same(state, other, skip)
        same(model, expected, skip)
        assert outcomes[1:] == all_outcomes[at + 1 :]
        assert outcomes[0].loss == all_outcomes[at].loss or math.isnan(outcomes[0].loss)


@pytest.mark.parametrize(
    "chosen",
    [AverageOptions(every="epoch"), AverageOptions(every=40), AverageOptions(every=3, post_local=True)],
    ids=str,
)
def test_what_decides_when_to_average_is_saved(chosen: AverageOptions) -> None:
    steps = [
        Part(part.shares, 0.1 if number < 20 else 0.01) for number, part in enumerate(even(2, 50))
    ]  # post-local from step 20 on
    whole = trained(2, steps, chosen, epoch=100)
    for at in (18, 21, 35):
        [(state, _, _), *_] = trained(2, steps[:at], chosen, epoch=100)
        for (found, _, outcomes), (other, _, expected) in zip(
            trained(2, steps[at:], chosen, state=state, epoch=100), whole, strict=True
        ):
            same(found, other)
            assert outcomes == expected[at:]


def test_a_state_has_the_common_model_and_each_workers_own() -> None:
    found = trained(3, uneven(6), ELASTIC)
    state, models = found[0][0], [model for _, model, _ in found]
    for rank, model in enumerate(models):
        for name, tensor in model.items():
            assert torch.equal(state[f"workers/{rank}/model/{name}"], tensor)
        assert f"workers/{rank}/optimizer/momentum_buffer/0.weight" in state
    counts = [int(state[f"workers/{rank}/model/1.num_batches_tracked"]) for rank in range(3)]
    assert counts == [6, 6, 4]  # the last worker had no sample twice
    assert state["average/used"].tolist() == [8, 4, 6]
    assert all(not name.startswith("workers/") for other, _, _ in found[1:] for name in other)


@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("outer", OUTERS)
def test_other_workers_go_on_from_the_average(outer: str, then: int) -> None:
    [(state, _, _), *_] = trained(3, uneven(6), OUTERS[outer])
    learned = {name: tensor for name, tensor in state.items() if name.startswith("model/")}

    def work(worker: Any, rank: int) -> State:
        worker.load_state(state)
        same({f"model/{name}": tensor for name, tensor in own(worker).items()}, learned)
        now = kept(worker)
        known = ["model/", "average/anchor/", "average/momentum/"]
        if outer != "nesterov" or then == 1:  # else the mean is of those who are there now
            known.append("optimizer/")
        for name, tensor in state.items():
            if name.startswith(tuple(known)):
                assert torch.equal(now[name], tensor), name
        assert not any(name.startswith("workers/") for name in now)
        for part in even(then, 5):
            step(worker, part, rank)
        worker.finalize()
        return own(worker)

    first, *rest = group_of(then, work, OUTERS[outer])
    assert all(tensor.isfinite().all() for tensor in first.values())
    for other in rest:
        same(first, other)


def memory(worker: Any) -> State:
    """A worker's optimizer state."""
    packed = pack(worker.model, worker._optimizer)
    return {name: tensor.clone() for name, tensor in packed.items() if name.startswith("optimizer/")}


@pytest.mark.parametrize("at", [4, 6])  # after an average, and in the middle of a round
@pytest.mark.parametrize("recipe", ["momentum", "adamw"])
def test_known_ranks_keep_their_optimizer_and_new_ones_take_the_mean(recipe: str, at: int) -> None:
    def first(worker: Any, rank: int) -> tuple[State, State]:
        for part in uneven(at):
            step(worker, part, rank)
        return memory(worker), kept(worker)

    found = group_of(3, first, NESTEROV, RECIPES[recipe])
    own, state = [memory for memory, _ in found], found[0][1]
    mean = {name: tensor for name, tensor in state.items() if name.startswith("optimizer/")}
    assert not any(torch.equal(own[0][name], own[1][name]) for name in mean if "/step/" not in name)
    for rank, memories in enumerate(own):
        for name, tensor in memories.items():
            assert torch.equal(state[f"rank/{rank}/{name}"], tensor), name
    assert not any(name.startswith("workers/") and "/optimizer/" in name for name in state)

    def then(worker: Any, rank: int) -> State:
        worker.load_state(state)
        return memory(worker)

    for workers, expected in ((2, own[:2]), (4, [*own, mean]), (1, [mean])):
        for now, before in zip(group_of(workers, then, NESTEROV, RECIPES[recipe]), expected, strict=True):
            same(now, before)
    averaging = NESTEROV.model_copy(update={"average_optimizer": True})
    for now in group_of(3, then, averaging, RECIPES[recipe]):
        same(now, mean)


def test_a_rank_that_had_no_sample_goes_on_without_memory() -> None:
    """Adam creates its state with the first gradient: a resumed rank must not get the mean of the others."""
    steps = parts(2, [[3, 0]] * 3 + [[3, 2]] * 3)
    chosen, adam = AverageOptions(every=2, outer="nesterov"), RECIPES["adamw"]
    whole = trained(2, steps, chosen, adam)
    [(state, _, _), *_] = trained(2, steps[:2], chosen, adam)
    assert not any(name.startswith("rank/1/") for name in state)
    for (found, model, _), (expected, other, _) in zip(
        trained(2, steps[2:], chosen, adam, state), whole, strict=True
    ):
        same(found, expected, "num_batches_tracked")
        same(model, other, "num_batches_tracked")


def test_a_state_from_before_optimizer_states_were_kept_per_rank_is_read() -> None:
    """Old checkpoints of nesterov have one optimizer state, the mean, or in a round each worker's own."""
    old = NESTEROV.model_copy(update={"average_optimizer": True})
    for at in (4, 6):
        before = trained(2, even(2, at), old)
        state = before[0][0]
        assert not any(name.startswith("rank/") for name in state)
        mean = {name: tensor for name, tensor in state.items() if name.startswith("optimizer/")}

        def then(worker: Any, rank: int, state: State = state) -> State:
            worker.load_state(state)
            return memory(worker)

        for rank, now in enumerate(group_of(2, then, NESTEROV)):
            own = {name.removeprefix(f"workers/{rank}/"): t for name, t in state.items()}
            same(now, mean if at == 4 else {name: own[name] for name in mean})


@pytest.mark.parametrize("before", OUTERS)
@pytest.mark.parametrize("after", OUTERS)
def test_another_rule_goes_on_from_the_average(before: str, after: str) -> None:
    if before == after:
        return
    [(state, _, _), *_] = trained(2, even(2, 6), OUTERS[before])
    learned = {name: tensor for name, tensor in state.items() if name.startswith("model/")}
    for _, model, _ in trained(2, [], OUTERS[after], state=state):
        same({f"model/{name}": tensor for name, tensor in model.items()}, learned)


def test_another_interval_goes_on_with_each_workers_own() -> None:
    """Nothing is lost, and the round that was begun counts: 6 steps are more than 5."""
    steps = even(2, 8)
    whole = trained(2, steps[:6], AverageOptions(every=7))
    state = whole[0][0]
    for rank, (_, model, _) in enumerate(trained(2, [], AverageOptions(every=5), state=state)):
        same(model, whole[rank][1])
    for _, _, outcomes in trained(2, steps[6:], AverageOptions(every=5), state=state):
        assert [outcome.shared for outcome in outcomes] == [True, False]
    for _, _, outcomes in trained(2, steps[6:], AverageOptions(every=7), state=state):
        assert [outcome.shared for outcome in outcomes] == [True, False]


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("recipe", ["momentum", "adamw", "lamb"])
def test_any_strategy_goes_on_from_an_average_and_the_other_way_round(recipe: str, outer: str) -> None:
    chosen, steps = OUTERS[outer], even(2, 6)
    [(state, _, _), *_] = trained(2, steps, chosen, RECIPES[recipe])
    learned = {n: t for n, t in state.items() if n.startswith(("model/", "optimizer/"))}
    for workers, strategy in ((1, Single), (2, AllReduce)):
        [(theirs, _, _), *_] = trained(workers, [], chosen, RECIPES[recipe], state, strategy)
        same(theirs, learned)
        [(theirs, _, _), *_] = trained(workers, even(workers, 2), chosen, RECIPES[recipe], state, strategy)
        [(ours, _, _), *_] = trained(2, [], chosen, RECIPES[recipe], theirs)
        same({n: t for n, t in ours.items() if n.startswith(("model/", "optimizer/"))}, theirs)


@pytest.mark.parametrize("chosen", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_another_optimizer_begins_without_memory(chosen: AverageOptions) -> None:
    """A run that resumes with another optimizer gets no state of the old one, and neither do its workers."""
    [(state, _, _), *_] = trained(2, even(2, 6), chosen)
    given = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer/")}
    for found, _, _ in trained(2, even(2, 1), chosen, RECIPES["adamw"], given):
        steps = {t.item() for name, t in found.items() if name.startswith("optimizer/step/")}
        assert steps == {1.0}
        assert not any("momentum_buffer" in name for name in found)


# ---- beginnings


def test_workers_start_from_rank_0s_values() -> None:
    seeds = iter(range(3))

    def model() -> nn.Module:
        torch.manual_seed(seed := next(seeds))
        made = normed()
        made[1].running_mean.fill_(float(seed))
        made[3].bias.requires_grad_(False).fill_(float(seed))
        return made

    first, *rest = group_of(3, lambda worker, rank: own(worker), model=model)
    assert first["1.running_mean"].eq(0).all()
    for other in rest:
        same(first, other)


def test_another_model_at_one_worker_is_noticed() -> None:
    models = [normed(), plain()]
    with pytest.raises(ManyhandsError, match=r"^worker 1 built another model than worker 0: "):
        group_of(2, lambda worker, rank: None, model=models.pop)


@pytest.mark.parametrize("outer", ["nesterov", "elastic"])
def test_a_rule_that_would_never_act_is_refused(outer: str) -> None:
    with pytest.raises(UsageError, match=rf"^strategy average: outer {outer} acts when workers meet during"):
        options.build("average", {"every": "end", "outer": outer})


def test_elastic_has_no_optimizer_states_to_average() -> None:
    with pytest.raises(UsageError, match=r"^strategy average: average_optimizer does not go with outer elas"):
        options.build("average", {"outer": "elastic", "average_optimizer": "true"})
    for name, averages in (("mean", True), ("nesterov", False)):
        chosen = options.build("average", {"outer": name})
        assert isinstance(chosen, AverageOptions)
        assert chosen.averages_optimizer == averages
