"""`megasync chaos` on a simulated run, and faults with a duration, each of which is always undone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import permitted
from waits import PATIENCE, wait_until

from megasync.config import Config
from megasync.errors import ConfigError
from megasync.lab.chaos.experiment import ChaosExperiment, ChaosTiming, FaultPlan, check_patience
from megasync.lab.chaos.faults import FILLER, Disk, NetworkInterface, slowed

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


def chaos(run_root: Path, log: Callable[[str], None] = lambda text: None, **faults: Any) -> StandIn:
    loaded = Config()
    loaded.run_root, loaded.schedule.groups_per_step = str(run_root), 1
    timing = ChaosTiming(pause=0.1, patience=PATIENCE, hold=1.0)
    return StandIn(Path("config.yaml"), loaded, [], FaultPlan(**faults), timing, 1, log)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_slow_process_is_stopped_and_continued_in_turns_and_runs_at_the_end(sleeper: psutil.Process) -> None:
    with pytest.raises(KeyboardInterrupt), slowed([sleeper]):
        for _ in range(2):
            wait_until(lambda: sleeper.status() == psutil.STATUS_STOPPED)
            wait_until(lambda: sleeper.status() != psutil.STATUS_STOPPED)
        wait_until(lambda: sleeper.status() == psutil.STATUS_STOPPED)
        raise KeyboardInterrupt
    wait_until(lambda: sleeper.status() != psutil.STATUS_STOPPED)


def test_a_slow_process_may_end_meanwhile(sleeper: psutil.Process) -> None:
    with slowed([sleeper]):
        sleeper.send_signal(signal.SIGKILL)


@pytest.mark.processes
def test_a_slow_server_is_reported_with_the_time_to_the_next_step(tmp_path: Path) -> None:
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
def test_a_disk_is_filled_completely_and_freed_again(small_disk: Path) -> None:
    disk = Disk.of(small_disk, small_disk / "runs")
    with pytest.raises(KeyboardInterrupt), disk.filled():
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "one").write_bytes(b"x")
        raise KeyboardInterrupt
    (small_disk / "one").write_bytes(b"x" * 2**20)
    assert not (small_disk / FILLER).exists()


@as_root
def test_the_filler_of_a_killed_experiment_is_removed(small_disk: Path) -> None:
    (small_disk / FILLER).write_bytes(b"x")
    Disk.of(small_disk, small_disk / "runs")
    assert list(small_disk.iterdir()) == []


@as_root
def test_a_disk_with_other_files_is_refused(small_disk: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"does not contain run_root=.*/elsewhere"):
        Disk.of(small_disk, tmp_path / "elsewhere")
    (small_disk / "runs").mkdir()
    Disk.of(small_disk, small_disk / "runs")
    (small_disk / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"contains thesis\.tex besides run_root"):
        Disk.of(small_disk, small_disk / "runs")
    monkeypatch.setattr("megasync.lab.chaos.faults.LARGEST_DISK", 2**20)
    with pytest.raises(ConfigError, match="more than the limit of 0"):
        Disk.of(small_disk, small_disk / "runs")


@pytest.mark.parametrize("shared", ["/", "/dev/shm", "/tmp", "folder"])
def test_a_folder_or_a_shared_mount_is_refused(shared: str, tmp_path: Path) -> None:
    folder = tmp_path if shared == "folder" else Path(shared)
    with pytest.raises(ConfigError, match="not a filesystem of its own; it must be a mount point"):
        Disk.of(folder, folder / "runs")


@pytest.mark.processes
@as_root
def test_a_run_that_ends_on_a_full_disk_is_resumed(small_disk: Path) -> None:
    lines: list[str] = []
    experiment = chaos(small_disk / "runs", disk=small_disk, log=lines.append)
    faults, status = run(experiment)
    assert experiment.started == ["train", "resume"]
    assert any("the run ended with status 2; resuming it" in line for line in lines)
    assert [fault.kind for fault in faults] == ["disk"] and faults[0].recovered is not None and status == 0


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"mscut{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@as_root
def test_a_link_is_taken_down_and_up_again(namespace: str) -> None:
    def is_up() -> bool:
        shown = subprocess.run(
            ["ip", "-n", namespace, "-o", "link", "show", "dev", "lo"], check=True, capture_output=True, text=True
        ).stdout
        return "UP" in shown.partition("<")[2].partition(">")[0].split(",")

    link = NetworkInterface.parse(f"{namespace}/lo")
    with pytest.raises(KeyboardInterrupt), link.cut():
        assert not is_up()
        raise KeyboardInterrupt
    assert is_up()


@as_root
def test_a_missing_or_down_link_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match=rf"--cut {namespace}/eth7: .*eth7"):
        NetworkInterface.parse(f"{namespace}/eth7")
    subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "down"], check=True)
    with pytest.raises(ConfigError, match="not up"):
        NetworkInterface.parse(f"{namespace}/lo")


def test_a_link_of_the_machine_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be NAMESPACE/INTERFACE"):
        NetworkInterface.parse("eth0")


def test_a_wait_shorter_than_the_recovery_of_a_stopped_rank_is_refused() -> None:
    config = Config()
    with pytest.raises(ConfigError, match=r"--patience 600 must be longer than timeouts\.train_step=1800 \+ .* 2400 s"):
        check_patience(config, FaultPlan(["rank"], stop=True), 600.0)
    check_patience(config, FaultPlan(["rank"]), 600.0)
    check_patience(config, FaultPlan(["server"], stop=True), 600.0)
    with pytest.raises(ConfigError, match=r"longer than timeouts\.rollout_worker=180 \+ timeouts\.server_start=300"):
        check_patience(config, FaultPlan(["worker"], stop=True), 400.0)
    config.timeouts.train_step = config.timeouts.weight_sync = 60.0
    check_patience(config, FaultPlan(["rank"], stop=True), 600.0)


def test_no_fault_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no fault to inject"):
        chaos(tmp_path)
