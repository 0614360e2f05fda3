"""Messages of a weight sync, shared by both ends: the driver, the trainer ranks, and the plugin in SGLang's processes.

Messages to and from trainer ranks travel as objects, those to and from servers as JSON. Decoding refuses unknown and
missing fields (`SyncMessage.parse`). Imports no torch, so that every process can import it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.errors import SyncError, raised_as
from megasync.layout.engine_layout import Fill, ParamRectangle


@prepared
class SyncMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request or an answer."""

    @classmethod
    def parse(cls, given: object) -> Self:
        """The message in parsed JSON. Raises SyncError, naming the field."""
        fix = "install the same version of megasync for the driver and the servers"
        with raised_as(SyncError, f"not a {cls.__name__}", fix, of=msgspec.ValidationError):
            return msgspec.convert(given, cls)


# On the links between trainer ranks and engine ranks

# Kinds of a bucket's payload.
FULL, DELTA = 0, 1
# The tag of the table of digests that ends a transfer without headers.
TABLE = 2**30
# The tag of a receiver's confirmation: its digest (signed), and the microseconds that it spent on digests.
CONFIRMED = TABLE + 1
CONFIRMED_WORDS = 2


class BucketHeader(NamedTuple):
    """Precedes a bucket, as int64 words, when its size is not known in advance or it is used on arrival.

    ``nbytes`` is of the payload, ``digest`` (signed) of the whole bucket.
    """

    form: int
    nbytes: int
    changed: int
    digest: int


# Driver to engine ranks, and their answers


@prepared
class InboundBucket(SyncMessage, frozen=True):
    """A bucket as its receiver sees it; ``source`` is the sending trainer rank.

    The message has ``nbytes`` bytes: the rectangles one after another, as ``elements`` elements of ``dtype``, and
    padding up to whole words.
    """

    tag: int
    source: int
    dtype: str
    elements: int
    nbytes: int
    rectangles: tuple[ParamRectangle, ...]


@prepared
class ReceivePlan(SyncMessage, frozen=True):
    """The plan by which an engine rank receives every version, and the constants that it fills in itself."""

    name: str
    buckets: tuple[InboundBucket, ...]
    fills: tuple[Fill, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def params(self) -> set[str]:
        """The parameters that are written."""
        placed = {rectangle.param for bucket in self.buckets for rectangle in bucket.rectangles}
        return placed | {fill.param for fill in self.fills}

    @property
    def confirmed_to(self) -> int:
        """The trainer rank that receives the confirmation of a complete, verified version."""
        return min(bucket.source for bucket in self.buckets)


@prepared
class ReceivePlanRequest(SyncMessage, frozen=True):
    """Command ``receive_plan``: the plans of all ranks of a server, and where and how large an arena may be.

    ``arena`` is "host" or "device"; ``arena_bytes`` is the limit per rank, None for no limit. With ``deltas`` the arena
    keeps a version that was committed, because the next one may be sent as changes to it.
    """

    plans: tuple[ReceivePlan, ...]
    arena: str
    arena_bytes: int | None
    deltas: bool


@prepared
class ReceivePlanAnswer(SyncMessage, frozen=True):
    """Whether the rank stages versions in an arena, which takes ``bytes``."""

    stages: bool
    bytes: int


@prepared
class Rendezvous(SyncMessage, frozen=True):
    """Where a server's ranks and the trainer ranks that send to it make their links, within ``seconds``.

    In the group of the links the trainer ranks ``sources`` (ascending) come first, then the ``engine_ranks``.
    """

    name: str
    host: str
    port: int
    own_host: str
    sources: tuple[int, ...]
    engine_ranks: int
    backend: str
    seconds: float


@prepared
class ReceiveRequest(SyncMessage, frozen=True):
    """Command ``stage``: receive an attempt into the arena.

    ``base`` is the attempt that deltas build on, or "". With ``headers`` a `BucketHeader` precedes each bucket.
    ``timeout`` is for the whole transfer, ``stall`` for one message, and ``patience`` more for the first one of each
    trainer rank, in seconds.
    """

    attempt: str
    plan: str
    rendezvous: Rendezvous
    base: str
    headers: bool
    timeout: float
    stall: float
    patience: float


@prepared
class CommitRequest(SyncMessage, frozen=True):
    """Write a staged attempt into the live parameters; with ``stream``, receive it while writing."""

    attempt: str
    plan: str
    stream: ReceiveRequest | None = None


@prepared
class Empty(SyncMessage, frozen=True):
    """Commands ``poll`` and ``drop``, and the answer to ``drop``."""


@prepared
class StageReport(SyncMessage, frozen=True):
    """How far a rank's staging is. ``digest`` is of all that it received, ``seconds`` by activity.

    The answer to ``stage`` has state "none" on a rank without the plan of the request: its process is new.
    """

    attempt: str = ""
    state: Literal["none", "running", "staged", "failed", "committed"] = "none"
    error: str = ""
    digest: int = 0
    seconds: dict[str, float] = {}
    bytes: int = 0


# Driver to trainer ranks, and their answers


@prepared
class ServerLinks(SyncMessage, frozen=True):
    """One server of a `SendRequest`: the names of its links and its plan, its URL, and the replicas that feed it."""

    name: str
    plan: str
    url: str
    replicas: tuple[int, ...]


@prepared
class SendRequest(SyncMessage, frozen=True):
    """Send the present weights to all ``servers``.

    ``links`` names all links that may be used again; others are closed. Missing ones are made within ``join`` seconds.
    ``bases`` gives, by plan, the attempt to send deltas against. With ``stream`` buckets are used on arrival; with
    ``keep`` later attempts may send deltas against this one. ``timeout`` is for the whole transfer and ``stall`` for
    one message, in seconds.
    """

    attempt: str
    timeout: float
    stall: float
    meeting_point: tuple[str, int]
    servers: tuple[ServerLinks, ...]
    links: tuple[str, ...]
    join: float
    bases: dict[str, str]
    stream: bool
    keep: bool


class SentDigest(NamedTuple):
    """The digest of all that one source of a plan sent to one engine rank."""

    plan: str
    source: int
    engine_rank: int
    digest: int


class Confirmation(NamedTuple):
    """An engine rank's own digest of all that it received, and the seconds that it spent on digests."""

    url: str
    engine_rank: int
    digest: int
    seconds: float


@prepared
class SendReport(SyncMessage, frozen=True):
    """The report of a trainer rank that has sent; ``bytes`` went over the wire, ``seconds`` are by activity.

    ``failed`` has, by URL, why a server did not get everything; its links are closed.
    """

    digests: tuple[SentDigest, ...]
    confirmed: tuple[Confirmation, ...]
    failed: dict[str, str]
    seconds: dict[str, float]
    bytes: int


@prepared
class WrittenFile(SyncMessage, frozen=True):
    """A weight file on the shared disk: its size, and the SHA-256 of its bytes in hexadecimal."""

    bytes: int
    sha256: str


@prepared
class WriteReport(SyncMessage, frozen=True):
    """The files that a trainer rank wrote, by name, and the seconds that it took, by activity."""

    files: dict[str, WrittenFile]
    seconds: dict[str, float]
