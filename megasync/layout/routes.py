"""Routes: the experts that a server chose for each token, for the trainer to choose the same.

Trainer and server compute router scores with different kernels, batches and, after a weight update, different weights.
Where two experts score nearly the same, they choose differently, which changes the log-prob of a token by far more than
rounding does. Routing replay (R3, https://arxiv.org/abs/2510.11370) trains each token with the experts that sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megasync.layout.families import sizes_of

# [positions, expert layers, experts per token].
RouteArray = NDArray[Any]
# Bytes of an expert as servers report it.
_REPORTED_BYTES = 4


@dataclass(frozen=True, slots=True)
class RouteFormat:
    """The format in which servers report routes: int32 [positions, `layers`, `per_token`] of all layers."""

    layers: int
    # The numbers of the layers with experts, in ascending order.
    sparse: tuple[int, ...]
    per_token: int
    # The experts of each of them.
    experts: int

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> RouteFormat | None:
        """The format of a model's routes; None without experts. Raises ConfigError for an unknown family."""
        sizes = sizes_of(hf_config)
        if not sizes.experts:
            return None
        return cls(sizes.layers, tuple(sorted(sizes.sparse_layers)), sizes.topk, sizes.experts)

    @property
    def dtype(self) -> DTypeLike:
        """The smallest dtype that holds the number of an expert."""
        return np.min_scalar_type(self.experts - 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the routes that are kept of a position."""
        return len(self.sparse), self.per_token

    @property
    def nbytes(self) -> int:
        """The bytes of the routes that are kept of a position."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def text_bytes(self) -> int:
        """The bytes of the routes that a server reports of a position, in base64."""
        return math.ceil(self.layers * self.per_token * _REPORTED_BYTES * 4 / 3)

    def parse(self, raw: bytes) -> RouteArray:
        """The routes [positions, *shape] that a server reported. Raises ValueError for anything else."""
        size = self.layers * self.per_token * _REPORTED_BYTES
        if len(raw) % size:
            raise ValueError(f"{len(raw)} bytes are no multiple of {size}")
        return self.checked(np.frombuffer(raw, np.int32).reshape(-1, self.layers, self.per_token))

    def checked(self, reported: NDArray[Any]) -> RouteArray:
        """The routes [positions, *shape] among integers [positions, layers, per_token]. Raises ValueError if they are
        not different experts of the model.
        """
        if reported.shape[1:] != (self.layers, self.per_token):
            raise ValueError(f"routes of the shape {reported.shape[1:]} instead of {(self.layers, self.per_token)}")
        routes = reported[:, self.sparse]
        if routes.size and (routes.min() < 0 or routes.max() >= self.experts):
            raise ValueError(f"experts {routes.min()} to {routes.max()} are outside [0, {self.experts})")
        ordered = np.sort(routes, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise ValueError("a token is routed to one expert twice")
        return routes.astype(self.dtype)
