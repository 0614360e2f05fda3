"""A server of several engines as one process, over fake actors: what starts when, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from megasync.cluster.engine_group import EngineGroup
from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import ProcessLost, ServerError


class FakeActor:
    """An engine or a router. `log` gets what it is asked, in the order of all actors of a test."""

    def __init__(self, name: str, log: list[tuple], problem: str = "") -> None:
        self.name, self._log, self._problem = name, log, problem
        self.url = f"http://{name}"
        self.port = 40000 + int(name[-1])
        self.timeout = 0.0
        self.down = asyncio.Event()
        self.tail_error: Exception | None = None

    async def start(self, timeout: float) -> str:
        self.timeout = timeout
        self._log.append(("start", self.name))
        await asyncio.sleep(0)
        if self._problem:
            raise ServerError(self._problem)
        self._log.append(("started", self.name))
        return self.url

    async def handover_port(self) -> int:
        # A port is known only once the engine runs.
        assert ("started", self.name) in self._log
        return self.port

    async def know_prefill(self, engines: list[tuple[str, int]]) -> None:
        self._log.append(("know", self.name, list(engines)))

    async def ended(self) -> None:
        await self.down.wait()

    def processes(self) -> list[tuple[str, int]]:
        return [(f"node of {self.name}", self.port)] if ("started", self.name) in self._log else []

    async def tail(self, lines: int) -> str:
        if self.tail_error is not None:
            raise self.tail_error
        return f"{lines} lines of {self.name}"

    async def visible_devices(self) -> str:
        return f"GPUs of {self.name}"

    async def stop(self, timeout: float) -> None:
        self._log.append(("stop", self.name, timeout))


class Rig:
    """A group of fake actors. `log` has what was asked of all of them; `fronts` what routers were made for."""

    def __init__(self, prefill: int, decode: int, problems: dict[str, str]) -> None:
        self.log: list[tuple] = []
        self.fronts: list[list[str]] = []
        self.actors: dict[str, FakeActor] = {}

        def actor(name: str) -> FakeActor:
            self.actors[name] = FakeActor(name, self.log, problems.get(name, ""))
            return self.actors[name]

        def front(urls) -> FakeActor:
            self.fronts.append(list(urls))
            return actor("router-0")

        first = [actor(f"prefill-{number}") for number in range(prefill)]
        second = [actor(f"decode-{number}") for number in range(decode)]
        self.group = EngineGroup(first, second, front)

    def of(self, what: str) -> list[str]:
        """The actors of which this was asked."""
        return [event[1] for event in self.log if event[0] == what]


def make(prefill: int, decode: int, **problems: str) -> Rig:
    return Rig(prefill, decode, {name.replace("_", "-"): problem for name, problem in problems.items()})


async def test_all_engines_start_before_decode_engines_are_told_the_prefill_engines():
    rig = make(2, 1)
    assert await rig.group.start(60.0) == "http://decode-0"
    engines = ["prefill-0", "prefill-1", "decode-0"]
    known = [("http://prefill-0", 40000), ("http://prefill-1", 40001)]
    assert rig.log == [
        *(("start", name) for name in engines),
        *(("started", name) for name in engines),
        ("know", "decode-0", known),
    ]
    assert list(rig.group.prefill) == ["http://prefill-0", "http://prefill-1"]
    assert list(rig.group.decode) == ["http://decode-0"]
    assert rig.fronts == []


async def test_several_decode_engines_get_a_router_once_they_know_the_prefill_engines():
    rig = make(1, 2)
    assert await rig.group.start(60.0) == "http://router-0"
    assert rig.fronts == [["http://decode-0", "http://decode-1"]]
    assert rig.of("know") == ["decode-0", "decode-1"]
    assert rig.log[-2:] == [("start", "router-0"), ("started", "router-0")]
    assert list(rig.group.decode) == ["http://decode-0", "http://decode-1"]
    assert rig.actors["decode-1"].timeout == 60.0
    assert 1.0 <= rig.actors["router-0"].timeout <= 60.0


async def test_the_router_gets_a_moment_even_if_the_engines_took_all_the_time():
    rig = make(1, 2)
    await rig.group.start(0.0)
    assert rig.actors["router-0"].timeout == 1.0


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "decode-1", "router-0"])
async def test_a_group_has_ended_when_any_part_has(name):
    rig = make(1, 2)
    await rig.group.start(60.0)
    end = asyncio.create_task(rig.group.ended())
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        assert not end.done()
        rig.actors[name].down.set()
        await asyncio.wait_for(end, 5)
    finally:
        await cancel_and_wait(end)


async def test_a_part_whose_node_is_lost_ends_the_group_with_its_error():
    rig = make(1, 1)
    await rig.group.start(60.0)

    async def lost() -> None:
        raise ProcessLost("the node is gone")

    rig.actors["decode-0"].ended = lost
    with pytest.raises(ProcessLost, match="the node is gone"):
        await asyncio.wait_for(rig.group.ended(), 5)


async def test_stopping_stops_every_part():
    rig = make(2, 2)
    await rig.group.start(60.0)
    await rig.group.stop(7.0)
    stopped = [event for event in rig.log if event[0] == "stop"]
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "router-0"]
    assert stopped == [("stop", name, 7.0) for name in names]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("prefill-0", ["prefill-0", "decode-0", "decode-1"]),
        ("decode-1", ["prefill-0", "decode-0", "decode-1"]),
        ("router-0", ["prefill-0", "decode-0", "decode-1", "router-0"]),
    ],
)
async def test_a_start_that_fails_names_the_problem_and_can_be_stopped(name, parts):
    rig = make(1, 2, **{name.replace("-", "_"): f"{name}: no memory"})
    with pytest.raises(ServerError, match=f"{name}: no memory"):
        await rig.group.start(60.0)
    assert rig.of("know") == (["decode-0", "decode-1"] if name == "router-0" else [])
    await rig.group.stop(5.0)
    assert rig.of("stop") == parts


async def test_a_group_that_never_started_can_be_stopped():
    rig = make(1, 1)
    assert rig.group.processes() == []
    await rig.group.stop(5.0)
    assert rig.of("stop") == ["prefill-0", "decode-0"]


async def test_the_last_lines_are_those_of_all_logs_with_what_each_part_is():
    rig = make(2, 2)
    await rig.group.start(60.0)
    rig.actors["decode-0"].tail_error = ProcessLost("it is gone")
    assert (await rig.group.tail(3)).splitlines() == [
        "prefill: 3 lines of prefill-0",
        "prefill: 3 lines of prefill-1",
        "decode: (unknown: it is gone)",
        "decode: 3 lines of decode-1",
        "router: 3 lines of router-0",
    ]


async def test_the_last_lines_after_a_start_that_failed_are_those_of_the_engines():
    rig = make(1, 2, decode_0="no memory")
    with pytest.raises(ServerError):
        await rig.group.start(60.0)
    assert (await rig.group.tail(1)).splitlines() == [
        "prefill: 1 lines of prefill-0",
        "decode: 1 lines of decode-0",
        "decode: 1 lines of decode-1",
    ]


async def test_processes_are_those_of_all_parts():
    rig = make(1, 2)
    await rig.group.start(60.0)
    names = ["prefill-0", "decode-0", "decode-1", "router-0"]
    assert rig.group.processes() == [(f"node of {name}", rig.actors[name].port) for name in names]


async def test_the_devices_are_those_of_the_first_engine():
    rig = make(2, 1)
    assert await rig.group.visible_devices() == "GPUs of prefill-0"
