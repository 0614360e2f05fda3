"""The size and the slots of restarted trainer ranks while nodes are lost; Ray is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megasync.cluster import trainer_group
from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.errors import ProcessLost, RankLost
from megasync.observe.clock import read_clock
from megasync.observe.context import RunContext
from megasync.trainer.rank import TrainerRank


@dataclass
class FakePools:
    """Two ranks on each of four nodes; `lost` are the nodes that Ray knows to be gone."""

    lost: set[int] = field(default_factory=set)
    asked: int = 0

    def options(self, pool: str, slot: int) -> dict[str, int]:
        return {"slot": slot}

    async def kill_unresponsive(self, *_: object) -> None: ...

    async def living_slots(self, pool: str) -> list[int]:
        self.asked += 1
        return [slot for slot in range(8) if slot // 2 not in self.lost]

    async def nodes(self, pool: str) -> dict[int, str]:
        return {slot: f"node {slot // 2}" for slot in range(8) if slot // 2 not in self.lost}


class FakeActors:
    """What the ranks were created with."""

    unplaced: frozenset[int] = frozenset()

    def __init__(self, arguments: list[tuple], options: list[dict[str, int]]) -> None:
        self.sizes = {(config.trainer.data_parallel, world) for config, _, world, _ in arguments}
        self.ranks = [rank for _, rank, _, _ in arguments]
        self.slots = [each["slot"] for each in options]

    @classmethod
    def create(cls, role: str, actor: type, arguments: list[tuple], options: list[dict[str, int]]) -> FakeActors:
        return cls(arguments, options)

    async def on_all(self, timeout: float, method: Callable[..., Any], *args: Any) -> list[Any]:
        if method is TrainerRank.pid and self.slots[-1] in self.unplaced:
            # As Ray does until the node is back.
            await asyncio.sleep(timeout)
        answers = {"clock": read_clock(), "rendezvous": ("localhost", 1), "start": "GPU"}
        return [answers.get(method.__name__, 1)] * len(self.ranks)

    async def on_one(self, slot: int, timeout: float, method: Callable[..., Any]) -> Any:
        return (await self.on_all(timeout, method))[slot]

    def kill(self) -> None: ...


class Reports:
    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    async def report(self, reason: str, only: Any = None) -> None:
        self.asked.append(only)


async def test_ranks_that_do_not_answer_are_reported_before_anybody_ends_them(group: TrainerGroup, monkeypatch) -> None:
    def lost(silent: bool) -> Any:
        async def call(*_: object, **__: object) -> None:
            loss = ProcessLost("trainer [1] did not finish step()")
            loss.slots, loss.silent = (1,), silent
            raise loss

        return call

    await group.start(None)
    group._pids = [*range(100, 108)]
    for silent in (False, True):
        monkeypatch.setattr(group._actors, "on_all", lost(silent))
        with pytest.raises(RankLost) as error:
            await group.on_all(1, TrainerRank.pid)
        assert error.value.slots == (1,)
    assert group._reports.asked == [{f"rank {rank}" for rank in range(8)}], "only of those that are alive"
    assert [state.node for state in group.states()][::2] == [f"node {node}" for node in range(4)]
    assert {state.device for state in group.states()} == {"GPU"}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainerGroup:
    monkeypatch.setattr(trainer_group, "ActorGroup", FakeActors)
    monkeypatch.setattr(trainer_group, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(trainer_group, "GROW_SECONDS", 0.0)
    config = Config()
    config.trainer.tensor_parallel, config.trainer.data_parallel = 2, 4
    config.trainer.min_data_parallel = 2
    config.timeouts.lost_node = 0.05
    return TrainerGroup(config, tmp_path, FakePools(), RunContext(reports=Reports()))


async def test_ranks_fill_the_nodes_that_are_left_and_return_to_all(group: TrainerGroup) -> None:
    pools, actors = group._pools, lambda: group._actors
    assert (actors().sizes, actors().slots) == ({(4, 8)}, [*range(8)])
    assert not await group.can_grow() and pools.asked == 0, "all ranks are there"

    pools.lost = {1}
    await group.restart()
    assert (actors().sizes, actors().slots) == ({(3, 6)}, [0, 1, 4, 5, 6, 7])
    assert actors().ranks == [*range(6)]
    assert not await group.can_grow()

    pools.lost = {0, 3}
    await group.restart()
    assert (actors().sizes, actors().slots, group.data_parallel) == ({(2, 4)}, [2, 3, 4, 5], 2)
    pools.lost = {3}
    assert await group.can_grow()
    pools.lost = set()
    await group.restart()
    assert (actors().sizes, actors().slots) == ({(4, 8)}, [*range(8)])


async def test_a_node_that_ray_finds_lost_only_while_ranks_start_on_it_is_not_waited_for(
    group: TrainerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeActors, "unplaced", frozenset({7}))
    restart = asyncio.create_task(group.restart())
    await asyncio.sleep(0.05)
    assert not restart.done()
    group._pools.lost = {3}
    with pytest.raises(RankLost, match="a node was lost while trainer ranks were started on it"):
        await asyncio.wait_for(restart, 300)
    await group.restart()
    assert group.data_parallel == 3


async def test_a_node_that_returns_in_time_is_waited_for(group: TrainerGroup) -> None:
    group._timeouts.lost_node = 60.0

    async def returns(pool: str) -> list[int]:
        group._pools.asked += 1
        return [*range(8 if group._pools.asked > 3 else 6)]

    group._pools.living_slots = returns
    await group.restart()
    assert group.data_parallel == 4


async def test_fewer_ranks_than_allowed_are_a_lost_rank_and_without_a_bound_the_size_stays(group: TrainerGroup) -> None:
    group._pools.lost = {0, 1, 2}
    with pytest.raises(RankLost, match=r"room for 2 of 8 trainer ranks, fewer than trainer\.min_data_parallel=2 needs"):
        await group.restart()
    group._config.trainer.min_data_parallel = None
    await group.restart()
    assert group.data_parallel == 4
