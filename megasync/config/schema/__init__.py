"""The typed configuration: one dataclass per section, one file per noun; `Config` in `run` holds them all.

The comment above each key is its documentation: `megasync.config.reference` puts it into docs/configuration.md. A nested
section needs none, its class has a docstring. `limits` holds what each key allows. Nothing here imports torch or Ray.
"""

from megasync.config.schema.algorithm import AlgorithmConfig
from megasync.config.schema.chat import AUTO, ChatConfig
from megasync.config.schema.checkpoint import CheckpointConfig
from megasync.config.schema.cluster import ClusterConfig
from megasync.config.schema.data import DataConfig, DatasetConfig, PromptConfig
from megasync.config.schema.environment import EnvironmentConfig
from megasync.config.schema.evaluation import EvalConfig, EvalSamplingConfig, EvalSetConfig
from megasync.config.schema.gateway import GatewayConfig
from megasync.config.schema.health import HealthConfig
from megasync.config.schema.model import ModelConfig
from megasync.config.schema.observe import ObserveConfig
from megasync.config.schema.reward_model import RewardModelConfig
from megasync.config.schema.rewards import GroupConfig, RewardConfig
from megasync.config.schema.rollout import RolloutConfig
from megasync.config.schema.run import Config
from megasync.config.schema.sampling import SamplingConfig
from megasync.config.schema.schedule import ScheduleConfig
from megasync.config.schema.sync import SyncConfig
from megasync.config.schema.timeouts import TimeoutConfig
from megasync.config.schema.tools import ToolsConfig
from megasync.config.schema.trainer import OptimizerConfig, TrainerConfig

__all__ = [
    "AUTO",
    "AlgorithmConfig",
    "ChatConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSamplingConfig",
    "EvalSetConfig",
    "GatewayConfig",
    "GroupConfig",
    "HealthConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PromptConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SyncConfig",
    "TimeoutConfig",
    "ToolsConfig",
    "TrainerConfig",
]
