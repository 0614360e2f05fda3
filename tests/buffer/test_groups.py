"""What the buffer's bookkeeping costs: the same, but for a logarithm, with ten open groups and with thousands."""

import sys

import pytest

from megasync.buffer import TrajectoryBuffer
from megasync.buffer.payload import encode
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Trajectory

ANSWER = Trajectory([1], [2], [1], [-0.5], [0], reward=1.0)


def buffer_with(groups):
    """So many groups generating, as many returned, and as many finished, behind a straggler; room for more."""
    buffer = TrajectoryBuffer(Pacing(4 * groups, 1, window_fraction=0.3))
    for number in range(3 * groups):
        assert buffer.admit(f"0:{number}")
    for number in range(groups, 3 * groups):
        assert buffer.commit(encode(Group(f"0:{number}", [ANSWER, ANSWER])))
    for number in range(2 * groups, 3 * groups):
        buffer._groups.give_back(buffer._groups.find(f"0:{number}"), 0.0)
    return buffer


CALLS = {
    "admit": lambda buffer: buffer.admit("1:0"),
    "commit": lambda buffer: buffer.commit(encode(Group("0:3", [ANSWER, ANSWER]))),
    "drop": lambda buffer: buffer.drop("0:3", "failed"),
    "reclaim": lambda buffer: buffer.reclaim("somebody"),
    "reclaim again": lambda buffer: (buffer.reclaim("somebody"), buffer.reclaim("somebody")),
    "a lease that must wait": lambda buffer: buffer.lease(1, 0),
    "counts": lambda buffer: buffer.counts(),
    "blockers": lambda buffer: (buffer.admission_blocker(), buffer.lease_blocker()),
    "predicates": lambda buffer: (buffer.has_room(), buffer.has_batch(), buffer.has_returned()),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_cost_does_not_grow_linearly_with_the_number_of_open_groups(name):
    few, many = (operations(CALLS[name], buffer_with(groups)) for groups in (16, 2000))
    assert many < 3 * few, f"{few} operations with 48 groups, {many} with 6000"


def operations(call, buffer):
    """Bytecodes that a call executes, those of comprehensions and generators too."""
    executed = 0

    def trace(frame, event, argument):
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call(buffer)
    finally:
        sys.settrace(None)
    return executed
