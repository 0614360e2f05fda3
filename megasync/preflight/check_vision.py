"""Checks of a model folder that holds a vision tower beside the language model; a part of `check`."""

from __future__ import annotations

from pathlib import Path

from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_storage


def check_vision_folder(source: Path, layout: Layout) -> None:
    """Refuses a quantized folder; ``source`` is its config.json."""
    if layout.frozen_tensors and read_storage(source) is not None:
        raise ConfigError(
            f"{source} describes a quantized model with a vision tower, which has not been tested; give an unquantized "
            f"folder"
        )


def check_vision_policy(config: Config, layout: Layout) -> None:
    """Refuses what a policy with a vision tower cannot be combined with."""
    if not layout.frozen_tensors:
        return
    kind = layout.hf_config["model_type"]
    if config.critic.enabled:
        raise ConfigError(
            f"critic.enabled=true with model_type {kind}: a value model with a vision tower has no Hugging Face class "
            f"to be exported as; choose an estimator without a critic, such as algorithm.advantage=grpo"
        )
    if config.sync.transport == "adapters":
        raise ConfigError(
            f"sync.transport=adapters with model_type {kind}: servers with a vision tower have not been tested with "
            f"adapters; set transport=auto, which merges them"
        )
