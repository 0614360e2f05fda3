"""Joins Megatron-LM: weights to and from checkpoints of Megatron's own format (`megatron.core.dist_checkpointing`).

The other side is a Hugging Face folder. One process holds the whole model in the local flavour. Megatron's format names
parameters alike in all flavours and stores them whole, so a training job of Megatron-LM reads such a checkpoint on any
topology, and the other way round. Only weights are converted: the optimizer starts anew, and Transformer Engine's extra
state, which FP8 uses, is absent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch._C._distributed_c10d import HashStore

from megasync.base.files import new_folder
from megasync.config.schema import ModelConfig, TrainerConfig
from megasync.device import Device
from megasync.errors import CheckpointError, ConfigError
from megasync.layout.layout import Layout
from megasync.layout.shards import check_vacant, write_folder
from megasync.trainer.learner import MegatronLearner

log = logging.getLogger(__name__)

# The version of the state dictionary that Megatron-LM writes beside its weights.
VERSION = 3.0


def write_dist_checkpoint(model: ModelConfig, out: Path) -> None:
    """Writes a Hugging Face folder's weights, in ``model.dtype``, as a checkpoint folder of Megatron's format.

    The folder gets its name only when it is complete. Raises ConfigError for a model that Megatron's own layers do not
    compute, and CheckpointError for a folder that exists or cannot be written.
    """
    check_vacant(out)
    with _whole_model(model, load=True) as learner:
        try:
            with new_folder(out) as draft:
                dist_checkpointing.save(_state(learner) | {"checkpoint_version": VERSION, "iteration": 0}, str(draft))
        except (OSError, dist_checkpointing.core.CheckpointingException) as error:
            raise CheckpointError(f"could not write {out}: {error}") from error


def read_dist_checkpoint(source: Path, model: ModelConfig, out: Path) -> None:
    """Writes the weights of a checkpoint of Megatron's format as a Hugging Face folder, in ``model.dtype``.

    config.json and tokenizer are those of ``model.path``. Raises ConfigError as `write_dist_checkpoint`, and
    CheckpointError for a checkpoint that is incomplete or of another model, or a folder that exists.
    """
    check_vacant(out)
    with _whole_model(model, load=False) as learner:
        state = _state(learner)
        _check_names(source, state)
        try:
            # Without further arguments it returns the state alone.
            loaded = cast("dict[str, Any]", dist_checkpointing.load(state, str(source)))
            learner.chunks[0].load_state_dict(loaded["model"], strict=False)
        except (OSError, RuntimeError, ValueError, dist_checkpointing.core.CheckpointingException) as error:
            raise CheckpointError(f"{source} cannot be read as {model.path}: {error}") from error
        params = learner.params()
        write_folder(Path(model.path), out, learner.layout, model.dtype, lambda rank, name: params[name])
    log.info("Wrote %s from %s", out, source)


@contextmanager
def _whole_model(model: ModelConfig, load: bool) -> Iterator[MegatronLearner]:
    """The model on one rank, in a process group of its own."""
    learner = MegatronLearner(model, TrainerConfig(), Device("cpu"), 0, trains=False)
    _check_family(learner.layout)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        learner.initialize(None if load else _zeros)
        yield learner
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _zeros(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.params(rank).items()}


def _check_family(layout: Layout) -> None:
    family, kind = layout.family, layout.hf_config["model_type"]
    differs = family.latent or family.clamped or family.norms_all_heads or family.norms_outputs or family.delta
    if differs or family.chunks:
        raise ConfigError(
            f"models of type {kind} have parts here that Megatron's own layers lack, name or order otherwise, so they "
            "cannot be converted; use a Hugging Face folder (`megasync export`) and Megatron Bridge"
        )


def _state(learner: MegatronLearner) -> dict[str, Any]:
    """What Megatron-LM saves of a model: its parameters, as slices of whole tensors."""
    state = learner.chunks[0].sharded_state_dict()
    sparse = {f"decoder.layers.{layer}.pre_mlp_layernorm.weight" for layer in learner.layout.sizes.sparse_layers}
    for name, tensor in state.items():
        if name in sparse:
            # Megatron's local layers name it as those without experts do, its Transformer Engine layers do not.
            tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        # The padding of a vocabulary depends on the topology.
        if name.startswith(("embedding.", "output_layer.")):
            tensor.allow_shape_mismatch = True
    return {"model": state}


def _check_names(source: Path, state: dict[str, Any]) -> None:
    """Raises CheckpointError when parameters are missing: `load` would say so in many lines."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(source)):
        raise CheckpointError(f"{source} is no checkpoint of Megatron's format: it has no metadata.json of one")
    stored = dist_checkpointing.load_tensors_metadata(str(source))
    wanted = {tensor.key for tensor in nested_values(state["model"]) if isinstance(tensor, ShardedTensor)}
    if missing := sorted(wanted - stored.keys()):
        raise CheckpointError(
            f"{source} has no {missing[0]}" + (f" and {len(missing) - 1} more parameters" if missing[1:] else "")
        )
