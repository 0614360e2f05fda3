"""What is said of several nodes together; the nodes themselves are real ones in the multi-host test."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megasync.config import load_config
from megasync.preflight.cluster_doctor import _equal, _sizes
from megasync.preflight.doctor import FAILURE, OK
from megasync.preflight.node_probe import NodeProbe, code_digest

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def look(**facts: str) -> dict:
    usual = {"python": "3.11.7", "megasync's code": "abc", "packages": "torch 2, ray 2", "devices": "no GPU"}
    return {"facts": usual | facts, "gpus": 0, "findings": []}


def test_nodes_that_are_alike_pass() -> None:
    found = list(_equal({"a": look(), "b": look()}))
    assert [finding.status for finding in found] == [OK] * 4


def test_the_odd_node_is_named_with_what_differs() -> None:
    looks = {"a": look(), "b": look(packages="torch 2, ray 3"), "c": look()}
    (odd,) = [finding for finding in _equal(looks) if finding.status == FAILURE]
    assert odd.subject == "same packages" and odd.detail == "b has ray 3, others ray 2" and odd.fix


def test_too_few_nodes_and_too_few_gpus_are_found() -> None:
    one_each = ["cluster.device=cpu", "cluster.devices_per_node=2"]
    config = load_config(CONFIG, one_each)
    (size,) = _sizes({"a": look()}, config)
    assert size.status == FAILURE and "take 2 node(s) of 2 devices; there are 1" in size.detail
    assert [finding.status for finding in _sizes({"a": look(), "b": look()}, config)] == [OK]
    config = load_config(CONFIG, ["cluster.device=cuda"])
    *_, few = _sizes({"a": look() | {"gpus": 4}}, config)
    assert few.status == FAILURE and "cluster.devices_per_node=4" in few.fix


def test_a_node_reaches_another_or_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGASYNC_HOST", "127.0.0.1")
    here, there = NodeProbe(), NodeProbe()
    place = there.listen()
    assert place[0] == "127.0.0.1"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        failures = here.connect({"there": place, "nowhere": closed.getsockname()}, 5.0)
    assert list(failures) == ["nowhere"]
    (tmp_path / "note").write_text("seen")
    assert here.reads(str(tmp_path / "note")) == "seen" and here.reads(str(tmp_path / "missing")) is None
    here.all_reduce(*here.meeting_point(20.0), rank=0, world=1, seconds=20.0)


def test_the_digest_of_the_code_is_stable() -> None:
    assert code_digest() == code_digest() and len(code_digest()) == 12
