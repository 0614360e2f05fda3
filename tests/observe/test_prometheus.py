"""The endpoint shows the newest value of every metric under one rule for names, and nothing else."""

import json
import socket
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from functools import partialmethod
from io import StringIO
from socketserver import TCPServer

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from rich.console import Console
from waits import PATIENCE

from megasync.config import load_config
from megasync.config.schema import PrometheusConfig
from megasync.observe import prometheus
from megasync.observe.observer import RunObserver
from megasync.observe.prometheus import Exported, PrometheusSink, state_gauges
from megasync.observe.registry import METRICS, metric_of
from megasync.observe.sinks import StepMetrics


@pytest.fixture
def observer(tmp_path):
    config = load_config(
        {"model": {"path": "m"}, "data": {"train": {"kind": "digits", "source": "copy"}}},
        ["observe.tensorboard=false", "observe.live=false", "name=test", "schedule.total_steps=20"],
    )
    return RunObserver(config, tmp_path / "run-1", console=Console(file=StringIO()))


@pytest.fixture(autouse=True)
def prompt_end(monkeypatch):
    """A server's thread looks every half second whether it is to end."""
    monkeypatch.setattr(prometheus._Server, "serve_forever", partialmethod(TCPServer.serve_forever, 0.01))


@contextmanager
def endpoint(observer, servers=None):
    """A sink that listens, and its address."""
    sink = PrometheusSink(PrometheusConfig(port=0), observer.snapshot, lambda: servers or {})
    message = sink.open()
    try:
        yield sink, message.split()[3].removesuffix("/metrics,")
    finally:
        sink.close(failed=False)


def get(url, accept="text/plain"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return answer.read().decode()


def samples(url):
    """Values by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse(get(url + "/metrics"))
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("logged", "series", "labels"),
    [
        ("train/loss", "megasync_train_loss", {}),
        ("time/step", "megasync_time_step_seconds", {}),
        ("train/seconds", "megasync_train_seconds", {}),
        ("rollout/tokens", "megasync_rollout_tokens_total", {}),
        ("train/server_kl@3", "megasync_train_server_kl_versions", {"versions": "3"}),
        ("eval/score", "megasync_eval_score", {}),
        ("eval/score@0.7", "megasync_eval_score_temperature", {"temperature": "0.7"}),
        ("eval/hard/pass8@1", "megasync_eval_set_pass_k_temperature", {"set": "hard", "k": "8", "temperature": "1"}),
        ("sync/load_seconds", "megasync_sync_phase_seconds", {"phase": "load"}),
        ("rollout/dropped_uniform", "megasync_rollout_dropped_reason_total", {"reason": "uniform"}),
        ("rollout/search/hits", "megasync_rollout_metric", {"metric": "search/hits"}),
        ("teachers/large/requests", "megasync_teachers_name_requests_total", {"name": "large"}),
    ],
)
def test_a_metric_has_a_name_without_values_and_labels_with_them(observer, logged, series, labels):
    with endpoint(observer) as (sink, url):
        sink.log(StepMetrics(1, 0.0, {logged: 2.5}))
        assert samples(url)[(series, *sorted(labels.items()))] == 2.5


def test_no_two_metrics_share_a_name(observer):
    exported = [*map(Exported.of, METRICS), *(gauge for gauge, _ in state_gauges(observer.snapshot(), {}))]
    assert max(Counter(metric.name for metric in exported).values()) == 1
    assert max(Counter(metric.series for metric in exported).values()) == 1


def test_every_metric_can_be_scraped_with_its_meaning_and_unit(observer):
    """Both formats of Prometheus accept the names, and the text of the registry arrives."""
    logged = {metric.name.replace("<", "").replace(">", "").replace("...", ""): 1.0 for metric in METRICS}
    with endpoint(observer) as (sink, url):
        sink.log(StepMetrics(1, 5.0, logged))
        families = {
            family.name: family for family in parse_openmetrics(get(url + "/metrics", "application/openmetrics-text"))
        }
        assert {family.name for family in parse(get(url + "/metrics"))} >= families.keys()
    for name in logged:
        exported = Exported.of(metric_of(name))
        assert families[exported.name].documentation == exported.meaning
        assert families[exported.name].type == ("counter" if exported.counter else "gauge")
    assert families["megasync_rollout_tokens"].documentation.endswith("Unit: tokens.")


def test_a_counter_does_not_fall_when_steps_are_trained_again(observer):
    """Otherwise Prometheus would take it for a restart, and count everything twice."""
    with endpoint(observer) as (sink, url):
        for step, trained in ((1, 40.0), (2, 80.0), (1, 40.0), (2, 80.0), (3, 120.0)):
            sink.log(StepMetrics(step, 0.0, {"groups/trained": trained, "groups/live": trained}))
            assert samples(url)["megasync_groups_live",] == trained
        assert samples(url)["megasync_groups_trained_total",] == 120.0
        sink.log(StepMetrics(2, 0.0, {"groups/trained": 80.0}))
        assert samples(url)["megasync_groups_trained_total",] == 120.0


def test_how_old_values_are_can_be_seen(observer):
    with endpoint(observer) as (sink, url):
        assert not any("timestamp" in key[0] for key in samples(url))
        sink.log(StepMetrics(7, 1000.0, {"train/loss": 1.0}))
        sink.log(StepMetrics(5, 900.0, {"eval/score": 0.5}, evaluation=True))
        found = samples(url)
    assert found["megasync_last_step_timestamp_seconds",] == 1000.0
    assert found["megasync_last_evaluation_timestamp_seconds",] == 900.0
    assert found["megasync_evaluation_step",] == 5.0


def test_the_state_between_steps_is_shown(observer):
    with endpoint(observer) as (_, url):
        observer.step(3, 2, {})
        counts = dict.fromkeys(("capacity", "admitted", "trained", "live"), 0)
        observer.buffer({"slots": {"finished": 4}, "dropped": {}, **counts}, {})
        observer.activity("rollout", "generating 12 groups")
        found = samples(url)
    assert found["megasync_step",] == 3.0 and found["megasync_total_steps",] == 20.0
    assert found["megasync_buffer_finished",] == 4.0
    assert ("megasync_activity_seconds", ("doing", "generating n groups"), ("part", "rollout")) in found
    assert found["megasync_run_info", ("directory", "run-1"), ("run", "test")] == 1.0


def test_the_servers_are_listed_for_service_discovery(observer):
    servers = {"server-0": "http://10.0.0.3:3000/metrics", "router": "http://[::1]:29000/metrics"}
    with endpoint(observer, servers) as (_, url):
        listed = json.loads(get(url + "/servers"))
    run = {"run": "test", "directory": "run-1"}
    assert listed == [
        {"targets": ["[::1]:29000"], "labels": {"server": "router", "__metrics_path__": "/metrics", **run}},
        {"targets": ["10.0.0.3:3000"], "labels": {"server": "server-0", "__metrics_path__": "/metrics", **run}},
    ]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/config", 404), ("POST", "/metrics", 501)]
)
def test_every_other_request_is_refused(observer, method, path, status):
    with endpoint(observer) as (_, url):
        request = urllib.request.Request(url + path, method=method, data=b"" if method == "POST" else None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE)
    assert refused.value.code == status


def test_it_listens_on_its_address_only(observer):
    with endpoint(observer) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", int(port)))


def test_connections_that_send_nothing_are_few_and_keep_nobody_out(observer, monkeypatch):
    monkeypatch.setattr(prometheus, "CONNECTIONS", 4)
    with endpoint(observer) as (sink, url):
        address = sink._server.server_address
        clients = [socket.create_connection(address, timeout=PATIENCE) for _ in range(12)]
        try:
            for client in clients:
                client.send(b"GET /met")
            assert "megasync_step" in get(url + "/metrics")
            # The oldest were ended; what is left and the request above fit.
            for client in clients[:8]:
                assert client.recv(1) == b""
            assert len(sink._server._ends) <= 4
        finally:
            for client in clients:
                client.close()


def test_a_request_that_trickles_in_ends_when_its_time_is_over(observer, monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_SECONDS", 0.0)
    with endpoint(observer) as (sink, url):
        with socket.create_connection(sink._server.server_address, timeout=PATIENCE) as client:
            client.send(b"GET /met")
            assert client.recv(1) == b"", "ended, although the thread would wait 10 s for the next byte"
        monkeypatch.undo()
        assert "megasync_step" in get(url + "/metrics")
