"""Groups and partial responses as bytes: MessagePack, compressed by Zstandard, with a checksum.

Numbers are decoded exactly as encoded; arrays come back as lists. Decoding never executes what it reads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zstandard

from megasync.errors import DataError
from megasync.trajectory import Group, Partial, Trajectory

# Ids and log-probs hardly compress, versions and masks do at any level: higher levels only take longer.
LEVEL = 1


def _plain(value: Any) -> Any:
    """Converts scalars and arrays of NumPy and torch, which users' functions return."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(type(value).__qualname__)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
# Untyped: whatever a workflow put into a trajectory and the buffer accepted must come back.
_decoder = msgspec.msgpack.Decoder()
_compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
_decompressor = zstandard.ZstdDecompressor()


def encode(value: Group | Partial) -> bytes:
    """Raises DataError for a value other than numbers, strings, lists and dicts."""
    try:
        return _compressor.compress(_encoder.encode(value))
    except (NotImplementedError, TypeError, ValueError, OverflowError) as error:
        whose = f"group {value.uid}" if isinstance(value, Group) else "a partial response"
        raise DataError(
            f"{whose} holds a value that cannot be recorded ({type(error).__name__}: {error}); trajectories and their "
            f"metrics must consist of plain numbers and strings"
        ) from error


def decode_group(data: bytes) -> Group:
    """Raises ValueError for damaged bytes."""
    found = _decode(data)
    return Group(found["uid"], [Trajectory(**trajectory) for trajectory in found["trajectories"]])


def decode_partial(data: bytes) -> Partial:
    """Raises ValueError for damaged bytes."""
    return Partial(**_decode(data))


def verify(data: bytes) -> None:
    """Checks the bytes against their checksum. Raises ValueError for damaged bytes."""
    try:
        _decompressor.decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _decode(data: bytes) -> dict[str, Any]:
    try:
        return _decoder.decode(_decompressor.decompress(data))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error
