"""Sends in flight: which tensors are copied, and which requests a sender must wait for."""

from __future__ import annotations

import pytest
import torch

from manyhands.transports.send_queue import EAGER_BYTES, MAX_EAGER, SendQueue, buffer_for

SMALL = torch.zeros(EAGER_BYTES // 4)
LARGE = torch.zeros(EAGER_BYTES // 4 + 1)


@pytest.mark.parametrize(
    ("tensor", "ahead", "limit", "copied"),
    [
        (SMALL, 0, MAX_EAGER, True),
        (SMALL, 9, 9, True),
        (LARGE, 0, 0, False),  # the sender waits for it, so its memory can be sent as it is
        (LARGE, 2, 2, True),
    ],
)
def test_what_may_stay_in_flight_is_copied(
    tensor: torch.Tensor, ahead: int, limit: int, copied: bool
) -> None:
    buffer, found = buffer_for(tensor, ahead)
    assert found == limit
    assert (buffer.data_ptr() != tensor.data_ptr()) == copied


def test_a_transposed_tensor_is_copied_once() -> None:
    tensor = torch.arange(6).view(2, 3).t()
    buffer, _ = buffer_for(tensor, 0)
    assert buffer.tolist() == [0, 3, 1, 4, 2, 5]


def test_the_oldest_sends_to_a_rank_are_waited_for() -> None:
    queue: SendQueue[str] = SendQueue()
    for number in range(4):
        queue.add(1, f"to 1, {number}", SMALL)
    queue.add(2, "to 2", SMALL)
    assert list(queue.excess(1, 2)) == ["to 1, 0", "to 1, 1"]
    assert list(queue.excess(1, 2)) == []
    assert list(queue.excess(3, 0)) == []
    assert queue.by_destination() == [["to 1, 2", "to 1, 3"], ["to 2"]]
    queue.clear()
    assert queue.by_destination() == []


def test_a_send_that_fails_is_not_waited_for_again() -> None:
    """Waiting twice for a request that a library has given up would hang or fail again when closing."""
    queue: SendQueue[int] = SendQueue()
    for number in range(3):
        queue.add(1, number, SMALL)
    assert next(queue.excess(1, 1)) == 0  # and the wait for it fails
    assert queue.by_destination() == [[1, 2]]
