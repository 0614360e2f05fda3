"""Checks across machines: each problem on one machine at a time.

The machines are `NodeProbe`s in this process with their own sockets and files; the multi-host test has real ones.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from megasync.config import load_config
from megasync.errors import MegasyncError
from megasync.planning import cluster_doctor
from megasync.planning.cluster_checks import examine_nodes
from megasync.planning.finding import FAILURE, OK, WARNING
from megasync.planning.node_probe import NodeProbe, code_digest

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
USUAL = {"python": "3.11.7", "megasync's code": "abc", "packages": "torch 2, ray 2", "devices": "no GPU"}


class FakeNode(NodeProbe):
    """A fake for facts, meeting point and all-reduce; listens, connects and reads like the real probe."""

    def __init__(self) -> None:
        super().__init__()
        self.facts, self.gpus, self.findings = (
            dict(USUAL),
            0,
            [{"subject": "disk", "status": OK, "detail": "room", "fix": ""}],
        )
        self.skew, self.folder, self.reduced = 0.0, None, []

    def look(self, config):
        self.config = config
        return {"facts": self.facts, "gpus": self.gpus, "findings": self.findings}

    def clock(self):
        return time.time() + self.skew

    def reads(self, path):
        return super().reads(path if self.folder is None else str(self.folder / Path(path).name))

    def all_reduce(self, backend, host, port, rank, world, seconds):
        self.reduced.append((backend, rank, world))

    def close(self):
        if self._listener is not None:
            self._listener.close()


class FakeNodes:
    """Calls all nodes concurrently, each in a thread; `silent` names those that do not answer a method."""

    def __init__(self, count: int = 3) -> None:
        self.nodes = {f"h{number}": FakeNode() for number in range(count)}
        self.silent: set[tuple[str, str]] = set()

    @property
    def names(self):
        return tuple(self.nodes)

    def ask(self, method: str, seconds: float, arguments: Mapping[str, tuple]):
        lost = {name: "no answer" for name in arguments if (name, method) in self.silent}
        with ThreadPoolExecutor() as pool:
            asked = {
                n: pool.submit(getattr(self.nodes[n], method), *given)
                for n, given in arguments.items()
                if n not in lost
            }
        answers = {}
        for name, future in asked.items():
            if error := future.exception():
                lost[name] = str(error)
            else:
                answers[name] = future.result()
        return answers, lost


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    made = FakeNodes()
    yield made
    for node in made.nodes.values():
        node.close()


@pytest.fixture
def config(tmp_path):
    return load_config(CONFIG, [f"run_root={tmp_path / 'runs'}", "cluster.device=cpu", "cluster.devices_per_node=2"])


def examine(nodes, config=None):
    """The findings that are not OK, each of which must have a fix."""
    found = list(examine_nodes(nodes, config))
    assert all((finding.status == OK) == (finding.fix == "") for finding in found)
    return [finding for finding in found if finding.status != OK]


def only(findings):
    (found,) = findings
    return found


def test_identical_machines_without_problems(nodes, config, tmp_path):
    assert examine(nodes, config) == []
    assert [node.reduced for node in nodes.nodes.values()] == [[("gloo", rank, 3)] for rank in range(3)]
    assert list((tmp_path / "runs").iterdir()) == []
    subjects = [finding.subject for finding in examine_nodes(nodes, config)]
    assert subjects[:3] == ["h0", "h1", "h2"] and "size" in subjects and "clocks" in subjects


def test_relative_paths_are_absolute_on_other_machines(nodes, config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config.model.path = "models/digits"
    examine(nodes, config)
    assert {node.config.model.path for node in nodes.nodes.values()} == {str(tmp_path / "models" / "digits")}
    assert config.model.path == "models/digits"


def test_findings_of_a_machine_have_its_name(nodes):
    nodes.nodes["h1"].findings.append(
        {"subject": "patch x", "status": FAILURE, "detail": "other version", "fix": "install"}
    )
    found = only(examine(nodes))
    assert (found.subject, found.status, found.fix) == ("h1: patch x", FAILURE, "install")


def test_a_machine_that_does_not_answer(nodes):
    nodes.silent.add(("h2", "look"))
    found = only(examine(nodes))
    assert (found.subject, found.status) == ("h2", FAILURE) and "look: no answer" in found.detail


@pytest.mark.parametrize(
    ("subject", "value", "detail"),
    [
        ("python", "3.12.1", "h1 has 3.12.1, others have 3.11.7"),
        ("megasync's code", "xyz", "h1 has xyz, others have abc"),
        ("packages", "torch 2, ray 3", "h1 has ray 3, others have ray 2"),
    ],
)
def test_a_machine_with_another_version(nodes, subject, value, detail):
    nodes.nodes["h1"].facts[subject] = value
    found = only(examine(nodes))
    assert (found.subject, found.status, found.detail) == (f"same {subject}", FAILURE, detail)


def test_machines_of_two_kinds_are_a_warning(nodes):
    nodes.nodes["h2"].facts["devices"] = "H100"
    found = only(examine(nodes))
    assert (found.subject, found.status) == ("same devices", WARNING) and "--hosts" in found.fix


def test_a_clock_that_is_wrong(nodes):
    nodes.nodes["h1"].skew = -30.0
    found = only(examine(nodes))
    assert (found.subject, found.status) == ("clocks", WARNING)
    assert "at h1" in found.detail and "30.0 s" in found.detail and "NTP" in found.fix


def test_a_run_folder_that_is_not_shared(nodes, config, tmp_path):
    nodes.nodes["h1"].folder = tmp_path
    found = only(examine(nodes, config))
    assert (found.subject, found.status) == ("shared run folder", FAILURE)
    assert "not the same folder on h1" in found.detail and "run_root" in found.fix


def test_a_run_folder_that_cannot_be_written(nodes, config, tmp_path):
    (tmp_path / "file").touch()
    config.run_root = str(tmp_path / "file" / "runs")
    assert only(examine(nodes, config)).subject == "shared run folder"


def test_too_few_machines(config, monkeypatch):
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    one = FakeNodes(1)
    found = only(examine(one, config))
    one.nodes["h0"].close()
    assert found.subject == "size" and "need 2 node(s) of 2 devices; there are 1" in found.detail


def test_too_few_gpus_on_a_machine(nodes, config):
    config.cluster.device = "cuda"
    for name, gpus in (("h0", 8), ("h1", 1), ("h2", 0)):
        nodes.nodes[name].gpus = gpus
    one, none = examine(nodes, config)
    assert (one.subject, one.status) == ("h1: gpus", FAILURE) and "cluster.devices_per_node=1" in one.fix
    assert none.subject == "h2: gpus" and "driver" in none.fix


def test_a_blocked_connection(nodes):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = closed.getsockname()
        nodes.nodes["h1"].listen = lambda: place
        found = only(examine(nodes))
    assert (found.subject, found.status) == ("network between nodes", FAILURE)
    assert "h0 to h1" in found.detail and "firewall" in found.fix
    assert nodes.nodes["h0"].reduced == []


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_collective_that_fails(nodes, backend):
    for node in nodes.nodes.values():
        node.gpus = 8

    def fail(kind, *rest):
        if kind == backend:
            raise RuntimeError("no route to host")

    nodes.nodes["h2"].all_reduce = fail
    found = only(examine(nodes))
    assert (found.subject, found.status) == (f"all-reduce over {backend}", FAILURE)
    assert "h2: no route to host" in found.detail and f"{backend.upper()}_SOCKET_IFNAME" in found.fix


def test_no_cluster_at_the_address(monkeypatch):
    def refuse(**options):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        MegasyncError, match="no Ray cluster can be joined at 192.0.2.1:1.*nobody there.*RAY_AUTH_TOKEN"
    ):
        cluster_doctor.examine_cluster("192.0.2.1:1", 1, 0.0)


NODE = {"Alive": True, "NodeManagerAddress": "192.0.2.1", "NodeManagerHostname": "h0", "Resources": {"CPU": 4.0}}


def test_missing_machines(monkeypatch):
    """A head for the driver alone, which offers Ray no device, is none of those that are waited for."""
    head = {"NodeManagerAddress": "192.0.2.9", "NodeManagerHostname": "head", "Resources": {"memory": 1.0}}
    there = [NODE | {"NodeID": "0"}, NODE | head | {"NodeID": "1"}]
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: there)
    found = only(cluster_doctor.examine_cluster("auto", 2, 0.0))
    assert (found.subject, found.status) == ("nodes", FAILURE) and "1 of 2 within 0 s: h0 (192.0.2.1)" in found.detail


def test_a_machine_under_two_names(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [NODE | {"NodeID": "0"}, NODE | {"NodeID": "1"}])
    found = only(cluster_doctor.examine_cluster("auto", 2, 0.0))
    assert (found.status, found.detail) == (FAILURE, "2 Ray nodes at 192.0.2.1") and "once" in found.fix


def test_a_real_probe_reads_connects_and_reduces(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    here, there = NodeProbe(), NodeProbe()
    place = there.listen()
    assert place[0] == "127.0.0.1"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        failures = here.connect({"there": place, "nowhere": closed.getsockname()}, 5.0)
    assert list(failures) == ["nowhere"]
    there._listener.close()
    (tmp_path / "note").write_text("seen")
    assert here.reads(str(tmp_path / "note")) == "seen" and here.reads(str(tmp_path / "missing")) is None
    here.all_reduce("gloo", *here.meeting_point(20.0), rank=0, world=1, seconds=20.0)


@pytest.mark.processes
def test_a_probe_examines_its_machine_for_the_configuration(config, monkeypatch):
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    config.model.path = "/absent"
    look = NodeProbe().look(config)
    assert set(look["facts"]) == set(USUAL) and look["gpus"] == 0
    wrong = [finding["subject"] for finding in look["findings"] if finding["status"] == FAILURE]
    assert wrong == ["configuration"]


def test_the_digest_of_the_code_is_stable():
    assert code_digest() == code_digest() and len(code_digest()) == 12
