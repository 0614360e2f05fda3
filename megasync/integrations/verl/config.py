"""Converts verl's engine configuration to megasync's; refuses every setting that megasync does not support.

Users expect each value of a verl configuration to take effect. So a value is either applied, or irrelevant for this
engine (`use_mbridge`, whose work the layout table does), or refused with an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.trainer.config import CheckpointConfig
from verl.workers.config import EngineConfig as VerlEngineConfig
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.errors import ConfigError
from megasync.layout.families import family_of
from megasync.layout.model_files import read_hf_config, read_storage

STRATEGY = "megasync"
DTYPES = ("bfloat16", "float32")
DECAYS = ("constant", "linear", "cosine")
# Supported values of `override_transformer_config`. Entries with None are applied below or irrelevant.
TRANSFORMER = {
    "recompute_granularity": (None, "full"),
    "recompute_method": (None, "uniform"),
    "recompute_num_layers": (None, 1),
    # Megatron reads it only for a granularity that is refused.
    "recompute_modules": None,
    # megasync's layers choose their attention; these values leave the choice to them.
    "attention_backend": (None, "auto", "flash"),
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
}
# verl's names of the settings in megasync's error messages.
NAMES = {
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "data_parallel": "data-parallel size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "expert_tensor_parallel": "expert_tensor_parallel_size",
    "first_stage_layers": "override_transformer_config.num_layers_in_first_pipeline_stage",
    "last_stage_layers": "override_transformer_config.num_layers_in_last_pipeline_stage",
}
# Those of them that must be at least 1; in verl, None means the default.
SIZES = [name for name in NAMES.values() if name.endswith("_size")]
# Checkpoint contents that megasync always writes together.
WHOLE = frozenset({"model", "optimizer", "extra"})


@dataclass
class MegasyncEngineConfig(McoreEngineConfig):
    """verl's Megatron configuration for megasync's engine.

    Set `actor_rollout_ref.actor.megatron._target_` to this class, and those of the reference policy and the critic.
    Raises ConfigError if a setting is not supported by megasync.
    """

    strategy: str = STRATEGY

    def __post_init__(self) -> None:
        VerlEngineConfig.__post_init__(self)
        _allow("strategy", self.strategy, STRATEGY)
        _allow("dtype", self.dtype, *DTYPES)
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}; it must be at least 1")
        for name in ("full_determinism", "use_megatron_fsdp", "pad_to_length"):
            _allow(name, getattr(self, name), False)
        _allow("context_parallel_size", self.context_parallel_size, 1)
        _allow("dynamic_context_parallel", self.dynamic_context_parallel, False)
        _allow("use_dist_checkpointing", self.use_dist_checkpointing, False)
        _allow("router_replay.mode", self.router_replay.mode, "disabled", "R3")
        _allow("qat.enable", self.qat.enable, False)
        for name in ("override_ddp_config", "override_mcore_model_config"):
            _allow(name, dict(getattr(self, name)), {})
        for key, value in self.override_transformer_config.items():
            if key not in TRANSFORMER:
                raise ConfigError(
                    f"override_transformer_config.{key} is not supported by megasync; remove it, or use one of "
                    f"{', '.join(TRANSFORMER)}"
                )
            if TRANSFORMER[key] is not None:
                _allow(f"override_transformer_config.{key}", value, *TRANSFORMER[key])


@contextmanager
def verl_setting_names() -> Iterator[None]:
    """Within the context, ConfigErrors use verl's names of settings."""
    try:
        yield
    except ConfigError as error:
        pattern = rf"(?:trainer\.)?\b({'|'.join(NAMES)})\b"
        raise ConfigError(re.sub(pattern, lambda match: NAMES[match[1]], str(error))) from error


def to_trainer(engine: McoreEngineConfig, optimizer: McoreOptimizerConfig | None, world: int) -> TrainerConfig:
    """megasync's trainer section for ``world`` ranks; without an optimizer, for an engine that only scores.

    Raises ConfigError if a setting is not supported, or the parallel sizes do not divide the number of ranks.
    """
    if not isinstance(engine, MegasyncEngineConfig):
        raise ConfigError(
            f"the engine configuration is a {type(engine).__name__}; set its _target_ to "
            f"megasync.integrations.verl.{MegasyncEngineConfig.__name__}"
        )
    _allow("use_fused_kernels", engine.use_fused_kernels, False)
    ranks = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
    if world % ranks:
        raise ConfigError(
            f"tensor_model_parallel_size={engine.tensor_model_parallel_size} x pipeline_model_parallel_size="
            f"{engine.pipeline_model_parallel_size} does not divide the {world} ranks; change one of them"
        )
    transformer = engine.override_transformer_config
    return TrainerConfig(
        tensor_parallel=engine.tensor_model_parallel_size,
        pipeline_parallel=engine.pipeline_model_parallel_size,
        data_parallel=world // ranks,
        expert_parallel=engine.expert_model_parallel_size,
        expert_tensor_parallel=engine.expert_tensor_parallel_size,
        virtual_pipeline=engine.virtual_pipeline_model_parallel_size or 1,
        first_stage_layers=transformer.get("num_layers_in_first_pipeline_stage"),
        last_stage_layers=transformer.get("num_layers_in_last_pipeline_stage"),
        sequence_parallel=engine.sequence_parallel and engine.tensor_model_parallel_size > 1,
        distributed_optimizer=engine.use_distributed_optimizer,
        recompute=transformer.get("recompute_granularity"),
        optimizer=to_optimizer(optimizer)[0] if optimizer is not None else OptimizerConfig(),
    )


def to_optimizer(optimizer: McoreOptimizerConfig) -> tuple[OptimizerConfig, int]:
    """megasync's optimizer section, and the step at which its decay ends. Raises ConfigError like `to_trainer`."""
    if not isinstance(optimizer, McoreOptimizerConfig):
        raise ConfigError(f"the optimizer configuration is a {type(optimizer).__name__}; use McoreOptimizerConfig")
    _allow("optim.optimizer", optimizer.optimizer, "adam")
    _allow("optim.lr_decay_style", optimizer.lr_decay_style, *DECAYS)
    _allow("optim.lr_warmup_init", optimizer.lr_warmup_init, 0.0)
    _allow("optim.weight_decay_incr_style", optimizer.weight_decay_incr_style, "constant")
    _allow("optim.use_precision_aware_optimizer", optimizer.use_precision_aware_optimizer, False)
    _allow("optim.use_layer_wise_distributed_optimizer", optimizer.use_layer_wise_distributed_optimizer, False)
    _allow("optim.use_checkpoint_opt_param_scheduler", optimizer.use_checkpoint_opt_param_scheduler, False)
    _allow("optim.override_optimizer_config", dict(optimizer.override_optimizer_config or {}), {})
    # In verl, None or -1 steps mean "not set".
    total = max(optimizer.lr_decay_steps or optimizer.total_training_steps, 0)
    if not total and optimizer.lr_decay_style != "constant":
        raise ConfigError(
            f"optim.lr_decay_style={optimizer.lr_decay_style} needs an end: set optim.lr_decay_steps or "
            f"optim.total_training_steps"
        )
    warmup = optimizer.lr_warmup_steps or 0
    config = OptimizerConfig(
        lr=optimizer.lr,
        decay=optimizer.lr_decay_style,
        warmup_steps=warmup if warmup > 0 else int(optimizer.lr_warmup_steps_ratio * total),
        min_lr=optimizer.min_lr,
        betas=list(optimizer.betas),
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
    )
    return config, total


def to_model(model: HFModelConfig, engine: McoreEngineConfig) -> ModelConfig:
    """megasync's model section.

    Raises ConfigError for an adapter, and for any other change of the model that megasync does not support.
    """
    if model.lora_rank or model.lora.get("rank") or model.lora_adapter_path:
        raise ConfigError(
            "megasync trains whole models, but this configuration sets an adapter (model.lora_rank, model.lora.rank or "
            "model.lora_adapter_path); unset it, or use another strategy"
        )
    _allow("model.mtp.enable", model.mtp.enable, False)
    _allow("model.use_liger", model.use_liger, False)
    _allow("model.enable_activation_offload", model.enable_activation_offload, False)
    _allow("model.tiled_mlp.enabled", model.tiled_mlp.get("enabled", False), False)
    _allow("model.hf_config_path", model.hf_config_path, model.path, model.local_path)
    # verl requires the attention of the Hugging Face model, which this engine does not build.
    changed = {key: value for key, value in model.override_config.items() if key != "attn_implementation" and value}
    _allow("model.override_config", changed, {})
    path = model.local_path or model.path
    family = family_of(read_hf_config(path)) if (Path(path) / "config.json").is_file() else None
    if family is not None and family.vision is not None:
        raise ConfigError(
            f"model.path={path!r} has a vision tower, which megasync leaves out, while verl trains it; use another "
            f"strategy, or a model without one"
        )
    if family is not None and family.chunks:
        raise ConfigError(
            f"model.path={path!r} is not supported under verl: its servers would use SGLang's own class, which leaves "
            f"the experts of this model unloaded"
        )
    if family is not None and read_storage(path) is not None:
        raise ConfigError(
            f"model.path={path!r} is stored quantized, and verl's servers would keep it quantized while megasync sends "
            f"weights in {engine.dtype}; use an unquantized model"
        )
    return ModelConfig(path=path, dtype=engine.dtype)


def check_contents(checkpoint: CheckpointConfig) -> None:
    """Refuses partial checkpoints: megasync saves and loads model, optimizer and extra state together.

    Raises ConfigError for only some of the three, unknown contents, and asynchronous saving.
    """
    for key in ("save_contents", "load_contents"):
        contents = set(getattr(checkpoint, key))
        if not WHOLE <= contents <= WHOLE | {"hf_model"}:
            raise ConfigError(
                f"checkpoint.{key} is {sorted(contents)}; megasync saves and loads "
                f"{', '.join(sorted(WHOLE))} together, and optionally hf_model"
            )
    _allow("checkpoint.async_save", checkpoint.async_save, False)
    _allow("checkpoint.save_lora_only", checkpoint.save_lora_only, False)


def _allow(name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} is {value!r}, which megasync does not support; set it to {' or '.join(map(repr, allowed))}"
        )
