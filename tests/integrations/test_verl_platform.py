"""The CPU as a platform of verl: chosen by name only, and with a process group that torch opens."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="verl is not installed; run `bash launch/test.sh`")

OPEN = """
import sys
from verl.utils import device, distributed
import torch.distributed
assert device.get_device_name() == "cpu"
original = distributed.initialize_global_process_group_ray.__wrapped__
try:
    original()
except ValueError as error:
    print("refused:", *str(error).split())
from verl.workers.engine_workers import initialize_global_process_group_ray
initialize_global_process_group_ray()
print("opened:", torch.distributed.get_backend())
"""


def test_verls_process_group_opens_on_a_cpu_and_would_not_without_the_patch(tmp_path):
    """A missing line "refused" means that verl or torch does without `megasync_patches.verl_cpu_group`: delete it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPEN],
        env={**os.environ, "VERL_PLATFORM": "cpu", "DIST_INIT_METHOD": f"file://{tmp_path / 'meeting'}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    refused, opened = done.stdout.splitlines()[-2:]
    assert refused.startswith("refused:") and "cpu" in refused, done.stderr[-3000:]
    assert opened == "opened: gloo"
