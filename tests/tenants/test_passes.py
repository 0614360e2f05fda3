"""Which sequences of a pass are computed as one tree."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megasync.tenants.passes import LEAST_PREFIX, shared_prefixes

FEW = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def common(rows):
    return next((n for n, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))


def best(rows):
    """The most tokens that any partition saves, by trying all."""
    if not rows:
        return 0
    first, *rest = rows
    found = 0
    for chosen in range(2 ** len(rest)):
        group = [first, *(row for place, row in enumerate(rest) if chosen >> place & 1)]
        others = [row for place, row in enumerate(rest) if not chosen >> place & 1]
        prefix = common(group) if common(group) >= LEAST_PREFIX else 0
        found = max(found, (len(group) - 1) * prefix + best(others))
    return found


@given(FEW, st.integers(1, LEAST_PREFIX))
def test_groups_save_as_many_tokens_as_any_would(tails, factor):
    rows = [np.repeat(tail, factor).astype(np.int32) for tail in tails]
    groups, shared = shared_prefixes(rows)
    saved = 0
    for group in set(groups):
        members = [tuple(rows[index]) for index in np.flatnonzero(groups == group)]
        (prefix,) = set(shared[groups == group])
        assert prefix == common(members)
        saved += (len(members) - 1) * prefix
    assert saved == best([tuple(row) for row in rows])
