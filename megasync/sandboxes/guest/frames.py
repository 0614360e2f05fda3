"""Messages between a sandbox's owner and its first process: a JSON object and bytes, each with its length.

Standard library only: the same text runs on both sides.
"""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTHS = struct.Struct("!II")
# Largest JSON object and largest body that a side accepts. What a program writes is in the body, which is cut before.
HEADER_BYTES, BODY_BYTES = 2**26, 2**31
# The exit status of a check that ran to its end.
PASSED = 42


def packed(header: dict[str, Any], body: bytes = b"") -> bytes:
    """The bytes of a message."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


def lengths(start: bytes) -> tuple[int, int]:
    """The bytes of the JSON object and of the body that follow. Raises ValueError for more than a side accepts."""
    header, body = LENGTHS.unpack(start)
    if header > HEADER_BYTES or body > BODY_BYTES:
        raise ValueError(f"a message of {header} + {body} bytes, more than {HEADER_BYTES} + {BODY_BYTES}")
    return header, body


def unpacked(text: bytes) -> dict[str, Any]:
    """The JSON object of a message. Raises ValueError for anything else."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"a message of type {type(header).__name__}, not an object")
    return header
