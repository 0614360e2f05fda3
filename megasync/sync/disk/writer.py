"""The trainer's side of a publish through a folder: the sender of each pipeline stage writes each bucket as one file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from megasync.errors import SyncError
from megasync.layout.shards import part_name
from megasync.sync.broadcast.plan import ITEM_BYTES, Bucket
from megasync.sync.broadcast.stage_sender import StageSender
from megasync.sync.groups import Deadline

# Bytes that go to the host, into the digest and to the file at a time.
CHUNK_BYTES = 2**24
# What safetensors calls the dtypes.
_DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class DiskWriter(StageSender):
    """One trainer rank's part in writing a version."""

    activity = "disk"

    def join(self, name: str, addresses: Sequence[tuple[str, int] | None], timeout: float) -> None:
        """Meets the stage's peers under the unique ``name``; ``addresses`` is what `listen` returned on each rank.

        Raises:
            SyncError: someone did not come in time.
        """
        self._meet(name, addresses, timeout)

    def write(self, folder: str, version: int, timeout: float) -> dict[str, Any]:
        """Writes all of this stage's buckets into ``folder``, which exists, within ``timeout`` seconds.

        Returns:
            ``files``: name -> ``bytes`` and ``sha256`` of each file that this rank wrote, which then is on the disk.
            ``seconds``: ``pack``, ``wire`` (handing over to the sender), ``disk``, ``total``.

        Raises:
            SyncError: naming rank, version and file; this rank has then left its group.
        """
        self._folder, self._written = Path(folder), {}
        numbers = [number for number, bucket in enumerate(self._plan.buckets) if bucket.stage == self._stage]
        self._names = [part_name(number, len(self._plan.buckets)) for number in numbers]
        seconds = self._run(f"write version {version}", timeout)
        return {"files": self._written, "seconds": seconds}

    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        name = self._names[index]
        self._written[name] = write_bucket(self._folder / name, self._buckets[index], message, deadline)


def write_bucket(path: Path, bucket: Bucket, message: torch.Tensor, deadline: Deadline) -> dict[str, Any]:
    """Writes a packed bucket ([nbytes] uint8, on any device) as a safetensors file; returns once it is on the disk.

    Raises:
        SyncError: the file could not be written (its path, and why), or the time was up.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:

            def put(data: bytes | memoryview) -> None:
                nonlocal size
                size += file.write(data)
                digest.update(data)

            put(header_of(bucket))
            for chunk in message.split(CHUNK_BYTES):
                deadline.left()
                put(memoryview(chunk.cpu().numpy()))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SyncError(f"{path} cannot be written: {error.strerror or error}") from error
    return {"bytes": size, "sha256": digest.hexdigest()}


def header_of(bucket: Bucket) -> bytes:
    """What stands before the data in a safetensors file: a length of 8 bytes, and JSON filled up to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in bucket.tensors:
        end = entry.offset + prod(entry.shape) * ITEM_BYTES[bucket.dtype]
        entries[entry.name] = {
            "dtype": _DTYPE_CODES[bucket.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.offset, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
