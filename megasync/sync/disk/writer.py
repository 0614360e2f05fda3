"""The trainer's side of a publish through a folder: each pipeline stage's sender writes each bucket as one file."""

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
from megasync.sync.broadcast.sender import StageSender
from megasync.sync.groups import Deadline
from megasync.sync.messages import WriteReport, WrittenFile

# Bytes that are copied to the host, hashed and written at a time.
CHUNK_BYTES = 2**24
# The dtypes' names in safetensors.
_DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}


class DiskWriter(StageSender):
    """One trainer rank's part in writing a version to the shared folder."""

    activity = "disk"

    def join(self, name: str, addresses: Sequence[tuple[str, int] | None], timeout: float) -> None:
        """Meets the stage's peers; see `_join_peers`."""
        self._join_peers(name, addresses, timeout)

    def write(self, folder: str, version: int, timeout: float) -> WriteReport:
        """Writes all of this stage's buckets into ``folder``, which exists, within ``timeout`` seconds.

        The files of the report are on the disk then. Its seconds are ``pack``, ``wire`` (handing pieces to the sender),
        ``disk`` and ``total``.

        Raises SyncError, which names rank, version and file; this rank has then left its group.
        """
        self._folder = Path(folder)
        self._written: dict[str, WrittenFile] = {}
        numbers = [number for number, bucket in enumerate(self._plan.buckets) if bucket.stage == self._stage]
        self._names = [part_name(number, len(self._plan.buckets)) for number in numbers]
        seconds = self._run(f"write version {version}", timeout)
        return WriteReport(self._written, seconds)

    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        name = self._names[index]
        self._written[name] = write_bucket(self._folder / name, self._buckets[index], message, deadline)


def write_bucket(path: Path, bucket: Bucket, message: torch.Tensor, deadline: Deadline) -> WrittenFile:
    """Writes a packed bucket ([nbytes] uint8, on any device) as a safetensors file; returns once it is on the disk.

    Raises SyncError when the file could not be written (its path, and why), or the deadline passed.
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
                put(chunk.cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SyncError(f"{path} cannot be written: {error.strerror or error}") from error
    return WrittenFile(size, digest.hexdigest())


def header_of(bucket: Bucket) -> bytes:
    """The header of a safetensors file: a length of 8 bytes, and JSON padded to a multiple of 8 bytes."""
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
