"""The fleet's router: its process, started again on the same port when it dies, and its list of servers.

Invariant: the servers that the router is told of are those that `wanted` returns, which is asked anew at every look and at
every start. A request that is running when the router dies is cut; the client retries until the router is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from megasync.cluster.server_slot import LOOK_SECONDS, TAIL_LINES, ServerProcess
from megasync.config.schema import HealthConfig
from megasync.errors import MegasyncError, ServerError
from megasync.serving.restart_budget import RestartBudget
from megasync.serving.router import RouterMembers

log = logging.getLogger(__name__)

# Seconds between two looks at the router's list, and between two while it is being changed.
LOOK_AT_LIST = 2.0
_LOOK_AT_CHANGE = 0.1


class RouterSlot:
    """`url` stays the same for the life of the run."""

    def __init__(
        self,
        make_process: Callable[[Collection[str], int], ServerProcess],
        wanted: Callable[[], Collection[str]],
        config: HealthConfig,
        start_timeout: float,
        stop_timeout: float,
        members: Callable[[str], RouterMembers],
        clock: Callable[[], float],
    ) -> None:
        """`make_process` takes the servers to start with and the port, 0 for any; `members` the router's URL."""
        self.url = ""
        self.starts = 0
        self._make_process = make_process
        self._wanted = wanted
        self._config = config
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._restarts = RestartBudget(config.restarts, config.restart_window, clock)
        self._reach_members = members
        self._process: ServerProcess | None = None
        self._members: RouterMembers | None = None
        self._lock = asyncio.Lock()
        self._next_look = 0.0

    async def start(self, servers: Collection[str]) -> None:
        """Raises MegasyncError, and leaves nothing running, when it does not come up with these servers."""
        self.starts += 1
        port = urlsplit(self.url).port if self.url else 0
        self._process = self._make_process(servers, port)
        try:
            self.url = await self._process.start(self._start_timeout)
        except BaseException:
            await self._end_process()
            raise
        if self._members is None:
            self._members = self._reach_members(self.url)

    async def live(self) -> None:
        """Keeps the router running with the wanted servers. Raises ServerError when restarts do not help any more."""
        while True:
            reason = await self._watch()
            log.warning("router at %s: %s", self.url, reason)
            await self._end_process()
            while self._process is None:
                wait = self._restarts.take()
                if wait is None:
                    raise ServerError(
                        f"the router was started again {self._restarts.limit} times in {self._restarts.window:g} s "
                        f"(rollout.health.restarts); the last time: {reason}"
                    )
                await asyncio.sleep(wait)
                try:
                    # With none at first: one that just died would keep it from coming up.
                    await self.start(())
                except MegasyncError as error:
                    reason = str(error)
            log.warning("router: started again at %s", self.url)

    def look_now(self) -> None:
        """The wanted servers have changed: the list is looked at with the next look at the process."""
        self._next_look = 0.0

    async def settle(self, timeout: float) -> bool:
        """Brings the list to what is wanted now; False when it did not get there in time, and `live` goes on trying."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                if await self._adjust():
                    return True
            except ServerError as error:
                log.debug("the router's list could not be changed: %s", error)
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_AT_CHANGE)

    async def close(self) -> None:
        await self._end_process()
        if self._members is not None:
            await self._members.close()

    async def _adjust(self) -> bool:
        """True when the router lists exactly the wanted servers."""
        async with self._lock:
            return await self._members.adjust(self._wanted())

    async def _watch(self) -> str:
        """Why the router must be started again."""
        failures = 0
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if not await self._process.alive():
                    return f"its process has ended. Last lines of its log:\n{await self._process.tail(TAIL_LINES)}"
            except MegasyncError as error:
                return f"its actor is gone: {error}"
            if clock() >= self._next_look:
                self._next_look = clock() + LOOK_AT_LIST
                try:
                    await self._adjust()
                    failures = 0
                except ServerError as error:
                    failures += 1
                    if failures >= self._config.probe_failures:
                        return f"{failures} calls in a row failed: {error}"
            await asyncio.sleep(LOOK_SECONDS)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop(self._stop_timeout)
