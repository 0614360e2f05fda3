"""Every rank creates the same process groups in the same order: over NCCL another order is a deadlock."""

from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megasync.lab.rehearsal.groups import fake_world
from megasync.layout.topology import Topology
from megasync.trainer.learner import open_process_groups


def created_groups(topology: Topology, rank: int) -> list[tuple[int, ...]]:
    """The members of the groups that a rank creates, in the order of its calls; a collective each."""
    made: list[tuple[int, ...]] = []
    with fake_world(rank, topology.world):
        new_group = dist.new_group

        def noted(ranks=None, *args, **options):
            made.append(tuple(ranks or range(topology.world)))
            return new_group(ranks, *args, **options)

        with mock.patch.object(dist, "new_group", noted):
            open_process_groups(topology)
        parallel_state.destroy_model_parallel()
    return made


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        (Topology(2, 2, 4, expert=2), range(16)),
        (Topology(4, 1, 4, expert=4, expert_tensor=1), range(16)),
        (Topology(2, 4, 2, virtual=2), range(16)),
        (Topology(8, 2, 32), (0, 7, 8, 255, 256, 511)),
    ],
    ids=["TP2 PP2 DP4 EP2", "TP4 EP4 ETP1", "PP4 VPP2", "512 ranks"],
)
def test_every_rank_creates_the_same_groups_in_the_same_order(topology, ranks):
    first, *others = [created_groups(topology, rank) for rank in ranks]
    assert all(groups == first for groups in others)
    assert 0 < sum(topology.world // 2 in members for members in first) < 32
