"""SGLang's Llama 4, with the weights as Hugging Face stores them.

SGLang's class of the language model, which is built from a folder without a vision tower, leaves the experts as they
were initialised, and rotates the halves of a head where a checkpoint has pairs of channels. Its class of folders with a
tower loads experts, and reorders the rows of queries and keys for that rotation. Here neither reorders rows, so that a
weight sync sends them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models import llama4, mllama4

EXPERTS = ".experts."
# SGLang's parameter of a tensor of all experts, and the parts of it that a matrix of that tensor has side by side.
PROJECTIONS = {"gate_up_proj": ("w13_weight", ("w1", "w3")), "down_proj": ("w2_weight", ("w2",))}


class Llama4ForCausalLM(llama4.Llama4ForCausalLM):
    """SGLang's class with interleaved rotary embeddings and a loader of experts."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layers: Any = self.get_layers()
        for layer in layers:
            attention = layer.self_attn
            if attention.use_rope:
                attention.rotary_emb = get_rope(
                    attention.head_dim,
                    rotary_dim=attention.head_dim,
                    max_position=attention.max_position_embeddings,
                    base=int(attention.rope_theta),
                    rope_scaling=config.rope_parameters,
                    is_neox_style=False,
                )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return super().load_weights(self._load_experts(weights))

    def _load_experts(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Loads the tensors of experts, [experts, in, out], and yields the others."""
        params = dict(self.named_parameters())
        for name, tensor in weights:
            layer, experts, projection = name.partition(EXPERTS)
            if not experts:
                yield name, tensor
                continue
            leaf, parts = PROJECTIONS[projection]
            target = f"{layer}{experts}{leaf}"
            loader: Any = params[target].weight_loader  # pyright: ignore[reportAttributeAccessIssue] - SGLang sets it
            for expert, matrix in enumerate(tensor):
                for part, columns in zip(parts, matrix.chunk(len(parts), dim=-1), strict=True):
                    loader(params[target], columns.T, target, shard_id=part, expert_id=expert)


class Llama4ForConditionalGeneration(mllama4.Llama4ForConditionalGeneration):
    """SGLang's class around the language model above. It has a tower only with ``--enable-multimodal``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The base class imports the language model's class while it is built.
        with patch.object(llama4, "Llama4ForCausalLM", Llama4ForCausalLM):
            super().__init__(*args, **kwargs)

    def permute_qk_weight_for_rotary(self, name: str, loaded_weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The weight as it is stored."""
        return name, loaded_weight


EntryClass = [Llama4ForCausalLM, Llama4ForConditionalGeneration]
