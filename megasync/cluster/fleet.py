"""The rollout pool's processes: SGLang servers and the router in front of them. Their one owner in the driver."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from megasync.cluster.actors import Actors
from megasync.cluster.pools import Pools
from megasync.config import Config
from megasync.device import Device
from megasync.errors import MegasyncError, ServerError

log = logging.getLogger(__name__)

# Lines of a dead process's log that go into the error.
TAIL_LINES = 30
ANSWER_SECONDS = 30.0


class Fleet:
    """`urls` and `router_url` are known once `start` has returned."""

    def __init__(self, config: Config, run_dir: Path, device: Device, pools: Pools, api_key: str) -> None:
        self._config = config
        self._logs = run_dir / "logs"
        self._pools = pools
        self._router: Actors | None = None
        self.urls: list[str] = []
        self.router_url = ""
        host = config.cluster.host
        self._servers = Actors.create(
            "server",
            [
                (
                    config.model.path,
                    config.rollout,
                    config.model.dtype,
                    device.kind,
                    host,
                    0,
                    str(self._logs / f"server-{index}.log"),
                    api_key,
                    config.seed + index,
                    config.rollout.deterministic,
                )
                for index in range(config.rollout.servers)
            ],
            pools=pools,
        )

    async def start(self) -> None:
        """Starts the servers together, then the router. Raises ServerError with the log's end when one dies."""
        limit = self._config.timeouts.server_start
        self.urls = await self._servers.call("start", limit, timeout=limit + ANSWER_SECONDS)
        log.info("servers: %s", self.urls)
        config = self._config
        settings = (config.rollout.router_policy, config.cluster.host, 0, str(self._logs / "router.log"))
        self._router = Actors.create(
            "router", [(self.urls, *settings, config.timeouts.request)], pools=self._pools, guest=True
        )
        (self.router_url,) = await self._router.call("start", limit, timeout=limit + ANSWER_SECONDS)
        log.info("router: %s", self.router_url)

    async def watch(self) -> None:
        """Raises ServerError, with the last lines of its log, when a server or the router has died."""
        for role in (self._servers, self._router):
            if role is None:
                continue
            for slot, alive in enumerate(await role.call("alive", timeout=ANSWER_SECONDS)):
                if not alive:
                    tail = await role.call_one(slot, "tail", TAIL_LINES, timeout=ANSWER_SECONDS)
                    raise ServerError(f"{role.role} {slot} has died. Last lines of its log:\n{tail}")

    async def stop(self) -> None:
        limit = self._config.timeouts.shutdown
        for role in (self._router, self._servers):
            if role is None:
                continue
            try:
                await role.call("stop", timeout=limit)
            except (MegasyncError, asyncio.CancelledError) as error:
                log.debug("%s was ended without an answer: %r", role.role, error)
            finally:
                role.kill()
