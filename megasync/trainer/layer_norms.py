"""Norms of gradients and weights by groups of layers: where in the model an update is large.

A group is the embedding, a span of layers, or what follows the layers. The squares of all groups' norms of gradients
add up to that of `train/grad_norm`: both take the same elements, each once over all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch

from megasync.layout.topology import Topology

# The most spans of layers.
SPANS = 8
EMBEDDING, OUTPUT = "embedding", "output"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Of an interleaved pipeline: the number of the chunk.
_CHUNK = re.compile(r"(\d+)\.")


def group_names(layers: int) -> list[str]:
    """The groups of a model with that many layers, from the input on."""
    bounds = [layers * span // min(SPANS, layers) for span in range(min(SPANS, layers) + 1)]
    spans = [
        f"layers_{first}" if last == first else f"layers_{first}-{last}"
        for first, last in ((low, high - 1) for low, high in pairwise(bounds))
    ]
    return [EMBEDDING, *spans, OUTPUT]


def groups_of(names: Iterable[str], layers: int, topology: Topology, stage: int) -> dict[str, int]:
    """The group of each of a rank's parameters, as a position in `group_names`; names are those of `Layout.params`."""
    chunks = topology.stage_layers(layers)[stage]
    spans = min(SPANS, layers)
    groups: dict[str, int] = {}
    for name in names:
        layer = _LAYER.search(name)
        if layer is None:
            groups[name] = 0 if "embedding" in name else spans + 1
            continue
        chunk = _CHUNK.match(name)
        number = chunks[int(chunk[1]) if chunk else 0][int(layer[1])]
        # The last span that begins at or before the layer.
        groups[name] = 1 + max(span for span in range(spans) if layers * span // spans <= number)
    return groups


def named_norms(squares: torch.Tensor, layers: int) -> Mapping[str, float]:
    """Metrics from the squared norms [2, groups] of gradients and weights; without groups that have no weights."""
    norms = squares.sqrt().tolist()
    return {
        f"norms/{kind}/{name}": norm
        for kind, of_groups in zip(("grad", "weight"), norms, strict=True)
        for name, norm, weight in zip(group_names(layers), of_groups, norms[1], strict=True)
        if weight
    }
