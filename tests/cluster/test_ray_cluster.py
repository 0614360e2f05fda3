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

from megasync.config.host import route_from

pytestmark = pytest.mark.real

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


def test_a_local_cluster_joins_no_other_and_listens_on_loopback_only(folder: str) -> None:
    # Where Ray notes the machine's newest cluster, which it would otherwise join.
    note = Path(folder, "ray", "ray_current_cluster")
    note.parent.mkdir()
    note.write_text("127.0.0.1:1")
    nodes, places = started(folder)
    assert nodes == 1
    assert {address for address, _ in places} == {"127.0.0.1"}, places
    assert {"gcs_server", "raylet"} < {process for _, process in places}


@pytest.mark.skipif(route_from() is None, reason="the machine is in no network")
def test_ray_without_the_patch_still_listens_on_all_interfaces(folder: str) -> None:
    """If this fails, Ray no longer needs the patch `megasync_patches.ray_loopback`: delete it."""
    _, places = started(folder, "unpatched")
    assert {"gcs_server", "raylet"} <= {process for address, process in places if address == "::"}
