"""Refuses servers that could not keep the policy in block FP8 (`rollout.fp8`); a part of `check`."""

from __future__ import annotations

from pathlib import Path

from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.block_fp8 import Block
from megasync.layout.families import Split
from megasync.layout.fp8_folder import linear_matrices
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_storage
from megasync.layout.quantized import QuantizedLayout

KEY = "rollout.fp8=true"
# What SGLang computes with beside block FP8.
DTYPE = "bfloat16"


def planned_fp8(layout: Layout, source: Path) -> QuantizedLayout | None:
    """The weights as servers of a folder in block FP8 keep them, from its config.json alone; None for other folders."""
    block = read_storage(source)
    return QuantizedLayout(layout, block, linear_matrices(layout, block)) if isinstance(block, Block) else None


def check_fp8_servers(config: Config, layout: Layout, source: Path) -> None:
    """Raises ConfigError for the first contradiction."""
    if not config.rollout.fp8:
        return
    quantized = planned_fp8(layout, source)
    if quantized is None:
        raise ConfigError(
            f"{KEY} needs a model folder in block FP8, and model.path={config.model.path!r} is not: make one with "
            f"`megasync quantize {config.model.path} OUT`, and set model.path to it"
        )
    if config.model.dtype != DTYPE:
        raise ConfigError(
            f"{KEY} with model.dtype={config.model.dtype}: such servers compute in {DTYPE}; set model.dtype to it"
        )
    if config.sync.transport == "adapters":
        raise ConfigError(
            f"{KEY} with sync.transport=adapters: servers would add adapters to quantized weights, which the trainer "
            f"does not have; set rollout.fp8=false, or sync.transport=auto for merged adapters"
        )
    _check_split(config, quantized)


def _check_split(config: Config, layout: QuantizedLayout) -> None:
    """Applies SGLang's rule that a block belongs to one rank of a server."""
    tensor, expert, block = config.rollout.tensor_parallel, config.rollout.expert_parallel, layout.block
    if tensor == 1:
        return
    for item in layout.quantized(0):
        ranks = tensor if item.ep is None else tensor // expert
        for name, shape in item.tensors:
            rows = item.split is not Split.ROW
            size, edge = (shape[0], block.rows) if rows else (shape[1], block.cols)
            # Ranks beyond the number of key-value heads hold copies of whole heads.
            share = max(size // ranks, layout.sizes.head_dim) if item.split is Split.QKV else size // ranks
            if item.split is not Split.REPLICATED and ranks > 1 and share % edge:
                raise ConfigError(
                    f"{KEY} with rollout.tensor_parallel={tensor}: each rank of a server would have {share} "
                    f"{'rows' if rows else 'columns'} of {name!r}, which is not a multiple of its blocks' {edge}; "
                    f"lower rollout.tensor_parallel"
                )
