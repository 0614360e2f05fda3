"""Servers of several actors, over fake pools and actors: where each part is placed, what starts when, what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megasync.cluster import fleet_processes, server_slot
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.service_actors import EngineGroup, SpreadServer
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import pool_specs
from megasync.device import resolve_device
from megasync.errors import ProcessLost, ServerError
from megasync.observe.context import RunContext
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.router import Router
from megasync.serving.server import SGLangServer

KEYS = Keys("admin-key", "router-key", "generation-key")


class FakePools:
    def __init__(self, config: Config) -> None:
        self.specs = pool_specs(config)
        self.added: list[int] = []
        self.removed: list[int] = []

    async def add_slot(self, pool: str, slot: int, timeout: float) -> None:
        self.added.append(slot)

    def remove_slot(self, pool: str, slot: int) -> None:
        self.removed.append(slot)


class FakeActor:
    """A `ServiceActor` that starts nothing; its URL has the name of its log. `log` has what all actors were asked."""

    def __init__(self, rig: Rig, service, arguments, pools, pool, slot, *, beside=False) -> None:
        self.service, self.arguments, self.place = service, arguments, (pool, slot, beside)
        self.log_path = Path(arguments[4] if service is Router else arguments[3])
        self.name = self.log_path.stem.removeprefix("server-0-")
        self.timeout = 0.0
        self.down = asyncio.Event()
        self.tail_error: Exception | None = None
        self._rig = rig

    @property
    def engine_role(self):
        return self.arguments[8]

    @property
    def started(self) -> bool:
        return ("started", self.name) in self._rig.log

    async def meet(self, timeout: float) -> tuple[str, int]:
        return "10.0.0.1", 7000

    async def start(self, timeout: float) -> str:
        self.timeout = timeout
        self._rig.log.append(("start", self.name))
        await asyncio.sleep(0)
        if self.name in self._rig.problems:
            raise ServerError(self._rig.problems[self.name])
        self._rig.log.append(("started", self.name))
        return f"http://{self.log_path.stem}"

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if method is SGLangServer.handover_port:
            assert self.started, "a port is known only once the engine runs"
            return 40000 + int(self.name[-1])
        assert method is SGLangServer.know_prefill
        self._rig.log.append(("know", self.name, *arguments))

    async def ended(self) -> None:
        await self.down.wait()

    def processes(self) -> list[tuple[str, int]]:
        return [(f"node of {self.name}", 1)] if self.started else []

    async def tail(self, lines: int) -> str:
        if self.tail_error is not None:
            raise self.tail_error
        return f"{lines} lines of {self.name}"

    async def visible_devices(self) -> str:
        return f"GPUs of {self.name}"

    async def stop(self, timeout: float) -> None:
        self._rig.log.append(("stop", self.name, timeout))


class Rig:
    """The processes of a fleet with these values of `rollout`, and the actors that they make."""

    def __init__(self, folder: Path, problems: Mapping[str, str], cluster: Mapping[str, Any], rollout: dict) -> None:
        self.config = Config()
        for section, values in ((self.config.rollout, rollout), (self.config.cluster, cluster)):
            for name, value in values.items():
                setattr(section, name, value)
        self.problems = problems
        self.made: list[FakeActor] = []
        self.log: list[tuple] = []
        self.pools: Any = FakePools(self.config)
        self.processes = FleetProcesses(self.config, folder, resolve_device("cpu"), self.pools, KEYS)

    def actor(self, *arguments: Any, **options: Any) -> FakeActor:
        self.made.append(FakeActor(self, *arguments, **options))
        return self.made[-1]

    def __getitem__(self, name: str) -> FakeActor:
        return next(actor for actor in self.made if actor.name == name)

    def fleet(self) -> Fleet:
        return Fleet(self.config, self.processes, 100, RunContext())

    def of(self, what: str) -> list[str]:
        """The actors of which this was asked."""
        return [event[1] for event in self.log if event[0] == what]


@pytest.fixture
def make(monkeypatch, tmp_path):
    def rig(problems: Mapping[str, str] | None = None, cluster: Mapping[str, Any] | None = None, **rollout: int) -> Rig:
        made = Rig(tmp_path, problems or {}, cluster or {}, {"servers": 1, **rollout})
        monkeypatch.setattr(fleet_processes, "ServiceActor", made.actor)
        return made

    return rig


def test_each_engine_has_a_slot_a_log_and_ranks_of_its_own(make, tmp_path):
    rig = make(servers=2, prefill_engines=1, decode_engines=3, tensor_parallel=2)
    assert all(isinstance(rig.processes.server(index), EngineGroup) for index in range(2))
    names = [
        f"server-{index}-{part}" for index in range(2) for part in ("prefill-0", "decode-0", "decode-1", "decode-2")
    ]
    assert [actor.log_path for actor in rig.made] == [tmp_path / "logs" / f"{name}.log" for name in names]
    assert [actor.place for actor in rig.made] == [("rollout", slot, False) for slot in range(8)]
    roles = [actor.engine_role for actor in rig.made]
    each = [("prefill", 0, 8), ("decode", 2, 8), ("decode", 4, 8), ("decode", 6, 8)]
    assert [(role.kind, role.first, role.ranks) for role in roles] == 2 * each


def test_engines_with_one_handover_key_are_those_of_one_server(make):
    rig = make(servers=2, prefill_engines=1, decode_engines=1)
    for index in (0, 1, 0):
        rig.processes.server(index)
    keys = [actor.engine_role.key for actor in rig.made]
    # A server that starts again is another one.
    assert keys[::2] == keys[1::2] and len(set(keys)) == 3
    assert all(len(key) >= 32 for key in keys) and not set(keys) & {KEYS.admin, KEYS.generation, KEYS.router}


def test_engines_have_the_keys_and_the_model_of_any_server_and_run_on_one_node(make):
    rig = make(prefill_engines=1, decode_engines=1)
    rig.processes.server(0)
    for actor in rig.made:
        spec, host, port, _, admin, generation, node, meeting_point, _ = actor.arguments
        assert (actor.service, host, port, admin) == (SGLangServer, "127.0.0.1", 0, KEYS.admin)
        assert (generation, node, meeting_point, spec.nodes) == (KEYS.generation, 0, None, 1)


def test_a_server_of_one_engine_has_no_role_and_its_share_of_the_gpus_of_the_ranks(make):
    rig = make(servers=2, tensor_parallel=2)
    assert rig.processes.server(1, ["4", "5", "6", "7"]) is rig.made[0]
    (actor,) = rig.made
    assert actor.arguments[0].gpus == "6,7"
    assert actor.place == ("rollout", 1, False) and actor.name == "server-1"
    assert len(actor.arguments) == 8


async def test_a_server_on_several_nodes_meets_at_the_first_and_answers_there(make):
    rig = make(tensor_parallel=4, cluster={"devices_per_node": 2})
    server = rig.processes.server(0)
    assert isinstance(server, SpreadServer) and await server.start(60.0) == "http://server-0"
    assert [actor.log_path.stem for actor in rig.made] == ["server-0", "server-0-node-1"]
    assert [actor.arguments[-2:] for actor in rig.made] == [(0, None), (1, ("10.0.0.1", 7000))]
    assert await server.tail(1) == "node 0: 1 lines of server-0\nnode 1: 1 lines of node-1"


async def test_the_router_of_a_server_is_beside_its_first_engine_and_takes_the_generation_key(make, tmp_path):
    rig = make(servers=2, prefill_engines=1, decode_engines=2)
    group = rig.processes.server(1)
    assert await group.start(60.0) == "http://server-1-router"
    router = rig.made[-1]
    assert (router.service, router.place) == (Router, ("rollout", 3, True))
    assert router.log_path == tmp_path / "logs" / "server-1-router.log"
    urls, policy, *_, keys = router.arguments
    assert urls == ["http://server-1-decode-0", "http://server-1-decode-1"]
    assert (policy, keys) == ("round_robin", KEYS)
    control = rig.processes.control("http://server-1-router", group)
    assert isinstance(control, DisaggregatedControl)
    assert control._api_key == KEYS.generation
    assert [engine._api_key for engine in control._engines] == [KEYS.admin] * 3
    await control.close()


async def test_the_only_decode_engine_takes_requests_itself_with_the_admin_key(make):
    rig = make(prefill_engines=2, decode_engines=1)
    group = rig.processes.server(0)
    names = ["prefill-0", "prefill-1", "decode-0"]
    assert await group.start(60.0) == "http://server-0-decode-0"
    # All engines run before the decode engines get the addresses of the prefill engines.
    places = [("http://server-0-prefill-0", 40000), ("http://server-0-prefill-1", 40001)]
    expected = [*(("start", name) for name in names), *(("started", name) for name in names)]
    assert rig.log == [*expected, ("know", "decode-0", places)]
    control = rig.processes.control("http://server-0-decode-0", group)
    assert (control.url, control._api_key, control.pairs) == ("http://server-0-decode-0", KEYS.admin, 2)
    assert control.engine_urls == tuple(f"http://server-0-{name}" for name in names)
    assert await group.visible_devices() == "GPUs of prefill-0"
    await control.close()


async def test_the_parts_of_a_server_start_stop_and_are_described_as_one(make):
    rig = make(prefill_engines=1, decode_engines=2)
    group = rig.processes.server(0)
    assert group.processes() == []
    names = ["prefill-0", "decode-0", "decode-1", "router"]
    await group.start(0.0)
    assert rig.of("know") == ["decode-0", "decode-1"] and rig.of("started") == names
    assert rig["router"].timeout == 1.0, "a moment even if the engines took all the time"
    assert group.processes() == [(f"node of {name}", 1) for name in names]
    rig["decode-0"].tail_error = ProcessLost("it is gone")
    assert (await group.tail(3)).splitlines() == [
        "prefill: 3 lines of prefill-0",
        "decode: (unknown: it is gone)",
        "decode: 3 lines of decode-1",
        "router: 3 lines of router",
    ]
    await group.stop(7.0)
    assert [event for event in rig.log if event[0] == "stop"] == [("stop", name, 7.0) for name in names]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "decode-1", "router"])
async def test_a_group_has_ended_when_any_part_has(make, name):
    rig = make(prefill_engines=1, decode_engines=2)
    group = rig.processes.server(0)
    await group.start(60.0)
    end = asyncio.create_task(group.ended())
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not end.done()
        rig[name].down.set()
        await asyncio.wait_for(end, 300)
    finally:
        await cancel_and_wait(end)


async def test_a_part_whose_node_is_lost_ends_the_group_with_its_error(make):
    rig = make(prefill_engines=1, decode_engines=1)
    group = rig.processes.server(0)
    await group.start(60.0)

    async def lost() -> None:
        raise ProcessLost("the node is gone")

    rig["decode-0"].ended = lost
    with pytest.raises(ProcessLost, match="the node is gone"):
        await asyncio.wait_for(group.ended(), 300)


@pytest.mark.parametrize("name", ["prefill-0", "decode-1", "router"])
async def test_a_start_that_fails_names_the_problem_and_can_be_stopped(make, name):
    rig = make({name: f"{name}: no memory"}, prefill_engines=1, decode_engines=2)
    group = rig.processes.server(0)
    with pytest.raises(ServerError, match=f"{name}: no memory"):
        await group.start(60.0)
    with_router = name == "router"
    assert rig.of("know") == ["decode-0", "decode-1"] * with_router
    await group.stop(5.0)
    assert rig.of("stop") == ["prefill-0", "decode-0", "decode-1", *["router"] * with_router]


@pytest.mark.parametrize(
    ("engines", "urls"),
    [
        ({}, {"server-0": "server-0"}),
        # Not from its router.
        (
            {"prefill_engines": 1, "decode_engines": 2},
            {f"server-0-engine-{n}": f"server-0-{x}" for n, x in enumerate(["prefill-0", "decode-0", "decode-1"])},
        ),
    ],
)
async def test_metrics_are_scraped_from_each_engine_of_a_server(make, engines, urls):
    fleet = make(**engines).fleet()
    await fleet._new_slot(0).start()
    assert fleet.metrics_urls() == {name: f"http://{host}/metrics" for name, host in urls.items()}
    await fleet.stop()


async def test_a_server_that_joins_a_run_takes_a_slot_for_each_engine_and_gives_them_back(make, monkeypatch):
    monkeypatch.setattr(server_slot, "DRAIN_SECONDS", 0.0)
    rig = make(servers=2, prefill_engines=1, decode_engines=2)
    fleet = rig.fleet()
    await fleet.scaling._add(2)
    assert rig.pools.added == [6, 7, 8]
    assert [actor.place[1:] for actor in rig.made] == [(6, False), (7, False), (8, False), (6, True)]
    await fleet.scaling._remove(fleet.slots[2])
    assert rig.pools.removed == [6, 7, 8]
    assert rig.of("stop") == rig.of("started")


@pytest.mark.parametrize(
    ("cluster", "rollout", "words"),
    [
        ({"colocate": True}, {}, r"cluster\.colocate\) have room for 1"),
        ({}, {"external": ["http://127.0.0.1:1"]}, "those of rollout.external"),
    ],
)
async def test_devices_of_others_are_not_scaled(make, cluster, rollout, words):
    with pytest.raises(ServerError, match=words):
        await make(cluster=cluster, **rollout).fleet().scaling.resize(2)
