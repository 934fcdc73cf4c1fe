"""A model in stages equals one worker tensor by tensor: any cut, schedule, replicas, way of handing over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.core.rank_info import RankInfo
from manyhands.data.base import Batch
from manyhands.data.order import BatchShare
from manyhands.engine.timing.traffic import CountingTransport
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, lars
from manyhands.strategies.base import Compute, Outcome, PartitionedSetup, Votes
from manyhands.strategies.data_parallel.allreduce import AllReduce
from manyhands.strategies.data_parallel.arena import Arena
from manyhands.strategies.options import PipelineOptions
from manyhands.strategies.pipeline import stage_link
from manyhands.strategies.pipeline.remote_stages import RemoteStages
from manyhands.strategies.pipeline.schedule import SCHEDULES, Action, gpipe
from manyhands.strategies.pipeline.worker import Recomputed, pipeline
from manyhands.strategies.single import Single
from manyhands.transports.base import Transport
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from parity import alike
from parity.alike import CLASSES, State, close, equal, held, make, parts_of
from transports.groups import between_hosts, processes

FEATURES = 16
batches = partial(alike.batches, features=FEATURES)
MOMENTUM = constant(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = constant(lr=0.01, optimizer="adamw", weight_decay=0.1)
RECIPES = {
    "sgd": constant(lr=0.1),
    "momentum": MOMENTUM,
    "adam": constant(lr=0.01, optimizer="adam"),
    "adamw": ADAMW,
    "lars": lars(lr=0.5, weight_decay=0.01, momentum=0.9),
    "lamb": lamb(lr=0.05, weight_decay=0.01),
    "clipped": constant(lr=0.1, momentum=0.9, clip=0.05),
}
SIZES = (13, 13, 2, 7)  # uneven, and once fewer samples than replicas x micro-batches
BATCH = 13
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stage whose neighbor has failed waits no longer than that: threads do not notice a death."""
    monkeypatch.setattr(stage_link, "DEFAULT_TIMEOUT", 20.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- models


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 11), nn.Tanh(), nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, CLASSES)
    )


def images() -> nn.Module:
    """Rectifiers that write over their inputs: there is no cut before them."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, momentum=None),  # the mean over all batches: it needs its count
        nn.Linear(8, CLASSES),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x).relu())
        return out


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(
            nn.Linear(FEATURES, 7),
            Residual(7),
            Residual(7),
            Residual(7),
            nn.ReLU(True),
            nn.Linear(7, CLASSES),
        )
    )


def tied() -> nn.Module:
    """Blocks 1 to 3 share a weight and stay together."""
    model = nn.Sequential(
        nn.Linear(FEATURES, 6),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Linear(6, 5),
        nn.Linear(5, CLASSES),
    )
    model[3].weight = model[1].weight
    return model


def frozen() -> nn.Module:
    """Parameters that are not trained: a block's all, another's bias."""
    model = plain()
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def idle_ends() -> nn.Module:
    """Nothing to train in the first two blocks and in the last two."""
    return nn.Sequential(
        nn.Unflatten(1, (4, 4)),
        nn.Flatten(),
        nn.Linear(FEATURES, 6),
        nn.Tanh(),
        nn.Linear(6, CLASSES),
        nn.Tanh(),
        nn.LogSoftmax(1),
    )


class Rare(nn.Module):
    """A branch that some micro-batches need and others do not, and one that none does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.rare, self.never = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        odd = x[:, 0].detach() > 1.2
        return out + self.rare(x) * odd[:, None] if odd.any() else out


def rare() -> nn.Module:
    return nn.Sequential(Rare(FEATURES), nn.Linear(FEATURES, 6), Rare(6), nn.Linear(6, CLASSES))


class Named(nn.Module):
    """No sequence: it names its blocks itself, and registers them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, CLASSES)
        self.trunk = nn.ModuleList([nn.Linear(FEATURES, 7), nn.Tanh(), Residual(7)])

    def blocks(self) -> list[nn.Module]:
        return [*self.trunk, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.trunk:
            x = block(x)
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "images": images,
    "residual": residual,
    "tied": tied,
    "frozen": frozen,
    "frozen first": frozen_first,
    "idle ends": idle_ends,
    "rare": rare,
    "named": Named,
}
CUTS = {"frozen first": (1, 3), "idle ends": (2, 5), "tied": (1, 4)}  # where it matters which


# ---- gangs


class Plan(NamedTuple):
    """A group: stages x replicas on some hosts, and the options of its pipelines."""

    stages: int = 2
    replicas: int = 1
    micro_batches: int = 4
    schedule: str = "1f1b"
    hosts: str = ""  # one letter a worker; none: all on one
    recompute: bool = False
    cut: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.stages * self.replicas

    @property
    def options(self) -> PipelineOptions:
        return PipelineOptions(
            stages=self.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule,  # type: ignore[arg-type]
            recompute=self.recompute,
            cut=self.cut,
        )

    def share(self, rank: int) -> BatchShare:
        replica, stage = divmod(rank, self.stages)
        return BatchShare(replica, self.replicas, self.micro_batches, reads=stage == 0)


class Led(NamedTuple):
    """Where some steps led one worker."""

    state: State
    losses: list[float]
    worker: Any


def drive(
    worker: Any, share: BatchShare, data: list[Batch], state: State | None = None, first: int = 0
) -> Led:
    if state is not None:
        worker.load_state(state)
    losses = []
    for number, batch in enumerate(data):
        lr = 0.1 / (1 + first + number)
        losses.append(worker.step(iter(parts_of(batch, share)), batch.size, lr).loss)
    leads = share.rank == 0 and share.reads
    return Led(held(worker, 0 if leads else 1), losses, worker)


def setup(
    model: Callable[[], nn.Module], recipe: Recipe, transport: Transport, plan: Plan | None = None
) -> PartitionedSetup:
    [example] = batches((BATCH,))
    return PartitionedSetup(
        model=make(model),
        recipe=recipe,
        compute=Compute(nn.functional.cross_entropy),
        transport=transport,
        options=plan.options if plan else None,
        batch=BATCH,
        example=lambda size: Batch(example.inputs[:size], example.targets[:size]),
    )


def alone(
    model: Callable[[], nn.Module],
    recipe: Recipe,
    data: list[Batch],
    accumulate: int = 1,
    state: State | None = None,
    first: int = 0,
) -> Led:
    return drive(
        Single(setup(model, recipe, SoloTransport())), BatchShare(accumulate=accumulate), data, state, first
    )


def together(
    plan: Plan,
    model: Callable[[], nn.Module],
    recipe: Recipe,
    data: list[Batch],
    state: State | None = None,
    first: int = 0,
) -> list[Led]:
    """Models are built one after the other (threads share torch's generator), then all train at once."""
    group = ThreadGroup(plan.size, timeout=20, hosts=plan.hosts or None)
    setups = [setup(model, recipe, group.transport(rank), plan) for rank in range(plan.size)]

    def work(transport: Transport) -> Led:
        made = setups[transport.rank]
        return drive(pipeline(made), plan.share(transport.rank), data, state, first)

    return group.run(work)


def check(plan: Plan, model: Callable[[], nn.Module], recipe: Recipe, data: list[Batch]) -> None:
    expected = alone(model, recipe, data)
    for found in together(plan, model, recipe, data):
        close(found.state, expected.state)
        assert found.losses == pytest.approx(expected.losses, abs=1e-12)


# ---- against one worker

PLANS = [
    Plan(2, 1, 1, "gpipe"),  # what `layers` does
    Plan(2, 1, 4, "gpipe"),
    Plan(2, 1, 4),
    Plan(2, 1, 5),
    Plan(3, 1, 2),
    Plan(3, 1, 4, "gpipe"),
    Plan(4, 1, 3),
    Plan(4, 1, 5, "gpipe"),
    Plan(2, 2, 4),
    Plan(2, 2, 3, "gpipe"),
    Plan(3, 2, 5),
    Plan(2, 1, 4, hosts="ab"),
    Plan(2, 2, 4, hosts="aabb"),  # a pipeline a host
    Plan(2, 2, 3, hosts="abab"),  # every pipeline goes over both hosts
    Plan(3, 2, 4, "gpipe", hosts="aaabbb"),
    Plan(3, 1, 4, hosts="aab"),
    Plan(2, 2, 4, hosts="abcd"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_division_equals_one_worker(plan: Plan) -> None:
    check(plan, plain, MOMENTUM, batches(SIZES))


@pytest.mark.parametrize("hosts", ["aaaa", "abab"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_optimizer_equals_one_worker(recipe: str, hosts: str) -> None:
    check(Plan(2, 2, 3, hosts=hosts), plain, RECIPES[recipe], batches(SIZES))


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
@pytest.mark.parametrize(
    ("model", "recipe"),
    [(model, "momentum") for model in MODELS] + [("idle ends", "lamb"), ("idle ends", "clipped")],
)
def test_every_kind_of_model_equals_one_worker(model: str, recipe: str, hosts: str) -> None:
    plan = Plan(3, 1, 4, hosts=hosts, cut=CUTS.get(model, ()))
    check(plan, MODELS[model], RECIPES[recipe], batches((13, 8, 3)))


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@pytest.mark.parametrize("model", ["rare", "frozen first", "images"])
def test_replicas_of_every_kind_of_model(model: str, hosts: str) -> None:
    plan = Plan(2, 2, 2, hosts=hosts, cut=(1,) if model == "frozen first" else ())
    check(plan, MODELS[model], MOMENTUM, batches((13, 1, 5)))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stages=st.integers(2, 4),
    replicas=st.integers(1, 2),
    micro_batches=st.integers(1, 5),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    recompute=st.booleans(),
    spread=st.sampled_from(["", "by turns", "each"]),
    sizes=st.lists(st.integers(1, BATCH), min_size=1, max_size=3),
    recipe=st.sampled_from(sorted(RECIPES)),
)
def test_any_division_of_any_batches(
    stages: int,
    replicas: int,
    micro_batches: int,
    schedule: str,
    recompute: bool,
    spread: str,
    sizes: list[int],
    recipe: str,
) -> None:
    size = stages * replicas
    hosts = {"": "", "by turns": ("ab" * size)[:size], "each": "abcdefgh"[:size]}[spread]
    plan = Plan(stages, replicas, micro_batches, schedule, hosts, recompute)
    data = batches(sizes)
    expected = alone(plain, RECIPES[recipe], data)
    for found in together(plan, plain, RECIPES[recipe], data):
        close(found.state, expected.state, 1e-9)
        assert found.losses == pytest.approx(expected.losses, abs=1e-11)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_pipeline_has_the_bits_of_one_worker_that_accumulates(model: str, schedule: str) -> None:
    """Gradients are added up in the same order: not only close."""
    data = batches(SIZES)
    expected = alone(MODELS[model], MOMENTUM, data, accumulate=4)
    for found in together(Plan(2, 1, 4, schedule), MODELS[model], MOMENTUM, data):
        equal(found.state, expected.state)
        assert found.losses == expected.losses


# ---- batch norm


@pytest.mark.parametrize("plan", [Plan(2, 1, 4), Plan(3, 1, 4, "gpipe"), Plan(3, 1, 3, hosts="abc")], ids=str)
def test_batch_norm_is_one_worker_that_takes_the_micro_batches_in_turn(plan: Plan) -> None:
    """Running statistics and the count of batches included: one pipeline takes them in turn as well."""
    data = batches((13, 12, 10))
    expected = alone(normed, MOMENTUM, data, accumulate=plan.micro_batches)
    assert expected.state["model/1.num_batches_tracked"] == 3 * plan.micro_batches
    for found in together(plan, normed, MOMENTUM, data):
        close(found.state, expected.state)
        assert found.losses == pytest.approx(expected.losses, abs=1e-12)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_batch_norm_of_replicas(hosts: str) -> None:
    """The parts of both replicas in turn; running statistics are the mean of what the replicas saw."""
    data = batches((12, 12, 8))
    expected = alone(normed, MOMENTUM, data, accumulate=4)
    first, *others = together(Plan(2, 2, 2, hosts=hosts), normed, MOMENTUM, data)
    close(first.state, expected.state, skip=STATISTICS)
    assert first.state["model/1.num_batches_tracked"] == 6  # of replica 0
    for other in others:
        equal(other.state, first.state)
        assert other.losses == first.losses


# ---- recomputing and dropout


@pytest.mark.parametrize("model", ["images", "normed", "named"])
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_recomputed_has_the_same_bits(model: str, hosts: str) -> None:
    """Statistics of norms included: a batch that is seen again is not counted again."""
    data = batches((13, 9))
    made = {**MODELS, "normed": normed}[model]
    copied, computed = (
        together(Plan(2, 1, 4, hosts=hosts, recompute=recompute), made, ADAMW, data)
        for recompute in (False, True)
    )
    assert isinstance(computed[0].worker._module, Recomputed)
    assert not isinstance(computed[1].worker._module, Recomputed)  # the last stage needs it at once
    for one, other in zip(copied, computed, strict=True):
        equal(one.state, other.state)
        assert one.losses == other.losses


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 9),
        nn.Dropout(0.3),
        nn.BatchNorm1d(9),
        nn.Tanh(),
        nn.Linear(9, 9),
        nn.Dropout(0.5),
        nn.Linear(9, CLASSES),
    )


def drops_out(transport: Transport) -> list[tuple[State, list[float]]]:
    """In processes, each with a generator of its own; several ways in one group."""
    found = []
    for seed, schedule, recompute in (
        (0, "1f1b", False),
        (0, "1f1b", False),
        (0, "gpipe", False),
        (0, "1f1b", True),
        (0, "gpipe", True),
        (1, "1f1b", False),
    ):
        plan = Plan(2, 1, 4, schedule, recompute=recompute, cut=(4,))
        worker = pipeline(setup(dropped, MOMENTUM, transport, plan))
        torch.manual_seed(100 * seed + transport.rank)
        led = drive(worker, plan.share(transport.rank), batches((13, 9)))
        found.append((led.state, led.losses))
    return found


def test_dropout_is_the_same_for_the_same_seed_whatever_the_schedule() -> None:
    for (state, losses), *same, (_, other) in processes(ShmTransport, ("here",) * 2, drops_out):
        for again, found in same:
            equal(again, state)
            assert found == losses
        assert other != losses


# ---- replicas that share no memory


def wide() -> nn.Module:
    """Much more to sum than to hand on."""
    return nn.Sequential(nn.Linear(FEATURES, 1000), nn.Tanh(), nn.Linear(1000, 2), nn.Linear(2, CLASSES))


@pytest.mark.parametrize("replicas", [3, 4])
def test_no_replica_carries_the_gradients_of_all(replicas: int) -> None:
    """They sum by an all-reduce among themselves: what passes a rank does not grow with their number.

    Through a star the first of them took and sent the gradients of all others, six times as much with four.
    """
    plan, data = Plan(2, replicas, 2, hosts="abcdefgh"[: 2 * replicas], cut=(3,)), batches((16, 13))
    group = ThreadGroup(plan.size, timeout=20, hosts=plan.hosts)
    counted = [CountingTransport(group.transport(rank)) for rank in range(plan.size)]
    setups = [setup(wide, MOMENTUM, transport, plan) for transport in counted]

    def moved(transport: CountingTransport) -> int:
        return sum(entry.bytes for entry in transport.traffic.values())

    def work(transport: Transport) -> tuple[float, State]:
        rank = transport.rank
        worker: Any = pipeline(setups[rank])
        assert isinstance(worker._gradients, RemoteStages)
        before = moved(counted[rank])
        for number, batch in enumerate(data):
            worker.step(iter(parts_of(batch, plan.share(rank))), batch.size, 0.1 / (1 + number))
        return (moved(counted[rank]) - before) / len(data), held(worker, rank)

    first_stage = 8 * (FEATURES * 1000 + 1000 + 2 * 1000 + 2)
    expected = alone(wide, MOMENTUM, data)
    for rank, (nbytes, state) in enumerate(group.run(work)):
        close(state, expected.state)  # in float64, within rounding
        stage = first_stage if rank % 2 == 0 else 0
        assert stage <= nbytes < stage + 0.05 * first_stage, rank


# ---- messages between processes


def over_messages(transport: Transport) -> list[tuple[str, State, list[float]]]:
    """Many checks in one group of four that does not share all of its memory."""
    found = []
    for model, recipe, plan in MESSAGES:
        worker: Any = pipeline(setup({**MODELS, "normed": normed}[model], RECIPES[recipe], transport, plan))
        assert isinstance(worker._gradients, RemoteStages)
        led = drive(worker, plan.share(transport.rank), batches((13, 12, 3, 13)))
        found.append((model, led.state, led.losses))
    return found


MESSAGES = [
    ("plain", "momentum", Plan(2, 2, 4)),
    ("plain", "clipped", Plan(2, 2, 3, "gpipe")),
    ("images", "adamw", Plan(2, 2, 2, recompute=True)),
    ("idle ends", "lamb", Plan(2, 2, 3, cut=(2,))),
    ("frozen first", "lars", Plan(2, 2, 2, cut=(1,))),
    ("rare", "momentum", Plan(4, 1, 4)),
    ("residual", "adam", Plan(4, 1, 5, "gpipe")),
]


WAYS: dict[str, tuple[Callable[[RankInfo], Transport], str]] = {
    "no common memory": (partial(TorchTransport, timeout=30.0), "aaaa"),
    "two and two on a host": (partial(between_hosts, name="torch"), "aabb"),
}


@pytest.mark.parametrize("way", WAYS)
def test_processes_that_send_messages_equal_one_worker(way: str) -> None:
    data = batches((13, 12, 3, 13))
    expected = [alone(MODELS[model], RECIPES[recipe], data) for model, recipe, _ in MESSAGES]
    make, hosts = WAYS[way]
    for results in processes(make, hosts, over_messages):
        for (_, state, losses), reference in zip(results, expected, strict=True):
            close(state, reference.state)
            assert losses == pytest.approx(reference.losses, abs=1e-12)


# ---- states


class Relay(NamedTuple):
    """What resumes from a state: a pipeline, some workers of all-reduce, or one worker."""

    plan: Plan | None
    workers: int = 1

    def go_on(self, data: list[Batch], state: State | None, first: int) -> State:
        if self.plan is not None:
            return together(self.plan, tied, ADAMW, data, state, first)[0].state
        if self.workers == 1:
            return alone(tied, ADAMW, data, 1, state, first).state
        group = ThreadGroup(self.workers, timeout=20)
        setups = [setup(tied, ADAMW, group.transport(rank)) for rank in range(self.workers)]

        def work(transport: Transport) -> State:
            share = BatchShare(transport.rank, self.workers)
            return drive(AllReduce(setups[transport.rank]), share, data, state, first).state

        return group.run(work)[0]


def test_a_state_goes_on_with_any_strategy_and_any_number_of_stages() -> None:
    """Law 6: whole tensors in one format, so that what two stages began anyone can end."""
    runners = [
        Relay(Plan(2, 1, 4)),
        Relay(None),
        Relay(Plan(3, 1, 2, hosts="abc")),
        Relay(None, workers=2),
        Relay(Plan(2, 2, 2)),
        Relay(Plan(4, 1, 3)),
    ]
    data = batches((13,) * len(runners))
    state: State | None = None
    for number, runner in enumerate(runners):
        state = runner.go_on([data[number]], state, number)
        again = runner.go_on([], state, number)  # taken and given back
        equal(again, state)
    assert state is not None
    close(state, alone(tied, ADAMW, data).state, 1e-9)


@pytest.mark.parametrize("plan", [Plan(2, 1, 4), Plan(2, 2, 2), Plan(2, 2, 2, hosts="abab")], ids=str)
def test_the_same_workers_go_on_bit_for_bit(plan: Plan) -> None:
    data = batches((13, 9, 12))
    whole = together(plan, normed, ADAMW, data)
    half = together(plan, normed, ADAMW, data[:1])
    for found, expected in zip(
        together(plan, normed, ADAMW, data[1:], half[0].state, first=1), whole, strict=True
    ):
        equal(found.state, expected.state)
        assert found.losses == expected.losses[1:]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_the_model_is_whole_at_every_worker(hosts: str) -> None:
    """For evaluations, and when the run is over; its counts of batches included."""
    plan, data = Plan(2, 1, 4, hosts=hosts, cut=(3,)), batches((13, 9))
    expected = alone(normed, MOMENTUM, data, accumulate=4).worker.model.state_dict()
    group = ThreadGroup(2, timeout=20, hosts=hosts)
    setups = [setup(normed, MOMENTUM, group.transport(rank), plan) for rank in range(2)]

    def work(transport: Transport) -> tuple[State, State]:
        worker = pipeline(setups[transport.rank])
        for number, batch in enumerate(data):
            worker.step(iter(parts_of(batch, plan.share(transport.rank))), batch.size, 0.1 / (1 + number))
        with worker.consolidated():
            inside = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
        worker.finalize()
        return inside, dict(worker.model.state_dict())

    for inside, final in group.run(work):
        close(inside, expected)
        equal(final, inside)


def test_a_state_sends_each_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stages share no memory: the model to consolidate it, then only the optimizer states."""
    sent: list[list[str]] = []
    send = RemoteStages._from_all_stages

    def noted(self: RemoteStages, own: Mapping[str, Tensor]) -> State:
        sent.append(list(own))
        return send(self, own)

    monkeypatch.setattr(RemoteStages, "_from_all_stages", noted)
    [found, _] = together(Plan(hosts="ab"), plain, ADAMW, batches((13,)))
    names = sorted(name if name.startswith("optimizer/") else f"model/{name}" for own in sent for name in own)
    assert names == sorted(found.state)


def test_what_any_worker_votes_for_happens_at_all() -> None:
    plan, [data] = Plan(2, 2, 2), batches((13,))
    group = ThreadGroup(4, timeout=20)
    setups = [setup(plain, MOMENTUM, group.transport(rank), plan) for rank in range(4)]

    def work(transport: Transport) -> Outcome:
        rank = transport.rank
        votes = Votes(stop=rank == 3, save=rank == 0)
        mine = parts_of(data, plan.share(rank))
        return pipeline(setups[rank]).step(iter(mine), data.size, 0.1, lambda: votes)

    outcomes = group.run(work)
    assert [outcome.votes for outcome in outcomes] == [Votes(stop=True, save=True)] * 4
    assert len({outcome.loss for outcome in outcomes}) == 1


# ---- where it is cut, and who is asked


def test_one_stage_is_all_reduce() -> None:
    plan, data = Plan(1, 2, 3), batches(SIZES)
    expected = alone(plain, MOMENTUM, data)
    for found in together(plan, plain, MOMENTUM, data):
        assert isinstance(found.worker, AllReduce)
        close(found.state, expected.state)


def test_memory_is_shared_where_it_can_be() -> None:
    for hosts, kind in (("aa", Arena), ("ab", RemoteStages)):
        found = together(Plan(2, 1, 1, hosts=hosts), plain, MOMENTUM, [])
        assert [type(each.worker._gradients) for each in found] == [kind] * 2


def test_the_partition_is_reported() -> None:
    group = ThreadGroup(2, timeout=20)
    plan = Plan(2, 1, 4, cut=(3,))
    setups = [setup(plain, MOMENTUM, group.transport(rank), plan) for rank in range(2)]
    group.run(lambda transport: pipeline(setups[transport.rank]).model)
    first, second = setups[0].choices["stages"]
    assert (first["first"], first["end"], second["first"], second["end"]) == (0, 3, 3, 5)
    assert (first["parameters"], second["parameters"]) == (16 * 11 + 11 + 11 * 9 + 9, 9 * 3 + 3)
    assert first["outputs"] == 4 * 9 * 8  # a micro-batch of four samples, nine numbers of eight bytes each
    assert setups[0].choices["cut"].startswith("cut: blocks 0-2 (")
    assert "sends 288 B) | 3-4 (" in setups[0].choices["cut"]
    assert setups[1].choices == {}


def test_no_cut_before_a_block_that_writes_over_its_inputs() -> None:
    for border in (2, 4):
        with pytest.raises(UsageError) as caught:
            together(Plan(2, 1, 4, cut=(border,)), images, MOMENTUM, [])
        assert str(caught.value) == (
            f"the model cannot be cut at block {border} (ReLU): its inputs are changed in place"
        )
    for stages in (2, 3, 4, 5):  # and by itself it finds none there
        check(Plan(stages, 1, 3), images, MOMENTUM, batches((13,)))


def test_more_stages_than_there_are_cuts() -> None:
    with pytest.raises(UsageError, match=r"^7 blocks cannot be cut into 6 stages: "):
        together(Plan(6, 1, 1), images, MOMENTUM, [])


def viewed() -> nn.Module:
    """What a view leads to is written over as well: no cut before the view either."""
    return nn.Sequential(
        nn.Linear(FEATURES, 9), nn.Unflatten(1, (3, 3)), nn.Flatten(), nn.ReLU(True), nn.Linear(9, CLASSES)
    )


def test_no_cut_before_a_view_that_is_written_over() -> None:
    check(Plan(2, 1, 2), viewed, MOMENTUM, batches((13,)))
    for border in (1, 2, 3):
        with pytest.raises(UsageError, match=rf"^the model cannot be cut at block {border} \("):
            together(Plan(2, 1, 2, cut=(border,)), viewed, MOMENTUM, [])


class Buckets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).long().abs() % 11


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rows(x).sum(1)
        return out


def counted() -> nn.Module:
    """Between its blocks go whole numbers, which have no gradient."""
    return nn.Sequential(Buckets(), Bag(), nn.Linear(CLASSES, CLASSES))


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_integers_are_sent_between_stages(hosts: str) -> None:
    check(Plan(3, 1, 4, hosts=hosts), counted, MOMENTUM, batches((13, 9)))


# ---- these tests can fail


def skips_a_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    for action in gpipe(stage, stages, micro_batches):
        if action != Action("backward", micro_batches - 1):
            yield action


def test_a_schedule_that_leaves_out_a_backward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "gpipe", skips_a_backward)  # type: ignore[misc]
    with pytest.raises(AssertionError, match=r"^model/\S+ differs by "):
        check(Plan(2, 1, 4, "gpipe"), plain, MOMENTUM, batches((13,)))


def test_a_replica_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "reduce", lambda self: self._host.barrier())
    with pytest.raises(AssertionError):
        check(Plan(2, 2, 2), plain, MOMENTUM, batches((13,)))
