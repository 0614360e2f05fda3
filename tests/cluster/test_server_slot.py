"""The loops of a server slot, over a fake process whose faults the tests choose."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

from aiohttp import web

from megasync.cluster.server_slot import ServerSlot
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import Config
from megasync.config.schema import HealthConfig, TimeoutConfig
from megasync.errors import ServerError
from megasync.observe import trace
from megasync.observe.context import RunContext
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerState
from megasync.watch.spans import TraceReader

LOADS = {"loads": [{"token_usage": 0.25, "num_running_reqs": 2, "num_waiting_reqs": 1}]}


class FakeProcess:
    """Answers probes at a port of its own while it is alive; while `hung`, its scheduler answers nothing."""

    def __init__(self, starts: bool = True) -> None:
        self._starts = starts
        self.hung = False
        self._up = asyncio.Event()
        self._down = asyncio.Event()

    async def start(self, timeout: float) -> str:
        if not self._starts:
            raise ServerError("no memory")
        app = web.Application()
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/server_info", self._info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._up.set()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response(LOADS)

    async def _info(self, request: web.Request) -> web.Response:
        if self.hung:
            await asyncio.sleep(600)
        return web.json_response({})

    @property
    def living(self) -> bool:
        return self._up.is_set() and not self._down.is_set()

    def end(self) -> None:
        self._down.set()

    async def ended(self) -> None:
        await self._down.wait()

    async def tail(self, lines: int) -> str:
        return "out of memory"

    async def stop(self, timeout: float) -> None:
        if self.living:
            await self._runner.cleanup()
        self.end()


@asynccontextmanager
async def living(*processes: FakeProcess, restarts: int = 5, context: RunContext | None = None):
    """(slot, transitions as they come), started with the first of the processes."""
    config = Config()
    config.timeouts = TimeoutConfig(server_start=10.0, shutdown=1.0)
    config.rollout.health = HealthConfig(
        probe_seconds=0.01,
        request_seconds=0.01,
        request_timeout=0.1,
        probe_failures=3,
        request_failures=2,
        restarts=restarts,
        restart_window=600.0,
    )
    seen: asyncio.Queue[tuple[ServerState, ServerState, str]] = asyncio.Queue()
    queue = iter(processes)
    slot = ServerSlot(
        config,
        context or RunContext(),
        0,
        "server-0",
        lambda: next(queue),
        lambda url, _: ServerControl(url, "key"),
        lambda slot, before: seen.put_nowait((before, slot.health.state, slot.url)),
    )
    await slot.start()
    life = asyncio.create_task(slot.run())
    try:
        yield slot, seen
    finally:
        await cancel_and_wait(life)
        await slot.close()
        assert not any(process.living for process in processes)


async def until(seen: asyncio.Queue, state: ServerState) -> str:
    """The URL that the slot had at its transition to the state."""
    async with asyncio.timeout(300):
        while (change := await seen.get())[1] is not state:
            pass
    return change[2]


class Reports:
    """Whether the process still lived when the slot was reported as silent."""

    def __init__(self, process):
        self.process, self.lived = process, []

    async def report(self, reason, only=None):
        assert only == {"server-0"} and "does not answer" in reason
        self.lived.append(self.process.living)


async def test_a_dead_process_is_replaced_by_another_server_which_is_stale_and_not_reported_as_silent():
    first, second = FakeProcess(), FakeProcess()
    reports = Reports(first)
    async with living(first, second, context=RunContext(reports=reports)) as (slot, seen):
        old = await until(seen, ServerState.STALE)
        slot.note(slot.health.synced)
        first.end()
        assert await until(seen, ServerState.DEAD) == old
        assert "its process has ended. Last lines of its log:\nout of memory" in slot.health.reason
        assert await until(seen, ServerState.STALE) == slot.url != old
        assert not slot.health.serves
        assert reports.lived == []
        await first._runner.cleanup()


async def test_probes_trace_what_the_server_does(tmp_path):
    with trace.recording(tmp_path, "driver"):
        async with living(FakeProcess()) as (slot, seen):
            await until(seen, ServerState.STALE)
            while slot.load is None:
                await asyncio.sleep(0.01)
    spans = TraceReader(tmp_path).update()
    assert {(span.process, span.track, span.name) for span in spans} == {("driver", "server-0", "generating")}
    assert spans[0].args == {"running": 2, "waiting": 1, "cache": 0.25} and all(
        one.end <= other.start for one, other in pairwise(spans)
    )


async def test_a_hung_scheduler_is_detected_although_probes_are_answered_and_reported_before_its_end():
    first, second = FakeProcess(), FakeProcess()
    reports = Reports(first)
    async with living(first, second, context=RunContext(reports=reports)) as (slot, seen):
        async with asyncio.timeout(300):
            while slot.load is None:
                await asyncio.sleep(0.01)
        assert (slot.load.token_usage, slot.load.running, slot.load.waiting) == (0.25, 2, 1)
        first.hung = True
        await until(seen, ServerState.DEAD)
        assert "2 requests in a row failed" in slot.health.reason
        await until(seen, ServerState.STALE)
        assert not first.living and second.living
        assert reports.lived == [True]


async def test_a_slot_retires_when_failed_starts_have_used_up_its_restarts():
    first = FakeProcess()
    async with living(first, FakeProcess(starts=False), restarts=1) as (slot, seen):
        slot.note(slot.health.died, "killed")
        await until(seen, ServerState.RETIRED)
        assert slot.health.reason == "1 restarts in 600 s were not enough; last failure: no memory"
        assert slot.control is None


async def test_a_cancelled_slot_starts_no_further_server():
    first, second = FakeProcess(), FakeProcess()
    stopping = asyncio.Event()

    async def slow_stop(timeout: float) -> None:
        stopping.set()
        try:
            await asyncio.sleep(600)
        finally:
            first.end()

    first.stop = slow_stop
    async with living(first, second) as (slot, _):
        slot.note(slot.health.died, "killed")
        await asyncio.wait_for(stopping.wait(), 300)
    assert slot.starts == 1
    await first._runner.cleanup()


async def test_retiring_a_slot_ends_its_process():
    async with living(FakeProcess()) as (slot, seen):
        slot.note(slot.health.retire, "it was scaled away")
        await until(seen, ServerState.RETIRED)
        async with asyncio.timeout(300):
            while slot.control is not None:
                await asyncio.sleep(0.01)
        assert slot.starts == 1
