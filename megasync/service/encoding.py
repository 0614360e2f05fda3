"""Requests, outcomes and records as MessagePack; arrays as their type, shape and bytes.

Equal values have equal bytes whatever the order of their mappings, so a digest identifies the body of a request.
Nothing that is decoded is ever executed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from megasync.concurrency.first_use import prepared
from megasync.errors import DataError
from megasync.service import requests
from megasync.service.interfaces import PassResult, Samples

_REQUESTS = (
    requests.CreateModel,
    requests.Compute,
    requests.OptimStep,
    requests.SaveWeights,
    requests.SaveForSampler,
    requests.LoadWeights,
    requests.UnloadModel,
    requests.Sample,
    requests.Refused,
)
_OUTCOMES = (requests.ModelReady, PassResult, requests.Updated, requests.Saved, Samples, requests.Failed)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__qualname__} cannot be recorded")


def _decode_array(_: Any, value: Any) -> Any:
    dtype, shape, data = value
    # A copy can be written to, and is aligned.
    return np.frombuffer(data, dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array, order="deterministic")


def encode(value: Any) -> bytes:
    """Raises DataError for what cannot be recorded, as an object or a text that is no Unicode."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, NotImplementedError, OverflowError, RecursionError) as error:
        raise DataError(f"{type(value).__name__} holds what cannot be recorded: {error}") from error


_decoders = {
    kind.__name__: msgspec.msgpack.Decoder(prepared(kind), dec_hook=_decode_array) for kind in (*_REQUESTS, *_OUTCOMES)
}


def decode(name: str, data: bytes) -> Any:
    """The request or outcome of the type with this name. Raises ValueError for damaged bytes, KeyError for the name."""
    return _decoders[name].decode(data)
