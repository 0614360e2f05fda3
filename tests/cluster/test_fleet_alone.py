"""A fleet over fake processes in virtual time: a server taken out for suspects, and servers that alone misbehave."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import orjson
import pytest

from megasync.cluster.fleet import Fleet
from megasync.cluster.gray_failures import CheckAnswer
from megasync.cluster.server_slot import CHECK_SECONDS
from megasync.config import Config
from megasync.errors import InvalidAnswer, ServerError
from megasync.lab.sim.clock import VirtualLoop
from megasync.observe.context import RunContext
from megasync.serving.answers import EVENT_STREAM, AnswerLimits, StreamedError

VOCABULARY = 100


def answer(scores: list | None = None, sampled: list | None = None, **changes: Any) -> dict:
    """A healthy server's answer to the fleet's check."""
    sampled = [[-0.5, 7, None], [-0.5, 8, None]] if sampled is None else sampled
    meta = {
        "input_token_logprobs": scores or [[None, 1, None], [-1.5, 2, None], [-2.0, 3, None]],
        "output_token_logprobs": sampled,
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "0", "start": 0, "end": len(sampled)}],
    }
    return {"text": "x", "output_ids": [token for _, token, _ in sampled], "meta_info": meta | changes}


GOOD = answer()
BAD = answer(scores=[[None, 1, None], [None, 2, None], [-2.0, 3, None]])


RELEASE = ["/pause_generation", "/release_memory_occupation"]
RESUME = ["/resume_memory_occupation", "/continue_generation"]
MEMORY_CALLS = RELEASE + RESUME


def event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class FakeServer:
    """A process and what answers under its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._ended = asyncio.Event()
        self.running, self.throughput, self.answer = 0, 0.0, GOOD
        # Whether it answers checks at all, whether the answer ends, and what waits in its queue.
        self.silent, self.endless, self.waiting = False, False, 0
        self.asked: list[str] = []
        self.aborts = 0
        self.start_seconds = 0.0
        # Calls about memory, and the one that it refuses.
        self.memory: list[str] = []
        self.refuses = ""

    async def start(self, timeout: float) -> str:
        await asyncio.sleep(self.start_seconds)
        return self.url

    @property
    def living(self) -> bool:
        return not self._ended.is_set()

    @living.setter
    def living(self, lives: bool) -> None:
        assert not lives
        self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    async def tail(self, lines: int) -> str:
        return "Segmentation fault"

    async def stop(self, timeout: float) -> None:
        self.living = False

    async def get(self, path: str, timeout: float = 60.0) -> Any:
        await asyncio.sleep(0.01)
        if not self.living:
            raise ServerError("it refuses the connection")
        now = asyncio.get_running_loop().time()
        load = {"token_usage": 0.1, "num_running_reqs": self.running, "num_waiting_reqs": self.waiting}
        return {"loads": [load | {"timestamp": now, "decode_moments": [1.0, self.throughput * now]}]}

    async def post(self, path: str, body: dict | None = None, timeout: float = 60.0) -> Any:
        await asyncio.sleep(0.01)
        if path == "/abort_request":
            self.aborts += 1
            self.running = 0
            return ""
        if path in MEMORY_CALLS:
            self.memory.append(path)
            if path == self.refuses:
                raise ServerError("CUDA out of memory")
            return ""
        self.asked.append(path)
        if self.silent:
            await asyncio.sleep(timeout)
            raise ServerError("no answer")
        return self.answer

    @asynccontextmanager
    async def stream(self, path: str, body: dict) -> AsyncIterator[SimpleNamespace]:
        self.asked.append(path)
        if self.silent:
            await asyncio.Event().wait()
        assert body["stream"]
        yield SimpleNamespace(content_type=EVENT_STREAM, content=SimpleNamespace(iter_any=self._pieces))

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.endless:
            yield event(answer(sampled=[[-0.5, 7, None]], finish_reason=None, weight_version="0"))
            while True:
                await asyncio.sleep(5.0)
                yield event(answer(sampled=[], finish_reason=None, weight_version="0"))
        yield event(self.answer)

    async def close(self) -> None: ...


class FakeRouter:
    def __init__(self) -> None:
        self.listed: set[str] = set()

    async def start(self, timeout: float) -> str:
        return "http://router"

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, timeout: float) -> None: ...
    async def close(self) -> None: ...

    async def adjust(self, wanted: Any) -> bool:
        settled, self.listed = self.listed == set(wanted), set(wanted)
        return settled


class FakeFleet(Fleet):
    """`left` has the departures of servers, `recorded` the faults and recoveries, `newest` is the newest version."""

    def __init__(self, servers: int) -> None:
        config = Config()
        config.rollout.servers = servers
        self.made: list[FakeServer] = []
        self.fake_router = FakeRouter()
        self.newest: int | None = None
        self.start_seconds = 0.0
        self.left: list[tuple[int, bool, bool]] = []
        self.recorded: list[tuple[str, str]] = []
        processes: Any = SimpleNamespace(
            server=self._server,
            control=lambda url, process: next(server for server in self.made if server.url == url),
            router=lambda servers, port: self.fake_router,
            members=lambda url: self.fake_router,
            shared_devices=None,
            place=AsyncMock(),
            release=lambda index: None,
        )
        events: Any = SimpleNamespace(
            fault=lambda what, text, **_: self.recorded.append(("fault", what)),
            recovery=lambda what, text, **_: self.recorded.append(("recovery", what)),
        )
        clock = asyncio.get_running_loop().time
        context = RunContext(events=events, newest_version=lambda: self.newest, clock=clock)
        super().__init__(config, processes, VOCABULARY, context)
        self.on_departure(lambda *news: self.left.append(news))

    def _server(self, index: int, shared_gpus: Sequence[str]) -> FakeServer:
        self.made.append(FakeServer(f"http://{index}-{len(self.made)}"))
        self.made[-1].start_seconds = self.start_seconds
        return self.made[-1]

    @property
    def listed(self) -> set[str]:
        return self.fake_router.listed

    async def all_join(self) -> None:
        while not self.joiners():
            await self.changed()
        await self.joined([control.url for control in self.joiners()])

    async def until(self, holds: Callable[[], bool], seconds: float = 1000.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.5)


def in_virtual_time(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Runs the test with a fleet of three servers that all serve."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        async def body() -> None:
            fleet = FakeFleet(3)
            await fleet.start()
            try:
                await fleet.all_join()
                await test(fleet, **arguments)
            finally:
                await fleet.stop()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(body())

    # pytest takes the names of arguments from it.
    parameters = [*inspect.signature(test).parameters.values()][1:]
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return run


# Memory that the trainer ranks use in turns with the servers


@in_virtual_time
async def test_servers_release_their_memory_once_and_serve_again_with_it(fleet):
    for _ in range(2):
        await fleet.release_memory()
    assert [server.memory for server in fleet.made] == [RELEASE] * 3
    # Checks of answers find nothing, and nothing is held against a server that waits.
    await asyncio.sleep(300)
    assert [server.asked for server in fleet.made] == [[]] * 3
    for _ in range(2):
        await fleet.resume_memory()
    assert [server.memory for server in fleet.made] == [RELEASE + RESUME] * 3
    assert len(fleet.serving()) == 3
    await asyncio.sleep(100)
    assert all(server.asked for server in fleet.made)


@in_virtual_time
async def test_a_server_that_does_not_release_its_memory_ends_before_others_use_it(fleet):
    fleet.made[1].refuses = "/release_memory_occupation"
    await fleet.release_memory()
    assert [server.living for server in fleet.made] == [True, False, True]
    await asyncio.sleep(100)
    assert len(fleet.made) == 3, "no server starts on devices that others use"
    await fleet.resume_memory()
    await fleet.until(lambda: len(fleet.joiners()) == 1)
    assert len(fleet.made) == 4


@in_virtual_time
async def test_a_server_that_starts_is_up_before_the_memory_is_released(fleet):
    fleet.start_seconds = 30.0
    fleet.made[0].living = False
    await fleet.until(lambda: len(fleet.made) == 4)
    await fleet.release_memory()
    assert fleet.made[3].memory == RELEASE


@in_virtual_time
async def test_a_server_that_does_not_get_its_memory_back_is_replaced(fleet):
    await fleet.release_memory()
    fleet.made[2].refuses = "/resume_memory_occupation"
    fleet.made[0].living = False
    await fleet.until(lambda: len(fleet.serving()) == 2)
    await fleet.resume_memory()
    await fleet.until(lambda: len(fleet.joiners()) == 2)
    assert fleet.made[1].memory == RELEASE + RESUME and len(fleet.serving()) == 1


# A server for suspects


@in_virtual_time
async def test_an_isolated_server_leaves_the_router_drains_and_still_takes_part_in_syncs(fleet):
    first = fleet.made[0]
    await fleet.until(lambda: len(fleet.loads()) == 3)
    first.running = 5
    assert await fleet.reservations.isolate(()) == (0, first.url)
    assert first.aborts and first.running == 0
    assert fleet.listed == {server.url for server in fleet.made[1:]}
    assert len(fleet.loads()) == 2
    assert first in fleet.serving()
    assert fleet.metrics()["fleet/isolated"] == 1.0
    fleet.reservations.release(0)
    await fleet.until(lambda: len(fleet.listed) == 3)


@in_virtual_time
async def test_isolation_prefers_another_server_and_needs_one_that_serves(fleet):
    for avoid, slot in (({0, 1}, 2), ({0, 1, 2}, 0)):
        assert (await fleet.reservations.isolate(avoid))[0] == slot
        fleet.reservations.release(slot)
    for server in fleet.made[:3]:
        server.living = False
    await fleet.until(lambda: not fleet.serving())
    assert await fleet.reservations.isolate(()) is None


@in_virtual_time
async def test_a_server_that_dies_in_isolation_is_in_the_router_again_once_it_joins(fleet):
    slot, _ = await fleet.reservations.isolate(())
    fleet.made[0].living = False
    await fleet.until(lambda: fleet.left == [(slot, True, True)])
    fleet.reservations.refund_restart(slot)
    await fleet.all_join()
    assert fleet.made[3].url in fleet.listed
    assert not fleet.slots[slot].health._restarts._times


@in_virtual_time
async def test_requests_are_suspected_for_a_death_outside_a_sync_alone(fleet):
    await fleet.sync_failed({fleet.made[2].url: "lost"})
    with fleet.syncing([fleet.made[0].url]):
        fleet.made[0].living = fleet.made[1].living = False
        await fleet.until(lambda: len(fleet.left) == 3)
    assert sorted(fleet.left) == [(0, True, False), (1, True, True), (2, False, False)]


# Servers that keep a version for an evaluation


@in_virtual_time
async def test_a_pinned_server_leaves_the_router_and_the_syncs_and_answers_directly(fleet):
    await fleet.until(lambda: len(fleet.loads()) == 3)
    fleet.made[0].running = fleet.made[2].running = 5
    await fleet.until(lambda: sum(load.running for load in fleet.loads()) == 10)
    (url,) = await fleet.reservations.pin(1, 7)
    assert url == fleet.made[1].url, "the one with the fewest requests"
    assert fleet.made[1].aborts
    others = [fleet.made[0], fleet.made[2]]
    assert fleet.serving() == others and fleet.listed == {server.url for server in others}
    assert fleet.reservations.pinned() == [fleet.made[1]] and len(fleet.loads()) == 2
    described = fleet.states()[1]
    assert (described.state, described.version, described.reason) == ("healthy", 7, "pinned for an evaluation")
    assert fleet.metrics()["fleet/pinned"] == 1.0 and fleet.metrics()["fleet/healthy"] == 3.0
    assert not fleet.left


@in_virtual_time
async def test_an_unpinned_server_serves_at_once_or_if_it_missed_a_version_after_a_sync(fleet):
    fleet.newest = 7
    urls = await fleet.reservations.pin(2, 7)
    assert len(urls) == 2
    fleet.reservations.unpin(urls)
    assert len(fleet.serving()) == 3 and not fleet.joiners() and not fleet.reservations.pinned()
    await fleet.until(lambda: len(fleet.listed) == 3)

    urls = await fleet.reservations.pin(1, 7)
    fleet.newest = 8
    fleet.reservations.unpin(urls)
    assert [server.url for server in fleet.joiners()] == urls
    await fleet.changed()
    await fleet.joined(urls)
    assert len(fleet.serving()) == 3
    await fleet.until(lambda: len(fleet.listed) == 3)
    assert fleet.metrics()["fleet/restarts"] == 0.0 and not fleet.recorded, "it has no fault"


@in_virtual_time
async def test_the_last_server_is_never_pinned_and_no_isolated_one(fleet):
    reservations = fleet.reservations
    assert len(await reservations.pin(5, 7)) == 2
    assert await reservations.pin(1, 7) == []
    reservations.unpin([server.url for server in reservations.pinned()])
    await fleet.all_join()
    slot, url = await reservations.isolate(())
    assert url not in await reservations.pin(5, 7)
    assert len(reservations.pinned()) == 1, "another stays in the router"
    _, other = await reservations.isolate({slot})
    assert other not in [server.url for server in reservations.pinned()]


@in_virtual_time
async def test_who_waits_for_a_pinned_server_learns_of_its_death_and_of_its_release(fleet):
    reservations = fleet.reservations
    first, second = await reservations.pin(2, 7)
    waits = [asyncio.create_task(reservations.unpinned(url)) for url in (first, second)]
    await asyncio.sleep(1)
    assert not any(wait.done() for wait in waits)
    next(server for server in fleet.made if server.url == first).living = False
    await waits[0]
    assert [server.url for server in reservations.pinned()] == [second]
    reservations.unpin([first, second])
    await waits[1]
    await reservations.unpinned("http://unknown")
    await fleet.until(lambda: len(fleet.made) == 4 and len(fleet.joiners()) == 2)


@in_virtual_time
async def test_a_server_that_does_not_end_its_requests_is_not_pinned(fleet):
    async def refuse(path, body=None, timeout=60.0):
        raise ServerError("no answer")

    for server in fleet.made:
        server.post = refuse
    fleet.newest = 7
    assert await fleet.reservations.pin(1, 7) == []
    assert not fleet.reservations.pinned() and len(fleet.serving()) == 3


# Servers that alone misbehave

OUTSIDE = answer(sampled=[[-0.5, VOCABULARY, None]])
QUEUED = {"silent": True, "waiting": 3}


@pytest.mark.parametrize(
    ("faults", "checks", "left"),
    [
        pytest.param({1: {"answer": BAD}}, 2, 1, id="an invalid answer"),
        pytest.param({2: {"answer": OUTSIDE}}, 2, 2, id="a token outside the vocabulary"),
        pytest.param({1: {"endless": True}}, 3, 1, id="a stream without an end"),
        pytest.param({1: {"silent": True}}, 5, 1, id="no answer, with an empty queue"),
        # No peer confirms that better answers are possible, but the silent ones cannot be waited for.
        pytest.param({0: QUEUED, 2: QUEUED, 1: {"answer": BAD}}, 10, 1, id="an invalid answer beside silent peers"),
    ],
)
@in_virtual_time
async def test_a_server_whose_answers_are_bad_is_restarted(fleet, faults, checks, left):
    for number, values in faults.items():
        vars(fleet.made[number]).update(values)
    await fleet.until(lambda: fleet.left, checks * CHECK_SECONDS)
    assert fleet.left == [(left, True, False)]
    assert fleet.metrics()["fleet/gray_answers"] == 1.0
    await fleet.all_join()
    assert len(fleet.serving()) == 3


@in_virtual_time
async def test_an_invalid_answer_triggers_an_immediate_check(fleet):
    await asyncio.sleep(CHECK_SECONDS + 10)
    fleet.made[1].answer = BAD
    fleet.check_all()
    await fleet.until(lambda: fleet.left, 10.0)
    assert fleet.left == [(1, True, False)]


@in_virtual_time
async def test_when_all_give_invalid_answers_one_is_restarted_and_compared_with_the_trainer(fleet):
    for server in fleet.made:
        server.answer = BAD
    await asyncio.sleep(10 * CHECK_SECONDS)
    assert (len(fleet.left), len(fleet.serving()), len(fleet.joiners())) == (1, 2, 1)
    assert all(server.asked for server in fleet.made[:3])


@in_virtual_time
async def test_servers_are_not_checked_during_a_weight_sync(fleet):
    with fleet.syncing([server.url for server in fleet.made]):
        await asyncio.sleep(5 * CHECK_SECONDS)
    assert not any(server.asked for server in fleet.made)


@in_virtual_time
async def test_a_silent_server_is_also_detected_without_streams(fleet):
    fleet._gray.streams = False
    fleet.made[1].silent = True
    await fleet.until(lambda: fleet.left, 5 * CHECK_SECONDS)
    assert fleet.left == [(1, True, False)]


ABORTED = answer(sampled=[], finish_reason={"type": "abort"})
del ABORTED["meta_info"]["input_token_logprobs"]


@pytest.mark.parametrize(
    ("fault", "syncs"),
    [
        pytest.param(QUEUED, False, id="its queue is long"),
        pytest.param({"answer": ABORTED}, False, id="it was aborted"),
        pytest.param({"silent": True}, True, id="a sync fell into it"),
    ],
)
@in_virtual_time
async def test_a_check_without_an_answer_gives_no_verdict_if(fleet, fault, syncs):
    vars(fleet.made[1]).update(fault)
    for _ in range(20):
        await asyncio.sleep(CHECK_SECONDS / 2)
        with fleet.syncing([fleet.made[1].url] if syncs else []):
            await asyncio.sleep(1.0)
    assert fleet.left == []


@in_virtual_time
async def test_a_server_much_slower_than_its_peers_is_restarted(fleet):
    for server in fleet.made:
        server.running, server.throughput = 10, 100.0
    fleet.made[2].throughput = 10.0
    await fleet.until(lambda: fleet.left)
    assert fleet.left == [(2, True, False)]
    assert fleet.metrics()["fleet/gray_slow"] == 1.0


@in_virtual_time
async def test_a_server_that_alone_fails_parity_is_restarted(fleet):
    url = fleet.made[0].url
    await fleet.parity_failed({url: f"{url}, version 3: off by 3 nats"})
    assert fleet.left == [(0, True, False)]
    assert fleet.listed == {server.url for server in fleet.made[1:3]}
    await fleet.all_join()
    assert len(fleet.serving()) == 3
    assert fleet.metrics()["fleet/gray_parity"] == 1.0


# What the fleet records


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (GOOD, None),
        (BAD, "token 1 has no log-prob"),
        (answer(scores=[[None, 1, None], [3.0, 2, None], [-1.0, 3, None]]), "log-prob 3 of"),
        (answer(scores=[[None, 1, None]]), "it scored 1 tokens, not the 3"),
        (answer(sampled=[[-0.5, VOCABULARY, None]]), "token id 100 is outside the vocabulary"),
        (answer(weight_versions=[{"version": "5", "start": 0, "end": 2}]), "weight version 5 does not exist yet"),
        (answer() | {"error": {"code": 500, "message": "out of memory"}}, "out of memory"),
    ],
)
def test_the_check_refuses_bad_scores_and_what_the_client_refuses(body: Any, problem: str | None) -> None:
    check = CheckAnswer(AnswerLimits(VOCABULARY, tokens=2, newest=lambda: 4))
    try:
        check.add(orjson.dumps(body))
        verdict = check.problem()
    except (InvalidAnswer, StreamedError) as error:
        verdict = str(error)
    assert (verdict is None) if problem is None else (problem in verdict)


@in_virtual_time
async def test_the_death_of_a_server_and_its_return_are_recorded(fleet):
    victim = fleet.slots[1]
    victim.note(victim.health.died, "killed by hand")
    dead = fleet.states()[1]
    assert (dead.name, dead.state, dead.reason) == ("server-1", "dead", "killed by hand")
    await fleet.until(lambda: bool(fleet.joiners()))
    assert fleet.recorded == [("fault", "server-1")], "it is back once it serves"
    await fleet.all_join()
    assert fleet.recorded == [("fault", "server-1"), ("recovery", "server-1")]
    assert [server.state for server in fleet.states()] == ["healthy"] * 3 and fleet.states()[1].starts == 2


@in_virtual_time
async def test_a_failed_sync_is_a_fault_of_the_server_until_one_succeeds(fleet):
    await fleet.sync_failed({fleet.made[0].url: "phase transfer"})
    assert fleet.listed == {server.url for server in fleet.made[1:]}
    await fleet.all_join()
    assert fleet.recorded == [("fault", "server-0"), ("recovery", "server-0")]


@in_virtual_time
async def test_the_fleet_is_scaled_and_servers_that_it_gives_up_are_no_faults(fleet):
    with pytest.raises(ServerError, match=r"rollout=0 is below rollout\.min_servers=1"):
        await fleet.scaling.resize(0)
    assert await fleet.scaling.resize(3) == "there are already 3 servers"
    (pinned,) = await fleet.reservations.pin(1, 7)
    fleet.made[0].living = False
    await fleet.until(lambda: len(fleet.made) == 4 and len(fleet.joiners()) == 1)
    recorded = [*fleet.recorded]
    # First what does not serve, a pinned server last.
    assert await fleet.scaling.resize(2) == "3 -> 2 servers"
    assert [server.name for server in fleet.states()] == ["server-1", "server-2"]
    assert await fleet.scaling.resize(1) == "2 -> 1 servers"
    assert [server.url for server in fleet.reservations.pinned()] == [pinned]
    assert fleet.recorded == recorded
    assert await fleet.scaling.resize(2) == "1 -> 2 servers; the new ones serve after the next weight sync"
    assert fleet.size == 2 and len(fleet.joiners()) == 1
