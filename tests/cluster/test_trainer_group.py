"""Real Megatron ranks through Ray: what a killed, a stopped and a mistaken rank look like from the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from processes import living

from megasync.buffer.payload import LeasedGroup, in_memory
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.config.pools import pool_specs
from megasync.errors import RankLost, TrainingError
from megasync.observe.context import RunContext
from megasync.observe.hang import HANG_FOLDER, HangReporter
from megasync.observe.state_file import RunState
from megasync.starters.fetch import fetch
from megasync.trainer.rank import TrainerRank
from megasync.trajectory import Group, Trajectory

pytestmark = pytest.mark.processes

PROBE = [[3, 4, 5, 6]]
# Deadline after which a silent rank counts as lost.
TRAIN_STEP_SECONDS = 15.0


def batch() -> list[LeasedGroup]:
    answers = [Trajectory([3, 4], [5, 6], [1, 1], [-2.0, -2.0], [0, 0], reward=reward) for reward in (0.0, 1.0)]
    return [in_memory(Group("0:0", answers)), in_memory(Group("0:1", answers))]


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[TrainerGroup]:
    config = Config()
    config.model.path, config.model.dtype = str(fetch("digits", tmp_path / "digits")), "float32"
    config.cluster.device = "cpu"
    config.trainer.tensor_parallel = 2
    config.rollout.servers = 1
    config.timeouts.train_step = TRAIN_STEP_SECONDS
    specs = {"trainer": pool_specs(config)["trainer"]}
    cluster = RayCluster(config, devices_needed=specs["trainer"].total_devices)
    await asyncio.to_thread(cluster.connect)
    pools = Pools(specs, "cpu")
    await pools.create(timeout=300)
    state = RunState(time=time.time())
    reports = HangReporter(tmp_path, lambda: state, lambda text: None)
    group = TrainerGroup(config, tmp_path / "run", pools, RunContext(reports=reports))
    reports.cover(pools.stacks, group.processes)
    try:
        await group.start(None)
        yield group
    finally:
        await group.stop()
        pools.remove()
        cluster.close()


async def pids(ranks: TrainerGroup) -> list[int]:
    return await ranks.on_all(30, TrainerRank.pid)


@pytest.mark.matrix
async def test_lost_ranks_are_distinguished_from_errors_and_replaced_from_the_checkpoint(
    ranks: TrainerGroup, tmp_path: Path
) -> None:
    initial = await ranks.logprobs(PROBE)

    # A mistake in a step is no loss: the ranks live, and would make it again.
    with pytest.raises(TrainingError, match="failed in step") as caught:
        await ranks.step(None, 1, 0)
    assert not isinstance(caught.value, RankLost)
    await ranks.check()

    # Killed while its peer waits for it in a collective: known long before the collective's deadline.
    first = await pids(ranks)
    os.kill(first[1], signal.SIGSTOP)
    step = asyncio.create_task(ranks.step(batch(), 1, 0))
    await asyncio.sleep(1.0)
    os.kill(first[1], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"trainer 1 died during step\(\)"):
        await asyncio.wait_for(step, TRAIN_STEP_SECONDS - 2.0)
    with pytest.raises(RankLost, match="trainer 1 died"):
        await ranks.check()

    # No checkpoint yet: the new ranks hold what the old ones began with.
    assert await ranks.restart() is None
    assert not living(first)
    assert await ranks.logprobs(PROBE) == initial

    await ranks.step(batch(), 1, 0)
    trained = await ranks.logprobs(PROBE)
    assert trained != initial
    await ranks.begin_save(1, {"step": 1})
    saved = await ranks.finish_save(wait=True)
    assert saved is not None and saved.oldest_step == 1

    # A stopped process misses its deadline, and is killed although it cannot react to a request. Before that, a report
    # says that it is stopped, and where its peer waits for it.
    second = await pids(ranks)
    os.kill(second[0], signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"did not finish step\(\) within 15 s|died during step"):
        await ranks.step(batch(), 2, 1)
    (report,) = (tmp_path / HANG_FOLDER).iterdir()
    lines = report.read_text().splitlines()
    stopped, waits = (
        next(line for line in lines if line.startswith(f"rank {rank} (process {second[rank]})")) for rank in (0, 1)
    )
    assert "STOPPED by a signal" in stopped
    assert "step(): in the collective" in waits and "(megatron/core/" in waits
    assert await ranks.restart() == {"step": 1}
    assert not living(second)
    assert await ranks.logprobs(PROBE) == trained
