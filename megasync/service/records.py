"""Records of sessions, models, samplers and checkpoints: all that the service knows besides promises.

Times are seconds since 1970. ``tenant`` owns the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megasync.concurrency.first_use import prepared
from megasync.service.interfaces import AdapterSpec
from megasync.service.saved_files import Files

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


@prepared
@dataclass(slots=True)
class Session:
    """A client's session. ``models`` and ``samplers`` are the ids of what it made, in order.

    They follow from the records of these, so the session is not written again for each.
    """

    id: str
    tenant: str
    created: float
    tags: list[str] = field(default_factory=list[str])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    name: str | None = None
    # The idempotency key that it was made with.
    key: str | None = None
    # When it last showed a sign of life, once it is silent.
    silent: float = 0.0
    # The number of its first model that may be made: earlier ones are forgotten.
    first_model: int = 0
    models: list[str] = field(default_factory=list[str])
    samplers: list[str] = field(default_factory=list[str])
    # How the client ended it: "success", "errored" or "interrupted"; empty while it lives.
    ended: str = ""
    detail: str | None = None
    ended_at: float = 0.0


@prepared
@dataclass(slots=True)
class Model:
    """A model. ``next`` is the number of the request that it waits for; request 0 makes it."""

    id: str
    tenant: str
    session: str
    created: float
    spec: AdapterSpec
    metadata: Mapping[str, Any] | None = None
    next: int = 0
    # The folder of the last durable state, relative to the run's, empty for fresh adapters; and its files.
    state: str = ""
    state_files: Files = field(default_factory=Files)
    steps: int = 0
    # Passes whose gradients are lost for good, until the next optimizer step has failed for it.
    lost: str = ""
    # The newest adapter of inflight samplers.
    inflight: str = ""
    inflight_files: Files = field(default_factory=Files)
    # Why it accepts nothing anymore; empty while it lives.
    ended: str = ""
    last_request: float = 0.0


@prepared
@dataclass(slots=True)
class Sampler:
    """A session of sampling: a snapshot, a checkpoint, the newest adapters of a model (inflight), or the base model."""

    id: str
    tenant: str
    session: str
    created: float
    # Of the checkpoint that it samples.
    path: str | None = None
    # The model that it follows.
    inflight: str | None = None
    # The adapter of a snapshot, which this sampler alone has, and its files.
    adapter: str = ""
    adapter_files: Files = field(default_factory=Files)
    # Clients that have joined it.
    joined: int = 0
    # Why it accepts nothing anymore; empty while it lives.
    ended: str = ""


@prepared
@dataclass(slots=True)
class Checkpoint:
    """A checkpoint under ``path``, as `tinker://MODEL/weights/NAME`. ``adapter`` also tells its folder."""

    path: str
    tenant: str
    model: str
    kind: CheckpointKind
    name: str
    created: float
    spec: AdapterSpec
    adapter: str
    files: Files
    metadata: Mapping[str, str] | None = None
    expires: float | None = None
    public: bool = False
