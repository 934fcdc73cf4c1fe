"""What every transport promises: subclass, say how to make a group, and pytest does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manyhands.transports.base import Transport

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 4))


class TransportSuite:
    """Contract tests of a transport. `gang` runs a function once a rank and returns the results by rank."""

    sizes: tuple[int, ...] = (1,)

    def gang(self, size: int, function: Callable[[Transport], Any]) -> list[Any]:
        """Run the function at every rank of a group of this size."""
        raise NotImplementedError

    def test_ranks_are_numbered(self) -> None:
        """Each rank knows its number, the size, and that it shares memory with itself."""
        for size in self.sizes:
            seen = self.gang(size, lambda t: (t.rank, t.size, t.rank in t.peers_on_host))
            assert seen == [(rank, size, True) for rank in range(size)]

    def test_all_reduce_sums_in_place(self) -> None:
        """Any dtype and shape, empty ones included."""
        for size in self.sizes:
            for dtype in DTYPES:
                for shape in SHAPES:
                    self.gang(size, lambda t, d=dtype, s=shape: self._sum(t, d, s))  # type: ignore[misc]

    def test_broadcast_gives_the_roots_tensor(self) -> None:
        """From every root."""
        for size in self.sizes:
            for root in range(size):

                def check(transport: Transport, root: int = root) -> None:
                    tensor = torch.full((3,), float(transport.rank))
                    transport.broadcast(tensor, root)
                    assert torch.equal(tensor, torch.full((3,), float(root)))

                self.gang(size, check)

    def test_all_gather_takes_uneven_sizes(self) -> None:
        """By rank, each as long as its rank says, none sharing memory with the input."""
        for size in self.sizes:

            def check(transport: Transport) -> None:
                mine = torch.full((transport.rank,), float(transport.rank))
                parts = transport.all_gather(mine)
                assert [len(part) for part in parts] == list(range(transport.size))
                mine.fill_(-1.0)
                for rank, part in enumerate(parts):
                    assert torch.equal(part, torch.full((rank,), float(rank)))

            self.gang(size, check)

    def test_messages_arrive_in_order(self) -> None:
        """Around the ring, two messages each."""
        for size in self.sizes:
            if size > 1:
                self.gang(size, self._ring)

    def test_barrier_and_closing_twice(self) -> None:
        """Everyone passes; closing again does nothing."""
        for size in self.sizes:

            def check(transport: Transport) -> None:
                transport.barrier()
                transport.close()
                transport.close()

            self.gang(size, check)

    def _sum(self, transport: Transport, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.full(shape, transport.rank + 1, dtype=dtype)
        result = transport.all_reduce(tensor)
        expected = torch.full(shape, sum(range(1, transport.size + 1)), dtype=dtype)
        assert torch.equal(tensor, expected)
        assert torch.equal(result, expected)

    def _ring(self, transport: Transport) -> None:
        after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        for number in range(2):
            message = torch.tensor([transport.rank, number])
            received = torch.zeros(2, dtype=torch.int64)
            if transport.rank == 0:
                transport.send(message, after)
                transport.recv(received, before)
            else:
                transport.recv(received, before)
                transport.send(message, after)
            assert received.tolist() == [before, number]
