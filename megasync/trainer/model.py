"""A Hugging Face config.json as a Megatron GPTModel.

The parameters of the model built here are exactly those that `sync.layout.Layout.params` names for the rank;
`build_model` checks that before it returns, so a model can neither miss a weight nor keep a random one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from megasync.config.schema import TrainerConfig
from megasync.device import Device
from megasync.errors import ConfigError
from megasync.sync.families import Split
from megasync.sync.layout import Layout
from megasync.trainer.architecture import rope_parameters
from megasync.trainer.attention import TreeAttention
from megasync.trainer.batch import PackedTokens
from megasync.trainer.rotary import PackedRotary


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm, marked so that Megatron reduces its weight's gradient under sequence parallelism.

    Megatron's own wrapper around torch's norms refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel


class PolicyModel(GPTModel):
    """A GPTModel whose last stage computes logits for the wanted rows of the hidden states only.

    A response of 8 tokens behind a prompt of 150 needs 8 rows of logits, not 158, and the output layer is a large part
    of a small model. Under sequence parallelism rows are scattered over tensor ranks, so they are gathered first; the
    gather's backward pass then does the reduction that the output layer would otherwise do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = False
            self.output_layer.disable_grad_reduce = True

    def _postprocess(self, hidden_states: torch.Tensor, *, packed_seq_params: PackedTokens, **_: Any) -> torch.Tensor:
        """Logits [wanted rows, padded vocabulary / tensor ranks], or the hidden states on stages before the last."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        wanted = hidden_states.index_select(0, packed_seq_params.rows)
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(wanted, weight=tied)
        return logits.squeeze(1)


def build_model(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> PolicyModel:
    """This rank's stage and shard, with uninitialised parameters of ``dtype`` on the device.

    Needs initialised Megatron process groups.

    Raises:
        ConfigError: the layout table does not describe the model that Megatron built.
    """
    config = transformer_config(layout, trainer, device, dtype)
    rank = torch.distributed.get_rank()
    model = PolicyModel(
        config,
        _layer_specs(config, layout, rank, device.spec),
        vocab_size=layout.padded_vocab,
        max_sequence_length=layout.hf_config.get("max_position_embeddings", 0),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=layout.sizes.tied,
    )
    model.rotary_pos_emb = PackedRotary(rope_parameters(layout.hf_config), layout.sizes.head_dim, device.torch_device)
    _check_parameters(model, layout, rank)
    _mark_split_parameters(model, layout, rank)
    return model


def transformer_config(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the model and of how this run splits it."""
    sizes, params = layout.sizes, layout.params(0)
    fused = device.spec == "te"
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.groups,
        kv_channels=sizes.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=layout.hf_config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=any(name.endswith("linear_qkv.bias") for name in params),
        qk_layernorm=any(name.endswith("q_layernorm.weight") for name in params),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        num_layers_in_first_pipeline_stage=trainer.first_stage_layers,
        num_layers_in_last_pipeline_stage=trainer.last_stage_layers,
        sequence_parallel=trainer.sequence_parallel and trainer.tensor_parallel > 1,
        variable_seq_lengths=True,
        # Dense models have no experts, but Megatron checks that their dispatcher could take variable lengths.
        moe_token_dispatcher_type="alltoall",
        # The loss arrives normalised by the global token count, so Megatron must not average it over anything.
        calculate_per_token_loss=True,
        use_cpu_initialization=device.kind == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **(recompute if trainer.recompute == "full" else {}),
    )


def _layer_specs(
    config: TransformerConfig, layout: Layout, rank: int, flavour: str
) -> ModuleSpec | TransformerBlockSubmodules:
    """Megatron's layer, with this package's norm and attention in the local flavour."""
    if flavour == "te":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TreeAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * len(layout.stages[layout.topology.coords(rank).pp][0]), layer_norm=RMSNorm
    )


def _check_parameters(model: PolicyModel, layout: Layout, rank: int) -> None:
    """The layout table and Megatron must agree on every name and shape, or weights would go astray silently."""
    built = {name: tuple(param.shape) for name, param in model.named_parameters()}
    planned = layout.params(rank)
    if built != planned:
        differing = sorted(set(built.items()) ^ set(planned.items()))
        raise ConfigError(f"the layout table and the Megatron model disagree on {len(differing)} entries: {differing}")


def _mark_split_parameters(model: PolicyModel, layout: Layout, rank: int) -> None:
    """Tells Megatron which parameters differ between tensor ranks: the gradient norm counts all others only once.

    Megatron marks them while it draws initial weights, which this package skips because it loads every weight.
    """
    params = dict(model.named_parameters())
    for item in layout.of_rank(rank):
        param = params[item.param]
        if item.split is not Split.REPLICATED and not hasattr(param, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(param, True, 1 if item.split is Split.ROW else 0, 1)
