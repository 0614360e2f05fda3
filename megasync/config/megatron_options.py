"""Checks the fields of Megatron's classes that `trainer.megatron` sets, and refuses those that other keys decide.

The fields and their types are read from the source of the installed megatron-core, which is parsed and not imported, so
a driver can check them without torch. `python -m megasync.config.megatron_options` writes docs/megatron_options.md.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megasync.base.files import atomic_write
from megasync.config.limits import as_typed
from megasync.errors import ConfigError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_options.md"

# Files of megatron-core with the classes that a table sets, base classes first.
_SOURCES = {
    "model": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "latent": (("transformer/transformer_config.py", "MLATransformerConfig"),),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
_ENUMS = "transformer/enums.py"
CLASSES = {
    "model": "TransformerConfig, with latent attention MLATransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}
# What `torch.dtype` may be.
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int16")

# By table: the key of the configuration that decides fields.
KEYS: dict[str, dict[str, str]] = {
    "model": {
        "trainer.tensor_parallel": "tensor_model_parallel_size",
        "trainer.context_parallel": "context_parallel_size",
        "trainer.context_parallel_comm": "cp_comm_type",
        "trainer.pipeline_parallel": "pipeline_model_parallel_size",
        "trainer.virtual_pipeline": "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage",
        "trainer.sequence_parallel": "sequence_parallel",
        "trainer.pad_microbatches": "variable_seq_lengths",
        "trainer.tp_comm_overlap": (
            "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
            "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
            "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend"
        ),
        "trainer.cuda_graphs": (
            "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules "
            "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps "
            "delay_offload_until_cuda_graph"
        ),
        "trainer.expert_parallel": "expert_model_parallel_size",
        "trainer.expert_tensor_parallel": "expert_tensor_parallel_size moe_extended_tp",
        "trainer.first_stage_layers": "num_layers_in_first_pipeline_stage account_for_embedding_in_pipeline_split",
        "trainer.last_stage_layers": "num_layers_in_last_pipeline_stage account_for_loss_in_pipeline_split",
        "trainer.pipeline_layout": "pipeline_model_parallel_layout",
        "trainer.recompute": "recompute_granularity recompute_method moe_layer_recompute",
        "trainer.recompute_layers": "recompute_num_layers",
        "trainer.recompute_modules": "recompute_modules",
        "trainer.moe_aux_loss": "moe_aux_loss_coeff moe_router_load_balancing_type",
        "trainer.fp8": "fp8 fp8_recipe",
        "trainer.gradient_accumulation_fusion": "gradient_accumulation_fusion",
        "trainer.moe_permute_fusion": "moe_permute_fusion",
        "trainer.moe_deepep": "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
        "trainer.moe_shared_expert_overlap": "moe_shared_expert_overlap",
        "model.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype fp32_residual_connection",
        "rollout.routing_replay": "moe_enable_routing_replay",
        "cluster.device": "use_cpu_initialization transformer_impl",
    },
    "ddp": {
        "trainer.distributed_optimizer": "use_distributed_optimizer",
        "trainer.overlap_grad_reduce": "overlap_grad_reduce",
        "trainer.overlap_param_gather": "overlap_param_gather",
    },
    "optimizer": {
        "trainer.optimizer.lr": "lr decoupled_lr",
        "trainer.optimizer.min_lr": "min_lr decoupled_min_lr",
        "trainer.optimizer.weight_decay": "weight_decay",
        "trainer.optimizer.betas": "adam_beta1 adam_beta2",
        "trainer.optimizer.eps": "adam_eps",
        "trainer.optimizer.clip_grad": "clip_grad",
        "trainer.optimizer.exp_avg_dtype": "exp_avg_dtype use_precision_aware_optimizer",
        "trainer.optimizer.exp_avg_sq_dtype": "exp_avg_sq_dtype",
        "trainer.optimizer.store_param_remainders": "store_param_remainders",
        "trainer.optimizer.offload": (
            "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
            "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params"
        ),
        "trainer.distributed_optimizer": "use_distributed_optimizer",
        "trainer.overlap_param_gather": "overlap_param_gather",
        "trainer.max_skipped_steps": "grad_norm_skip_threshold",
        "model.dtype": (
            "bf16 fp16 params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
        ),
    },
}

_ARCHITECTURE = "config.json of the model decides the architecture, and the weight sync serves the same"
_WEIGHTS = "weight sync and checkpoints read parameters in model.dtype, under their names"
_READ_AT_ONCE = (
    "the weight sync reads all parameters right after a step, and trainer.overlap_param_gather provides that"
)
_STATE = "megasync keeps main weights and gradients in float32, in Megatron's plain or its distributed optimizer"
_PACKED = "megasync places the tokens of a packed sequence itself"
_LOSS = "megasync computes the loss, and normalises it by the tokens of a whole step"
_INFERENCE = "SGLang generates; this is for generation by Megatron"
_PLACES = "megasync builds the model and writes its weights"
_EIGHT_BITS = (
    "of 8-bit and 4-bit products megasync supports what trainer.fp8 names: linear layers, scales without a history"
)
_DISPATCHER = "of the dispatchers of experts, only all-to-all and DeepEP with its own settings have been tested"
_FSDP = "megasync does not use Megatron's FSDP"
_LAYERS = "megasync's layers do not use it"
_ADAM = "megasync trains with Adam"
_MIXING = "tokens and log-probs of a sequence would depend on its neighbours in the batch"

# By table: why megasync decides fields for which there is no key.
REASONS: dict[str, dict[str, str]] = {
    "model": {
        _ARCHITECTURE: (
            "num_layers hidden_size num_attention_heads softmax_scale softmax_type num_query_groups "
            "ffn_hidden_size kv_channels hidden_dropout attention_dropout "
            "apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma "
            "add_bias_linear add_qkv_bias gated_linear_unit activation_func glu_linear_offset "
            "activation_func_clamp_value num_moe_experts rotary_interleaved window_size window_attn_skip_freq "
            "normalization qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention no_rope_freq "
            "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
            "linear_value_head_dim linear_num_key_heads linear_num_value_heads apply_query_key_layer_scaling "
            "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size "
            "moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk "
            "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
            "moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size q_lora_rank kv_lora_rank "
            "qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
            "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
            "mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads "
            "use_mamba_mem_eff_path mamba_training_ssm_states_dtype heterogeneous_block_specs "
            "hetereogenous_dist_checkpoint use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult "
            "mup_output_mult mup_base_head_dim mup_attn_scale_power dsa_indexer_n_heads dsa_indexer_head_dim "
            "dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_indexer_topk_freq "
            "dsa_indexer_skip_topk_offset dsa_kernel_backend dsa_indexer_rope_interleaved "
            "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon "
            "dsa_indexer_k_norm_fp32 mtp_num_layers mtp_standalone mtp_loss_scaling_factor mtp_use_repeated_layer "
            "mtp_detach_heads mtp_hybrid_override_pattern"
        ),
        "microbatches may differ in length, and this needs buffers of one size": "symmetric_ar_type",
        "torch.distributed has no ring_exchange": "use_ring_exchange_p2p",
        _WEIGHTS: (
            "fp8_param fp4_param moe_grouped_gemm moe_use_legacy_grouped_gemm moe_single_grouped_weight "
            "moe_single_grouped_bias tensor_parallel_num_weight_shards gtp_weight_remat_size "
            "expert_tensor_parallel_num_weight_shards expert_gtp_weight_remat_size cpu_offloading_weights "
            "mla_down_proj_fusion moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size "
            "use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp use_kitchen use_kitchen_attention "
            "kitchen_attention_backend quant_recipe"
        ),
        _PACKED: ("hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel"),
        _MIXING: (
            "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
            "moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased "
            "moe_expert_rank_capacity_factor"
        ),
        _LOSS: (
            "calculate_per_token_loss cross_entropy_loss_fusion cross_entropy_fusion_impl grad_scale_func "
            "moe_grad_scale_func mtp_grad_scale_func finalize_model_grads_func no_sync_func grad_sync_func "
            "param_sync_func timers experimental_attention_variant_loss_scale_func"
        ),
        _PLACES: (
            "perform_initialization init_method output_layer_init_method init_method_std embedding_init_method "
            "embedding_init_method_std init_model_with_meta_device qk_clip "
            "qk_clip_alpha qk_clip_threshold moe_router_bias_update_rate test_mode"
        ),
        _INFERENCE: (
            "flash_decode cache_mla_latents inference_rng_tracker inference_sampling_seed "
            "use_inference_optimized_layers inference_fuse_tp_communication inference_cuda_graph_scope "
            "inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
            "inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type "
            "nccl_all_reduce_for_prefill mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference"
        ),
        _EIGHT_BITS: (
            "fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
            "fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj fp4 "
            "fp4_recipe fp4_quantizer_factory activation_func_fp8_input_store moe_router_padding_for_fp8 "
            "moe_router_padding_for_quantization"
        ),
        _DISPATCHER: (
            "moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms_preprocessing "
            "moe_hybridep_num_blocks_permute "
            "moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_pad_uneven_dispatch_inputs "
            "moe_permute_fusion_into_hybridep moe_ncclep_static_shape moe_ncclep_zero_copy"
        ),
        _LAYERS: (
            "async_tensor_model_parallel_allreduce masked_softmax_fusion bias_dropout_fusion persist_layer_norm "
            "defer_embedding_wgrad_compute wgrad_deferral_limit moe_per_layer_logging "
            "num_microbatches_with_partial_activation_checkpoints barrier_with_L1_time "
            "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
            "overlap_dispatch_backward_with_experts_wgrad use_fused_weighted_squared_relu "
            "log_max_attention_logit"
        ),
    },
    "ddp": {
        _READ_AT_ONCE: "align_param_gather",
        _LOSS: "grad_reduce_in_fp32 average_in_collective gradient_reduce_div_fusion delay_wgrad_compute",
        "the optimizer state of a run is spread over all data-parallel ranks": "num_distributed_optimizer_instances",
        "megasync itself skips a step whose gradient is not finite": "check_for_nan_in_grad check_for_large_grads",
        _WEIGHTS: "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag",
        _FSDP: (
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
            "suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache fsdp_double_buffer "
            "fsdp_manual_registration fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync "
            "megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype "
            "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
            "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"
        ),
    },
    "optimizer": {
        _READ_AT_ONCE: "overlap_param_gather_with_optimizer_step",
        _STATE: ("main_grads_dtype main_params_dtype use_layer_wise_distributed_optimizer optimizer_cuda_graph"),
        _WEIGHTS: "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
        _ADAM: (
            "optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_nesterov muon_scale_mode "
            "muon_coefficient_type muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor "
            "muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency "
            "soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps"
        ),
        _LOSS: "timers barrier_with_L1_time log_num_zeros_in_grad",
    },
}


@dataclass(frozen=True, slots=True)
class MegatronField:
    """A field of one of Megatron's classes: its type and default as written in the source."""

    annotation: ast.expr
    default: str

    @property
    def type(self) -> str:
        return ast.unparse(self.annotation)


def decided(table: str) -> dict[str, str]:
    """The fields of a table that megasync decides: by name, the end of an error message."""
    found = {name: f"set {key} instead" for key, names in KEYS[table].items() for name in names.split()}
    return found | {name: reason for reason, names in REASONS[table].items() for name in names.split()}


def check_megatron(tables: Mapping[str, Mapping[str, Any]], *, latent: bool) -> None:
    """Raises ConfigError for the first field that is unknown, decided by another key, or of another type.

    ``tables`` are the fields by the names of `CLASSES`; ``latent`` says that the model has latent attention. Without
    megatron-core in this environment, types and names are left to the trainer ranks.
    """
    for table, values in tables.items():
        for name in values:
            if (reason := decided(table).get(name)) is not None:
                raise ConfigError(f"trainer.megatron.{table}.{name} cannot be set: {reason}")
        if not values or (root := installed_root()) is None:
            continue
        known = megatron_fields(table, root)
        if table == "model" and latent:
            known = known | megatron_fields("latent", root)
        enums = _enums(root)
        for name, value in values.items():
            key = f"trainer.megatron.{table}.{name}"
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"{key} is not a field of {CLASSES[table]} in megatron-core {version('megatron-core')}"
                    + (f"; did you mean {near[0]!r}?" if near else "; docs/megatron_options.md lists them")
                )
            _check_type(key, value, known[name], enums)


def installed_root() -> Path | None:
    """The folder of the installed megatron.core, which is not imported; None if there is none."""
    try:
        spec = find_spec("megatron")
    except ValueError:  # a module without a spec stands in for it
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () if (path := Path(folder) / "core").is_dir()), None)


@cache
def megatron_fields(table: str, root: Path) -> dict[str, MegatronField]:
    """The fields that a table may name, by name; "latent" are those that only MLATransformerConfig has."""
    found: dict[str, MegatronField] = {}
    for file, name in _SOURCES[table]:
        for line in _class(root / file, name).body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                default = ast.unparse(line.value) if line.value is not None else "required"
                found[line.target.id] = MegatronField(line.annotation, default)
    if table == "latent":
        return {name: item for name, item in found.items() if name not in megatron_fields("model", root)}
    return {name: item for name, item in found.items() if not name.startswith("_")}


def _class(file: Path, name: str) -> ast.ClassDef:
    module = ast.parse(file.read_text(encoding="utf-8"))
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


@cache
def _enums(root: Path) -> dict[str, tuple[str, ...]]:
    """Names of the members of Megatron's enumerations."""
    module = ast.parse((root / _ENUMS).read_text(encoding="utf-8"))
    return {
        node.name: tuple(
            line.targets[0].id
            for line in node.body
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        )
        for node in module.body
        if isinstance(node, ast.ClassDef)
    }


def _check_type(key: str, value: Any, item: MegatronField, enums: Mapping[str, tuple[str, ...]]) -> None:
    if all(kind.startswith(("Callable", "ContextManager", "None")) for kind in _alternatives(item.annotation)):
        raise ConfigError(f"{key} takes a Python object ({item.type}), which no configuration contains; remove it")
    if not _fits(item.annotation, value, enums):
        words = ", ".join(_words(kind, enums) for kind in _alternatives(item.annotation))
        raise ConfigError(f"{key}={as_typed(value)} has the wrong type; Megatron takes {words}")


def _alternatives(annotation: ast.expr) -> list[str]:
    return [ast.unparse(part) for part in _parts(annotation)]


def _parts(annotation: ast.expr) -> Iterator[ast.expr]:
    """The members of a union, or the annotation itself."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _parts(inner)
            yield ast.Name("None")
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            for member in members:
                yield from _parts(member)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _parts(left)
            yield from _parts(right)
        case _:
            yield annotation


def _fits(annotation: ast.expr, value: Any, enums: Mapping[str, tuple[str, ...]]) -> bool:
    return any(_fits_part(part, value, enums) for part in _parts(annotation))


def _fits_part(part: ast.expr, value: Any, enums: Mapping[str, tuple[str, ...]]) -> bool:
    match part:
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id=name) if name in TYPES:
            return isinstance(value, TYPES[name]) and not isinstance(value, bool)
        case ast.Name(id="list"):
            return isinstance(value, list)
        case ast.Name(id=name) if name in enums:
            return value in enums[name]
        case ast.Attribute(attr="dtype"):
            return value in DTYPES
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return value in ast.literal_eval(ast.Tuple(inner.elts if isinstance(inner, ast.Tuple) else [inner]))
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            return isinstance(value, list) and all(_fits(inner, entry, enums) for entry in value)
        case ast.Subscript(value=ast.Name(id="Tuple" | "tuple"), slice=ast.Tuple(elts=[first, *rest])):
            if not isinstance(value, list):
                return False
            if [ast.unparse(kind) for kind in rest] == ["..."]:
                return all(_fits(first, entry, enums) for entry in value)
            return len(value) == 1 + len(rest) and all(map(lambda k, v: _fits(k, v, enums), [first, *rest], value))
        case _:
            return False


def _words(kind: str, enums: Mapping[str, tuple[str, ...]]) -> str:
    known = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "None": "null"}
    if kind in enums:
        return " or ".join(enums[kind])
    if kind == "torch.dtype":
        return " or ".join(DTYPES)
    return known.get(kind, kind.replace("Literal", "one of "))


# Values as Megatron takes them


def converted(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked values of a table as arguments of Megatron's class, with its dtypes, enumerations and tuples."""
    from importlib import import_module

    root = installed_root()
    assert root is not None
    known = megatron_fields(table, root) | (megatron_fields("latent", root) if table == "model" else {})
    result = dict(values)
    for name, value in values.items():
        kinds = _alternatives(known[name].annotation)
        if "torch.dtype" in kinds and value is not None:
            result[name] = getattr(import_module("torch"), value)
        elif isinstance(value, str) and (enum := next((kind for kind in kinds if kind in _enums(root)), None)):
            members = getattr(import_module("megatron.core.transformer.enums"), enum)
            # Of text or an enumeration Megatron itself makes the latter.
            result[name] = value if "str" in kinds else members[value]
        elif isinstance(value, list) and any(kind.startswith(("Tuple", "tuple")) for kind in kinds):
            result[name] = tuple(value)
    return result


# The page

_HEAD = """# Megatron's options

`trainer.megatron` sets fields of Megatron's own classes, for what has no key of megasync:

```yaml
trainer:
  megatron:
    model: {attention_backend: flash, moe_router_fusion: true}
    ddp: {bucket_size: 40000000}
    optimizer: {apply_wd_to_qk_layernorm: true}
```

Fields and types are those of the installed megatron-core. An unknown field is refused with the nearest name, and so is
a value of another type; enumerations and dtypes are written by name (`flash`, `bfloat16`). What contradicts other
fields is refused by Megatron when the trainer ranks start; `megasync rehearse CONFIG` finds it without a GPU.
`megasync plan` does not know what these fields do to memory. None of them has been run on a GPU.
"""


def page(root: Path, release: str) -> str:
    """The Markdown page: for each table the fields that megasync decides, and the others with type and default."""
    parts = [_HEAD]
    for table, cls in CLASSES.items():
        known = megatron_fields(table, root) | (megatron_fields("latent", root) if table == "model" else {})
        parts.append(f"## `trainer.megatron.{table}`\n\nFields of {cls}.\n")
        rows = [(f"`{key}`", names) for key, names in KEYS[table].items()]
        rows += [(reason, names) for reason, names in REASONS[table].items()]
        parts.append("| refused, because it is decided by | fields |\n|---|---|")
        parts += [f"| {what} | {', '.join(f'`{name}`' for name in sorted(names.split()))} |" for what, names in rows]
        parts.append(
            f"\nAll others may be set. In megatron-core {release}:\n\n"
            "| field | type | Megatron's default |\n|---|---|---|"
        )
        free = sorted(known.keys() - decided(table).keys())
        parts += [f"| `{name}` | `{_cell(known[name].type)}` | `{_cell(known[name].default)}` |" for name in free]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    root = installed_root()
    assert root is not None, "megatron-core is not installed"
    text = page(root, version("megatron-core"))
    atomic_write(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, text)
