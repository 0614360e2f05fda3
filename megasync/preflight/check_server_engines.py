"""Refuses servers that cannot have prefill and decode engines (`rollout.prefill_engines`); a part of `check`."""

from __future__ import annotations

from importlib.util import find_spec

from megasync.config.pools import frozen_models
from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.layout import Layout

# The model types whose servers are tested with both kinds of engines.
HANDED_OVER = ("deepseek_v3", "glm4_moe", "llama", "qwen2", "qwen3", "qwen3_moe")


def check_server_engines(config: Config, layout: Layout, *, planning: bool) -> None:
    """Raises ConfigError for the first contradiction. Only when not ``planning``, the packages must be installed."""
    rollout = config.rollout
    given = f"rollout.prefill_engines={rollout.prefill_engines} and decode_engines={rollout.decode_engines}"
    if not (rollout.prefill_engines or rollout.decode_engines):
        return
    if not (rollout.prefill_engines and rollout.decode_engines):
        raise ConfigError(f"{given}: a server needs at least one of each kind, or none of both; change one of them")
    if (kind := layout.hf_config["model_type"]) not in HANDED_OVER:
        raise ConfigError(f"{given} are tested with {', '.join(HANDED_OVER)} only, not with {kind}; set both to 0")
    if config.sync.pause_mode != "abort":
        raise ConfigError(
            f"{given} with sync.pause_mode={config.sync.pause_mode}: prompts on the way between two engines would "
            f"keep the cache of the weights before; set sync.pause_mode=abort"
        )
    untested = {
        f"rollout.external={rollout.external}": rollout.external,
        f"sync.transport={config.sync.transport}": config.sync.transport in ("broadcast", "adapters"),
        "rollout.routing_replay=true": rollout.routing_replay,
        f"rollout.sampling.top_k={rollout.sampling.top_k}": rollout.sampling.top_k != -1,
        "rollout.deterministic=true": rollout.deterministic,
        "rollout.fp8=true": rollout.fp8,
        f"rollout.expert_parallel={rollout.expert_parallel}": rollout.expert_parallel > 1,
        f"rollout.pipeline_parallel={rollout.pipeline_parallel}": rollout.pipeline_parallel > 1,
        f"rollout.attention_data_parallel={rollout.attention_data_parallel}": rollout.attention_data_parallel > 1,
        **{f"{key}.pool={model.pool}": model.pool != "own" for key, model in frozen_models(config).items()},
    }
    for other, is_set in untested.items():
        if is_set:
            raise ConfigError(f"{given} are not possible with {other}; change one of them")
    if not planning and find_spec("nixl") is None:
        raise ConfigError(
            f"{given} move caches with the package nixl, which is not installed; install the extra `engines` (in a "
            f"checkout: bash launch/setup_extra.sh engines), or set both to 0"
        )
