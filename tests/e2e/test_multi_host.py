"""`launch/multi_node.sh` over two hosts with networks of their own: training on one, generation on the other."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import ssh
from namespaces import FakeHosts, permitted
from processes import command_line, living
from ssh import Ssh
from waits import wait_until

from megasync.config.access import GENERATION_KEY_VARIABLE
from megasync.launch.preemption import UNFINISHED

SCRIPT = Path(__file__).parents[2] / "launch" / "multi_node.sh"
ENDLESS = {"total_steps": 100_000}
APART = "host0=trainer,host1=rollout"
BACK = ("[host1] Ray node exited", "joined at version")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHosts]:
    made = FakeHosts(tmp_path_factory.mktemp("hosts"), 3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def real_ssh(hosts: FakeHosts, tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    if not ssh.installed():
        pytest.skip("needs an ssh daemon (openssh-server)")
    return Ssh(tmp_path_factory.mktemp("ssh"), hosts)


@pytest.fixture
def shell(hosts: FakeHosts, request: pytest.FixtureRequest) -> str | Path:
    """A configuration with everything real."""
    return request.getfixturevalue("real_ssh").program if ssh.installed() else hosts.shell


@pytest.fixture
def small(miniature) -> Path:
    return miniature(schedule=ENDLESS, rollout={"servers": 1}, cluster={"devices_per_node": 2})


def secrets(run) -> set[str]:
    """Ray's token and the key for generation, found where only the same user looks, and nowhere else."""
    found, lines = set(), []
    for process in living(run.family()):
        with contextlib.suppress(psutil.NoSuchProcess):
            environment = process.environ()
            found.update(environment.get(name, "") for name in ("RAY_AUTH_TOKEN", GENERATION_KEY_VARIABLE))
            lines.append(command_line(process))
    found -= {""}
    assert not any(word in line for line in lines for word in found)
    return found


def files_with(words: Iterable[str], folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(word.encode() in path.read_bytes() for word in words)
    ]


def beyond(hosts: FakeHosts) -> set[tuple[str, str, str]]:
    """(host, address, process) that listen on more than loopback and the chosen interface."""
    ours = {(name, address) for name in hosts.names for address in (hosts.address(name), "127.0.0.1", "::1")}
    found = {
        (name, address.strip("[]").removeprefix("::ffff:"), process)
        for name in hosts.names
        for address, process in hosts.listening(name)
    }
    there = {process for name, address, process in found if address == hosts.address(name)}
    assert {"gcs_server", "raylet", "ray::TrainerRan", "ray::SGLangServ", "sglang::router"} <= there
    return {(name, address, process) for name, address, process in found if (name, address) not in ours}


def power_cycle(hosts: FakeHosts, name: str) -> None:
    hosts.crash(name)
    hosts.switch_on(name)


def wait_for_progress(run) -> None:
    run.wait_for(f"step {run.last_step() + 2}/")


def after(run, act: Callable[[], object], *words: str) -> None:
    """Acts, then waits until the run has printed the words in this order."""
    printed = len(run.output)
    act()
    for word in words:
        run.wait_for(word, printed)
        printed = run.output.index(word, printed)


def await_no_process(hosts: FakeHosts) -> None:
    """A node that the launcher had to kill takes its processes with it, a moment later."""

    def left() -> list[str]:
        return [*hosts.processes("host0"), *hosts.processes("host1")]

    wait_until(lambda: not left(), left)


def test_a_run_survives_faults_of_its_other_host_and_is_resumed_after_losing_its_head(
    hosts: FakeHosts, small: Path, execute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GENERATION_KEY_VARIABLE, "a-key-of-the-users-own")
    command = ("bash", SCRIPT, small, "--hosts", APART, "--shell", hosts.shell, "--continue", tmp_path / "this.run")
    run = execute(*command)
    run.wait_for("over 2 nodes")
    run.wait_for("step 2/")
    assert beyond(hosts) == set()
    hidden = secrets(run)
    assert len(hidden) == 2
    # A cable that is out for a moment costs nothing but that moment.
    hosts.cut("host1")
    hosts.heal("host1")
    wait_for_progress(run)

    # The launcher brings the Ray node back, the fleet its server, the next sync its weights.
    after(run, lambda: power_cycle(hosts, "host1"), *BACK)
    wait_for_progress(run)

    # The driver is on the head: losing that ends the run, which resumes when it is started again.
    trained = run.last_step()
    hosts.kill("host0", "gcs_server")
    assert run.wait() not in (0, None), run.output
    await_no_process(hosts)

    again = execute(*command)
    again.wait_for("resuming with the configuration ")
    wait_for_progress(again)
    assert again.last_step() <= trained + 4, "it went on from a checkpoint or the ledger"
    hidden |= secrets(again)
    again.signal(signal.SIGINT)
    assert again.wait() == 0, again.output
    assert "published version" in again.output
    (log,) = (tmp_path / "runs").glob("*/logs/controller.log")
    assert f"http://{hosts.address('host1')}" in log.read_text(encoding="utf-8")
    assert hosts.processes("host0") == hosts.processes("host1") == []
    assert files_with(hidden, tmp_path) == []


def test_hosts_that_a_scheduler_starts_alike_are_one_job_and_a_preempted_run_goes_on_where_it_stopped(
    hosts: FakeHosts, miniature: Callable[..., Path], execute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    config = miniature(schedule={"total_steps": 12}, rollout={"servers": 1}, cluster={"devices_per_node": 2})
    run_file = tmp_path / "this.run"
    python = (sys.executable, "-m")

    def start(rank: int):
        host = f"host{rank}"
        part = ("--hosts", APART, "--rank", str(rank), "--continue", run_file)
        return execute(hosts.shell, host, *python, "megasync", "launch", config, *part)

    other, head = start(1), start(0)
    head.wait_for("step 2/")
    # As a scheduler does on a host that it is about to take away.
    said = hosts.run("host1", *python, "megasync.launch.preemption", "stop", str(run_file), "120")
    assert "has stopped" in said
    assert head.wait() == UNFINISHED, head.output
    assert "the same command continues it" in head.output
    trained = head.last_step()
    assert 2 <= trained < 12

    again = start(0)
    assert again.wait() == 0, again.output
    assert f"step {trained + 1}/12" in again.output and f"step {trained}/12" not in again.output
    assert other.wait() == 0, other.output
    assert "the run is complete" in other.output
    assert hosts.processes("host0") == hosts.processes("host1") == []


@pytest.mark.hosts
def test_a_dead_raylet_and_a_network_cut_longer_than_all_deadlines_count_as_a_lost_host(
    hosts: FakeHosts, shell: str | Path, small: Path, execute
) -> None:
    run = execute("bash", SCRIPT, small, "--hosts", APART, "--shell", shell)
    run.wait_for("step 2/")
    after(run, lambda: hosts.kill("host1", "raylet"), *BACK)
    wait_for_progress(run)
    after(run, lambda: hosts.cut("host1"), "-> dead", "[host1] Ray node exited")
    after(run, lambda: hosts.heal("host1"), "[host1] Ray node ready at", "joined at version")
    wait_for_progress(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert hosts.processes("host0") == hosts.processes("host1") == []


@pytest.mark.hosts
def test_training_goes_on_without_a_host_and_takes_it_back(
    hosts: FakeHosts, miniature: Callable[..., Path], execute
) -> None:
    config = miniature(
        schedule=ENDLESS,
        rollout={"servers": 1},
        trainer={"tensor_parallel": 1, "data_parallel": 2, "min_data_parallel": 1},
        cluster={"devices_per_node": 1},
        checkpoint={"every_steps": 5},
        timeouts={"lost_node": 5},
    )
    run = execute(
        "bash", SCRIPT, config, "--hosts", "host0=trainer,host1=trainer,host2=rollout", "--shell", hosts.shell
    )
    run.wait_for("step 6/")
    after(run, lambda: hosts.crash("host1"), "with trainer.data_parallel=1 instead of 2; ")
    wait_for_progress(run)
    after(run, lambda: hosts.switch_on("host1"), "there is room for more of them again", "; 0 steps are trained again")
    wait_for_progress(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert all(hosts.processes(name) == [] for name in hosts.names)


@pytest.mark.hosts
def test_an_engine_over_two_hosts_is_started_again_after_losing_the_second_one(
    hosts: FakeHosts, miniature: Callable[..., Path], execute
) -> None:
    config = miniature(
        schedule=ENDLESS,
        rollout={"servers": 1, "tensor_parallel": 2},
        trainer={"tensor_parallel": 1},
        cluster={"devices_per_node": 1},
        sync={"transport": "p2p"},
    )
    roles = "host0=trainer,host1=rollout,host2=rollout"
    run = execute("bash", SCRIPT, config, "--hosts", roles, "--shell", hosts.shell)
    run.wait_for("step 2/")
    assert beyond(hosts) == set()
    # The engine's ranks are on both, whichever of them is its first.
    after(run, lambda: power_cycle(hosts, "host2"), "[host2] Ray node exited", "joined at version")
    wait_for_progress(run)
    run.signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert all(hosts.processes(name) == [] for name in hosts.names)


@pytest.mark.parametrize("way", ["namespaces", "ssh"])
def test_hosts_that_are_not_ready_are_named_and_everything_is_cleaned_up(
    hosts: FakeHosts, way: str, small: Path, execute, request: pytest.FixtureRequest
) -> None:
    shell = hosts.shell if way == "namespaces" else request.getfixturevalue("real_ssh").program
    hosts.cut("host1")
    run = execute("bash", SCRIPT, small, "--hosts", "host0,host1", "--shell", shell, "--wait", "5")
    assert run.wait() == 2, run.output
    assert "1 of 2 within 5 s" in run.output and "[host1]" in run.output
    hosts.heal("host1")
    assert hosts.processes("host0") == []
