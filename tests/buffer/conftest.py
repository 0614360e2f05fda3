"""Trajectories and groups in one line, for tests that care about versions only."""

import pytest

from megasync.buffer.payload import encode
from megasync.trajectory import Group, Trajectory


def make_trajectory(versions, mask=None, reward=1.0):
    n = len(versions)
    return Trajectory([1], list(range(n)), mask or [1] * n, [-0.5] * n, list(versions), reward=reward)


@pytest.fixture
def trajectory():
    return make_trajectory


@pytest.fixture
def group():
    """``group(uid, v, w, ...)``: one trajectory of two tokens per version; two of version 0 when none is named."""

    def make(uid, *versions):
        return encode(Group(uid, [make_trajectory([v, v]) for v in versions or (0, 0)]))

    return make
