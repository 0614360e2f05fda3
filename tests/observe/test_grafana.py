"""configs/grafana.json asks only for metrics that exist, and Prometheus itself understands its questions."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from rich.console import Console

from megasync.config import load_config
from megasync.config.schema import PrometheusConfig
from megasync.observe.display import RunSnapshot
from megasync.observe.observer import RunObserver
from megasync.observe.prometheus import Exported, PrometheusSink, state_gauges
from megasync.observe.registry import METRICS
from megasync.observe.sinks import StepMetrics

PROMETHEUS = shutil.which("prometheus")
PANELS = json.loads((Path(__file__).parents[2] / "configs" / "grafana.json").read_text())["panels"]
TARGETS = [target for panel in PANELS for target in panel.get("targets", ())]
QUERIES = [target["expr"] for target in TARGETS]
SNAPSHOT = RunSnapshot("run", Path("run"), step=0, total_steps=1, version=0, seconds=0.0)
EXPORTED = [*map(Exported.of, METRICS), *(gauge for gauge, _ in state_gauges(SNAPSHOT, {}))]
# Of SGLang, with --enable-metrics.
SERVER_METRICS = {"gen_throughput", "num_queue_reqs", "token_usage"}


def test_every_metric_that_it_asks_for_exists():
    exported = {metric.series for metric in EXPORTED}
    asked = {name for query in QUERIES for name in re.findall(r"megasync_\w+", query)}
    assert len(asked) > 50 and asked <= exported
    assert {name for query in QUERIES for name in re.findall(r"sglang\[:_\](\w+)", query)} == SERVER_METRICS


def test_labels_in_legends_are_labels_of_the_metric():
    labels = {metric.series: metric.labels for metric in EXPORTED}
    for target in TARGETS:
        name, *_ = [*re.findall(r"megasync_\w+", target["expr"]), ""]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= {*labels.get(name, ()), "server"}, target


@contextmanager
def prometheus_server(folder, target):
    """A Prometheus that scrapes a run every second, as docs/trackers.md says; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "prometheus.yml"
    config.write_text(
        f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: megasync
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: megasync-servers
    http_sd_configs: [{{url: "http://{target}/servers", refresh_interval: 1s}}]
"""
    )
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *arguments], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def ask(address, query):
    """The series that answer a query, as labels and value."""
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        found = json.load(answer)["data"]["result"]
    return [(series["metric"], float(series["value"][1])) for series in found]


def wait_for(address, query):
    while True:
        try:
            if found := ask(address, query):
                return found
        except urllib.error.HTTPError as error:
            assert error.code == 503, error.read()
        except urllib.error.URLError:
            pass  # it still starts
        time.sleep(0.1)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_scrapes_a_run_and_its_servers_and_answers_every_query(tmp_path):
    config = load_config(
        {"model": {"path": "m"}, "data": {"train": {"kind": "digits", "source": "copy"}}}, ["observe.live=false"]
    )
    observer = RunObserver(config, tmp_path / "run-1", console=Console(file=StringIO()))
    of_server = CollectorRegistry()
    Gauge("sglang:gen_throughput", "Tokens per second.", registry=of_server).set(70.0)
    server, thread = start_http_server(0, "127.0.0.1", registry=of_server)
    servers = {"server-0": f"http://127.0.0.1:{server.server_port}/metrics"}
    sink = PrometheusSink(PrometheusConfig(port=0), observer.snapshot, lambda: servers)
    target = urllib.parse.urlsplit(sink.open().split()[3]).netloc
    try:
        sink.log(StepMetrics(4, 1000.0, {"train/server_kl@2": 0.25, "rollout/tokens": 640.0}))
        with prometheus_server(tmp_path, target) as address:
            ((labels, value),) = wait_for(address, "megasync_train_server_kl_versions")
            assert (labels["versions"], labels["job"], value) == ("2", "megasync", 0.25)
            ((_, counted),) = wait_for(address, "megasync_rollout_tokens_total")
            assert counted == 640.0
            (of_servers,) = (query for query in QUERIES if "gen_throughput" in query)
            ((labels, value),) = wait_for(address, of_servers.replace("$directory", "run-1"))
            assert (labels["server"], labels["job"], value) == ("server-0", "megasync-servers", 70.0)
            for query in QUERIES:
                # Raises for one that Prometheus does not understand.
                ask(address, query.replace("$instance", target).replace("$directory", "run-1"))
    finally:
        sink.close(failed=False)
        server.shutdown()
        server.server_close()
        thread.join()
