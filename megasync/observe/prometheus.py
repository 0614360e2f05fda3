"""An HTTP endpoint that Prometheus scrapes: the newest value of every metric of a run, and where its servers are.

    GET /metrics    the metrics of driver, rollout workers and trainer ranks, as the driver knows them
    GET /servers    addresses of the servers' and the router's own metrics, for `http_sd_configs`

Prometheus scrapes servers itself, so nothing in the driver grows with their number. Their metrics need no key, and
neither do these: they hold counts and names, no prompts and no secrets, and every other request is refused.

Whoever reaches the endpoint may connect, so it has at most CONNECTIONS threads, each for at most REQUEST_SECONDS: one
connection more ends the oldest, and a request that trickles in ends when its time is over.

A name of the registry becomes a name of Prometheus by one rule (`Exported.of`): `eval/<set>/score@<temperature>` is
`megasync_eval_set_score_temperature{set="hard",temperature="0.7"}`. What `counts` is a counter, and never falls while
the process lives: steps that are trained again count once. A gauge holds what was measured last, and
`megasync_last_step_timestamp_seconds` says when that was.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from megasync.config.host import resolve_host
from megasync.config.schema import PrometheusConfig
from megasync.errors import ConfigError, raised_as
from megasync.observe import names
from megasync.observe.display import RunSnapshot
from megasync.observe.registry import Metric, metric_of
from megasync.observe.sinks import Sink, StepMetrics

log = logging.getLogger(__name__)

PREFIX = "megasync"
METRICS_PATH = "/metrics"
SERVERS_PATH = "/servers"
# Prometheus wants base units at the end of a name.
UNITS = {"s": "seconds", "bytes": "bytes"}
# Seconds from the connection of a client until it has its answer.
REQUEST_SECONDS = 10.0
# Connections at a time: one scraper has one, for milliseconds.
CONNECTIONS = 16
_WORD = re.compile(r"[^a-zA-Z0-9]+")


@dataclass(frozen=True, slots=True)
class Exported:
    """A metric of the registry as Prometheus knows it. `name` lacks the `_total` of a counter."""

    name: str
    labels: tuple[str, ...]
    meaning: str
    counter: bool

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, metric: Metric) -> Exported:
        words = [PREFIX, *filter(None, _WORD.split(metric.name))]
        unit = UNITS.get(metric.unit)
        if unit is not None and unit != words[-1]:
            words.append(unit)
        meaning = metric.meaning
        if metric.unit not in ("", *UNITS):
            meaning += f" Unit: {metric.unit}."
        labels = tuple("_".join(part.split()) for part in metric.parts)
        return cls("_".join(words), labels, meaning, metric.counts)

    @property
    def series(self) -> str:
        """The name in queries."""
        return f"{self.name}_total" if self.counter else self.name

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        return kind(self.name, self.meaning, labels=self.labels)


# Label values and the value of each sample.
Samples = list[tuple[tuple[str, ...], float]]


def state_gauges(snapshot: RunSnapshot, rows: Mapping[bool, StepMetrics]) -> list[tuple[Exported, Samples]]:
    """Gauges of the state of a run. `rows` are the newest of a step (False) and of an evaluation (True)."""
    step, evaluation = rows.get(False), rows.get(True)
    # Numbers in the text would make a series of each.
    activities: Samples = [
        ((activity.part, re.sub(r"\d+", "n", activity.doing)), activity.seconds) for activity in snapshot.activities
    ]
    gauges: list[tuple[str, str, tuple[str, ...], Samples]] = [
        ("run_info", "Always 1.", ("run", "directory"), [((snapshot.name, snapshot.run_dir.name), 1.0)]),
        ("activity_seconds", "For how long a part of the run has been doing this.", ("part", "doing"), activities),
    ]
    for name, meaning, value in (
        ("step", "Trained steps.", snapshot.step),
        ("total_steps", "Steps at which the run ends.", snapshot.total_steps),
        ("staleness_limit", "Largest age of a trained token. Unit: versions.", snapshot.staleness_limit),
        ("buffer_capacity", "Most groups that are active at a time.", snapshot.capacity),
        ("last_step_timestamp_seconds", "When the newest step was measured.", step and step.time),
        ("last_evaluation_timestamp_seconds", "When the newest evaluation ended.", evaluation and evaluation.time),
        ("evaluation_step", "The step whose weights the newest evaluation used.", evaluation and evaluation.step),
    ):
        gauges.append((name, meaning, (), [] if value is None else [((), value)]))
    return [
        (Exported(f"{PREFIX}_{name}", labels, meaning, False), samples) for name, meaning, labels, samples in gauges
    ]


class PrometheusSink(Sink):
    """An endpoint without a key shows no text, so no answers.

    `snapshot` and `servers`, which gives addresses by the server's name, are called by the threads of requests.
    """

    name = "Prometheus"

    def __init__(
        self,
        settings: PrometheusConfig,
        snapshot: Callable[[], RunSnapshot],
        servers: Callable[[], Mapping[str, str]],
    ) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._servers = servers
        self._lock = threading.Lock()
        # By their names in the registry.
        self._values: dict[str, float] = {}
        self._rows: dict[bool, StepMetrics] = {}
        self._server: _Server | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def open(self) -> str:
        host, port = resolve_host(self._settings.host), self._settings.port
        with raised_as(ConfigError, f"cannot listen at {host}:{port} (observe.prometheus)"):
            self._server = _Server(host, port, {METRICS_PATH: self._metrics, SERVERS_PATH: self._targets})
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return f"Prometheus can scrape {self._server.url}{METRICS_PATH}, and finds the servers at {SERVERS_PATH}"

    def log(self, row: StepMetrics) -> None:
        with self._lock:
            self._rows[row.evaluation] = row
            for name, value in row.values.items():
                if (metric := metric_of(name)) is None:
                    continue
                self._values[name] = max(value, self._values.get(name, value)) if metric.counts else value

    def close(self, failed: bool) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Family]:
        """All families, for `prometheus_client`."""
        snapshot = self._snapshot()
        with self._lock:
            values, rows = dict(self._values), dict(self._rows)
        # The buffer is reported every second, not only after a step.
        values |= {f"{names.BUFFER_PREFIX}{state}": float(count) for state, count in snapshot.buffer.items()}
        families: dict[str, Any] = {}
        for name, value in values.items():
            metric = metric_of(name)
            if metric is None:
                continue
            exported = Exported.of(metric)
            family = families.setdefault(exported.name, exported.family())
            match = metric.pattern.fullmatch(name)
            family.add_metric(match.groups() if match else (), value)
        yield from families.values()
        for exported, samples in state_gauges(snapshot, rows):
            family = exported.family()
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family

    def _metrics(self, accepted: str) -> tuple[str, bytes]:
        encode, kind = choose_encoder(accepted)
        return kind, encode(self._registry)

    def _targets(self, accepted: str) -> tuple[str, bytes]:
        """See Prometheus' `http_sd_configs`."""
        snapshot = self._snapshot()
        of_run = {"run": snapshot.name, "directory": snapshot.run_dir.name}
        targets = []
        for server, url in sorted(self._servers().items()):
            labels = {"server": server, "__metrics_path__": urlsplit(url).path} | of_run
            targets.append({"targets": [urlsplit(url).netloc], "labels": labels})
        return "application/json", json.dumps(targets).encode()


class _Server(ThreadingMixIn, TCPServer):
    """Answers GET at the given paths; each function gets the Accept header and returns the content and its type."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[str], tuple[str, bytes]]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        # When each open connection ends, the oldest first.
        self._ends: dict[socket.socket, float] = {}
        self._open = threading.Lock()
        super().__init__((host, port), _Handler)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open:
            if len(self._ends) >= CONNECTIONS:
                self._end(next(iter(self._ends)))
            self._ends[request] = time.monotonic() + REQUEST_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called every half second."""
        now = time.monotonic()
        with self._open:
            for request in [request for request, end in self._ends.items() if end < now]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Wakes the thread of a connection, which then closes it."""
        del self._ends[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._open:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        with self._open:
            for request in [*self._ends]:
                self._end(request)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that went away.
        log.debug("Prometheus: request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        page = self.server.pages.get(urlsplit(self.path).path)
        if page is None:
            self.send_error(404)
            return
        kind, content = page(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return PREFIX

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)
