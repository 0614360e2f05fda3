"""The router in front of the SGLang servers: one address, and requests spread by policy.

It forwards generation only; control calls go straight to the servers. A request is sent once: the router's own retries
would run a generation twice, so they are off and the client retries. Health probes stay rare and lenient, because a
server that is paused for a weight sync must not be taken out of rotation.

With keys, only the holder of the router's key can read or change its list of servers, and only the holder of the
generation key, if there is one, can generate. The open routes expose the number of healthy servers and the model's
name.

The list of servers changes over the router's own HTTP interface while it runs (`RouterMembers`). Observed behaviour of
sglang-router 0.3.2: adding (`POST /workers`) and removing (`DELETE /workers/{id}`) are queued, so callers repeat them
until the list shows the change. A removal interrupts nothing: running requests, streamed or not, finish. A server
added twice is listed once. A router may run without servers, and then answers 503.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import aiohttp
import msgspec

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config.access import Keys, check_certificates, router_trust
from megasync.config.host import without_proxies
from megasync.config.schema import ClusterConfig
from megasync.errors import HttpStatusError, ServerError
from megasync.serving.answers import parse_as
from megasync.serving.control import ServerControl
from megasync.serving.process import Service, free_port

POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing", "sticky")
# Those that send requests with the same value of `ROUTING_KEY_HEADER`, or with the same beginning, to one server.
STICKY_POLICIES = ("cache_aware", "consistent_hashing", "sticky")
# Seconds for the router to answer a call about its list of servers.
ANSWER_SECONDS = 5.0

# Seconds after which a change of the list is requested again if the router has not applied it; it first checks the
# health of a server that it adds.
REPEAT_SECONDS = 5.0
_CHANGES_AT_ONCE = 8

# `consistent_hashing` is not on the router's command line, only in its Python arguments. The package's own launcher
# would work too, but it imports SGLang and torch first, for a second router in Python that is not needed here.
_LAUNCH = """
import json, sys
from setproctitle import setproctitle
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
setproctitle("sglang::router")
Router.from_args(RouterArgs(**json.loads(sys.argv[1]), **json.load(sys.stdin))).start()
"""


class Router(Service):
    """One router process. The constructor only stores settings; `start` opens everything."""

    name = "router"

    def __init__(
        self,
        server_urls: Sequence[str],
        policy: str,
        host: str,
        port: int,
        log_path: str | Path,
        request_timeout: float = 600.0,
        keys: Keys | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        """`cluster` names the TLS certificate, if there is one."""
        super().__init__(host, port, log_path)
        if policy not in POLICIES:
            raise ServerError(f"router policy {policy!r} is not one of {', '.join(POLICIES)}")
        self.server_urls = [url.rstrip("/") for url in server_urls]
        # power_of_two chooses between two servers; the router refuses to start with it for fewer.
        self.policy = "round_robin" if policy == "power_of_two" and len(server_urls) < 2 else policy
        self.request_timeout = request_timeout
        self._keys = keys
        self._cluster = cluster or ClusterConfig()
        self.scheme = "http" if self._cluster.tls_cert is None else "https"
        self._prometheus_port = 0

    def arguments(self) -> dict[str, object]:
        """Fields of the router package's `RouterArgs`."""
        arguments: dict[str, object] = {
            "worker_urls": self.server_urls,
            # The router remembers the server of each key, and gives a new key to the server with the fewest requests.
            "policy": "manual" if self.policy == "sticky" else self.policy,
            "assignment_mode": "min_load",
            "host": self.host,
            "port": self.port,
            # The metrics endpoint listens on all interfaces and a fixed port unless told otherwise.
            "prometheus_host": self.host,
            "prometheus_port": self._prometheus_port,
            "disable_retries": True,
            # Keeps cache-affine requests off a dead server long before the health probe notices it.
            "cb_failure_threshold": 5,
            "cb_success_threshold": 1,
            "cb_timeout_duration_secs": 10,
            "health_check_interval_secs": 30,
            "health_check_timeout_secs": 20,
            "health_failure_threshold": 3,
            "health_success_threshold": 1,
            "worker_startup_check_interval": 1,
            # The client's deadline comes first, so that it is the one that is reported.
            "request_timeout_secs": int(self.request_timeout) + 60,
            "shutdown_grace_period_secs": 1,
            "history_backend": "none",
            "log_level": "warn",
        }
        certificate = {"server_cert_path": self._cluster.tls_cert, "server_key_path": self._cluster.tls_key}
        return arguments | {name: str(path) for name, path in certificate.items() if path is not None}

    def secrets(self) -> bytes:
        if self._keys is None:
            return b"{}"
        # The router expects tuples of id, name, key and role.
        keys: dict[str, object] = {"control_plane_api_keys": [("megasync", "megasync", self._keys.router, "admin")]}
        if self._keys.generation is not None:
            keys["api_key"] = self._keys.generation
        return json.dumps(keys).encode()

    def prepare(self) -> None:
        # On the machine that the router runs on, which may differ from the driver's.
        check_certificates(self._cluster)
        self._prometheus_port = free_port(self.host)

    def command(self) -> list[str]:
        return [sys.executable, "-c", _LAUNCH, json.dumps(self.arguments())]

    def environment(self) -> dict[str, str]:
        return without_proxies(os.environ) | {"PYTHONUNBUFFERED": "1"}

    async def ready(self) -> bool:
        """Whether it answers and every server that it was started with is registered and healthy."""
        if not self.alive():
            return False
        listed = await self.listed_servers()
        healthy = {server.url for server in listed or () if server.is_healthy}
        return listed is not None and healthy.issuperset(self.server_urls)

    def metrics_url(self) -> str:
        """Where Prometheus can scrape the router; known once it has started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._prometheus_port}/metrics"

    async def listed_servers(self) -> list[ListedServer] | None:
        """The servers that the router lists; None while it does not answer.

        Raises ServerError when the certificate does not identify the router.
        """
        key = None if self._keys is None else self._keys.router
        try:
            async with ServerControl(self.url, key, router_trust(self._cluster)) as control:
                return await list_servers(control)
        except ServerError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorCertificateError):
                raise ServerError(
                    f"the certificate in cluster.tls_cert={self._cluster.tls_cert} does not prove that {self.url} is "
                    f"the router: {error.__cause__.certificate_error}; it must name {self.host} and be signed by "
                    f"{self._cluster.tls_ca or 'itself'} (cluster.tls_ca)"
                ) from error
            return None


@prepared
class ListedServer(msgspec.Struct):
    """A server as the router lists it, which calls it a worker."""

    url: str
    id: str = ""
    is_healthy: bool = False

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")


@prepared
class _ServerList(msgspec.Struct):
    workers: list[ListedServer]


async def list_servers(router: ServerControl) -> list[ListedServer]:
    """The servers that the router lists. Raises ServerError."""
    answer = await router.get("/workers", timeout=ANSWER_SECONDS)
    return parse_as(answer, _ServerList, f"{router.url}/workers").workers


class RouterMembers:
    """Changes the list of servers of a running router. Owns the router's control: `close` closes it.

    Each change is one request per server that is added or removed. The router applies it later, so a change that was
    requested is not requested again for REPEAT_SECONDS.
    """

    def __init__(
        self,
        router: ServerControl,
        generation_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`generation_key` is the key that the servers require for generation."""
        self._control = router
        self._server = {} if generation_key is None else {"api_key": generation_key}
        self._clock = clock
        # Clock readings of requested changes, by URL and whether to list it, until the router has applied them.
        self._requested: dict[tuple[str, bool], float] = {}

    async def adjust(self, wanted: Collection[str]) -> bool:
        """Requests the additions and removals that are needed; returns True when the list matched `wanted` already.

        Raises ServerError when the router does not answer.
        """
        ids = {server.url: server.id for server in await list_servers(self._control)}
        missing, surplus = set(wanted) - ids.keys(), ids.keys() - set(wanted)
        changes = {(url, True) for url in missing} | {(url, False) for url in surplus}
        late = self._clock() - REPEAT_SECONDS
        self._requested = {change: at for change, at in self._requested.items() if change in changes and at > late}
        due = sorted(changes - self._requested.keys())
        # In batches: the first change of a restarted router adds every server.
        for begin in range(0, len(due), _CHANGES_AT_ONCE):
            batch = due[begin : begin + _CHANGES_AT_ONCE]
            await gather_or_cancel(*(self._change(url, None if listed else ids[url]) for url, listed in batch))
            self._requested |= dict.fromkeys(batch, self._clock())
        return not changes

    async def _change(self, url: str, listed_id: str | None) -> None:
        """Requests that a listed server is removed, or another one is added."""
        try:
            if listed_id is None:
                await self._control.post("/workers", {"url": url} | self._server, timeout=ANSWER_SECONDS)
            else:
                await self._control.delete(f"/workers/{listed_id}", timeout=ANSWER_SECONDS)
        except HttpStatusError as error:
            # An earlier removal of the same server has completed in the meantime.
            if listed_id is None or error.status != 404:
                raise

    async def close(self) -> None:
        await self._control.close()
