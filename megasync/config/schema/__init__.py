"""The typed configuration: one dataclass per section, all held by `Config`.

The comment above each key is its documentation; `megasync.config.reference` copies it into docs/configuration.md. A
nested section needs no comment, because its class has a docstring. `key` declares a key with its default, its
limit (`megasync.config.limits`) and its rules (`megasync.config.rules`). Nothing here imports torch or Ray.
"""

from megasync.config.schema.cluster import ClusterConfig, SyncConfig, TimeoutConfig
from megasync.config.schema.data import DataConfig, DatasetConfig, ModelConfig, PromptConfig, SftConfig, TrainSetConfig
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
    RolloutConfig,
    SamplingConfig,
    ToolsConfig,
)
from megasync.config.schema.run import Config
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
    "SftConfig",
    "SyncConfig",
    "TeacherConfig",
    "TimeoutConfig",
    "ToolsConfig",
    "TrainSetConfig",
    "TrainerConfig",
    "WandbConfig",
]
