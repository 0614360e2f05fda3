"""Refuses servers that cannot have several attention groups (`rollout.attention_data_parallel`); a part of `check`."""

from __future__ import annotations

from megasync.config.pools import attention_ranks, engine_nodes
from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.layout import Layout

# The model types whose servers are tested with several groups.
GROUPED = ("deepseek_v3", "glm4_moe", "qwen3", "qwen3_moe")


def check_attention_groups(config: Config, layout: Layout) -> None:
    """Raises ConfigError for the first contradiction."""
    rollout = config.rollout
    if rollout.attention_data_parallel == 1:
        return
    given = f"rollout.attention_data_parallel={rollout.attention_data_parallel}"
    if rollout.tensor_parallel % rollout.attention_data_parallel:
        raise ConfigError(
            f"{given} does not divide rollout.tensor_parallel={rollout.tensor_parallel}, whose ranks form the groups; "
            f"choose a divisor"
        )
    ranks, key_heads = attention_ranks(rollout), layout.sizes.groups
    if key_heads % ranks and ranks % key_heads:
        raise ConfigError(
            f"{given} leaves {ranks} ranks for attention with num_key_value_heads={key_heads}; choose numbers that "
            f"divide one another"
        )
    if (kind := layout.hf_config["model_type"]) not in GROUPED:
        raise ConfigError(f"{given} is tested with {', '.join(GROUPED)} only, not with {kind}; set it to 1")
    untested = {
        f"rollout.external={rollout.external}": rollout.external,
        f"sync.transport={config.sync.transport}": config.sync.transport == "adapters",
        "rollout.routing_replay=true": rollout.routing_replay,
        "rollout.deterministic=true": rollout.deterministic,
        "rollout.fp8=true": rollout.fp8,
        f"rollout.expert_parallel={rollout.expert_parallel}": rollout.expert_parallel > 1,
        f"rollout.pipeline_parallel={rollout.pipeline_parallel}": rollout.pipeline_parallel > 1,
        "cluster.colocate=true": config.cluster.colocate,
        f"rollout.tensor_parallel={rollout.tensor_parallel}, which is more than a node": engine_nodes(config) > 1,
    }
    for other, is_set in untested.items():
        if is_set:
            raise ConfigError(f"{given} is not tested with {other}; change one of them")
