"""`launch/multi_node.sh` over two hosts with networks of their own: training on one, generation on the other."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import FakeHosts, permitted

SCRIPT = Path(__file__).parents[2] / "launch" / "multi_node.sh"
ENDLESS = {"total_steps": 100_000, "groups_per_step": 4, "samples_per_group": 4}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FakeHosts]:
    (tmp_path / "hosts").mkdir()
    made = FakeHosts(tmp_path / "hosts", 2)
    yield made
    made.close()


def processes(hosts: FakeHosts, name: str) -> list[str]:
    """What runs on a host, but for its first process with its sleep, and the look itself."""
    look = [hosts.shell, name, "ps", "-e", "-o", "comm="]
    found = subprocess.run(look, capture_output=True, text=True, check=True).stdout.split()
    return [command for command in found if command not in ("bash", "sleep", "ps")]


def test_a_run_spans_hosts_and_outlives_one_of_them(hosts: FakeHosts, miniature, execute) -> None:
    config = miniature(schedule=ENDLESS, rollout={"servers": 1}, cluster={"devices_per_node": 2})
    run = execute("bash", SCRIPT, config, "--hosts", "host0=trainer,host1=rollout", "--shell", hosts.shell)
    run.wait_for("over 2 nodes")
    run.wait_for("step 2/")
    # A cable that is out for a moment costs nothing but that moment.
    hosts.cut("host1")
    hosts.heal("host1")
    run.wait_for("step 4/")

    hosts.crash("host1")
    hosts.switch_on("host1")
    run.wait_for("[host1] its node ended")
    # The launcher brings the Ray node back, the fleet its server, the next sync its weights.
    run.wait_for("joined at version")
    after = run.last_step() + 2
    run.wait_for(f"step {after}/")
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert "published version" in run.output
    assert f"http://{hosts.address('host1')}" in run.output
    assert processes(hosts, "host0") == processes(hosts, "host1") == []


def test_machines_that_are_not_ready_are_named_and_nothing_stays(hosts: FakeHosts, miniature, execute) -> None:
    config = miniature(rollout={"servers": 1}, cluster={"devices_per_node": 2})
    hosts.crash("host1")
    options = ("--hosts", "host0,host1", "--shell", hosts.shell, "--wait", "5")
    run = execute("bash", SCRIPT, config, *options)
    assert run.wait() == 2, run.output
    assert "1 of 2 within 5 s" in run.output and "[host1]" in run.output
    assert processes(hosts, "host0") == []
