"""Builds Megatron GPTModels from a Hugging Face config.json, one per chunk of layers that a rank holds.

The parameters of these models are exactly those of `layout.Layout.params` for the rank. `build_chunks` checks this, so
a model can neither miss a weight nor keep a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu as fused_quick_gelu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import gelu, silu

from megasync.config.megatron_options import converted
from megasync.config.schema import TrainerConfig
from megasync.device import Device
from megasync.errors import ConfigError, raised_as
from megasync.layout.families.value_head import BIAS, WEIGHT
from megasync.layout.layout import Layout
from megasync.trainer.architecture import chunks_of, rope_parameters, window_options
from megasync.trainer.batch import PackedTokens
from megasync.trainer.latent_attention import latent_options
from megasync.trainer.layer_specs import chunk_specs
from megasync.trainer.logprobs import token_logprobs
from megasync.trainer.param_attributes import set_param_attributes
from megasync.trainer.rotary import PackedRotary, attention_factor
from megasync.trainer.routing import score_options

# Standard deviation of a new value head if config.json gives none; that of Hugging Face.
INITIALIZER_RANGE = 0.02


class TargetHead(torch.nn.Module):
    """The output layer of a policy: scores targets without the logits of all rows; see `logprobs.token_logprobs`.

    A module of its own, so that hooks see when the weight is read. It has none if it is the embedding's. With adapters
    it has an ``adapter``; see `adapters.LowRankHead`.
    """

    def __init__(self, weight: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, rows: torch.Tensor, tied: torch.Tensor | None, targets: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.weight if tied is None else tied
        assert weight is not None
        adapter = getattr(self, "adapter", None)
        return token_logprobs(rows, weight, targets, adapter=None if adapter is None else adapter(rows), **options)


class PolicyModel(GPTModel):
    """A GPTModel whose last stage returns the requested rows of the hidden states; `score` turns them into log-probs.

    A response of 8 tokens after a prompt of 150 needs 8 rows of logits, not 158, and the output layer is a large part
    of a small model. Under sequence parallelism rows are scattered over tensor ranks, so they are gathered first.
    """

    # Each tensor rank has a shard of the output layer, and so computes a partial gradient of the hidden states.
    splits_output = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self._replace_output()

    def _replace_output(self) -> None:
        self.output_layer = TargetHead(cast("torch.nn.Parameter | None", self.output_layer.weight))

    def forward(self, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """``padding_mask`` [1, tokens] is true for tokens that do not count for load balancing."""
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:
            # Megatron scatters the mask together with the embeddings, which only the first stage has.
            rank, size = parallel_state.get_tensor_model_parallel_rank(), self.config.tensor_model_parallel_size
            padding_mask = padding_mask.chunk(size, dim=1)[rank]
        return super().forward(*args, padding_mask=padding_mask, **kwargs)

    def _postprocess(  # pyright: ignore[reportIncompatibleMethodOverride] - Megatron passes all arguments by name
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedTokens, **_: Any
    ) -> torch.Tensor:
        """Hidden states [requested rows, hidden] on the last stage, all of them [tokens, 1, hidden] before it."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, self.splits_output)
        assert packed_seq_params.rows is not None
        rows = hidden_states.index_select(0, packed_seq_params.rows).squeeze(1)
        if self.splits_output and not self.config.sequence_parallel:
            # The backward pass adds the partial gradients, as that of the gather above does.
            rows = copy_to_tensor_model_parallel_region(rows)
        return self._output(rows)

    def _output(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def score(self, rows: torch.Tensor, targets: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of targets from the rows of `forward`, on the last stage; see `token_logprobs`."""
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(rows, tied, targets, **options)


class ValueModel(PolicyModel):
    """A critic: values [requested rows, 1]. Every tensor rank has the whole head."""

    splits_output = False

    def _replace_output(self) -> None:
        self.output_layer = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)

    def _output(self, rows: torch.Tensor) -> torch.Tensor:
        return self.output_layer(rows)


def build_chunks(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> list[PolicyModel]:
    """Builds this rank's shard of each of its chunks, with uninitialised parameters of ``dtype`` on the device.

    Needs initialised Megatron process groups. Raises ConfigError if the layout table does not match the model that
    Megatron built.
    """
    config = transformer_config(layout, trainer, device, dtype)
    rank = torch.distributed.get_rank()
    stages, stage = layout.stages, layout.topology.coords(rank).pp
    last = (len(stages) - 1, layout.topology.virtual - 1)
    rope = rope_parameters(layout.hf_config)
    chunks = []
    for number, layers in enumerate(stages[stage]):
        model = (ValueModel if layout.value_head else PolicyModel)(
            config,
            chunk_specs(config, layout, layers, device.spec, rope),
            vocab_size=layout.padded_vocab,
            max_sequence_length=layout.hf_config.get("max_position_embeddings", 0),
            pre_process=(stage, number) == (0, 0),
            post_process=(stage, number) == last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=layout.tied,
            vp_stage=number if layout.topology.virtual > 1 else None,
        )
        if not layout.family.latent:
            # Megatron declares its own rotary class; PackedRotary implements the two calls that the model makes.
            model.rotary_pos_emb = PackedRotary(  # pyright: ignore[reportAttributeAccessIssue]
                rope,
                layout.sizes.head_dim,
                device.torch_device,
                interleaved=layout.family.interleaved_rotary,
                windowed=rope_parameters(layout.hf_config, windowed=True) if layout.family.local_rotary else None,
            )
        if layout.family.scaled_embeddings and model.pre_process:
            model.embedding.register_forward_hook(partial(_scaled, layout.sizes.hidden**0.5))
        for name, param in model.named_parameters():
            if name.endswith(".softmax_offset"):
                # Transformer Engine makes it in float32.
                param.data = param.data.to(dtype)
        for module in model.modules():
            # Transformer Engine's layers.
            if hasattr(module, "fuse_wgrad_accumulation"):
                vars(module)["fuse_wgrad_accumulation"] = trainer.gradient_accumulation_fusion
        # Megatron creates the gates of routers and shared experts on the CPU and moves them at their first use.
        chunks.append(model.to(device.torch_device))
    if layout.family.norms_all_heads:
        # With this option, Megatron sums gradients of all norms of queries and keys over tensor ranks, by name. Here
        # each rank has other weights. Apart from that, only the layers' constructors read the option.
        config.qk_layernorm = False
    _check_parameters(chunks, layout, rank)
    set_param_attributes(named_weights(chunks), layout, rank, config.sequence_parallel)
    return chunks


def fresh_value_head(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """Initial float32 weights of a value head by name, as in Hugging Face; the same on every rank."""
    deviation = layout.hf_config.get("initializer_range", INITIALIZER_RANGE)
    generator = torch.Generator().manual_seed(seed)
    shapes = layout.hf_tensors
    return {
        WEIGHT: torch.empty(shapes[WEIGHT]).normal_(0.0, deviation, generator=generator),
        BIAS: torch.zeros(shapes[BIAS]),
    }


def named_weights(chunks: Sequence[PolicyModel]) -> dict[str, torch.Tensor]:
    """All weights under the names of `Layout.params`: parameters, and router biases, which are buffers."""
    weights = {}
    for number, chunk in enumerate(chunks):
        prefix = f"{number}." if len(chunks) > 1 else ""
        weights |= {prefix + name: param for name, param in chunk.named_parameters()}
        weights |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return weights


def transformer_config(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of the model and its parallelism."""
    sizes, rules = layout.sizes, [rule.local for rule in layout.family.layer]
    fused = device.spec == "te"
    virtual = layout.topology.virtual
    latent = layout.family.latent
    options: dict[str, Any] = dict(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=layout.hf_config["rms_norm_eps"],
        gated_linear_unit=True,
        **_activation_options(layout, fused=fused),
        **window_options(layout.hf_config),
        **_chunk_options(layout),
        softmax_type="learnable" if layout.family.has_sinks else "vanilla",
        softmax_scale=_softmax_scale(layout),
        add_bias_linear=any(name.endswith("linear_proj.bias") for name in rules),
        add_qkv_bias=any(name.endswith("linear_qkv.bias") for name in rules),
        qk_layernorm=latent or any(name.endswith("q_layernorm.weight") for name in rules),
        attention_output_gate=layout.family.gates_attention,
        layernorm_zero_centered_gamma=layout.family.zero_centered_norms,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=trainer.tensor_parallel,
        context_parallel_size=trainer.context_parallel,
        cp_comm_type=trainer.context_parallel_comm,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        num_layers_in_first_pipeline_stage=trainer.first_stage_layers,
        num_layers_in_last_pipeline_stage=trainer.last_stage_layers,
        pipeline_model_parallel_layout=_pipeline_layout(trainer),
        sequence_parallel=trainer.sequence_parallel and trainer.tensor_parallel > 1,
        tp_comm_overlap=trainer.tp_comm_overlap,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        # An interleaved schedule could confuse batched messages between the same two ranks.
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
        # The loss is already normalised by the global token count, so Megatron must not average it.
        calculate_per_token_loss=True,
        use_cpu_initialization=not fused,
        perform_initialization=False,
        # Megatron's own output layer, which is replaced, would refuse it without Apex; see `build_chunks`.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused and not latent and not layout.family.interleaved_rotary,
        rotary_interleaved=layout.family.interleaved_rotary,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **_recompute_options(trainer),
        **_fp8_options(trainer),
        **_expert_options(layout, trainer, device),
        **(latent_options(layout, rope_parameters(layout.hf_config)) if latent else {}),
    )
    options |= converted("model", trainer.megatron.model)
    what, fix = "Megatron refuses the options of trainer", "change them (docs/megatron_options.md)"
    with raised_as(ConfigError, what, fix, of=(ValueError, AssertionError)):
        config = (MLATransformerConfig if latent else TransformerConfig)(**options)
    # Set after Megatron's validation, which forbids it with the allgather dispatcher. Here it is safe: microbatches
    # may differ in length, but those that meet in a dispatcher are padded to the same (`Packing.microbatches`).
    config.variable_seq_lengths = not trainer.pad_microbatches
    return config


def _pipeline_layout(trainer: TrainerConfig) -> list[list[str]] | None:
    """Megatron's lists of what each chunk holds, in the order of `trainer.pipeline_layout`."""
    chunks = [["decoder"] * layers for layers in trainer.pipeline_layout]
    if not chunks:
        return None
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _scaled(factor: float, module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings * factor


def _activation_options(layout: Layout, *, fused: bool) -> dict[str, Any]:
    if layout.family.gelu:
        # Megatron's fused function computes the approximation by tanh under this name.
        return {"activation_func": gelu if fused else partial(gelu, approximate="tanh")}
    if not layout.family.clamped:
        return {"activation_func": silu}
    # The fused activation exists for Megatron's own function, which is compiled.
    return {
        "activation_func": fused_quick_gelu if fused else _quick_gelu,
        "activation_func_clamp_value": {**layout.family.defaults, **layout.hf_config}["swiglu_limit"],
        "glu_linear_offset": 1.0,
    }


def _quick_gelu(gate: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(1.702 * gate)


def _softmax_scale(layout: Layout) -> float | None:
    """The scale of attention scores if it is not the usual one.

    yarn's factor of rotated queries and of rotated keys is one of their products, because all channels are rotated.
    """
    if "query_pre_attn_scalar" in layout.family.defaults:
        return {**layout.family.defaults, **layout.hf_config}["query_pre_attn_scalar"] ** -0.5
    if layout.family.latent or "yarn" not in layout.family.rope_types:
        return None
    return attention_factor(rope_parameters(layout.hf_config)) ** 2 * layout.sizes.head_dim**-0.5


def _chunk_options(layout: Layout) -> dict[str, Any]:
    chunks = chunks_of(layout.hf_config)
    if chunks is None:
        return {}
    unrotated = [int(layer in chunks.full) for layer in range(layout.sizes.layers)]
    return {"no_rope_freq": unrotated, "qk_l2_norm": chunks.normed}


def _recompute_options(trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(trainer.recompute_modules)}
    if trainer.recompute is None:
        return {}
    if trainer.recompute_layers is None:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": trainer.recompute_layers,
    }


def _fp8_options(trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.fp8 is None:
        return {}
    # Blocks have scales fine enough for gradients in the more exact format.
    return {"fp8": "e4m3" if trainer.fp8 == "blockwise" else "hybrid", "fp8_recipe": trainer.fp8}


def _expert_options(layout: Layout, trainer: TrainerConfig, device: Device) -> dict[str, Any]:
    sizes = layout.sizes
    if not sizes.experts:
        return {}
    return {
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.moe_intermediate,
        "moe_layer_freq": [int(layer in sizes.sparse_layers) for layer in range(sizes.layers)],
        "moe_shared_expert_intermediate_size": sizes.shared_intermediate or None,
        "moe_shared_expert_gate": any("shared_experts.gate_weight" in rule.local for rule in layout.family.sparse),
        **score_options(layout),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if trainer.moe_aux_loss else "none",
        "moe_aux_loss_coeff": trainer.moe_aux_loss,
        "expert_model_parallel_size": layout.topology.expert,
        "expert_tensor_parallel_size": layout.topology.expert_tensor_size,
        "moe_grouped_gemm": device.spec == "te",
        # With `trainer.fp8` the grouped layers fill the tokens of each expert up with rows of zeros. With this option
        # the router would instead send tokens to experts that it did not choose, with a weight of zero.
        "moe_router_padding_for_quantization": False,
        "moe_token_dispatcher_type": "flex" if trainer.moe_deepep else device.expert_dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_permute_fusion": trainer.moe_permute_fusion,
        "moe_shared_expert_overlap": trainer.moe_shared_expert_overlap,
    }


def _check_parameters(chunks: Sequence[PolicyModel], layout: Layout, rank: int) -> None:
    """Raises ConfigError unless the layout table and Megatron agree on every name and shape."""
    built = {name: tuple(weight.shape) for name, weight in named_weights(chunks).items()}
    planned = layout.params(rank)
    differing = sorted(name for name in built.keys() | planned.keys() if built.get(name) != planned.get(name))
    if differing:
        name = differing[0]
        raise ConfigError(
            f"the layout table and the Megatron model differ in {len(differing)} parameter(s), first {name}: the "
            f"table has {planned.get(name, 'none')}, the model {built.get(name, 'none')}"
        )
