"""The router in front of the SGLang servers: one address, requests spread by policy.

It forwards generation only; control calls go straight to the servers. Which servers those are may change while it runs
(`router_members`). A request is sent once: the router's own retries would run a generation twice, so they are off and the
client retries. With keys its list of servers is open to the holder of the router's key alone, and generation to that of
the generation key where there is one; other routes tell how many servers are healthy, and the model's name. Health probes stay rare and lenient, because a server that is paused for a weight sync must not be taken
out of rotation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from megasync.config.access import check_certificates, router_trust
from megasync.config.schema import ClusterConfig
from megasync.errors import ServerError
from megasync.serving.control import ServerControl
from megasync.serving.keys import Keys
from megasync.serving.ports import free_port
from megasync.serving.router_members import Worker, list_workers
from megasync.serving.service import Service

POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing")
# Requests with the same value of this header go to the same server under `consistent_hashing`.
ROUTING_KEY_HEADER = "x-smg-routing-key"

# `consistent_hashing` is not on the router's command line, only in its Python arguments. The package's launcher would do
# the same, but imports SGLang and torch first, for a second router in Python that nobody asks for.
_LAUNCH = """
import json, sys
from setproctitle import setproctitle
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
setproctitle("sglang::router")
Router.from_args(RouterArgs(**json.loads(sys.argv[1]), **json.load(sys.stdin))).start()
"""


class Router(Service):
    """Settings in the constructor, nothing opened before `start`."""

    name = "router"

    def __init__(
        self,
        worker_urls: Sequence[str],
        policy: str,
        host: str,
        port: int,
        log_path: str | Path,
        request_timeout: float = 600.0,
        keys: Keys | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        """`cluster` names the certificate, if there is one."""
        super().__init__(host, port, log_path)
        if policy not in POLICIES:
            raise ServerError(f"router policy {policy!r} is not one of {', '.join(POLICIES)}")
        self.worker_urls = [url.rstrip("/") for url in worker_urls]
        # Between two is how power_of_two chooses; the router refuses to start with it for fewer.
        self.policy = "round_robin" if policy == "power_of_two" and len(worker_urls) < 2 else policy
        self.request_timeout = request_timeout
        self._keys = keys
        self._cluster = cluster or ClusterConfig()
        self.scheme = "http" if self._cluster.tls_cert is None else "https"
        self._prometheus_port = 0

    def arguments(self) -> dict[str, object]:
        """Fields of the router package's `RouterArgs`."""
        certificate = {"server_cert_path": self._cluster.tls_cert, "server_key_path": self._cluster.tls_key}
        return {
            "worker_urls": self.worker_urls,
            "policy": self.policy,
            "host": self.host,
            "port": self.port,
            # The metrics endpoint listens on all interfaces and a fixed port unless told otherwise.
            "prometheus_host": self.host,
            "prometheus_port": self._prometheus_port,
            "disable_retries": True,
            # Keeps cache-affine requests off a dead server long before the health probe finds it.
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
        } | {name: str(path) for name, path in certificate.items() if path is not None}

    def secrets(self) -> bytes:
        if self._keys is None:
            return b"{}"
        # Named, as the router wants it: id, name, key, role.
        found: dict[str, object] = {"control_plane_api_keys": [("megasync", "megasync", self._keys.router, "admin")]}
        if self._keys.generation is not None:
            found["api_key"] = self._keys.generation
        return json.dumps(found).encode()

    def prepare(self) -> None:
        # On the machine that the router runs on, which may be another one than the driver's.
        check_certificates(self._cluster)
        self._prometheus_port = free_port(self.host)

    def command(self) -> list[str]:
        return [sys.executable, "-c", _LAUNCH, json.dumps(self.arguments())]

    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {"PYTHONUNBUFFERED": "1"}

    async def serving(self) -> bool:
        """True once it answers and every server that it was started with is registered and healthy."""
        if not self.alive():
            return False
        workers = await self.workers()
        if workers is None:
            return False
        ready = {worker.url.rstrip("/") for worker in workers if worker.is_healthy}
        return ready.issuperset(self.worker_urls)

    async def workers(self) -> list[Worker] | None:
        """What the router knows of its servers; None while it does not answer. Raises ServerError for a certificate that
        does not prove who answers."""
        control = ServerControl(
            self.url, None if self._keys is None else self._keys.router, router_trust(self._cluster)
        )
        try:
            return await list_workers(control)
        except ServerError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorCertificateError):
                raise ServerError(
                    f"the certificate in cluster.tls_cert={self._cluster.tls_cert} does not prove that {self.url} is the "
                    f"router: {error.__cause__.certificate_error}; it must name {self.host} and be signed by "
                    f"{self._cluster.tls_ca or 'itself'} (cluster.tls_ca)"
                ) from error
            return None
        finally:
            await control.close()
