"""Translates runs of `megasync sft` and `megasync serve` into the other sections of the configuration."""

from __future__ import annotations

from dataclasses import replace

from megasync.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    EvalConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    ScheduleConfig,
)

# Keys of the section `rollout` that say what runs on servers, and not which servers there are.
_TASK = ("sampling", "workflow", "workflow_options", "agent", "gateway", "reward", "rewards", "workers")
_TASK += ("reward_processes", "groups", "environment", "tools", "chat")


def is_served(config: Config) -> bool:
    """Whether `megasync plan` and `megasync doctor` take it as a configuration of `megasync serve`."""
    return config.serve is not None


def served_config(config: Config, context: int) -> Config:
    """The configuration that ranks and servers of a service start with: no data, no algorithm, adapters alone.

    ``context`` is the longest sequence, in tokens. Any of it may be trained.
    """
    task = {name: getattr(RolloutConfig(), name) for name in _TASK}
    task["sampling"] = SamplingConfig(max_new_tokens=context - 1)
    return replace(
        config,
        data=DataConfig(prompt=PromptConfig(max_tokens=1)),
        schedule=ScheduleConfig(),
        algorithm=AlgorithmConfig(),
        critic=CriticConfig(),
        eval=EvalConfig(),
        teachers={},
        reward_models={},
        auxiliary_models={},
        rollout=replace(config.rollout, context_length=context, **task),
        sync=replace(config.sync, transport="adapters"),
    )


def is_supervised(config: Config) -> bool:
    """Whether `megasync plan` and `megasync doctor` take it as a configuration of `megasync sft`: it names rows."""
    return config.sft.train is not None


def supervised_config(config: Config) -> Config:
    """The configuration that ranks of a supervised run start with: no reference, no critic, and nothing for servers."""
    return replace(
        config,
        algorithm=AlgorithmConfig(),
        critic=replace(config.critic, enabled=False),
        teachers={},
        reward_models={},
        auxiliary_models={},
        cluster=replace(config.cluster, colocate=False, share_device=False),
        rollout=replace(config.rollout, fp8=False),
        # With this transport ranks keep no merged copy of adapted weights.
        sync=replace(config.sync, transport="adapters") if config.trainer.lora.rank else config.sync,
    )
