"""The requests that the service promises to answer, and the outcomes that it keeps for them.

A request of a model has a number (`seq`) in the order of its client; a session numbers its models and samplers
likewise. A tenant that asks again under the same number, or with the same idempotency key, gets the same promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megasync.errors import DataError, MegasyncError
from megasync.service.interfaces import Adam, AdapterSpec, Pass, PassResult, Samples, Sampling


class Unknown(DataError):
    """Nothing of this name belongs to the tenant."""


class Gone(DataError):
    """A finished session, an unloaded model or an outcome past its time was asked for."""


class Busy(DataError):
    """A limit is reached for now. The same request may be accepted later."""


class ServiceClosed(MegasyncError):
    """The service is shutting down or has failed. Promises are kept: ask again once it runs."""


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Asks for a model with fresh adapters; ``seq`` numbers the models of the session."""

    session: str
    seq: int
    base_model: str
    adapters: AdapterSpec
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Asks for a pass, with or without gradients."""

    model: str
    seq: int
    work: Pass


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Asks for an optimizer step."""

    model: str
    seq: int
    adam: Adam


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Asks for a checkpoint with the optimizer's state, under a name or the number of the request."""

    model: str
    seq: int
    name: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveForSampler:
    """Asks for adapters that can be sampled: a checkpoint of its own if it has a name, and otherwise a sampler.

    An ``inflight`` sampler follows the newest adapters that its model offers. An ``external`` checkpoint is saved to be
    downloaded.
    """

    model: str
    seq: int
    name: str | None = None
    inflight: bool = False
    external: bool = False
    # The number of the sampler in its session, if a sampler is asked for.
    sampler_seq: int | None = None
    ttl_seconds: int | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Asks an existing model (``model`` and ``seq``), or a new one of a session, to become what a checkpoint holds."""

    path: str
    optimizer: bool
    model: str | None = None
    seq: int | None = None
    session: str | None = None
    model_seq: int | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Asks to forget a model; its checkpoints stay."""

    model: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Asks for samples of a sampler, of a checkpoint (`tinker://...`), or of the base model."""

    sampling: Sampling
    sampler: str | None = None
    seq: int | None = None
    path: str | None = None
    base_model: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Holds the place of a request that was refused for good in the order of its model."""

    message: str


Request = CreateModel | Compute | OptimStep | SaveWeights | SaveForSampler | LoadWeights | UnloadModel | Sample


@dataclass(frozen=True, slots=True)
class ModelReady:
    """A model was created, loaded or unloaded."""

    model: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Updated:
    """An optimizer step was taken, and survives whatever dies."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written, or a sampler was made, or both."""

    path: str | None = None
    sampler: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request had no effect. ``category`` says who must change something; the message says what to repeat."""

    message: str
    category: Literal["user", "server", "unknown"] = "unknown"


Outcome = ModelReady | PassResult | Updated | Saved | Samples | Failed
