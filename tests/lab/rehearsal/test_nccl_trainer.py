"""The trainer's own groups over the fake NCCL: created in one order everywhere, and no schedule that deadlocks."""

import pytest
from fake_nccl import Part
from nccl_pipeline import create_eagerly, created_groups, record_step, run_programs

from megasync.layout.topology import Topology

WORLDS = {
    "TP2 PP2 DP4 EP2": Topology(2, 2, 4, expert=2),
    "TP4 EP4 ETP1": Topology(4, 1, 4, expert=4, expert_tensor=1),
    "PP4 VPP2": Topology(2, 4, 2, virtual=2),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_rank_creates_the_same_groups_in_the_same_order(name):
    topology = WORLDS[name]
    made = [created_groups(topology, rank) for rank in range(topology.world)]
    assert all(groups == made[0] for groups in made)
    run = run_programs(create_eagerly(made))
    assert (run.stuck, run.failures) == ("", {})


def test_a_rank_that_creates_two_groups_in_another_order_is_found():
    topology = WORLDS["TP2 PP2 DP4 EP2"]
    made = [list(created_groups(topology, rank)) for rank in range(topology.world)]
    mine = [at for at, ranks in enumerate(made[0]) if 3 in ranks and len(ranks) > 1]
    one = mine[0]
    other = next(at for at in mine if set(made[3][at]) != set(made[3][one]))
    made[3][one], made[3][other] = made[3][other], made[3][one]
    run = run_programs(create_eagerly(made))
    assert "trainer rank 3 creates group" in run.stuck


def test_groups_of_512_ranks_are_created_in_the_same_order():
    topology = Topology(8, 2, 32)
    first, *others = [created_groups(topology, rank) for rank in (0, 7, 8, 255, 256, 511)]
    assert all(groups == first for groups in others)
    assert sum(300 in ranks for ranks in first) < 32


@pytest.mark.parametrize(
    ("topology", "microbatches"),
    [
        (Topology(1, 2, 1), 3),
        (Topology(1, 4, 2), 8),
        (Topology(1, 2, 1, virtual=2), 4),
        (Topology(2, 4, 1, virtual=3), 8),
    ],
    ids=["1F1B over 2", "1F1B over 4", "interleaved over 2", "interleaved over 4"],
)
def test_megatrons_schedule_does_not_deadlock(topology, microbatches):
    run = run_programs(record_step(topology, microbatches))
    assert (run.stuck, run.faults, run.failures) == ("", [], {})
    # Each boundary between chunks is crossed by shapes and an activation, forward, and a gradient, backward.
    boundaries = (topology.pipeline * topology.virtual - 1) * topology.tensor * topology.data
    assert run.messages == 4 * microbatches * boundaries
    assert max(process.peak_communicators for process in run.processes) <= 4


def test_a_stage_with_another_number_of_microbatches_is_found():
    programs = record_step(Topology(1, 2, 1), 4)
    programs[1] = record_step(Topology(1, 2, 1), 3)[1]
    run = run_programs(programs)
    # The shapes of an activation, which nobody receives, hold up the gradient in the other direction.
    assert run.stuck.startswith("deadlock: trainer rank 0 waits for a send to trainer rank 1 (24 bytes")
    assert run.failures["trainer rank 0"][1].startswith("ended by torch's watchdog")


def test_a_stage_that_starts_its_messages_in_another_order_is_found():
    programs = record_step(Topology(1, 4, 1, virtual=2), 8)
    sends = [
        at
        for at, action in enumerate(programs[1])
        if action[0] == "start" and action[3][0].kind == "send" and action[3][0].nbytes > 24
    ]
    # One send never happens.
    gone = programs[1][sends[3]]
    programs[1] = [each for each in programs[1] if each is not gone and each[:2] != ("wait", gone[4])]
    run = run_programs(programs)
    assert isinstance(gone[3][0], Part)
    assert "trainer rank" in run.stuck
