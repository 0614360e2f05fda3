"""Checks of requests that need nothing of what the service holds at the moment."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from megasync.errors import DataError
from megasync.service.checkpoints import check_name, check_ttl
from megasync.service.encoding import encode
from megasync.service.interfaces import Ints, ServedModel
from megasync.service.limits import Limits
from megasync.service.requests import (
    Compute,
    CreateModel,
    OptimStep,
    Request,
    Sample,
    SaveForSampler,
    SaveWeights,
)

KEY_LENGTH = 200
# Of what clients say about a session, a model or a checkpoint, which stays in memory as long as that does.
METADATA_BYTES = 1 << 16


def check_request(request: Request, size: int, tokens: int, served: ServedModel, limits: Limits) -> None:
    """Raises DataError for a request, of so many bytes and tokens, that can never be accepted."""
    if size > limits.request:
        raise DataError(f"a request has {size} bytes, and the limit is request={limits.request}; send less at once")
    if tokens > limits.tokens:
        raise DataError(f"a request has {tokens} tokens, and the limit is tokens={limits.tokens}; send less at once")
    if (metadata := getattr(request, "metadata", None)) is not None:
        check_metadata(metadata)
    match request:
        case CreateModel():
            check_base(request.base_model, served)
            spec = request.adapters
            if not 1 <= spec.rank <= served.rank:
                raise DataError(f"adapters of rank {spec.rank} are not served; choose 1 to {served.rank}")
            if not (spec.attention or spec.mlp or spec.unembed):
                raise DataError("a model needs adapters on attention, mlp or unembed; it has none")
        case Compute():
            if not request.work.data:
                raise DataError("a pass needs data; it has none")
            for index, datum in enumerate(request.work.data):
                _check_tokens(datum.tokens, f"datum {index}", served)
        case OptimStep():
            for name, value in asdict(request.adam).items():
                if not math.isfinite(value):
                    raise DataError(f"{name}={value} is no finite number; an optimizer step needs finite parameters")
        case SaveWeights() | SaveForSampler():
            if request.name is not None:
                check_name(request.name)
            check_ttl(request.ttl_seconds)
        case Sample():
            check_base(request.base_model, served)
            _check_tokens(request.sampling.prompt, "the prompt", served)
            if not 1 <= request.sampling.samples <= 1024:
                raise DataError(f"{request.sampling.samples} samples cannot be asked for; ask for 1 to 1024")
        case _:
            pass


def tokens_of(request: Request, context: int) -> int:
    """The tokens that a request counts with: those that are given, and those that may be generated."""
    if isinstance(request, Compute):
        return sum(datum.tokens.size for datum in request.work.data)
    if isinstance(request, Sample):
        sampling = request.sampling
        room = max(0, context - sampling.prompt.size)
        most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        return sampling.prompt.size + max(1, sampling.samples) * max(0, most)
    return 0


def check_base(name: str | None, served: ServedModel) -> None:
    """Raises DataError for a base model that is not served."""
    if name is not None and name != served.name:
        raise DataError(f"the base model {name!r} is not served; this service has {served.name!r}")


def check_metadata(value: Any) -> None:
    """Raises DataError for metadata that is too large."""
    if (size := len(encode(value))) > METADATA_BYTES:
        raise DataError(f"metadata has {size} bytes, and {METADATA_BYTES} are allowed; keep the rest in files")


def _check_tokens(tokens: Ints, what: str, served: ServedModel) -> None:
    if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{what} needs at least one token, whole numbers in one dimension; it has the shape {tokens.shape} and "
            f"the type {tokens.dtype}"
        )
    if tokens.size > served.context:
        raise DataError(f"{what} has {tokens.size} tokens, and the context of {served.name} is {served.context}")
    least, greatest = int(tokens.min()), int(tokens.max())
    if least < 0 or greatest >= served.vocab:
        wrong = least if least < 0 else greatest
        raise DataError(f"{what} has the token {wrong}; the tokens of {served.name} are 0 to {served.vocab - 1}")


def check_key(key: str | None) -> None:
    """Raises DataError for an idempotency key that cannot be recorded."""
    if key is not None and not (key.isascii() and key.isprintable() and 0 < len(key) <= KEY_LENGTH):
        raise DataError(
            f"the idempotency key {key!r:.100} is not allowed: use 1 to {KEY_LENGTH} printable ASCII letters"
        )
