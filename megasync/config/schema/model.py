"""The section of the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """The model that is trained and served."""

    # Folder with a Hugging Face config.json, safetensors and tokenizer (`megasync fetch` makes two small ones).
    path: str = MISSING
    # config.json that `megasync plan` reads while the folder above is not on this machine yet.
    config: str | None = None
    # Compute, storage and serving dtype: float32 or bfloat16. On GPUs bfloat16 keeps float32 master weights.
    dtype: str = "bfloat16"
