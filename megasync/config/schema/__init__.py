"""The typed configuration: one dataclass per section, all held by `Config`.

The comment above each key is its documentation; `megasync.planning.reference` copies it into docs/keys. A
nested section needs no comment, because its class has a docstring. `key` declares a key with its default, its
limit (`megasync.config.limits`) and its rules (`megasync.config.rules`). Nothing here imports torch or Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasync.config.limits import NAMES, NO_KEY, PATH, RUN_NAME, SEED
from megasync.config.rules import key
from megasync.config.schema.cluster import ClusterConfig, SyncConfig, TimeoutConfig
from megasync.config.schema.data import (
    ORDER,
    DataConfig,
    DatasetConfig,
    ModelConfig,
    PromptConfig,
    SftConfig,
    TrainSetConfig,
)
from megasync.config.schema.evaluation import (
    EvalConfig,
    EvalSamplingConfig,
    EvalSetConfig,
    MlflowConfig,
    ObserveConfig,
    PrometheusConfig,
    WandbConfig,
)
from megasync.config.schema.rewards import (
    AuxiliaryModelConfig,
    FrozenModelConfig,
    GroupConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherConfig,
)
from megasync.config.schema.rollout import (
    AUTO,
    ChatConfig,
    EnvironmentConfig,
    GatewayConfig,
    HealthConfig,
    McpConfig,
    RolloutConfig,
    SamplingConfig,
    ToolsConfig,
)
from megasync.config.schema.service import OF_SERVICE, ServeConfig
from megasync.config.schema.training import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    LoraConfig,
    MegatronConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerConfig,
)

__all__ = [
    "AUTO",
    "AlgorithmConfig",
    "AuxiliaryModelConfig",
    "ChatConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DatasetConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSamplingConfig",
    "EvalSetConfig",
    "FrozenModelConfig",
    "GatewayConfig",
    "GroupConfig",
    "HealthConfig",
    "LoraConfig",
    "McpConfig",
    "MegatronConfig",
    "MlflowConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PrometheusConfig",
    "PromptConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "ServeConfig",
    "SftConfig",
    "SyncConfig",
    "TeacherConfig",
    "TimeoutConfig",
    "ToolsConfig",
    "TrainSetConfig",
    "TrainerConfig",
    "WandbConfig",
]

# Why keys cannot change when a run is resumed.
_PLACE = "it determines the run directory; move that folder instead, while the run is stopped"


@dataclass
class Config:
    """A whole configuration: the name, seed and folder of a run, and a section for each of its parts."""

    # Prefix of the run directory's name.
    name: str = key("run", RUN_NAME, fixed=_PLACE)
    # Seed of prompt order, servers and trainer ranks.
    seed: int = key(0, SEED, fixed=ORDER)
    # Folder in which run directories are made, as `<name>-<time>`.
    run_root: str = key("runs", PATH, fixed=_PLACE)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    serve: ServeConfig | None = key(None, OF_SERVICE)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    # Models that score responses, by names of your choice.
    reward_models: dict[str, RewardModelConfig] = key(dict, NAMES)
    # Models that workflows ask, such as a refiner of search results, by names of your choice.
    auxiliary_models: dict[str, AuxiliaryModelConfig] = key(dict, NAMES)
    # Models that the policy learns from token by token, by names of your choice.
    teachers: dict[str, TeacherConfig] = key(dict, NAMES)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    # No key. Text that the environment gives: how it was written, and its value. `config.load` fills and saves it.
    as_written: dict[tuple[str, ...], tuple[str, Any]] = field(
        default_factory=dict, repr=False, compare=False, metadata=NO_KEY
    )
