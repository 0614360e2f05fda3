"""The first weights of a value head that is put onto a language model."""

from __future__ import annotations

import torch

from megasync.layout.families.value_head import BIAS, WEIGHT
from megasync.layout.layout import Layout

# Standard deviation where config.json does not say; Hugging Face's own.
INITIALIZER_RANGE = 0.02


def fresh_value_head(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """Random weights and no bias, as Hugging Face initialises them; by name, the same on every rank, float32."""
    deviation = layout.hf_config.get("initializer_range", INITIALIZER_RANGE)
    generator = torch.Generator().manual_seed(seed)
    shapes = layout.hf_tensors
    return {
        WEIGHT: torch.empty(shapes[WEIGHT]).normal_(0.0, deviation, generator=generator),
        BIAS: torch.zeros(shapes[BIAS]),
    }
