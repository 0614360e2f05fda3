"""`megasync chaos` over a stand-in for a run, and the faults that last for a while: each ends whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import permitted

from megasync.chaos.experiment import ChaosExperiment, ChaosTiming, FaultPlan, check_patience
from megasync.chaos.faults import FILLER, Disk, Link, slowed
from megasync.config import Config
from megasync.errors import ConfigError

PATIENCE = 30.0
as_root = pytest.mark.skipif(not permitted(), reason="needs root, namespaces, and iproute2 and util-linux")

# A run of one group a step, which a full disk ends with status 2. Its child stands for a server's scheduler.
RUN = """
import json, os, signal, subprocess, sys, time
run_dir = sys.argv[1]
os.makedirs(run_dir, exist_ok=True)
server = subprocess.Popen(["bash", "-c", "exec -a sglang::scheduler sleep 60"])
done = []
signal.signal(signal.SIGINT, lambda *_: done.append(True))
metrics = os.path.join(run_dir, "metrics.jsonl")
step = len(open(metrics).readlines()) if os.path.exists(metrics) else 0
status = 0
while not done:
    time.sleep(0.02)
    line = json.dumps({"step": step + 1, "time": time.time(), "time/step": 0.02, "filler": "x" * 5000}) + "\\n"
    size = os.path.getsize(metrics) if os.path.exists(metrics) else 0
    try:
        with open(metrics, "a") as file:
            file.write(line)
    except OSError:
        os.truncate(metrics, size)
        status = 2
        break
    step += 1
server.kill()
server.wait()
sys.exit(status)
"""


class StandIn(ChaosExperiment):
    started: list[str]

    def _start(self, *arguments: str) -> None:
        self.started = [*getattr(self, "started", []), arguments[0]]
        self._run_dir = Path(self._config.run_root) / "run"
        self._process = subprocess.Popen([sys.executable, "-c", RUN, str(self._run_dir)])


def chaos(run_root: Path, say: Callable[[str], None] = lambda text: None, **faults: Any) -> StandIn:
    loaded = Config()
    loaded.run_root, loaded.schedule.groups_per_step = str(run_root), 1
    timing = ChaosTiming(pause=0.1, patience=PATIENCE, hold=1.0)
    return StandIn(Path("config.yaml"), loaded, [], FaultPlan(**faults), timing, 1, say)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_slow_process_stops_and_continues_in_turns_and_goes_on_at_the_end(sleeper: psutil.Process) -> None:
    with pytest.raises(KeyboardInterrupt), slowed([sleeper]):
        for _ in range(2):
            wait(lambda: sleeper.status() == psutil.STATUS_STOPPED)
            wait(lambda: sleeper.status() != psutil.STATUS_STOPPED)
        wait(lambda: sleeper.status() == psutil.STATUS_STOPPED)
        raise KeyboardInterrupt
    wait(lambda: sleeper.status() != psutil.STATUS_STOPPED)


def test_a_slow_process_may_end_meanwhile(sleeper: psutil.Process) -> None:
    with slowed([sleeper]):
        sleeper.send_signal(signal.SIGKILL)


@pytest.mark.processes
def test_a_run_is_slowed_and_the_time_to_its_next_step_is_taken(tmp_path: Path) -> None:
    experiment = chaos(tmp_path, slow=True)
    faults, status = run(experiment)
    assert [fault.kind for fault in faults] == ["slow"] and "stopped 80%" in faults[0].how
    assert faults[0].recovered is not None and status == 0


def run(experiment: StandIn) -> tuple[list, int]:
    """One round; what was injected and the status of the run, without the report, which needs a ledger."""
    ended: list[tuple[list, int]] = []
    experiment._report = lambda faults, status: ended.append((faults, status))
    experiment.run(1.0, rounds=1)
    return ended[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@as_root
def test_a_disk_is_filled_to_the_last_block_and_emptied_again(small_disk: Path) -> None:
    disk = Disk.of(small_disk, small_disk / "runs")
    with pytest.raises(KeyboardInterrupt), disk.filled():
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "one").write_bytes(b"x")
        raise KeyboardInterrupt
    (small_disk / "one").write_bytes(b"x" * 2**20)
    assert not (small_disk / FILLER).exists()


@as_root
def test_what_a_killed_chaos_left_on_the_disk_goes_first(small_disk: Path) -> None:
    (small_disk / FILLER).write_bytes(b"x")
    Disk.of(small_disk, small_disk / "runs")
    assert list(small_disk.iterdir()) == []


@as_root
def test_a_disk_that_something_else_uses_is_not_filled(small_disk: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"does not hold run_root=.*/elsewhere"):
        Disk.of(small_disk, tmp_path / "elsewhere")
    (small_disk / "runs").mkdir()
    Disk.of(small_disk, small_disk / "runs")
    (small_disk / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex besides run_root"):
        Disk.of(small_disk, small_disk / "runs")
    monkeypatch.setattr("megasync.chaos.faults.LARGEST_DISK", 2**20)
    with pytest.raises(ConfigError, match="at most 0 are filled"):
        Disk.of(small_disk, small_disk / "runs")


@pytest.mark.parametrize("shared", ["/", "/dev/shm", "/tmp", "folder"])
def test_a_folder_or_a_shared_mount_is_not_filled(shared: str, tmp_path: Path) -> None:
    folder = tmp_path if shared == "folder" else Path(shared)
    with pytest.raises(ConfigError, match="not a filesystem of the run's own: it must be a mount point"):
        Disk.of(folder, folder / "runs")


@pytest.mark.processes
@as_root
def test_a_run_that_a_full_disk_ends_is_resumed_once_there_is_room(small_disk: Path) -> None:
    said: list[str] = []
    experiment = chaos(small_disk / "runs", disk=small_disk, say=said.append)
    faults, status = run(experiment)
    assert experiment.started == ["train", "resume"]
    assert any("the run ended with status 2; resuming it" in line for line in said)
    assert [fault.kind for fault in faults] == ["disk"] and faults[0].recovered is not None and status == 0


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"mscut{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@as_root
def test_a_link_is_cut_and_comes_back(namespace: str) -> None:
    def is_up() -> bool:
        shown = subprocess.run(
            ["ip", "-n", namespace, "-o", "link", "show", "dev", "lo"], check=True, capture_output=True, text=True
        ).stdout
        return "UP" in shown.partition("<")[2].partition(">")[0].split(",")

    link = Link.parse(f"{namespace}/lo")
    with pytest.raises(KeyboardInterrupt), link.cut():
        assert not is_up()
        raise KeyboardInterrupt
    assert is_up()


@as_root
def test_a_link_that_is_not_there_or_down_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match=rf"--cut {namespace}/eth7: .*eth7"):
        Link.parse(f"{namespace}/eth7")
    subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "down"], check=True)
    with pytest.raises(ConfigError, match="not up"):
        Link.parse(f"{namespace}/lo")


def test_a_link_of_the_machine_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be NAMESPACE/INTERFACE"):
        Link.parse("eth0")


def test_a_wait_that_a_stopped_rank_outlasts_is_refused() -> None:
    config = Config()
    with pytest.raises(ConfigError, match=r"--patience 600 must be longer than timeouts\.train_step=1800 \+ .* 2400 s"):
        check_patience(config, FaultPlan(["rank"], stop=True), 600.0)
    check_patience(config, FaultPlan(["rank"]), 600.0)
    check_patience(config, FaultPlan(["server"], stop=True), 600.0)
    config.timeouts.train_step = config.timeouts.weight_sync = 60.0
    check_patience(config, FaultPlan(["rank"], stop=True), 600.0)


def test_no_fault_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no fault to inject"):
        chaos(tmp_path)
