"""Refuses servers that cannot have several pipeline stages (`rollout.pipeline_parallel`); a part of `check`."""

from __future__ import annotations

from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.layout import Layout

# The model types that SGLang has a pipeline for, as far as it is tested.
PIPELINED = (
    *("deepseek_v3", "glm4", "glm4_moe", "gpt_oss", "kimi_k2", "llama", "minimax_m2", "mistral"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
# With a tied embedding, the last stage of these would have no head.
UNTIED = ("glm4", "llama", "mistral")


def check_pipelined_servers(config: Config, layout: Layout) -> None:
    """Raises ConfigError for the first contradiction."""
    stages = config.rollout.pipeline_parallel
    if stages == 1:
        return
    given = f"rollout.pipeline_parallel={stages}"
    if config.rollout.external:
        raise ConfigError(f"{given} is for servers that the run starts, not for rollout.external; set it to 1")
    if stages > layout.sizes.layers:
        raise ConfigError(f"{given} exceeds the model's {layout.sizes.layers} layers; lower it")
    kind = layout.hf_config["model_type"]
    if kind not in PIPELINED or (layout.sizes.tied and kind in UNTIED):
        what = f"{kind} with tied embeddings" if kind in UNTIED else kind
        raise ConfigError(
            f"{given}: SGLang has no pipeline, or none that is tested, for {what}; set it to 1, and raise "
            f"rollout.tensor_parallel"
        )
    if config.sync.transport in ("broadcast", "adapters"):
        raise ConfigError(
            f"{given} with sync.transport={config.sync.transport}: SGLang takes those on one pipeline stage only; set "
            f"sync.transport to p2p or disk"
        )
    if config.rollout.routing_replay:
        raise ConfigError(
            f"{given} with rollout.routing_replay=true: SGLang reports the routes of the first pipeline stage only; "
            f"set one of them back"
        )
    if config.cluster.colocate:
        raise ConfigError(
            f"{given} with cluster.colocate=true: a server reports that its memory is free when that of its first "
            f"pipeline stage is; set one of them back"
        )
