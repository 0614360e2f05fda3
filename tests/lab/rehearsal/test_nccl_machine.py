"""Manners of the fake NCCL that the faults of `test_nccl_sync.py` do not show."""

import pytest
from fake_nccl import Costs, Machine, Part, Process

COSTS = Costs()
TWO = COSTS.init(2)


def machine(*programs, queues: int = 8, nodes=None, **options) -> Machine:
    """One process for each program, each on a node of its own."""
    made = Machine(**options)
    for index, program in enumerate(programs):
        made.add(Process(f"p{index}", (nodes or range(99))[index], queues), program)
    return made


def member(rank: int, *actions, size: int = 2, name: str = "g", blocks: int = 4, watch=None, limit=30.0) -> list:
    """A program that makes a communicator of all ``size`` members and goes on with the actions."""
    init = ("init", name, rank, name, tuple(range(size)), blocks, watch, limit)
    return [("join", name, rank, size), init, *actions]


def send(rank: int, to: int, handle: int, nbytes: int = 1000, tag: int = 0, name: str = "g") -> tuple:
    return ("start", name, rank, Part("send", to, nbytes, tag), handle)


def recv(rank: int, source: int, handle: int, nbytes: int = 1000, tag: int = 0, name: str = "g") -> tuple:
    return ("start", name, rank, Part("recv", source, nbytes, tag), handle)


def wait(handle: int, limit: float | None = None) -> tuple:
    return ("wait", handle, limit)


def test_a_communicator_is_made_once_all_members_call_and_takes_its_time():
    late = [("work", 10.0), *member(1, ("mark", "made"))]
    run = machine(member(0, ("mark", "made")), late)
    run.run()
    assert [host.times["made"] for host in run.hosts] == [10.0 + TWO, 10.0 + TWO]
    assert run.stuck == ""


def test_a_member_that_never_calls_leaves_the_first_member_waiting_for_ever():
    run = machine(member(0), [("join", "g", 1, 2), ("die",)])
    run.run()
    assert run.stuck == "stuck: p0 creates g and waits for p1; p1 is dead"
    assert run.failures == {}


def test_a_member_that_waits_for_the_id_gives_up_after_the_groups_timeout():
    run = machine([("join", "g", 0, 2), ("die",)], member(1))
    run.run()
    assert run.failures["p1"] == (30.0, "no time left: p1 creates g and waits for p0")


def test_a_program_may_leave_the_creation_of_a_communicator_to_a_thread():
    def program(*end: tuple) -> list:
        return [("join", "g", 1, 3), ("init", "g", 1, "g", (0, 1, 2), 4, None, 5.0, True), *end]

    run = machine(member(0, size=3), program(), [("join", "g", 2, 3), ("die",)])
    run.run()
    assert run.failures == {"p1": (5.0, "no time left: p1 creates g and waits for p2")}


def test_messages_of_two_members_that_each_send_first_deadlock():
    """Each send waits for a receive that its peer has queued behind its own send."""
    # Connected beforehand, so that the hosts do not wait.
    first = [send(0, 1, 0), recv(0, 1, 1), wait(0), wait(1)]
    second = [recv(1, 0, 0), send(1, 0, 1), wait(0), wait(1)]
    crossed = [send(0, 1, 2), recv(0, 1, 3), wait(2), wait(3)]
    also = [send(1, 0, 2), recv(1, 0, 3), wait(2), wait(3)]
    run = machine(member(0, *first, *crossed), member(1, *second, *also))
    run.run()
    assert run.messages == 2
    assert run.stuck == (
        "deadlock: p0 waits for a send to p1 (1000 bytes, tag 0, g); p1 waits for a send to p0 (1000 bytes, tag 0, g)"
    )


def test_the_first_messages_block_the_hosts_that_start_them():
    run = machine(member(0, send(0, 1, 0), recv(0, 1, 1)), member(1, send(1, 0, 0), recv(1, 0, 1)))
    run.run()
    assert run.stuck.startswith("deadlock: p0 connects for a send to p1")


def test_messages_of_one_communicator_queue_behind_each_other():
    """The receive from a late sender holds up the one from a sender that is there."""
    waits = [recv(0, 1, 0), recv(0, 2, 1), ("mark", "posted"), wait(1), ("mark", "second"), wait(0)]
    run = machine(
        member(0, *waits, size=3), member(1, ("work", 50.0), send(1, 0, 0), wait(0), size=3),
        member(2, send(2, 0, 0), wait(0), size=3),
    )  # fmt: skip
    run.run()
    assert run.hosts[0].times["second"] > 50.0


def pair(rank: int, name: str, *actions) -> list:
    return member(rank, *actions, name=name)


def test_running_operations_hold_thread_blocks_while_they_wait():
    names = [f"c{index}" for index in range(3)]
    receiver = [action for name in names for action in pair(0, name)]
    receiver += [recv(0, 1, index, name=name) for index, name in enumerate(names)]
    receiver += [wait(index) for index in range(3)]
    senders = [pair(1, name, send(1, 0, 0, name=name), ("work", 5.0), wait(0)) for name in names]
    run = machine(receiver, *senders)
    run.run()
    assert run.processes[0].peak_blocks <= 3 * 4
    few = machine(receiver, *senders, costs=Costs(blocks=8))
    few.run()
    assert (few.processes[0].peak_blocks, few.stuck) == (8, "") or few.processes[0].peak_blocks == 4


def test_a_dead_peer_leaves_the_others_waiting_until_their_deadline():
    run = machine(member(0, send(0, 1, 0), wait(0, 20.0)), member(1, recv(1, 0, 0, nbytes=1000), ("die",)))
    run.kill_at(TWO + COSTS.connect_seconds / 2, run.processes[1])
    run.run()
    assert run.stuck == ("stuck: p0 connects for a send to p1 (1000 bytes, tag 0, g); p1 is dead")
    gone = [send(0, 1, 0), wait(0), send(0, 1, 1), wait(1, 20.0)]
    run = machine(member(0, *gone), member(1, recv(1, 0, 0), wait(0), ("die",)))
    run.run()
    assert run.stuck == "stuck: p0 waits for a send to p1 (1000 bytes, tag 0, g); p1 is dead"
    at, what = run.failures["p0"]
    assert what.startswith("no time left: p0 waits for a send to p1") and at > 20.0


def test_an_abort_releases_its_caller_alone_and_spoils_the_communicator():
    run = machine(
        member(0, send(0, 1, 0), wait(0), send(0, 1, 1), ("abort", "g"), wait(1)),
        member(1, recv(1, 0, 0), wait(0), recv(1, 0, 1), ("work", 1.0), wait(1, 5.0)),
    )
    run.run()
    assert run.failures["p0"][1] == "g was aborted"
    assert run.failures["p1"][1].startswith("no time left: p1 waits for a receive from p0")
    after = machine(member(0, ("abort", "g"), send(0, 1, 0)), member(1))
    after.run()
    assert after.failures["p0"][1] == "g cannot be used any more in p0"


def test_collectives_in_another_order_are_found():
    def broadcast(rank: int, nbytes: int, handle: int) -> tuple:
        return ("start", "g", rank, Part("broadcast", 0, nbytes, 0), handle)

    orders = [(64, 32), (32, 64)]
    programs = [
        member(rank, *(broadcast(rank, nbytes, at) for at, nbytes in enumerate(order)), wait(0))
        for rank, order in enumerate(orders)
    ]
    run = machine(*programs)
    run.run()
    assert run.faults == ["collective 0 of g: p0 starts ('broadcast', 0, 64, 0), but p1 starts ('broadcast', 0, 32, 0)"]
    assert run.stuck.startswith("stuck: ")
    same = machine(*(member(rank, broadcast(rank, 64, 0), wait(0)) for rank in (0, 1)))
    same.run()
    assert (same.faults, same.stuck, same.processes[0].sent, same.processes[1].received) == ([], "", 64, 64)


def test_time_is_what_the_costs_say():
    gigabyte = 10**9
    programs = [
        member(0, send(0, 1, 0, gigabyte), wait(0), ("mark", "sent")), member(1, recv(1, 0, 0, gigabyte), wait(0)),
    ]  # fmt: skip
    far, near = machine(*programs), machine(*programs, nodes=(0, 0))
    for run, speed in ((far, COSTS.card), (near, 4 * COSTS.channel)):
        run.run()
        expected = TWO + COSTS.connect_seconds + gigabyte / speed + COSTS.message_seconds
        assert run.hosts[0].times["sent"] == pytest.approx(expected)
