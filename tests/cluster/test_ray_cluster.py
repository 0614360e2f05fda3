"""A run's own Ray, beside whatever other clusters the machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from megasync.cluster.ray_cluster import STARTS, RayCluster
from megasync.config import Config
from megasync.config.host import route_from
from megasync.errors import MegasyncError

PROGRAM = """
import json
import os
import sys
import ray
from processes import family, listening
from megasync.cluster.ray_cluster import RayCluster
from megasync.config import Config

cluster = RayCluster(Config(), 1)
if "unpatched" in sys.argv:
    ray.init(address="local", num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
else:
    cluster.connect()
assert ray.get(ray.remote(lambda: 1).remote()) == 1
print(json.dumps([len(ray.nodes()), sorted(listening(family(os.getpid())))]))
cluster.close()
"""


def started(folder: str, *words: str) -> tuple[int, list[list[str]]]:
    """The number of nodes, and the addresses on which each process listens."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=os.environ | {"RAY_TMPDIR": folder, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


@pytest.fixture
def folder() -> Iterator[str]:
    """Sockets lie in it, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as made:
        yield made


@pytest.mark.real
def test_a_local_cluster_joins_no_other_and_listens_on_loopback_only(folder: str) -> None:
    # Where Ray notes the machine's newest cluster, which it would otherwise join.
    note = Path(folder, "ray", "ray_current_cluster")
    note.parent.mkdir()
    note.write_text("127.0.0.1:1")
    nodes, places = started(folder)
    assert nodes == 1
    assert {address for address, _ in places} == {"127.0.0.1"}, places
    assert {"gcs_server", "raylet"} < {process for _, process in places}


@pytest.mark.real
@pytest.mark.skipif(route_from() is None, reason="the machine is in no network")
def test_ray_without_the_patch_still_listens_on_all_interfaces(folder: str) -> None:
    """If this fails, Ray no longer needs the patch `megasync_patches.ray_loopback`: delete it."""
    _, places = started(folder, "unpatched")
    assert {"gcs_server", "raylet"} <= {process for address, process in places if address == "::"}


LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class LateRay:
    """A stand-in for `ray.init`: each start leaves a process of Ray and one of others, and fails with a message."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.begun: list[subprocess.Popen] = []
        self.others: list[subprocess.Popen] = []

    def init(self, **options: object) -> None:
        waits = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.begun.append(subprocess.Popen([*waits, ray.__file__]))
        self.others.append(subprocess.Popen(waits))
        if self.messages:
            raise Exception(self.messages.pop(0))


@pytest.fixture
def late_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateRay]:
    late = LateRay()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late.init)
    yield late
    for process in (*late.begun, *late.others):
        process.kill()
        process.wait()


@pytest.mark.processes
def test_a_ray_that_is_late_is_started_again_and_only_its_own_processes_are_killed(late_ray: LateRay) -> None:
    late_ray.messages = [LATE, LATE]
    RayCluster(Config(), 1).connect()
    *late, started = late_ray.begun
    assert [process.wait() for process in late] == [-9, -9]
    assert [process.poll() for process in (started, *late_ray.others)] == [None] * 4


@pytest.mark.processes
@pytest.mark.parametrize(("message", "starts"), [("no space left on device", 1), (LATE, STARTS)])
def test_a_start_of_ray_that_fails_for_another_reason_or_again_and_again_is_an_error(
    late_ray: LateRay, message: str, starts: int
) -> None:
    late_ray.messages = [message] * 9
    with pytest.raises(MegasyncError, match=f"could not start Ray on this machine: Exception: {message}"):
        RayCluster(Config(), 1).connect()
    assert len(late_ray.begun) == starts
