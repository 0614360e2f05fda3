"""The shared memory of a machine, in which Ray, torch and NCCL hand data over. Containers have little of it or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megasync.errors import ConfigError

FOLDER = Path("/dev/shm")
# Room for the object store of the Ray session that a run starts.
SHARED_MEMORY_BYTES = 512 * 2**20
FIX = "enlarge /dev/shm (docker and podman: --shm-size=1g; Kubernetes: an emptyDir with `medium: Memory`)"


def free_shared_memory() -> int:
    """Free bytes. Raises ConfigError where nothing can use shared memory."""
    if not FOLDER.is_dir():
        raise ConfigError(f"this machine has no {FOLDER}, without which Ray cannot start; {FIX}")
    if not os.access(FOLDER, os.W_OK):
        raise ConfigError(f"{FOLDER} cannot be written, without which Ray cannot start; {FIX}")
    return shutil.disk_usage(FOLDER).free
