"""How the driver and the plugin inside SGLang's processes talk, and the messages that every plugin understands.

A command is the action of SGLang's ``/weights_checker``, its payload the only element of that call's tensor list; each
rank of the server answers with one string in place of a checksum. A commit is an ``update_weights_from_distributed``
with `LOAD_FORMAT`, its request the only name.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.errors import raised_as

# The driver refuses a plugin whose `Hello` reports another one.
PROTOCOL = 5

# Set in the environment of a server that reads its keys, as JSON, from its standard input.
KEYS_VARIABLE = "MEGASYNC_SERVER_KEYS"
# Not a route: without the key, a guarded server answers 401 and any other server 404.
CLOSED_ROUTE = "/closed"
# "1" in the environment of a server that scores texts instead of generating.
CLASSIFIER_VARIABLE = "MEGASYNC_CLASSIFIER"
# The address that a server's process is bound to, where an engine has processes on several nodes.
HOST_VARIABLE = "MEGASYNC_HOST"
# Scheme of the URL by which such processes join their `store`, which listens on one address only.
STORE_SCHEME = "megasync"
# In the environment of a server that serves a quantized folder unquantized, as JSON: "mxfp4", or [rows, columns] of a
# block of block FP8.
STORAGE_VARIABLE = "MEGASYNC_STORAGE"
# "1" in the environment of a server with several pipeline stages.
PIPELINE_VARIABLE = "MEGASYNC_PIPELINE"
# In the environment of a server with attention groups, the folder of their sockets.
SOCKETS_VARIABLE = "MEGASYNC_SOCKETS"
# "1" in the environment of a server that serves the policy's adapters beside its model.
ADAPTERS_VARIABLE = "MEGASYNC_ADAPTERS"
# In the environment of such a server, the folder in which it finds adapters by their names (`ADAPTER_NAME`).
ADAPTER_ROOT_VARIABLE = "MEGASYNC_ADAPTER_ROOT"
# In the environment of an engine of a server with several, as "2/3": the number of its first rank, and how many ranks
# the server has.
RANKS_VARIABLE = "MEGASYNC_RANKS"
# In the environment of the processes of such an engine: the key with which engines prove that they are of one server.
HANDOVER_VARIABLE = "MEGASYNC_HANDOVER"
# The route at which a decode engine gets the addresses of the prefill engines of its server.
PREFILL_ROUTE = "/prefill_engines"
# The header by which the router sends requests to one server.
ROUTING_KEY_HEADER = "x-smg-routing-key"
# Custom label of a request whose answer shall have the routes of all positions from this one on. The router drops
# SGLang's own fields for it, which it does not know.
ROUTES_FROM = "megasync_routes_from"
# Custom label, "1", of a request whose answer shall have the support of each token.
WITH_SUPPORT = "megasync_with_support"
# Custom label, "1", of a request whose answer shall have the likeliest tokens of its prompt as flat arrays.
FLAT_TOP = "megasync_flat_top"
# Custom label of a request for several responses: the seed of each, with commas between them.
SEEDS = "megasync_seeds"

# How the names of the policy's adapters begin; a version follows, and perhaps a dot and a number: "policy-7",
# "policy-7.1". The one with the highest number is that of the version.
POLICY_ADAPTER = "policy-"
# How the names of adapters begin that are one of the policy's, kept for an evaluation; the rest is as above.
KEPT_ADAPTER = "kept-"
# How the names of adapters begin that answer held-out sets; the name of the set follows.
EVAL_ADAPTER = "eval-"
# The name of an adapter in the folder of a server that loads adapters by name. It is a single part of a path.
ADAPTER_NAME = re.compile(rf"(?!{POLICY_ADAPTER}|{KEPT_ADAPTER}|{EVAL_ADAPTER})[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}")
# In the folder of a service, the folder in which its servers find adapters by their names.
ADAPTER_ROOT = "served"
# Different adapters in one batch of such a server, and those that it keeps in host memory.
ADAPTERS_IN_BATCH, ADAPTERS_LOADED = 8, 16
# In the metadata of an answer, the name of the adapter that sampled it.
ADAPTER = "adapter"
# In the folder of a published version, as JSON: {"files": {name: {"bytes": ..., "sha256": ...}}}.
MANIFEST = "manifest.json"

ACTION = "megasync:"
ANSWER = "megasync"
LOAD_FORMAT = "megasync"
# How the answer to a commit begins when no rank wrote anything.
REFUSED = "not committed"

_COMPRESSED = "zlib:"
# Below this many characters compression saves too little to matter.
_COMPRESS_ABOVE = 16_384


@prepared
class Hello(msgspec.Struct, frozen=True):
    """A rank's description of itself. Unknown fields are ignored, so that another protocol is recognised as such.

    ``ranks`` counts those of the server. ``instance`` is unique to the process; process ids may be the same in two
    containers.
    """

    protocol: int
    instance: str
    sglang: str = ""
    rank: int = 0
    ranks: int = 0
    model: str = ""
    dtype: str = ""
    pid: int = 0


@prepared
class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names and shapes of a checkpoint's tensors, in the order in which they are loaded."""

    specs: tuple[tuple[str, tuple[int, ...]], ...]


@prepared
class RankAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's answer to a command: its result, or its error."""

    rank: int
    ok: bool
    result: Any = None
    error: str = ""


def encode(message: object) -> str:
    """JSON, compressed when long: the layout of a rank with 20,000 tensors shrinks from megabytes to a tenth.

    Not `msgspec.json`, which has no notation for infinity and NaN.
    """
    text = json.dumps(msgspec.to_builtins(message), separators=(",", ":"))
    if len(text) <= _COMPRESS_ABOVE:
        return text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def decode(text: str) -> Any:
    """The parsed JSON of `encode`. Raises ValueError for anything else."""
    if text.startswith(_COMPRESSED):
        with raised_as(ValueError, "not a compressed message", of=zlib.error):
            text = zlib.decompress(base64.b64decode(text.removeprefix(_COMPRESSED))).decode()
    return json.loads(text)
