"""Which command a configuration is for, and what ranks of `megasync sft` read in its other sections."""

from __future__ import annotations

from dataclasses import replace

from megasync.config.schema import AlgorithmConfig, Config


def is_served(config: Config) -> bool:
    """Whether `megasync plan` and `megasync doctor` take it as a configuration of `megasync serve`."""
    return config.serve is not None


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
