"""What the driver and the plugin inside SGLang's processes say to each other, and how it travels.

A command is the action of SGLang's ``/weights_checker``, its payload the only element of that call's tensor list; each
tensor-parallel rank answers with one string in place of a checksum. A commit is an ``update_weights_from_distributed``
with `LOAD_FORMAT`, its request the only name.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

# Both sides must have the same; `hello` tells.
PROTOCOL = 2

# "1" in the environment of a server that scores texts instead of generating.
CLASSIFIER_VARIABLE = "MEGASYNC_CLASSIFIER"

ACTION = "megasync:"
ANSWER = "megasync"
LOAD_FORMAT = "megasync"
# How the answer to a commit begins when nothing was written on any rank.
REFUSED = "not committed"

_COMPRESSED = "zlib:"
# Below, compression saves nothing that a call would notice.
_COMPRESS_ABOVE = 16_384


def encode(message: dict[str, Any]) -> str:
    """JSON, compressed when long: the layout of a rank with 20,000 tensors shrinks from megabytes to a tenth."""
    text = json.dumps(message, separators=(",", ":"))
    if len(text) <= _COMPRESS_ABOVE:
        return text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def decode(text: str) -> dict[str, Any]:
    """The message of `encode`. Raises ValueError for anything else."""
    if text.startswith(_COMPRESSED):
        try:
            text = zlib.decompress(base64.b64decode(text.removeprefix(_COMPRESSED))).decode()
        except zlib.error as error:
            raise ValueError(f"not a compressed message: {error}") from error
    return json.loads(text)
