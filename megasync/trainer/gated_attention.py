"""Attention whose output is multiplied by the sigmoid of a gate (Qwen3-Next).

Megatron has it, but its version 0.16.1 fails with more tensor ranks than key-value groups, because it leaves each rank
the gates of the whole group.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention


class GatedAttention(SelfAttention):
    """Megatron's attention, with its own split of the fused projection."""

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride] - called by name
        self, hidden_states: torch.Tensor, key_value_states: None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value and gate, each [tokens, 1, local heads or groups, channels]."""
        modules: Any = self
        mixed, _ = modules.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.config.tensor_model_parallel_size
        assert groups is not None
        heads, dim = self.config.num_attention_heads // groups, self.hidden_size_per_attention_head
        # Ranks that share a group. Rows are cut contiguously, so each has any part of the group's.
        sharing, rank = max(1, ranks // groups), self.pg_collection.tp.rank()
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)
            mixed = mixed.unflatten(-1, (groups, -1))[:, :, rank // sharing]
        mixed = mixed.unflatten(-1, (-1, (2 * heads + 2) * dim))
        query, gate, key, value = mixed.split((heads * dim, heads * dim, dim, dim), dim=-1)
        local_heads = heads // sharing
        query, gate = (
            part.unflatten(-1, (heads, dim)).narrow(-2, rank % sharing * local_heads, local_heads).flatten(2, 3)
            for part in (query, gate)
        )
        return modules.q_layernorm(query), modules.k_layernorm(key), value, gate
