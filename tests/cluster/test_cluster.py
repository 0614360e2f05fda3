"""Pools and actors: every failure says who and why."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import lives
from ray import cloudpickle
from waits import PATIENCE

from megasync.cluster.actors import ActorGroup
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.rollout_workers import WorkerActor
from megasync.config import Config
from megasync.config.pools import PoolSpec
from megasync.errors import ConfigError, DataError, MegasyncError, ProcessLost, TrainingError

# Whether a worker finds this module by its name depends on what else is installed under the name "tests".
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class FakeRank:
    def __init__(self, slot: int) -> None:
        self._slot = slot

    def whoami(self) -> tuple[int, int]:
        return self._slot, os.getpid()

    def add(self, numbers: list[int], more: int) -> int:
        return sum(numbers) + more

    def refuse(self, slot: int) -> int:
        if self._slot == slot:
            raise DataError(f"slot {slot} refuses")
        return self._slot

    def crash(self) -> None:
        if self._slot == 1:
            raise ZeroDivisionError("by zero")

    def die(self) -> None:
        os._exit(1)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds if self._slot == 1 else 0)


@pytest.mark.parametrize("cause", [OSError(28, "No space left on device"), Exception("The node timed out.")])
def test_the_cause_of_a_failed_ray_start_is_reported(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def fail(**_: object) -> None:
        raise cause

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(MegasyncError, match=f"could not start Ray on this machine: {type(cause).__name__}: ") as caught:
        RayCluster(Config(), devices_needed=4).connect()
    assert str(cause) in str(caught.value)


def test_a_machine_without_shared_memory_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasync.base.shared_memory.FOLDER", Path("/nowhere"))
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match=r"has no /nowhere.*--shm-size=1g"):
        RayCluster(Config(), devices_needed=4).connect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    session = RayCluster(Config(), devices_needed=4)
    session.connect()
    yield
    session.close()
    assert not ray.is_initialized()


@pytest.fixture
async def ranks(cluster: None):
    pools = Pools({"rollout": PoolSpec("rollout", slots=2, devices=1, slots_per_node=8)}, "cpu")
    await pools.create(timeout=300)
    group = ActorGroup.create("fake", FakeRank, [(0,), (1,)], [pools.options("rollout", slot) for slot in range(2)])
    yield group
    group.kill()
    pools.remove()


@pytest.mark.processes
async def test_calls_reach_every_member_in_slot_order(ranks: ActorGroup) -> None:
    answers = await ranks.on_all(60, FakeRank.whoami)
    assert [slot for slot, _ in answers] == [0, 1]
    assert len({pid for _, pid in answers} | {os.getpid()}) == 3
    assert await ranks.on_all(60, FakeRank.add, [1, 2], 3) == [6, 6]
    assert (await ranks.on_one(1, 60, FakeRank.whoami))[0] == 1


@pytest.mark.processes
async def test_megasync_errors_are_re_raised_and_others_name_the_actor_and_method(ranks: ActorGroup) -> None:
    with pytest.raises(DataError, match="slot 1 refuses"):
        await ranks.on_all(60, FakeRank.refuse, 1)
    with pytest.raises(TrainingError, match=r"fake 1 failed in crash\(\): ZeroDivisionError: by zero"):
        await ranks.on_all(60, FakeRank.crash)


@pytest.mark.processes
async def test_a_late_or_dead_actor_is_named(ranks: ActorGroup) -> None:
    await ranks.on_all(60, FakeRank.whoami)
    with pytest.raises(TrainingError, match=r"fake \[1\] did not finish sleep\(\) within 3 s"):
        await ranks.on_all(3.0, FakeRank.sleep, 20.0)
    with pytest.raises(TrainingError, match=r"fake 0 died during die\(\)"):
        await ranks.on_one(0, 60, FakeRank.die)


@pytest.mark.processes
async def test_the_error_for_a_pool_that_does_not_fit_names_the_cluster_resources(cluster: None) -> None:
    pools = Pools({"trainer": PoolSpec("trainer", slots=64, devices=1, slots_per_node=64)}, "cpu")
    with pytest.raises(MegasyncError, match=r"pool 'trainer' needs 1 node\(s\) with \{'CPU': 64\} each.*cluster has"):
        await pools.create(timeout=1)
    pools.remove()


USER_CODE = """
import os, subprocess, sys

class End:
    async def poll(self, seconds):
        program = [sys.executable, "-c", "import time; time.sleep(600)"]
        return [subprocess.Popen(program, start_new_session=apart).pid for apart in (False, True)]

    async def send(self, commands):
        os._exit(3)

async def build(clock_offset):
    return End()
"""


@pytest.mark.processes
async def test_a_rollout_worker_imports_what_the_driver_can_and_leaves_no_program_behind(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = Pools({"rollout": PoolSpec("rollout", slots=1, devices=1, slots_per_node=8)}, "cpu")
    await pools.create(timeout=300)
    worker = WorkerActor(0, pools, importlib.import_module("beside_the_script").build)
    try:
        await worker.start(PATIENCE)
        programs: Any = await worker.poll(0.0, 60)
        assert all(map(lives, programs))
        with pytest.raises(ProcessLost, match="died"):
            await worker.send([], 60)
    finally:
        # Ray may have ended them already.
        await worker.kill()
        pools.remove()
    assert not any(map(lives, programs))
