"""Rotary position angles from a Hugging Face config.json, for packed tokens.

Megatron's rotary module hard-codes the scaling constants of llama3, and rebuilds positions from sequence boundaries in
a loop. This one reads all constants from the config. If tokens have explicit positions (`PackedTokens.positions`) it
returns one row of angles per token.

Layers with a sliding window may have a rotary base of their own (Gemma 3). The angles of both kinds of layers then go
through the model side by side, and a layer takes its own (`WindowedRotaryAttention`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention

if TYPE_CHECKING:
    from megasync.trainer.batch import PackedTokens


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of rotated channels, float32 [head_dim * partial_rotary_factor / 2].

    ``rope`` comes from `architecture.rope_parameters`. With llama3 scaling (Llama 3.1, "The Llama 3 Herd of Models",
    2024), wavelengths longer than the original context are stretched by ``factor``, short ones are kept, and those
    between are interpolated. yarn (https://arxiv.org/abs/2309.00071, section 3.2) interpolates between the channels
    that turn ``beta_fast`` and ``beta_slow`` times within the original context.
    """
    rotated = int(head_dim * rope["partial_rotary_factor"])
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    plain = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "default":
        return plain
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    kept = _kept_by_yarn(rope, rotated) if rope["rope_type"] == "yarn" else _kept_by_llama3(rope, plain)
    return plain * (kept + (1.0 - kept) / rope["factor"])


def _kept_by_llama3(rope: Mapping[str, Any], plain: torch.Tensor) -> torch.Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(rope: Mapping[str, Any], rotated: int) -> torch.Tensor:
    """1 for pairs of high frequency, 0 for pairs of low frequency, with a linear ramp over the pair index between."""

    def pair(turns: float) -> float:
        context = rope["original_max_position_embeddings"]
        return rotated * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    steps = torch.arange(rotated // 2, dtype=torch.float32)
    return 1.0 - ((steps - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)


def attention_factor(rope: Mapping[str, Any]) -> float:
    """The factor of the rotated channels of queries and keys; 1 except for yarn (the same paper, section 3.4)."""
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if above and below:
        return _yarn_scale(rope["factor"], above) / _yarn_scale(rope["factor"], below)
    return _yarn_scale(rope["factor"], 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class PackedRotary(torch.nn.Module):
    """Replaces ``GPTModel.rotary_pos_emb``: implements the two methods that the model calls. Has no parameters.

    ``interleaved``: the two channels of a pair are adjacent, instead of one in each half of the rotated channels.
    ``windowed``: the options of layers with a window, if they differ. Then both kinds of angles are returned, one after
    the other in the last dimension.
    """

    def __init__(
        self,
        rope: Mapping[str, Any],
        head_dim: int,
        device: torch.device,
        *,
        interleaved: bool = False,
        windowed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._interleaved = interleaved
        kinds = [rope] if windowed is None else [rope, windowed]
        self._frequencies = [inverse_frequencies(kind, head_dim).to(device) for kind in kinds]

    def get_rotary_seq_len(
        self, context: Any, block: Any, hidden: Any, config: Any, packed: PackedTokens
    ) -> PackedTokens:
        """Returns the packed tokens themselves, because the model passes the result on to `forward`."""
        return packed

    def forward(self, packed: PackedTokens, packed_seq: bool = True, cp_group: Any = None) -> torch.Tensor:
        """Angles [rows, 1, 1, kinds x rotated channels], a row per token if tokens have positions, or per position."""
        positions = packed.positions
        if positions is None:
            positions = torch.arange(packed.max_seqlen_q, device=self._frequencies[0].device)
        pairs = [torch.outer(positions.float(), frequencies) for frequencies in self._frequencies]
        if self._interleaved:
            channels = [angles.repeat_interleave(2, dim=-1) for angles in pairs]
        else:
            channels = [each for angles in pairs for each in (angles, angles)]
        return torch.cat(channels, dim=-1)[:, None, None, :]


class WindowedRotaryAttention(SelfAttention):
    """Megatron's attention; of the angles of both kinds of layers it takes its layer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_window = is_layer_window_attention(
            self.config.window_size,
            self.config.window_attn_skip_freq,  # pyright: ignore[reportArgumentType] - None means every layer
            self.layer_number,
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - Megatron passes the angles by name
        self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> Any:
        full, windowed = rotary_pos_emb.chunk(2, dim=-1)
        # Fused kernels read the angles as one block.
        angles = (windowed if self._has_window else full).contiguous()
        return super().forward(*args, rotary_pos_emb=angles, **kwargs)
