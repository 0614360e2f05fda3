"""Rotary position angles from a Hugging Face config.json, for packed tokens.

Megatron's own rotary module fixes llama3's scaling constants, and rebuilds positions from sequence boundaries in a
loop. This one reads all constants from the config, and where tokens carry explicit positions (`PackedTokens.positions`)
returns one row of angles per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megasync.trainer.batch import PackedTokens


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of rotated channels, float32 [head_dim * partial_rotary_factor / 2]; ``rope``
    comes from `architecture.rope_parameters`.

    Scaling of kind llama3 (Llama 3.1, "The Llama 3 Herd of Models", 2024): wavelengths longer than the original context
    are stretched by ``factor``, short ones kept, those between interpolated.
    """
    rotated = int(head_dim * rope["partial_rotary_factor"])
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    plain = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "default":
        return plain
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    turns = context * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (kept + (1.0 - kept) / factor)


class PackedRotary(torch.nn.Module):
    """Takes the place of ``GPTModel.rotary_pos_emb``, whose two calls it answers; it has no parameters.

    ``interleaved``: the two channels of a pair are neighbours, not one in each half of the rotated channels.
    """

    def __init__(
        self, rope: Mapping[str, Any], head_dim: int, device: torch.device, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        self._interleaved = interleaved
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, packed: PackedTokens) -> Any:
        """The model passes what this returns on to `forward`, so the packed tokens themselves are returned."""
        return packed

    def forward(self, packed: PackedTokens, packed_seq: bool = True, cp_group: Any = None) -> torch.Tensor:
        """Angles [rows, 1, 1, rotated channels]: a row per token where tokens carry positions, else per position."""
        positions = packed.positions
        if positions is None:
            positions = torch.arange(packed.max_seqlen_q, device=self._frequencies.device)
        angles = torch.outer(positions.float(), self._frequencies)
        both = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        return both[:, None, None, :]
