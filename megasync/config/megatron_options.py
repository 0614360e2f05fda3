"""The fields of Megatron's own classes that `trainer.megatron` may set, and the refusal of all others.

Invariant: only fields of `FIELDS` reach Megatron, in their types. Every other field is decided by a key, which names it
in `schema` (`key(megatron=...)`), by the model's config.json or by how megasync trains and syncs; or it has not been
tested with megasync. `planning.megatron_page` lists them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from megasync.config.limits import as_typed
from megasync.config.load import schema_items, type_name
from megasync.config.schema import TrainerConfig
from megasync.errors import ConfigError

CLASSES = {
    "model": "TransformerConfig, with latent attention MLATransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}
# By table and type: the fields that may be set.
FIELDS: dict[str, dict[Any, str]] = {
    "model": {
        bool: (
            "apply_rope_fusion attention_softmax_in_fp32 batch_invariant_mode batch_p2p_comm batch_p2p_sync "
            "bias_activation_fusion clone_scatter_output_in_embedding cpu_offloading cpu_offloading_activations "
            "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers deallocate_pipeline_outputs "
            "deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache "
            "distribute_saved_activations fine_grained_activation_offloading first_last_layers_bf16 "
            "fused_residual_rmsnorm fused_single_qkv_rope high_priority_a2a_comm_stream memory_efficient_layer_norm "
            "moe_paged_stash moe_router_fusion overlap_p2p_comm overlap_p2p_comm_warmup_flush tp_only_amax_red "
            "use_te_activation_func use_te_rng_tracker use_transformer_engine_op_fuser"
        ),
        int: (
            "cpu_offloading_num_layers delta_offload_bytes_across_pp_ranks min_offloaded_tensor_size "
            "mlp_chunks_for_training moe_paged_stash_page_size num_layers_at_end_in_bf16 num_layers_at_start_in_bf16"
        ),
        float: (
            "activation_offload_fraction moe_paged_stash_buffer_size_factor_cpu "
            "moe_paged_stash_buffer_size_factor_cuda moe_router_quantile_balancing_ema"
        ),
        str: "config_logger_dir",
        int | None: "fine_grained_offloading_max_inflight_offloads",
        float | None: "moe_z_loss_coeff",
        list[str] | None: "offload_modules",
        Literal["flash", "fused", "unfused", "local", "auto"]: "attention_backend",
        Literal["fp32", "fp64", None]: "moe_router_dtype",
        Literal["nccl", "ucc", None]: "pipeline_model_parallel_comm_backend",
        Literal[2, 3, 4, None]: "flash_attention_version",
    },
    "ddp": {
        bool: (
            "disable_symmetric_registration nccl_ub pad_buckets_for_high_nccl_busbw "
            "reduce_scatter_with_fp32_accumulation"
        ),
        int | None: "bucket_size num_buckets",
        list[str]: "param_name_patterns_for_fp32_local_accumulation",
    },
    "optimizer": {bool: "apply_wd_to_qk_layernorm decoupled_weight_decay", str: "config_logger_dir"},
}
# Those of them that Megatron has since 0.19.
SINCE_0_19 = (
    *("activation_offload_fraction", "cpu_offloading_retain_pinned_cpu_buffers", "delta_offload_bytes_across_pp_ranks"),
    *("fine_grained_offloading_max_inflight_offloads", "flash_attention_version", "fused_residual_rmsnorm"),
    *("high_priority_a2a_comm_stream", "mlp_chunks_for_training", "moe_paged_stash", "moe_paged_stash_page_size"),
    *("moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda", "num_buckets"),
    *("moe_router_quantile_balancing_ema", "param_name_patterns_for_fp32_local_accumulation"),
    "use_transformer_engine_op_fuser",
)


def types_of(table: str) -> dict[str, Any]:
    """The fields of a table that may be set, with their types."""
    return {name: kind for kind, names in FIELDS[table].items() for name in names.split()}


def deciding_keys() -> dict[str, list[str]]:
    """The keys that decide fields of other names, with these names; a * in one is any text."""
    return {item.key: words.split() for item in schema_items() if (words := item.field.metadata.get("megatron"))}


def check_megatron(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for the first field that may not be set, or has a value of another type.

    ``tables`` are the fields by the names of `CLASSES`.
    """
    for table, values in tables.items():
        types = types_of(table)
        for name, value in values.items():
            key = f"trainer.megatron.{table}.{name}"
            if name not in types:
                raise ConfigError(f"{key} cannot be set: {_why_not(name, types)}")
            if name in SINCE_0_19 and not newer_megatron():
                raise ConfigError(f"{key} needs megatron-core 0.19; {version('megatron-core')} is installed; remove it")
            if not _fits(types[name], value):
                raise ConfigError(f"{key}={as_typed(value)} has the wrong type; expected {type_name(types[name])}")


def newer_megatron() -> bool:
    """Whether the installed Megatron is 0.19 or later. Assumed if Megatron is not installed."""
    try:
        major, minor = version("megatron-core").split(".")[:2]
    except PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (0, 19)


def _why_not(name: str, types: Mapping[str, Any]) -> str:
    same = {item.key: [item.field.name] for item in schema_items(TrainerConfig, "trainer.")}
    for key, names in (same | deciding_keys()).items():
        if name == key.rpartition(".")[2] or any(fnmatchcase(name, word) for word in names):
            return f"set {key} instead"
    near = difflib.get_close_matches(name, types, 1, 0.85)
    return (
        "the model's config.json decides it, or megasync does, or it has not been tested; "
        + (f"did you mean {near[0]!r}?" if near else "remove it")
        + " (docs/megatron_options.md lists those that may be set)"
    )


def _fits(kind: Any, value: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(each, value) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(get_args(kind)[0], each) for each in value)
    return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)


def converted(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values of a table as arguments of Megatron's class, with its enumeration and tuples."""
    from megatron.core.transformer.enums import AttnBackend

    types = types_of(table)
    result = {name: tuple(value) if types[name] == list[str] else value for name, value in values.items()}
    if (backend := values.get("attention_backend")) is not None:
        result["attention_backend"] = AttnBackend[backend]
    return result
