"""`launch/multi_node.sh` over two hosts with networks of their own: training on one, generation on the other."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ssh
from namespaces import FakeHosts, permitted
from ssh import Ssh

SCRIPT = Path(__file__).parents[2] / "launch" / "multi_node.sh"
ENDLESS = {"total_steps": 100_000, "groups_per_step": 4, "samples_per_group": 4}
APART = "host0=trainer,host1=rollout"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    made = FakeHosts(tmp_path_factory.mktemp("hosts"), 2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def real_ssh(hosts: FakeHosts, tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    if not ssh.installed():
        pytest.skip("needs an ssh daemon (openssh-server)")
    return Ssh(tmp_path_factory.mktemp("ssh"), hosts)


@pytest.fixture
def small(miniature) -> Path:
    return miniature(schedule=ENDLESS, rollout={"servers": 1}, cluster={"devices_per_node": 2})


def kill(hosts: FakeHosts, name: str, process: str) -> None:
    subprocess.run([hosts.shell, name, "pkill", "--signal", "KILL", "--exact", process], check=True)


def goes_on(run) -> None:
    run.wait_for(f"step {run.last_step() + 2}/")


def after(run, act: Callable[[], object], *words: str) -> None:
    """Acts, and waits until the run has said the words, in order, since then."""
    said = len(run.output)
    act()
    for word in words:
        run.wait_for(word, said)
        said = run.output.index(word, said)


def test_a_run_outlives_what_befalls_its_other_host_and_is_resumed_when_its_head_is_lost(
    hosts: FakeHosts, small: Path, execute, tmp_path: Path
) -> None:
    command = ("bash", SCRIPT, small, "--hosts", APART, "--shell", hosts.shell, "--continue", tmp_path / "this.run")
    run = execute(*command)
    run.wait_for("over 2 nodes")
    run.wait_for("step 2/")
    # A cable that is out for a moment costs nothing but that moment.
    hosts.cut("host1")
    hosts.heal("host1")
    goes_on(run)

    back = ("[host1] its node ended", "joined at version")
    # The launcher brings the Ray node back, the fleet its server, the next sync its weights.
    after(run, lambda: kill(hosts, "host1", "raylet"), *back)
    goes_on(run)
    hosts.crash("host1")
    after(run, lambda: hosts.switch_on("host1"), *back)
    goes_on(run)

    # The driver is on the head: without that the run ends, and goes on when it is started again.
    trained = run.last_step()
    kill(hosts, "host0", "gcs_server")
    assert run.wait() not in (0, None), run.output
    assert hosts.processes("host0") == hosts.processes("host1") == []

    again = execute(*command)
    again.wait_for("going on as ")
    goes_on(again)
    assert again.last_step() <= trained + 4, "it went on from a checkpoint or the ledger"
    again.signal(signal.SIGINT)
    assert again.wait() == 0, again.output
    assert "published version" in again.output and f"http://{hosts.address('host1')}" in again.output
    assert hosts.processes("host0") == hosts.processes("host1") == []
