"""The CPU as a verl platform: a process group that torch accepts, and weight copies that are not pinned."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

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
tensor = torch.ones(3)
try:
    torch.Tensor.pin_memory.__wrapped__(tensor)
except RuntimeError as error:
    print("refused:", *str(error).split())
print("kept:", tensor.pin_memory() is tensor)
"""


def test_verl_works_on_a_cpu_and_would_not_without_the_patches(tmp_path):
    """Without the first line "refused", `megasync_patches.verl_cpu_group` is no longer needed; without the second,
    `megasync_patches.verl_cpu_pinning`. Delete the patch."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPEN],
        env={**os.environ, "VERL_PLATFORM": "cpu", "DIST_INIT_METHOD": f"file://{tmp_path / 'meeting'}"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    refused, opened, unpinned, kept = done.stdout.splitlines()[-4:]
    assert refused.startswith("refused:") and "cpu" in refused, done.stderr[-3000:]
    assert opened == "opened: gloo"
    assert unpinned.startswith("refused:") and "accelerator" in unpinned
    assert kept == "kept: True"
