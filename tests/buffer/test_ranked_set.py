"""A `RankedSet` answers as a sorted list would."""

from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.buffer.ranked_set import RankedSet

NUMBERS = st.one_of(st.integers(0, 40), st.integers(0, 3000))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), NUMBERS), max_size=80), st.lists(NUMBERS, max_size=5), st.sampled_from([0, 10**9])
)
def test_ranked_set_behaves_like_a_sorted_list_with_ranks(changes, questions, offset):
    numbers, oracle = RankedSet(), set()
    for adds, number in ((adds, number + offset) for adds, number in changes):
        (numbers.add if adds else numbers.discard)(number)
        (oracle.add if adds else oracle.discard)(number)
        assert len(numbers) == len(oracle) and (number in numbers) == (number in oracle)
    expected = sorted(oracle)
    assert list(numbers) == expected == [numbers.nth(index) for index in range(len(numbers))]
    for number in (*questions, *expected[:3], -1, 2 * 10**9):
        assert numbers.rank(number) == bisect_right(expected, number)
    for index in (-1, len(expected)):
        with pytest.raises(IndexError):
            numbers.nth(index)


@pytest.mark.parametrize("order", ["up", "down", "window"])
def test_ranked_set_rebuild_cost_is_amortized(monkeypatch, order):
    """Building costs as much as the span, so it may happen only once in that many numbers."""
    built = []
    build = RankedSet._build
    monkeypatch.setattr(RankedSet, "_build", lambda self: built.append(len(self._tree)) or build(self))
    numbers, n = RankedSet(), 20_000
    for number in range(n):
        numbers.add(n - number if order == "down" else number)
        if order == "window" and number >= 100:
            numbers.discard(number - 100)
    assert sum(built) < 8 * n
