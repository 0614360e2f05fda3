"""Multi-head latent attention over packed tokens: Megatron's projections with this package's rotation and gathers.

Megatron's implementation has three limitations. It does not support explicit positions (`PackedTokens.positions`). It
takes the scale of the rotation only from its own yarn module. And with a sharded down projection it does not sum over
tensor ranks the gradient of the key that all heads share. `LatentAttention` therefore replaces the whole method, and
passes the shared key through an operation whose backward pass sums over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megasync.layout.layout import Layout
from megasync.trainer.batch import PackedTokens
from megasync.trainer.rotary import PackedRotary, attention_factor

# The channels of a pair are adjacent, and not in the halves. megatron-core 0.16 concludes that from the configuration.
_ADJACENT_PAIRS = "mla_rotary_interleaved"
_PAIRS = {_ADJACENT_PAIRS: True} if _ADJACENT_PAIRS in signature(apply_rotary_pos_emb).parameters else {}


class LatentAttention(MLASelfAttention):
    """Supports both layer flavours: down projections sharded over tensor ranks (local) or whole (Transformer Engine).

    ``rope`` comes from `architecture.rope_parameters`.
    """

    def __init__(self, *args: Any, rope: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = torch.device("cpu" if self.config.use_cpu_initialization else torch.cuda.current_device())
        self.rotary_pos_emb = PackedRotary(rope, self.config.qk_pos_emb_head_dim, device)
        self._attention_factor = attention_factor(rope)
        rows = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        self._sharded = self.get_parameter("linear_kv_down_proj.weight").shape[0] < rows

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Modules by name. Called by megatron-core 0.19 only, which gives queries without a latent a norm."""
        resolved = super()._resolve_qk_norm_config(submodules)  # pyright: ignore[reportAttributeAccessIssue]
        if self.config.q_lora_rank is None:
            resolved["linear_q_proj"] = submodules.linear_q_proj
        return resolved

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride] - called by name
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Query and key [tokens, local heads, qk channels], value [tokens, local heads, value channels], both latents.

        ``hidden_states`` are [tokens, 1, hidden], or the tensor rank's own tokens under sequence parallelism. The
        latents are part of Megatron's interface; nothing here reads them.
        """
        config, packed = self.config, packed_seq_params
        assert packed is not None
        plain, rotated = config.qk_head_dim, config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            q_latent = hidden_states
            query, _ = self.linear_q_proj(hidden_states)
        else:
            q_latent = self._scatter_tokens(self._down(self.linear_q_down_proj, hidden_states))
            query, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))  # pyright: ignore[reportCallIssue] - a module
        down = self._down(self.linear_kv_down_proj, hidden_states)
        kv_latent, shared_key = down.split([config.kv_lora_rank, rotated], dim=-1)
        kv_latent = self._scatter_tokens(kv_latent)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_latent))  # pyright: ignore[reportCallIssue] - a module

        tokens, heads = query.shape[0], self.num_attention_heads_per_partition
        query = query.view(tokens, heads, plain + rotated)
        plain_query, query_part = query.split([plain, rotated], dim=-1)
        key_value = key_value.view(tokens, heads, plain + config.v_head_dim)
        plain_key, value = key_value.split([plain, config.v_head_dim], dim=-1)
        angles = self.rotary_pos_emb(packed)
        query = torch.cat((plain_query, self._rotate(query_part, angles, packed)), dim=-1)
        key_part = self._rotate(self._share_with_heads(shared_key).view(tokens, 1, rotated), angles, packed)
        key = torch.cat((plain_key, key_part.expand(tokens, heads, rotated)), dim=-1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _down(self, linear: Callable[..., Any], hidden_states: torch.Tensor) -> torch.Tensor:
        """All channels of a down projection. A sharded one has also gathered all tokens."""
        projected, _ = linear(hidden_states)
        return gather_from_tensor_model_parallel_region(projected) if self._sharded else projected

    def _scatter_tokens(self, latent: torch.Tensor) -> torch.Tensor:
        """The tensor rank's own tokens under sequence parallelism, otherwise all."""
        return (
            scatter_to_sequence_parallel_region(latent) if self._sharded and self.config.sequence_parallel else latent
        )

    def _share_with_heads(self, shared_key: torch.Tensor) -> torch.Tensor:
        """The shared key of all tokens; its gradient is summed over tensor ranks, which have different heads."""
        if self.config.sequence_parallel and not self._sharded:
            return gather_from_sequence_parallel_region(shared_key)
        return copy_to_tensor_model_parallel_region(shared_key)

    def _rotate(self, channels: torch.Tensor, angles: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        return apply_rotary_pos_emb(
            channels,
            angles,
            config=self.config,
            cu_seqlens=packed.cu_seqlens_q,
            mscale=self._attention_factor,
            cp_group=self.pg_collection.cp,
            **_PAIRS,
        )


def latent_options(layout: Layout, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's ``MLATransformerConfig``.

    From the two yarn fields Megatron derives a factor of the softmax scale, as Hugging Face does.
    """
    sizes = layout.sizes
    yarn = rope if rope["rope_type"] == "yarn" else {}
    return {
        "q_lora_rank": sizes.q_lora or None,
        "kv_lora_rank": sizes.kv_lora,
        "qk_head_dim": sizes.head_dim - sizes.rope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        # Only selects the rotary module that Megatron builds, which is then replaced.
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim") or 0.0,
    }
