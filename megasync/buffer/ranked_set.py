"""A set of integers with order statistics: how many members are up to a number, and which one is the n-th."""

from __future__ import annotations

from collections.abc import Iterator

LEAST_SIZE = 64


class RankedSet:
    """Every method takes time logarithmic in the span between the least and the greatest member; iteration sorts.

    A Fenwick tree of counts over a range of numbers. When a number falls outside that range, the tree is rebuilt with
    at least as much room on either side as its members span, so rebuilding has amortised constant cost per added
    number.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        # `_tree[i]` counts members among the `i & -i` numbers that end with `_base + i - 1`.
        self._base, self._tree = 0, [0] * (LEAST_SIZE + 1)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, number: int) -> bool:
        return number in self._members

    def __iter__(self) -> Iterator[int]:
        """Ascending, over a copy."""
        return iter(sorted(self._members))

    def add(self, number: int) -> None:
        if number in self._members:
            return
        self._members.add(number)
        if 0 <= number - self._base < len(self._tree) - 1:
            self._count(number, 1)
        else:
            self._build()

    def discard(self, number: int) -> None:
        if number in self._members:
            self._members.remove(number)
            self._count(number, -1)

    def rank(self, number: int) -> int:
        """The number of members less than or equal to this number."""
        index = min(number - self._base + 1, len(self._tree) - 1)
        smaller = 0
        while index > 0:
            smaller += self._tree[index]
            index &= index - 1
        return smaller

    def nth(self, index: int) -> int:
        """The member that exactly ``index`` members are smaller than. Raises IndexError."""
        if not 0 <= index < len(self._members):
            raise IndexError(f"member {index} of {len(self._members)}")
        at, step = 0, len(self._tree) - 1
        while step:
            if at + step < len(self._tree) and self._tree[at + step] <= index:
                at += step
                index -= self._tree[at]
            step //= 2
        return self._base + at

    def _count(self, number: int, change: int) -> None:
        index = number - self._base + 1
        while index < len(self._tree):
            self._tree[index] += change
            index += index & -index

    def _build(self) -> None:
        least, greatest = min(self._members), max(self._members)
        size = LEAST_SIZE
        while size < 4 * (greatest - least + 1):
            size *= 2
        self._base, self._tree = least - size // 4, [0] * (size + 1)
        if len(self._members) * size.bit_length() < size:
            for number in self._members:
                self._count(number, 1)
            return
        for number in self._members:
            self._tree[number - self._base + 1] = 1
        for index in range(1, size):
            if (above := index + (index & -index)) <= size:
                self._tree[above] += self._tree[index]
