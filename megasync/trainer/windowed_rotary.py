"""Attention with a rotary base of its own in layers with a sliding window (Gemma 3)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention


class WindowedRotaryAttention(SelfAttention):
    """Megatron's attention; of the angles of both kinds of layers (`rotary.PackedRotary`) it takes its layer's."""

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
        own = (windowed if self._has_window else full).contiguous()
        return super().forward(*args, rotary_pos_emb=own, **kwargs)
