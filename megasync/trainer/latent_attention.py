"""Multi-head latent attention over packed tokens: Megatron's projections, with this package's rotation and gathers.

Megatron's own computation knows no explicit positions (`PackedTokens.positions`), takes the rotation's scale from its own
yarn module only, and leaves apart what each tensor rank's heads contribute to the gradient of the key that all heads
share when the down projection is cut. The last is why `LatentAttention` replaces the whole method: the shared key goes
through an operation whose backward pass sums over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class LatentAttention(MLASelfAttention):
    """For both flavours of layers: down projections may be cut over tensor ranks (local) or whole (Transformer Engine).

    Args:
        rope: from `architecture.rope_parameters`.
    """

    def __init__(self, *args: Any, rope: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        device = torch.device("cpu") if self.config.use_cpu_initialization else torch.cuda.current_device()
        self.rotary_pos_emb = PackedRotary(rope, self.config.qk_pos_emb_head_dim, device)
        self._attention_factor = attention_factor(rope)
        whole = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        self._cut = self.linear_kv_down_proj.weight.shape[0] < whole

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Query and key [tokens, local heads, qk channels], value [tokens, local heads, value channels] of hidden states
        [tokens or a tensor rank's part of them, 1, hidden]; and both latents, which no caller here reads.
        """
        config, packed = self.config, packed_seq_params
        own, rotated = config.qk_head_dim, config.qk_pos_emb_head_dim
        if config.q_lora_rank is None:
            q_latent = hidden_states
            query, _ = self.linear_q_proj(hidden_states)
        else:
            q_latent = self._scattered(self._down(self.linear_q_down_proj, hidden_states))
            query, _ = self.linear_q_up_proj(self.q_layernorm(q_latent))
        down = self._down(self.linear_kv_down_proj, hidden_states)
        kv_latent, shared_key = down.split([config.kv_lora_rank, rotated], dim=-1)
        kv_latent = self._scattered(kv_latent)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_latent))

        tokens, heads = query.shape[0], self.num_attention_heads_per_partition
        query = query.view(tokens, heads, own + rotated)
        own_query, query_part = query.split([own, rotated], dim=-1)
        own_key, value = key_value.view(tokens, heads, own + config.v_head_dim).split([own, config.v_head_dim], dim=-1)
        angles = self.rotary_pos_emb(packed)
        query = torch.cat((own_query, self._rotate(query_part, angles, packed)), dim=-1)
        key_part = self._rotate(self._for_all_heads(shared_key).view(tokens, 1, rotated), angles, packed)
        key = torch.cat((own_key, key_part.expand(tokens, heads, rotated)), dim=-1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _down(self, linear: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """All channels; a cut projection has gathered all tokens as well."""
        projected, _ = linear(hidden_states)
        return gather_from_tensor_model_parallel_region(projected) if self._cut else projected

    def _scattered(self, latent: torch.Tensor) -> torch.Tensor:
        """The tensor rank's own tokens under sequence parallelism, else all."""
        return scatter_to_sequence_parallel_region(latent) if self._cut and self.config.sequence_parallel else latent

    def _for_all_heads(self, shared_key: torch.Tensor) -> torch.Tensor:
        """All tokens' shared key; its gradient is summed over tensor ranks, each of which has some of the heads."""
        if self.config.sequence_parallel and not self._cut:
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
        )


def latent_options(layout: Layout, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's ``MLATransformerConfig``.

    Megatron multiplies the softmax scale by a factor that depends on yarn's two numbers here, as Hugging Face does.
    """
    sizes = layout.sizes
    yarn = rope if rope["rope_type"] == "yarn" else {}
    return {
        "q_lora_rank": sizes.q_lora or None,
        "kv_lora_rank": sizes.kv_lora,
        "qk_head_dim": sizes.head_dim - sizes.rope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.value_dim,
        # Only decides which module of Megatron's is built, and replaced.
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.get("factor", 1.0),
        "mscale_all_dim": yarn.get("mscale_all_dim") or 0.0,
    }
