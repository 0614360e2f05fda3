"""A run's own Ray, beside whatever other clusters the machine has."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

PROGRAM = """
import ray
from megasync.cluster.ray_cluster import RayCluster
from megasync.config import Config

cluster = RayCluster(Config(), 1)
cluster.connect()
print("nodes:", len(ray.nodes()))
cluster.close()
"""


def test_another_cluster_on_this_machine_is_not_joined():
    # Sockets lie in it, whose paths must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder:
        # Where Ray notes the machine's newest cluster, which it would look for by itself.
        note = Path(folder, "ray", "ray_current_cluster")
        note.parent.mkdir()
        note.write_text("127.0.0.1:1")
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert found.stdout == "nodes: 1\n", found.stderr
