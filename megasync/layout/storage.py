"""How the weights of a model folder are quantized, according to its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from megasync.errors import ConfigError
from megasync.layout.block_fp8 import Block, stored_block
from megasync.layout.families import family_of
from megasync.layout.mxfp4 import MXFP4

# Block FP8 with blocks of this size, or MXFP4.
Storage = Block | Literal["mxfp4"]


def storage_of(config: Mapping[str, Any]) -> Storage | None:
    """The storage of the weights that belong to a config.json; None if they are not quantized.

    Raises ConfigError for every other quantization, and for MXFP4 of another model than gpt-oss.
    """
    stated: Any = config.get("quantization_config")
    values = cast(Mapping[str, Any], stated if isinstance(stated, Mapping) else {})
    if values.get("quant_method") != MXFP4:
        return stored_block(config)
    if not family_of(config).mxfp4:
        raise ConfigError(
            f"quantization_config.quant_method='mxfp4' in config.json cannot be loaded for model_type="
            f"{config['model_type']!r}, only for gpt_oss; use the model in block FP8 or unquantized"
        )
    return MXFP4
