"""A fleet over fake processes in virtual time: a server taken out for suspects, and servers that alone misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from megasync.cluster import server_slot
from megasync.cluster.fleet import Fleet
from megasync.cluster.server_slot import CheckAnswer
from megasync.config import Config
from megasync.errors import InvalidAnswer, ServerError
from megasync.lab.sim.clock import VirtualLoop
from megasync.serving.answers import EVENT_STREAM, AnswerLimits, StreamedError
from megasync.serving.health import ServerState

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
    def __init__(self, servers: int) -> None:
        config = Config()
        config.rollout.servers = servers
        self.made: list[FakeServer] = []
        self.router = FakeRouter()
        processes: Any = SimpleNamespace(
            server=self._server,
            control=lambda url, process: next(server for server in self.made if server.url == url),
            router=lambda servers, port: self.router,
            members=lambda url: self.router,
            shared_devices=None,
            release=lambda index: None,
        )
        super().__init__(config, processes, VOCABULARY, asyncio.get_running_loop().time)
        self.left: list[tuple[int, bool, bool]] = []
        self.on_departure(lambda *news: self.left.append(news))

    def _server(self, index: int) -> FakeServer:
        self.made.append(FakeServer(f"http://{index}-{len(self.made)}"))
        return self.made[-1]

    async def all_join(self) -> list[FakeServer]:
        while not self.joiners():
            await self.changed()
        await self.joined([control.url for control in self.joiners()])
        return self.serving()

    async def until(self, holds: Callable[[], bool], seconds: float = 1000.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.5)


def in_virtual_time(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Runs the test with a fleet of `servers` that all serve."""

    def run(servers: int = 3) -> None:
        async def body() -> None:
            fleet = FakeFleet(servers)
            await fleet.start()
            try:
                await fleet.all_join()
                await test(fleet)
            finally:
                await fleet.stop()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(body())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
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
    make = fleet._processes.server

    def slow(index):
        server = make(index)
        server.start_seconds = 30.0
        return server

    fleet._processes.server = slow
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
    slot, url = await fleet.isolate(())
    assert (slot, url) == (0, first.url)
    assert first.aborts and first.running == 0
    assert fleet.router.listed == {server.url for server in fleet.made[1:]}
    assert len(fleet.loads()) == 2
    assert first in fleet.serving()
    assert fleet.metrics()["fleet/isolated"] == 1.0
    fleet.release(slot)
    await fleet.until(lambda: len(fleet.router.listed) == 3)


@in_virtual_time
async def test_isolation_prefers_another_server(fleet):
    slot, _ = await fleet.isolate({0, 1})
    assert slot == 2
    fleet.release(2)
    slot, _ = await fleet.isolate({0, 1, 2})
    assert slot == 0


@in_virtual_time
async def test_no_server_is_isolated_when_none_serves(fleet):
    for server in fleet.made[:3]:
        server.living = False
    await fleet.until(lambda: not fleet.serving())
    assert await fleet.isolate(()) is None


@in_virtual_time
async def test_a_server_that_dies_in_isolation_is_in_the_router_again_once_it_joins(fleet):
    slot, _ = await fleet.isolate(())
    fleet.made[0].living = False
    await fleet.until(lambda: fleet.left == [(slot, True, True)])
    fleet.refund_restart(slot)
    await fleet.all_join()
    assert fleet.made[3].url in fleet.router.listed
    assert not fleet._slots[slot].health._restarts._times


@in_virtual_time
async def test_requests_are_not_suspected_for_a_death_in_a_sync(fleet):
    with fleet.syncing([fleet.made[0].url]):
        fleet.made[0].living = fleet.made[1].living = False
        await fleet.until(lambda: len(fleet.left) == 2)
    assert sorted(fleet.left) == [(0, True, False), (1, True, True)]


@in_virtual_time
async def test_a_removed_server_is_distinguished_from_a_dead_one(fleet):
    await fleet.sync_failed({fleet.made[0].url: "lost"})
    fleet.made[1].living = False
    await fleet.until(lambda: len(fleet.left) == 2)
    assert fleet.left == [(0, False, False), (1, True, True)]


# Servers that keep a version for an evaluation


@in_virtual_time
async def test_a_pinned_server_leaves_the_router_and_the_syncs_and_answers_directly(fleet):
    await fleet.until(lambda: len(fleet.loads()) == 3)
    fleet.made[0].running = fleet.made[2].running = 5
    await fleet.until(lambda: sum(load.running for load in fleet.loads()) == 10)
    (url,) = await fleet.pin(1, 7)
    assert url == fleet.made[1].url, "the one with the fewest requests"
    assert fleet.made[1].aborts
    others = [fleet.made[0], fleet.made[2]]
    assert fleet.serving() == others and fleet.router.listed == {server.url for server in others}
    assert fleet.pinned() == [fleet.made[1]] and len(fleet.loads()) == 2
    described = fleet.states()[1]
    assert (described.state, described.version, described.reason) == ("healthy", 7, "pinned for an evaluation")
    assert fleet.metrics()["fleet/pinned"] == 1.0 and fleet.metrics()["fleet/healthy"] == 3.0
    assert not fleet.left


@in_virtual_time
async def test_an_unpinned_server_serves_at_once_if_it_missed_nothing(fleet):
    fleet.newest_version = lambda: 7
    urls = await fleet.pin(2, 7)
    assert len(urls) == 2
    fleet.unpin(urls)
    assert len(fleet.serving()) == 3 and not fleet.joiners() and not fleet.pinned()
    await fleet.until(lambda: len(fleet.router.listed) == 3)


@in_virtual_time
async def test_an_unpinned_server_that_missed_a_version_waits_for_a_sync(fleet):
    urls = await fleet.pin(1, 7)
    fleet.newest_version = lambda: 8
    fleet.unpin(urls)
    assert [server.url for server in fleet.joiners()] == urls
    await fleet.changed()
    assert fleet.metrics()["fleet/restarts"] == 0.0
    await fleet.joined(urls)
    assert len(fleet.serving()) == 3
    await fleet.until(lambda: len(fleet.router.listed) == 3)


@in_virtual_time
async def test_the_last_server_is_never_pinned_and_no_isolated_one(fleet):
    assert len(await fleet.pin(5, 7)) == 2
    assert await fleet.pin(1, 7) == []
    fleet.unpin([server.url for server in fleet.pinned()])
    await fleet.all_join()
    slot, url = await fleet.isolate(())
    assert url not in await fleet.pin(5, 7)
    assert len(fleet.pinned()) == 1, "another stays in the router"
    _, other = await fleet.isolate({slot})
    assert other not in [server.url for server in fleet.pinned()]


@in_virtual_time
async def test_who_waits_for_a_pinned_server_learns_of_its_death_and_of_its_release(fleet):
    first, second = await fleet.pin(2, 7)
    waits = [asyncio.create_task(fleet.unpinned(url)) for url in (first, second)]
    await asyncio.sleep(1)
    assert not any(wait.done() for wait in waits)
    next(server for server in fleet.made if server.url == first).living = False
    await waits[0]
    assert [server.url for server in fleet.pinned()] == [second]
    fleet.unpin([first, second])
    await waits[1]
    await fleet.unpinned("http://unknown")
    await fleet.until(lambda: len(fleet.made) == 4 and len(fleet.joiners()) == 2)


@in_virtual_time
async def test_a_server_that_does_not_end_its_requests_is_not_pinned(fleet):
    async def refuse(path, body=None, timeout=60.0):
        raise ServerError("no answer")

    for server in fleet.made:
        server.post = refuse
    fleet.newest_version = lambda: 7
    assert await fleet.pin(1, 7) == []
    assert not fleet.pinned() and len(fleet.serving()) == 3


# Servers that alone misbehave


@in_virtual_time
async def test_a_server_that_alone_gives_invalid_answers_is_restarted(fleet):
    fleet.made[1].answer = BAD
    await fleet.until(lambda: fleet.left, 2 * server_slot.CHECK_SECONDS)
    assert fleet.left == [(1, True, False)]
    assert fleet.metrics()["fleet/gray_answers"] == 1.0
    await fleet.all_join()
    assert len(fleet.serving()) == 3


@in_virtual_time
async def test_a_server_that_alone_samples_outside_the_vocabulary_is_restarted(fleet):
    fleet.made[2].answer = answer(sampled=[[-0.5, VOCABULARY, None]])
    await fleet.until(lambda: fleet.left, 2 * server_slot.CHECK_SECONDS)
    assert fleet.left == [(2, True, False)]


@in_virtual_time
async def test_an_invalid_answer_triggers_an_immediate_check(fleet):
    await asyncio.sleep(server_slot.CHECK_SECONDS + 10)
    fleet.made[1].answer = BAD
    fleet.check_all()
    await fleet.until(lambda: fleet.left, 10.0)
    assert fleet.left == [(1, True, False)]


@in_virtual_time
async def test_when_all_give_invalid_answers_one_is_restarted_and_compared_with_the_trainer(fleet):
    for server in fleet.made:
        server.answer = BAD
    await asyncio.sleep(10 * server_slot.CHECK_SECONDS)
    assert len(fleet.left) == 1
    assert len(fleet.serving()) == 2
    assert len(fleet.joiners()) == 1
    assert all(server.asked for server in fleet.made[:3])


@in_virtual_time
async def test_servers_are_not_checked_during_a_weight_sync(fleet):
    with fleet.syncing([server.url for server in fleet.made]):
        await asyncio.sleep(5 * server_slot.CHECK_SECONDS)
    assert not any(server.asked for server in fleet.made)


@in_virtual_time
async def test_a_server_with_endless_streams_is_restarted(fleet):
    fleet.made[1].endless = True
    fleet.check_all()
    await fleet.until(lambda: fleet.left, 60.0)
    assert fleet.left == [(1, True, False)]


@in_virtual_time
async def test_a_server_with_an_empty_queue_that_answers_no_check_is_restarted(fleet):
    fleet.made[1].silent = True
    await fleet.until(lambda: fleet.left, 5 * server_slot.CHECK_SECONDS)
    assert fleet.left == [(1, True, False)]
    assert fleet.metrics()["fleet/gray_answers"] == 1.0


@in_virtual_time
async def test_a_silent_server_is_also_detected_without_streams(fleet):
    fleet.streams = False
    fleet.made[1].silent = True
    await fleet.until(lambda: fleet.left, 5 * server_slot.CHECK_SECONDS)
    assert fleet.left == [(1, True, False)]


@in_virtual_time
async def test_a_server_with_a_queue_may_leave_its_check_unanswered(fleet):
    fleet.made[1].silent, fleet.made[1].waiting = True, 3
    await asyncio.sleep(20 * server_slot.CHECK_SECONDS)
    assert fleet.left == []


@in_virtual_time
async def test_a_check_that_falls_into_a_sync_may_stay_unanswered(fleet):
    fleet.made[1].silent = True
    for _ in range(20):
        await asyncio.sleep(server_slot.CHECK_SECONDS / 2)
        with fleet.syncing([fleet.made[1].url]):
            await asyncio.sleep(1.0)
    assert fleet.left == []


@in_virtual_time
async def test_an_aborted_check_gives_no_verdict(fleet):
    aborted = answer(sampled=[], finish_reason={"type": "abort"})
    del aborted["meta_info"]["input_token_logprobs"]
    fleet.made[1].answer = aborted
    await asyncio.sleep(20 * server_slot.CHECK_SECONDS)
    assert fleet.left == []


@in_virtual_time
async def test_a_server_with_invalid_answers_beside_a_silent_one_is_restarted(fleet):
    """No peer confirms that better answers are possible, but the silent server cannot be waited for."""
    fleet.made[0].silent, fleet.made[0].waiting = True, 3
    fleet.made[2].silent, fleet.made[2].waiting = True, 3
    fleet.made[1].answer = BAD
    await fleet.until(lambda: fleet.left, 10 * server_slot.CHECK_SECONDS)
    assert fleet.left == [(1, True, False)]


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
    assert fleet.router.listed == {server.url for server in fleet.made[1:3]}
    await fleet.all_join()
    assert len(fleet.serving()) == 3
    assert fleet.metrics()["fleet/gray_parity"] == 1.0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (GOOD, None),
        (BAD, "token 1 has no log-prob"),
        (answer(scores=[[None, 1, None], [3.0, 2, None], [-1.0, 3, None]]), "log-prob 3 of"),
        (answer(scores=[[None, 1, None]]), "it scored 1 tokens, not the 3"),
        (answer(sampled=[[None, 7, None]]), "Expected `float`"),
        (answer(sampled=[[-0.5, VOCABULARY, None]]), "token id 100 is outside the vocabulary"),
        (answer(sampled=[[-0.5, 7, None]] * 3), "3 tokens, and at most 2 were requested"),
        (answer(sampled=[]), "the answer finished (length) without a token"),
        (answer() | {"output_ids": [8, 7]}, "2 output_ids and other log-probs"),
        (answer(finish_reason=None, weight_version="0"), "it has no finish_reason"),
        (answer(finish_reason={"type": "stop", "matched": "NaN happened"}), "it stopped at the text 'NaN happened'"),
        (answer(weight_versions=[]), "do not cover 2 tokens"),
        (answer(weight_versions=[{"version": "5", "start": 0, "end": 2}]), "weight version 5 does not exist yet"),
        ({"meta_info": {}}, "missing required field `finish_reason`"),
        ("Internal Server Error", "Expected `object`"),
        (answer() | {"error": {"code": 500, "message": "out of memory"}}, "out of memory"),
    ],
)
def test_the_check_refuses_what_the_client_refuses(body: Any, problem: str | None) -> None:
    check = CheckAnswer(AnswerLimits(VOCABULARY, tokens=2, newest=lambda: 4))
    try:
        check.add(orjson.dumps(body))
        found = check.problem()
    except (InvalidAnswer, StreamedError) as error:
        found = str(error)
    assert (found is None) if problem is None else (problem in found)


def test_states_that_serve() -> None:
    assert {state for state in ServerState if state.serves} == {ServerState.HEALTHY, ServerState.SUSPECT}


# What the fleet records


class Recorded:
    def __init__(self):
        self.events = []

    def fault(self, what, text, **fields):
        self.events.append(("fault", what, text))

    def recovery(self, what, text, **fields):
        self.events.append(("recovery", what, text))


@in_virtual_time
async def test_the_death_of_a_server_and_its_return_are_recorded(fleet):
    recorded = Recorded()
    fleet.report_to(recorded)
    victim = fleet._slots[1]
    victim.note(victim.health.died, "killed by hand")
    dead = fleet.states()[1]
    assert (dead.name, dead.state, dead.reason) == ("server-1", "dead", "killed by hand")
    await fleet.until(lambda: bool(fleet.joiners()))
    assert [event[:2] for event in recorded.events] == [("fault", "server-1")], "it is back once it serves"
    await fleet.all_join()
    assert [event[:2] for event in recorded.events] == [("fault", "server-1"), ("recovery", "server-1")]
    assert "killed by hand" in recorded.events[0][2]
    assert [server.state for server in fleet.states()] == ["healthy"] * 3 and fleet.states()[1].starts == 2


@in_virtual_time
async def test_a_failed_sync_is_a_fault_of_the_server_until_one_succeeds(fleet):
    recorded = Recorded()
    fleet.report_to(recorded)
    await fleet.sync_failed({fleet.made[0].url: "phase transfer"})
    await fleet.all_join()
    assert [event[:2] for event in recorded.events] == [("fault", "server-0"), ("recovery", "server-0")]


@in_virtual_time
async def test_a_server_that_is_scaled_away_is_no_fault(fleet):
    recorded = Recorded()
    fleet.report_to(recorded)
    fleet._slots[2].note(fleet._slots[2].health.retire, "removed by a resize")
    assert recorded.events == [] and [server.name for server in fleet.states()] == ["server-0", "server-1"]


@in_virtual_time
async def test_a_server_that_missed_a_sync_has_no_fault(fleet):
    recorded = Recorded()
    fleet.report_to(recorded)
    urls = await fleet.pin(1, 7)
    fleet.newest_version = lambda: 8
    fleet.unpin(urls)
    await fleet.joined(urls)
    assert recorded.events == [] and len(fleet.serving()) == 3
