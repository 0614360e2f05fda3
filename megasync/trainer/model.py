"""A Hugging Face config.json as Megatron GPTModels, one for each chunk of layers that a rank holds.

The parameters of the models built here are exactly those that `sync.layout.Layout.params` names for the rank;
`build_chunks` checks that before it returns, so a model can neither miss a weight nor keep a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu

from megasync.config.schema import TrainerConfig
from megasync.device import Device
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.trainer.architecture import rope_parameters
from megasync.trainer.batch import PackedTokens
from megasync.trainer.latent_attention import latent_options
from megasync.trainer.layer_specs import chunk_specs
from megasync.trainer.marks import mark_parameters
from megasync.trainer.rotary import PackedRotary
from megasync.trainer.routing import PolicyRouter, score_options


class PolicyModel(GPTModel):
    """A GPTModel whose last stage computes logits for the wanted rows of the hidden states only.

    A response of 8 tokens behind a prompt of 150 needs 8 rows of logits, not 158, and the output layer is a large part
    of a small model. Under sequence parallelism rows are scattered over tensor ranks, so they are gathered first; the
    gather's backward pass then does the reduction that the output layer would otherwise do.
    """

    # Each tensor rank has a part of the output layer, and so computes a part of the hidden states' gradient.
    splits_output = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = False
            self.output_layer.disable_grad_reduce = True

    def forward(self, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """``padding_mask`` [1, tokens] is true where a token does not count for the balance of experts."""
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:
            # Megatron scatters it together with the embeddings, which only the first stage has.
            rank, size = parallel_state.get_tensor_model_parallel_rank(), self.config.tensor_model_parallel_size
            padding_mask = padding_mask.chunk(size, dim=1)[rank]
        return super().forward(*args, padding_mask=padding_mask, **kwargs)

    def _postprocess(self, hidden_states: torch.Tensor, *, packed_seq_params: PackedTokens, **_: Any) -> torch.Tensor:
        """Logits [wanted rows, padded vocabulary / tensor ranks], or the hidden states on stages before the last."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, self.splits_output)
        return self._output(hidden_states.index_select(0, packed_seq_params.rows)).squeeze(1)

    def _output(self, wanted: torch.Tensor) -> torch.Tensor:
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(wanted, weight=tied)[0]


class ValueModel(PolicyModel):
    """The same with values [wanted rows, 1] for logits; every tensor rank has the whole head and computes all of them."""

    splits_output = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)

    def _output(self, wanted: torch.Tensor) -> torch.Tensor:
        return self.output_layer(wanted)


def build_chunks(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> list[PolicyModel]:
    """This rank's shard of each of its chunks, with uninitialised parameters of ``dtype`` on the device.

    Needs initialised Megatron process groups.

    Raises:
        ConfigError: the layout table does not describe the model that Megatron built.
    """
    config = transformer_config(layout, trainer, device, dtype)
    rank = torch.distributed.get_rank()
    stages, stage = layout.stages, layout.topology.coords(rank).pp
    last = (len(stages) - 1, layout.topology.virtual - 1)
    rope = rope_parameters(layout.hf_config)
    chunks = []
    for turn, layers in enumerate(stages[stage]):
        model = (ValueModel if layout.value_head else PolicyModel)(
            config,
            chunk_specs(config, layout, layers, device.spec, rope),
            vocab_size=layout.padded_vocab,
            max_sequence_length=layout.hf_config.get("max_position_embeddings", 0),
            pre_process=(stage, turn) == (0, 0),
            post_process=(stage, turn) == last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=layout.tied,
            vp_stage=turn if layout.topology.virtual > 1 else None,
        )
        if not layout.family.latent:
            model.rotary_pos_emb = PackedRotary(
                rope, layout.sizes.head_dim, device.torch_device, interleaved=layout.family.interleaved_rotary
            )
        # Megatron makes a router's and a shared expert's gate on the CPU and moves them at their first use.
        chunks.append(model.to(device.torch_device))
    _check_parameters(chunks, layout, rank)
    mark_parameters(named_weights(chunks), layout, rank, config.sequence_parallel)
    return chunks


def named_weights(chunks: Sequence[PolicyModel]) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, under the names of `Layout.params`: parameters, and a router's bias (a
    buffer, since no gradient trains it)."""
    found = {}
    for turn, chunk in enumerate(chunks):
        prefix = f"{turn}." if len(chunks) > 1 else ""
        found |= {prefix + name: param for name, param in chunk.named_parameters()}
        found |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")}
    return found


def set_step_tokens(chunks: Sequence[PolicyModel], tokens: int) -> None:
    """Tells every router how many tokens the step has; see `PolicyRouter`."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, PolicyRouter):
                module.step_tokens = tokens


def transformer_config(layout: Layout, trainer: TrainerConfig, device: Device, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the model and of how this run splits it."""
    sizes, params = layout.sizes, layout.params(0)
    fused = device.spec == "te"
    virtual = layout.topology.virtual
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    latent = layout.family.latent
    config = (MLATransformerConfig if latent else TransformerConfig)(
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
        qk_layernorm=latent or any(name.endswith("q_layernorm.weight") for name in params),
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
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        # Between the same two ranks, batched messages of an interleaved schedule could be taken for one another.
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
        # The loss arrives normalised by the global token count, so Megatron must not average it over anything.
        calculate_per_token_loss=True,
        use_cpu_initialization=device.kind == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        apply_rope_fusion=fused and not latent and not layout.family.interleaved_rotary,
        rotary_interleaved=layout.family.interleaved_rotary,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **(recompute if trainer.recompute == "full" else {}),
        **_expert_options(layout, trainer, device),
        **(latent_options(layout, rope_parameters(layout.hf_config)) if latent else {}),
    )
    # Set behind the back of Megatron's check, which forbids it to the allgather dispatcher: microbatches differ in
    # length, but those that meet in a dispatcher are padded to the same (`packing.level`).
    config.variable_seq_lengths = True
    return config


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
        "moe_token_dispatcher_type": device.expert_dispatcher,
    }


def _check_parameters(chunks: Sequence[PolicyModel], layout: Layout, rank: int) -> None:
    """The layout table and Megatron must agree on every name and shape, or weights would go astray silently."""
    built = {name: tuple(weight.shape) for name, weight in named_weights(chunks).items()}
    planned = layout.params(rank)
    if built != planned:
        differing = sorted(set(built.items()) ^ set(planned.items()))
        raise ConfigError(f"the layout table and the Megatron model disagree on {len(differing)} entries: {differing}")
