"""How many tokens a server holds: its context, and its KV cache on a CPU where the configuration leaves that open.

SGLang would take `mem_fraction` of the memory that is free when it starts, each server anew, until nothing is left for
the others. So a server gets one gibibyte, or what the longest sequence needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasync.config.pools import attention_ranks
from megasync.config.schema import Config, FrozenModelConfig, RolloutConfig
from megasync.layout.families import FAMILIES, sizes_of

CPU_CACHE_BYTES = 2**30
# SGLang 0.5.23 refuses prompts that come so close to its context or its cache, and ends responses two tokens before.
# Servers get these tokens on top of the configured ones; no request uses them.
RESERVED_TOKENS = 6
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def cpu_cache_tokens(bytes_per_token: int, longest: int) -> int:
    """Tokens of a cache of `CPU_CACHE_BYTES`, and at least ``longest``."""
    return max(CPU_CACHE_BYTES // bytes_per_token, longest)


def bytes_per_token(values: Mapping[str, Any], servers: RolloutConfig | FrozenModelConfig, dtype: str) -> int:
    """Bytes of a token in the cache of one rank of a server of the model with these ``values`` in its config.json."""
    ranks, stages = servers.tensor_parallel, 1
    if isinstance(servers, RolloutConfig):
        ranks, stages = attention_ranks(servers), servers.pipeline_parallel
    if values.get("model_type") in FAMILIES:
        sizes = sizes_of(values)
        layers, groups, head_dim = sizes.layers - len(sizes.delta_layers), sizes.groups, sizes.head_dim
        latent = sizes.kv_a_rows
    else:
        heads, layers, latent = values["num_attention_heads"], values["num_hidden_layers"], 0
        groups = values.get("num_key_value_heads") or heads
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
    # Every rank keeps the whole latent, which all heads share; otherwise keys and values of its own groups.
    channels = latent or 2 * max(1, groups // ranks) * head_dim
    return -(-layers // stages) * channels * ITEM_BYTES[dtype]


def longest_request(config: Config, servers: RolloutConfig | FrozenModelConfig) -> int:
    """Tokens of the longest sequence that servers have to hold: their context, or prompt, response and an answer."""
    answer = getattr(servers, "max_new_tokens", 0)
    return servers.context_length or config.data.prompt.max_tokens + config.rollout.sampling.max_new_tokens + answer + 1
