"""Groups and partial responses as bytes: MessagePack, compressed by Zstandard, with a checksum.

Every number comes back exactly as it went in. Nothing here can execute what it reads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zstandard

from megasync.buffer.trajectory import Group, Partial

# Ids and log-probs hardly compress, versions and masks do so at any level; higher levels only take longer.
LEVEL = 1


def _plain(value: Any) -> Any:
    """Scalars of NumPy and torch, which users' rewards return."""
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be kept in the ledger; return plain numbers and strings")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_groups = msgspec.msgpack.Decoder(Group)
_partials = msgspec.msgpack.Decoder(Partial)
_compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
_decompressor = zstandard.ZstdDecompressor()


def encode(value: Group | Partial) -> bytes:
    return _compressor.compress(_encoder.encode(value))


def decode_group(data: bytes) -> Group:
    """Raises ValueError for bytes that were damaged."""
    return _decode(_groups, data)


def decode_partial(data: bytes) -> Partial:
    """Raises ValueError for bytes that were damaged."""
    return _decode(_partials, data)


def _decode(decoder: msgspec.msgpack.Decoder, data: bytes) -> Any:
    try:
        return decoder.decode(_decompressor.decompress(data))
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error
