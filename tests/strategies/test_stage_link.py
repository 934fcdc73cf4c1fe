"""Sending a tensor to the neighboring stage: through slots that are used in place, or as messages."""

from __future__ import annotations

import shutil
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core.errors import DeadlineError, ManyhandsError
from manyhands.strategies.pipeline import stage_link
from manyhands.strategies.pipeline.stage_link import (
    LinkSize,
    LinkSpec,
    MessageLink,
    SlotLink,
    StageLink,
    open_links,
)
from manyhands.transports.base import CPU, Transport
from manyhands.transports.mpi import MpiTransport
from manyhands.transports.shm.transport import ShmTransport
from manyhands.transports.solo import SoloTransport
from manyhands.transports.threads import ThreadGroup
from manyhands.transports.torch_ import TorchTransport
from transports.groups import MpiGroup, processes

NO_MPI = find_spec("mpi4py") is None or shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None
SEVERAL = [
    torch.arange(12.0).view(3, 4),
    torch.arange(12.0).view(3, 4).t(),  # not in the order of its memory
    torch.tensor(2.5, dtype=torch.float64),
    torch.arange(5),
    torch.tensor([True, False, True]),
    torch.empty(0, 7),
    torch.randn(2, 1, 3, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    torch.full((8,), 3 + 1j),
]


def ends(slots: int = 2, nbytes: int = 64) -> tuple[SlotLink, SlotLink]:
    """Both ends of a link in one thread."""
    room = LinkSize(slots, nbytes)
    memory = torch.zeros(room.total, dtype=torch.uint8)
    sender, receiver = (SlotLink(SoloTransport(), memory, room, "activation") for _ in range(2))
    return sender, receiver


class TestSlots:
    def test_any_tensor_arrives_as_it_was(self) -> None:
        sender, receiver = ends(len(SEVERAL), 128)
        for tensor in SEVERAL:
            sender.put(tensor)
        for tensor in SEVERAL:
            found = receiver.take()
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert torch.equal(found, tensor)

    def test_what_was_put_may_change(self) -> None:
        sender, receiver = ends()
        tensor = torch.ones(3)
        sender.put(tensor)
        tensor.zero_()
        assert receiver.take().tolist() == [1, 1, 1]

    def test_a_full_link_makes_the_sender_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stage_link, "DEFAULT_TIMEOUT", 0.01)
        sender, receiver = ends(slots=2)
        sender.put(torch.tensor([0.0]))
        sender.put(torch.tensor([1.0]))
        with pytest.raises(DeadlineError, match=r"^waited 0.01 s for the room of the neighboring stage$"):
            sender.put(torch.tensor([2.0]))
        first = receiver.take()
        with pytest.raises(DeadlineError):  # taken is not released
            sender.put(torch.tensor([2.0]))
        assert first.item() == 0.0
        receiver.release()
        sender.put(torch.tensor([2.0]))
        assert [receiver.take().item() for _ in range(2)] == [1.0, 2.0]

    def test_an_empty_link_makes_the_receiver_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stage_link, "DEFAULT_TIMEOUT", 0.01)
        sender, receiver = ends()
        with pytest.raises(DeadlineError, match=r"^waited 0.01 s for the activation of the neighboring "):
            receiver.take()
        sender.put(torch.tensor([5.0]))
        assert receiver.take().item() == 5.0

    def test_slots_are_used_again_and_again(self) -> None:
        sender, receiver = ends(slots=3)
        places = set()
        for number in range(10):
            sender.put(torch.tensor([number]))
            found = receiver.take()
            places.add(found.data_ptr())
            assert found.item() == number
            receiver.release()
        assert len(places) == 3

    def test_what_is_still_used_is_not_overwritten(self) -> None:
        """Always two held, the older one released, the next put in its place."""
        sender, receiver = ends(slots=3)
        for number in range(2):
            sender.put(torch.tensor([number]))
        held = [receiver.take(), receiver.take()]
        for number in range(2, 9):
            sender.put(torch.tensor([number]))
            assert [each.item() for each in held] == [number - 2, number - 1]
            receiver.release()
            held = [held[1], receiver.take()]

    def test_slots_do_not_touch_each_other(self) -> None:
        """A tensor of every byte of a slot, between two others."""
        sender, receiver = ends(slots=3, nbytes=100)
        for number in range(3):
            sender.put(torch.full((100,), number + 1, dtype=torch.uint8))
        for number in range(3):
            assert receiver.take().tolist() == [number + 1] * 100

    def test_a_later_one_does_not_make_saved_activations_look_changed(self) -> None:
        """In one process, where both ends are views of one memory and autograd counts what is written."""
        sender, receiver = ends(slots=2)
        weight = torch.ones(3, requires_grad=True)
        sender.put(torch.tensor([1.0, 2.0, 3.0]))
        first = receiver.take().requires_grad_()
        output = (first * weight).sum()
        sender.put(torch.tensor([4.0, 5.0, 6.0]))
        second = receiver.take().requires_grad_()
        other = (second * weight).sum()
        output.backward()
        receiver.release()
        sender.put(torch.tensor([7.0, 8.0, 9.0]))  # over the first, which is no longer needed
        other.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [5.0, 7.0, 9.0]
        assert second.grad is not None
        assert second.grad.tolist() == [1.0, 1.0, 1.0]
        third = receiver.take()
        assert third.requires_grad is False
        assert third.grad is None
        assert third.tolist() == [7.0, 8.0, 9.0]

    def test_more_than_was_measured(self) -> None:
        sender, _ = ends(nbytes=64)
        sender.put(torch.zeros(16))
        with pytest.raises(ManyhandsError) as caught:
            sender.put(torch.zeros(17))
        assert str(caught.value) == (
            "a stage sends 68 bytes, but 64 were measured before the run: pad all batches to one "
            "length, or use --transport torch, which sends any size"
        )

    def test_slots_are_whole_cache_lines(self) -> None:
        assert LinkSize(2, 1).stride == LinkSize(2, 64).stride
        assert LinkSize(2, 65).stride == LinkSize(2, 64).stride + 64
        assert LinkSize(3, 100).total == 2 * 64 + 3 * LinkSize(3, 100).stride


# ---- between workers: rank 0 sends to the last rank, which answers


def wanted(size: int, slots: int = 2) -> list[LinkSpec]:
    room = LinkSize(slots, 128)
    return [LinkSpec(0, size - 1, "activation", room), LinkSpec(size - 1, 0, "gradient", room)]


def talks(transport: Transport, kind: type[StageLink]) -> list[Tensor]:
    """One direction full of different tensors, the answers in the other, several rounds."""
    there, back = open_links(transport, wanted(transport.size), CPU)
    if transport.rank not in (0, transport.size - 1):
        assert (there, back) == (None, None)
        return []
    assert isinstance(there, kind)
    assert isinstance(back, kind)
    found = []
    if transport.rank == 0:
        for _ in range(3):
            for tensor in SEVERAL:
                there.put(tensor)
                found.append(back.take().clone())
                back.release()
    else:
        for _ in range(3 * len(SEVERAL)):
            back.put(there.take())
            there.release()
    transport.barrier() if transport.size == 2 else None
    return found


def runs_ahead(transport: Transport) -> list[float]:
    """As many as there are slots may be on their way while the receiver does something else."""
    there, back = open_links(transport, wanted(2, slots=4), CPU)
    assert there is not None
    assert back is not None
    if transport.rank == 0:
        for number in range(4):
            there.put(torch.full((3,), float(number)))
        transport.barrier()
        return []
    transport.barrier()  # all four have been put before the first is taken
    found = []
    for _ in range(4):
        found.append(there.take()[0].item())
        there.release()
    return found


def hurries(transport: Transport) -> list[float]:
    """A sender that is faster than its receiver, through few slots."""
    [there, _] = open_links(transport, wanted(2), CPU)
    assert there is not None
    found = []
    for number in range(40):
        if transport.rank == 0:
            there.put(torch.full((16,), float(number)))
        else:
            taken = there.take()
            if number % 8 == 0:
                time.sleep(0.002)
            assert taken.unique().numel() == 1  # no stage writes meanwhile
            found.append(taken[0].item())
            there.release()
    return found


def all_of(transport: Transport, kind: type[StageLink]) -> tuple[list[Tensor], list[float], list[float]]:
    return talks(transport, kind), runs_ahead(transport), hurries(transport)


def check(results: list[Any]) -> None:
    (answers, _, _), (_, ahead, hurried) = results
    for found, tensor in zip(answers, SEVERAL * 3, strict=True):
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)
    assert ahead == [0.0, 1.0, 2.0, 3.0]
    assert hurried == list(range(40))


def test_threads() -> None:
    check(ThreadGroup(2, timeout=20).run(partial(all_of, kind=SlotLink)))


def test_threads_that_pretend_two_hosts() -> None:
    check(ThreadGroup(2, timeout=20, hosts="ab").run(partial(all_of, kind=MessageLink)))


def test_a_rank_at_neither_end_has_no_link() -> None:
    results = ThreadGroup(3, timeout=20).run(partial(talks, kind=SlotLink))
    assert [len(found) for found in results] == [3 * len(SEVERAL), 0, 0]
    results = ThreadGroup(3, timeout=20, hosts="aab").run(partial(talks, kind=MessageLink))
    assert [len(found) for found in results] == [3 * len(SEVERAL), 0, 0]


def test_processes_that_share_memory() -> None:
    check(processes(partial(ShmTransport, timeout=30.0), ("here",) * 2, partial(all_of, kind=SlotLink)))


def test_messages_of_torch() -> None:
    check(processes(partial(TorchTransport, timeout=30.0), ("here",) * 2, partial(all_of, kind=MessageLink)))


@pytest.mark.skipif(NO_MPI, reason="mpi4py or mpirun is not installed")
def test_messages_of_mpi() -> None:
    gang = MpiGroup(2)
    try:
        check(gang.run(partial(MpiTransport, timeout=30.0), ("here",) * 2, partial(all_of, kind=MessageLink)))
    finally:
        gang.close()


def test_a_device_of_its_own_shares_no_memory() -> None:
    """What lies on a GPU is sent, also to a peer on this host."""

    def made(transport: Transport) -> list[type]:
        return [type(link) for link in open_links(transport, wanted(2), torch.device("meta"))]

    assert ThreadGroup(2, timeout=20).run(made) == [[MessageLink, MessageLink]] * 2
