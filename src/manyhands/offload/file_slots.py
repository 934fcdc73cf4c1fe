"""A first-fit allocator for space in a file."""

from __future__ import annotations

from bisect import bisect_left

PAGE = 4096  # bytes: the unit of a file that bypasses the page cache


def whole_pages(nbytes: int) -> int:
    """Bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


class FileSlots:
    """The free parts of a file. All sizes are multiples of a page."""

    def __init__(self) -> None:
        self.end = 0  # nothing behind it was ever used
        self._starts: list[int] = []  # of the gaps before the end, in order
        self._sizes: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Free bytes before the end."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int:
        """Allocate: the start of the first gap that is large enough, or the end of the file grows."""
        for number, start in enumerate(self._starts):
            size = self._sizes[start]
            if size >= nbytes:
                del self._starts[number], self._sizes[start]
                if size > nbytes:
                    self._starts.insert(number, start + nbytes)
                    self._sizes[start + nbytes] = size - nbytes
                return start
        start = self.end
        if self._starts and self._starts[-1] + self._sizes[self._starts[-1]] == start:
            start = self._starts.pop()  # the last gap grows
            del self._sizes[start]
        self.end = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Free a part, and merge it with the gaps next to it."""
        number = bisect_left(self._starts, start)
        if number < len(self._starts) and self._starts[number] == start + nbytes:
            nbytes += self._sizes.pop(self._starts.pop(number))
        if number and self._starts[number - 1] + self._sizes[self._starts[number - 1]] == start:
            self._sizes[self._starts[number - 1]] += nbytes
            return
        self._starts.insert(number, start)
        self._sizes[start] = nbytes
