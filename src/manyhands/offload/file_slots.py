"""Room in a file that is handed out and given back: the first gap that is large enough, grown at the end."""

from __future__ import annotations

from bisect import bisect_left

PAGE = 4096  # what a file that bypasses the page cache is read and written in


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


class FileSlots:
    """Which parts of a file are free; all sizes are whole pages."""

    def __init__(self) -> None:
        self.end = 0  # behind it nothing was ever used
        self._starts: list[int] = []  # of the gaps before the end, in order
        self._sizes: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Bytes before the end that nobody has."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int:
        """Where the first gap of that size begins; where there is none, the end moves."""
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
            start = self._starts.pop()  # the last gap is widened
            del self._sizes[start]
        self.end = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Free again, in one piece with the gaps on both sides of it."""
        number = bisect_left(self._starts, start)
        if number < len(self._starts) and self._starts[number] == start + nbytes:
            nbytes += self._sizes.pop(self._starts.pop(number))
        if number and self._starts[number - 1] + self._sizes[self._starts[number - 1]] == start:
            self._sizes[self._starts[number - 1]] += nbytes
            return
        self._starts.insert(number, start)
        self._sizes[start] = nbytes
