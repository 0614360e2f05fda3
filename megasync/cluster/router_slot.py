"""The fleet's router: its process, restarted on the same port when it dies, and its list of servers.

Invariant: the router lists the servers that `wanted` returns, which is called again at every poll of the list.
The one exception is the first list, before `supervise`. When the router dies, its running requests are cut, and the
client retries until the router is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol
from urllib.parse import urlsplit

from megasync.cluster.server_slot import TAIL_LINES, ServiceProcess, raise_supervision_error
from megasync.concurrency.tasks import cancel_and_wait, set_within, wait_for_first
from megasync.config import Config
from megasync.errors import MegasyncError, ServerError
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import ProcessState
from megasync.serving.restart_budget import RestartBudget

log = logging.getLogger(__name__)

# Seconds between two polls of the router's list: at most, at least after a change, and while `settle` waits for one.
LIST_POLL_SECONDS = 2.0
LEAST_LIST_SECONDS = 0.5
_CHANGE_POLL_SECONDS = 0.1
# Seconds to wait until the router has applied a change of its list; it keeps trying after that.
SETTLE_SECONDS = 30.0


class ServerList(Protocol):
    """The list of servers of a running router; see `serving.router.RouterMembers`."""

    async def adjust(self, wanted: Collection[str]) -> bool: ...
    async def close(self) -> None: ...


class RouterProcess(ServiceProcess, Protocol):
    """The process of the router."""

    async def metrics_url(self) -> str:
        """Where Prometheus can scrape it."""
        ...


class RouterSlot:
    """Supervises the router. `url` stays the same for the life of the run; `metrics_url` is new at each start."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        make_process: Callable[[Collection[str], int], RouterProcess],
        members: Callable[[str], ServerList],
        wanted: Callable[[], Collection[str]],
    ) -> None:
        """`make_process` takes the servers to start with and the port, 0 for any; `members` the router's URL."""
        self.url = self.metrics_url = ""
        self.starts = 0
        self._events = context.events
        self._since = time.time()
        self._make_process = make_process
        self._wanted = wanted
        self._config = config.rollout.health
        self._timeouts = config.timeouts
        self._scraped = config.observe.prometheus is not None
        self._restarts = RestartBudget(self._config.restarts, self._config.restart_window, context.clock)
        self._reach_members = members
        self._process: RouterProcess | None = None
        self._members: ServerList | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._due = asyncio.Event()

    async def start(self, servers: Collection[str]) -> None:
        """Starts the router with these servers. Raises MegasyncError, and leaves nothing running, when that fails."""
        self.starts += 1
        port = urlsplit(self.url).port or 0
        self._process = self._make_process(servers, port)
        try:
            self.url = await self._process.start(self._timeouts.server_start)
            self.metrics_url = await self._process.metrics_url() if self._scraped else ""
        except BaseException:
            await self._end_process()
            raise
        if self._members is None:
            self._members = self._reach_members(self.url)

    def supervise(self) -> None:
        """Keeps the router running with the wanted servers, in the background."""
        if self._supervision is None:
            self._supervision = asyncio.create_task(self._run(), name="router")

    def watch(self) -> None:
        """Raises ServerError once the restart budget is spent."""
        if self._supervision is not None:
            raise_supervision_error([self._supervision])

    async def _run(self) -> None:
        while True:
            reason = await self._until_lost()
            log.warning("Router at %s: %s", self.url, reason)
            self._events.fault("router", reason, url=self.url)
            self._since = time.time()
            await self._end_process()
            while self._process is None:
                wait = self._restarts.take()
                if wait is None:
                    raise ServerError(
                        f"the router was restarted {self._restarts.limit} times in {self._restarts.window:g} s "
                        f"(rollout.health.restarts); last failure: {reason}"
                    )
                await asyncio.sleep(wait)
                try:
                    # Without servers at first: one that has just died would keep the router from becoming ready.
                    await self.start(())
                except MegasyncError as error:
                    reason = str(error)
            log.warning("Router restarted at %s", self.url)
            self._events.recovery("router", f"restarted at {self.url}", starts=self.starts)
            self._since = time.time()

    def processes(self) -> list[RunProcess]:
        """The running process."""
        return [RunProcess("router", node, pid) for node, pid in self._process.processes()] if self._process else []

    def described(self) -> ProcessState:
        """The router, for `state.json`."""
        state = "restarting" if self._process is None else "up"
        return ProcessState(name="router", state=state, since=self._since, url=self.url, starts=self.starts)

    def refresh(self) -> None:
        """Makes the supervision adjust the list now, because the wanted servers have changed."""
        self._due.set()

    async def settle(self) -> bool:
        """Waits until the router lists the wanted servers; False after SETTLE_SECONDS, while it is tried further.

        Nothing is waited for before `supervise`.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while self._supervision is not None:
            try:
                if await self._adjust():
                    return True
            except ServerError as error:
                log.debug("Router: list of servers not changed: %s", error)
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("Router has not applied its new list in %.0f s; retrying in the background", SETTLE_SECONDS)
                return False
            await asyncio.sleep(_CHANGE_POLL_SECONDS)
        return True

    async def stop(self) -> None:
        """Ends the supervision and the process."""
        try:
            if self._supervision is not None:
                await cancel_and_wait(self._supervision)
        finally:
            await self._end_process()
            if self._members is not None:
                await self._members.close()

    async def _adjust(self) -> bool:
        """Adjusts the list; True when the router listed exactly the wanted servers already."""
        if self._members is None:
            raise ServerError("the router was never started")
        async with self._lock:
            return await self._members.adjust(self._wanted())

    async def _until_lost(self) -> str:
        """Returns why the router must be restarted."""
        process = self._process
        if process is None:
            return "it does not run"
        end = asyncio.create_task(self._end_of(process), name="process of the router")
        lost = asyncio.create_task(self._keep_list(), name="list of the router")
        return await wait_for_first(end, lost)

    async def _end_of(self, process: ServiceProcess) -> str:
        try:
            await process.ended()
            return f"its process has ended. Last lines of its log:\n{await process.tail(TAIL_LINES)}"
        except MegasyncError as error:
            return f"it is lost: {error}"

    async def _keep_list(self) -> str:
        """Polls the list and adjusts it, soon after each change; returns why the router must be restarted."""
        failures = 0
        while True:
            self._due.clear()
            try:
                await self._adjust()
                failures = 0
            except ServerError as error:
                failures += 1
                if failures >= self._config.probe_failures:
                    return f"{failures} calls in a row failed: {error}"
            # Many servers may change at once: one adjustment applies all their changes.
            await asyncio.sleep(LIST_POLL_SECONDS if failures else LEAST_LIST_SECONDS)
            if not failures:
                await set_within(self._due, LIST_POLL_SECONDS - LEAST_LIST_SECONDS)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop(self._timeouts.shutdown)
