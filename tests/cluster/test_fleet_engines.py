"""Servers of several engines in a fleet, over fake pools and actors: where each part is placed, and as what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megasync.cluster import fleet as fleet_module
from megasync.cluster import fleet_processes
from megasync.cluster.engine_group import EngineGroup
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import pool_specs
from megasync.device import resolve_device
from megasync.serving.disaggregated_control import DisaggregatedControl

KEYS = Keys("admin-key", "router-key", "generation-key")


class FakePools:
    def __init__(self, config: Config) -> None:
        self.specs = pool_specs(config)
        self.added: list[int] = []
        self.removed: list[int] = []

    def options(self, pool: str, slot: int) -> dict[str, Any]:
        return {"pool": pool, "slot": slot}

    def same_node_options(self, pool: str, slot: int) -> dict[str, Any]:
        return {"pool": pool, "beside": slot}

    async def ended(self, pool: str, slot: int, process: object) -> None:
        await asyncio.Event().wait()

    def node(self, pool: str, slot: int) -> str:
        return f"node of {pool} {slot}"

    async def add_slot(self, pool: str, slot: int, timeout: float) -> None:
        self.added.append(slot)

    def remove_slot(self, pool: str, slot: int) -> None:
        self.removed.append(slot)


class FakeActor:
    """A `ServiceActor` that starts nothing; its URL has the name of its log."""

    def __init__(self, role, index, options, arguments, ended, node) -> None:
        self.role, self.index, self.options, self.arguments = role, index, options, arguments
        self.node = node()
        # Whose end is waited for.
        self.watched = ended.args
        self.log_path = Path(arguments[4] if role == "router" else arguments[3])
        self.name = self.log_path.stem
        self.stopped = False

    @property
    def engine_role(self):
        return self.arguments[8]

    async def start(self, timeout: float) -> str:
        return f"http://{self.name}"

    async def handover_port(self) -> int:
        return 40000

    async def know_prefill(self, engines: Any) -> None: ...

    def processes(self) -> list[tuple[str, int]]:
        return []

    async def stop(self, timeout: float) -> None:
        self.stopped = True


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes (a fleet of these servers, the actors that it makes, its pools)."""

    def fleet(**rollout: int) -> tuple[Fleet, list[FakeActor], FakePools]:
        config = Config()
        for name, value in rollout.items():
            setattr(config.rollout, name, value)
        made: list[FakeActor] = []

        def actor(*arguments: Any) -> FakeActor:
            made.append(FakeActor(*arguments))
            return made[-1]

        monkeypatch.setattr(fleet_processes, "ServiceActor", actor)
        pools = FakePools(config)
        processes = FleetProcesses(config, tmp_path, resolve_device("cpu"), pools, KEYS)
        return Fleet(config, processes, 100), made, pools

    return fleet


def test_each_engine_has_a_slot_a_log_and_ranks_of_its_own(make, tmp_path):
    fleet, made, _ = make(servers=2, prefill_engines=1, decode_engines=3, tensor_parallel=2)
    assert all(isinstance(fleet._processes.server(index), EngineGroup) for index in range(2))
    names = [
        f"server-{index}-{part}" for index in range(2) for part in ("prefill-0", "decode-0", "decode-1", "decode-2")
    ]
    assert [actor.log_path for actor in made] == [tmp_path / "logs" / f"{name}.log" for name in names]
    assert [actor.options for actor in made] == [{"pool": "rollout", "slot": slot} for slot in range(8)]
    assert [actor.watched for actor in made] == [("rollout", slot) for slot in range(8)]
    assert [actor.node for actor in made] == [f"node of rollout {slot}" for slot in range(8)]
    assert [(actor.role, actor.index) for actor in made] == [("server", 0)] * 4 + [("server", 1)] * 4
    roles = [actor.engine_role for actor in made]
    each = [("prefill", 0, 8), ("decode", 2, 8), ("decode", 4, 8), ("decode", 6, 8)]
    assert [(role.kind, role.first, role.ranks) for role in roles] == 2 * each


def test_engines_with_one_handover_key_are_those_of_one_server(make):
    fleet, made, _ = make(servers=2, prefill_engines=1, decode_engines=1)
    for index in (0, 1, 0):
        fleet._processes.server(index)
    keys = [actor.engine_role.key for actor in made]
    # A server that starts again is another one.
    assert keys[::2] == keys[1::2] and len(set(keys)) == 3
    assert all(len(key) >= 32 for key in keys) and not set(keys) & {KEYS.admin, KEYS.generation, KEYS.router}


def test_engines_have_the_keys_and_the_model_of_any_server_and_run_on_one_node(make):
    fleet, made, _ = make(servers=1, prefill_engines=1, decode_engines=1)
    fleet._processes.server(0)
    for actor in made:
        spec, host, port, _, admin, generation, node, meeting_point, _ = actor.arguments
        assert (host, port, admin, generation) == ("127.0.0.1", 0, KEYS.admin, KEYS.generation)
        assert (node, meeting_point, spec.nodes) == (0, None, 1)


def test_a_server_of_one_engine_has_no_role(make):
    fleet, made, _ = make(servers=2)
    assert fleet._processes.server(1) is made[0]
    (actor,) = made
    assert actor.options == {"pool": "rollout", "slot": 1} and actor.name == "server-1"
    assert len(actor.arguments) == 8


def test_prefill_engines_come_first_and_are_counted_apart(make):
    fleet, made, _ = make(servers=1, prefill_engines=2, decode_engines=1)
    fleet._processes.server(0)
    assert [actor.name for actor in made] == ["server-0-prefill-0", "server-0-prefill-1", "server-0-decode-0"]
    assert [actor.engine_role.first for actor in made] == [0, 1, 2]


async def test_the_router_of_a_server_is_beside_its_first_engine_and_takes_the_generation_key(make, tmp_path):
    fleet, made, _ = make(servers=2, prefill_engines=1, decode_engines=2)
    group = fleet._processes.server(1)
    assert await group.start(60.0) == "http://server-1-router"
    router = made[-1]
    assert (router.role, router.options) == ("router", {"pool": "rollout", "beside": 3})
    assert router.watched == ("rollout", 3) and router.node == "node of rollout 3"
    assert router.log_path == tmp_path / "logs" / "server-1-router.log"
    urls, policy, *_, keys = router.arguments
    assert urls == ["http://server-1-decode-0", "http://server-1-decode-1"]
    assert (policy, keys) == ("round_robin", KEYS)
    control = fleet._processes.control("http://server-1-router", group)
    assert isinstance(control, DisaggregatedControl)
    assert control._api_key == KEYS.generation
    assert [engine._api_key for engine in control._engines] == [KEYS.admin] * 3
    await control.close()


async def test_the_only_decode_engine_takes_requests_itself_with_the_admin_key(make):
    fleet, made, _ = make(servers=1, prefill_engines=2, decode_engines=1)
    group = fleet._processes.server(0)
    url = await group.start(60.0)
    assert [actor.role for actor in made] == ["server"] * 3
    control = fleet._processes.control(url, group)
    assert (control.url, control._api_key) == ("http://server-0-decode-0", KEYS.admin)
    names = ("prefill-0", "prefill-1", "decode-0")
    assert control.engine_urls == tuple(f"http://server-0-{name}" for name in names)
    assert control.pairs == 2
    await control.close()


async def test_metrics_are_scraped_from_each_engine_of_a_server_and_not_from_its_router(make):
    fleet, _, _ = make(servers=2, prefill_engines=1, decode_engines=2)
    slot = fleet._new_slot(1)
    await slot.start()
    names = ["prefill-0", "decode-0", "decode-1"]
    expected = {f"server-1-engine-{number}": f"http://server-1-{name}/metrics" for number, name in enumerate(names)}
    assert fleet.metrics_urls() == expected
    await fleet.stop()


async def test_metrics_of_a_server_of_one_engine_are_scraped_from_the_server(make):
    fleet, _, _ = make(servers=1)
    await fleet._new_slot(0).start()
    assert fleet.metrics_urls() == {"server-0": "http://server-0/metrics"}
    await fleet.stop()


async def test_a_server_that_joins_a_run_takes_a_slot_for_each_engine_and_gives_them_back(make, monkeypatch):
    monkeypatch.setattr(fleet_module, "DRAIN_SECONDS", 0.0)
    fleet, made, pools = make(servers=2, prefill_engines=1, decode_engines=2)
    await fleet._add(2)
    assert pools.added == [6, 7, 8]
    assert [actor.options.get("slot") for actor in made] == [6, 7, 8, None]
    await fleet._remove(fleet._slots[2])
    assert pools.removed == [6, 7, 8]
    assert all(actor.stopped for actor in made)
