"""What is trained and how: schedule, loss, trainer ranks, optimizer and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasync.config.limits import (
    ADVANTAGE,
    AT_LEAST_ONE,
    FRACTION,
    LOSS,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    PROCESSES,
    Choice,
    Range,
    limited,
)


@dataclass
class ScheduleConfig:
    """How much is trained, and how far generation may run ahead of training: docs/buffer.md."""

    # Number of training steps.
    total_steps: int = limited(100, AT_LEAST_ONE)
    # Prompts (groups) per training step.
    groups_per_step: int = limited(16, AT_LEAST_ONE)
    # Responses sampled per prompt.
    samples_per_group: int = limited(8, AT_LEAST_ONE)
    # Maximum age of a trained token, in published versions. A straggler that others overtook in the look-ahead window
    # may be older (`megasync plan` shows the bound). 0 is synchronous training.
    max_staleness: int = limited(1, NOT_NEGATIVE)
    # Training steps between two weight syncs, each of which publishes one version.
    weight_sync_steps: int = limited(1, AT_LEAST_ONE)
    # Maximum number of prompts in generation; null leaves it to the buffer's capacity.
    max_inflight_groups: int | None = limited(None, AT_LEAST_ONE)
    # true: requests survive a weight sync and continue under the new version. false: a sync waits until they are done.
    partial_rollout: bool = True
    # Look-ahead window of the batcher as a fraction of the buffer's capacity; null is strict FIFO.
    window_fraction: float | None = limited(0.3, FRACTION)
    # What to do with a finished group over the staleness bound: mask its stale tokens, regenerate it or drop it.
    stale: str = limited("regenerate", Choice("mask", "regenerate", "drop"))
    # Stop the run once the held-out score (greedy accuracy) exceeds this; null never does.
    stop_at_score: float | None = limited(None, Range(0, 1, open_high=True))


@dataclass
class AlgorithmConfig:
    """Advantages and loss: docs/algorithms.md."""

    # Estimator of advantages from the rewards of a step; docs/algorithms.md#advantages lists them.
    advantage: str = limited("grpo", ADVANTAGE)
    # Options of the estimator, by name.
    advantage_options: dict[str, Any] = field(default_factory=dict)
    # grpo, grpo_passk, grpo_process and gdpo: divide advantages by the standard deviation of the group's rewards. gae:
    # shift and scale them to mean 0 and variance 1 over the trained tokens of a step.
    normalize_std: bool = True
    # Weight of these advantages; 0 trains on `teachers` alone.
    reward_coef: float = limited(1.0, NOT_NEGATIVE)
    # Weight of the log-ratio of a teacher and the policy, which is added to the advantage of each token that has one.
    teacher_coef: float = limited(1.0, POSITIVE)
    # Loss of a token; docs/algorithms.md#policy-losses lists them.
    loss: str = limited("vanilla", LOSS)
    # Options of the loss, by name.
    loss_options: dict[str, Any] = field(default_factory=dict)
    # What the loss of a step is the mean of: token (all trained tokens alike), sequence (means over the tokens of
    # sequences), or constant (sums over the tokens of sequences, divided by the longest response).
    aggregation: str = limited("token", Choice("token", "sequence", "constant"))
    # What sequence and constant count as one sequence where the conversation of a sample forked: sample (all tokens of
    # the sample, so that it weighs as one that did not fork) or trajectory (each of its trajectories).
    sample_weight: str = limited("sample", Choice("trajectory", "sample"))
    # PPO clips the ratio below 1 - clip_low; with 1 there is no lower bound.
    clip_low: float = limited(0.2, FRACTION)
    # PPO clips the ratio above 1 + clip_high.
    clip_high: float = limited(0.28, POSITIVE)
    # Dual clip: bounds the surrogate of a token with a negative advantage at `dual_clip` times that advantage, where
    # PPO has no bound; null turns it off.
    dual_clip: float | None = limited(3.0, Range(1, open_low=True))
    # Denominator of the PPO ratio. trainer: the trainer's own log-probs before the step (decoupled PPO). behaviour: the
    # server's log-probs.
    ratio: str = limited("trainer", Choice("trainer", "behaviour"))
    # Off-policy correction by importance sampling against the server's log-probs: none, token, sequence (the geometric
    # mean over a response) or product (of all its tokens).
    correction: str = limited("token", Choice("none", "token", "sequence", "product"))
    # Upper bound of the importance ratio.
    correction_cap: float = limited(2.0, Range(1))
    # Lower bound of the importance ratio.
    correction_floor: float = limited(0.0, Range(0, 1))
    # What a token or sequence gets whose ratio is outside of these bounds: the bound (cap), or no gradient (mask).
    correction_outside: str = limited("cap", Choice("cap", "mask"))
    # Responses left out of the policy loss whose ratio is outside of the next two bounds: none; by the geometric mean
    # (sequence), by the product, or by any single token.
    rejection: str = limited("none", Choice("none", "sequence", "product", "token"))
    # Lower bound of that ratio; 0 for none.
    rejection_floor: float = limited(0.0, Range(0, 1))
    # Upper bound of that ratio; null for none.
    rejection_cap: float | None = limited(None, Range(1))
    # Coefficient of the KL penalty to the initial weights; 0 turns it off.
    kl_coef: float = limited(0.0, NOT_NEGATIVE)
    # Where that penalty is: a term of the loss, or subtracted from the rewards before advantages are estimated.
    kl_in: str = limited("loss", Choice("loss", "reward"))
    # Training steps after which the current weights take the place of the initial ones in the KL penalty; 0 never. A
    # multiple of checkpoint.every_steps, so that a resumed run finds them in a checkpoint.
    reference_every: int = limited(0, NOT_NEGATIVE)
    # Estimator of that KL: k1, k2 or k3.
    kl_kind: str = limited("k3", Choice("k1", "k2", "k3"))
    # Coefficient of the entropy bonus in the loss.
    entropy_coef: float = limited(0.0, NOT_NEGATIVE)


@dataclass
class OptimizerConfig:
    """Adam."""

    # Learning rate.
    lr: float = limited(1e-6, POSITIVE)
    # constant, linear or cosine, after `warmup_steps`; linear and cosine fall to `min_lr` over the steps that are left.
    decay: str = limited("constant", Choice("constant", "linear", "cosine"))
    # Steps of linear warmup from 0.
    warmup_steps: int = limited(0, NOT_NEGATIVE)
    # Learning rate at which linear or cosine decay ends, after the last step.
    min_lr: float = limited(0.0, NOT_NEGATIVE)
    # Adam's two decay rates.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    # Adam's epsilon.
    eps: float = limited(1e-8, POSITIVE)
    # Decoupled weight decay.
    weight_decay: float = limited(0.0, NOT_NEGATIVE)
    # Maximum gradient norm; 0 turns clipping off.
    clip_grad: float = limited(1.0, NOT_NEGATIVE)
    # Dtype of Adam's average of gradients. bfloat16 needs a GPU and model.dtype=bfloat16. 16- and 8-bit floats with a
    # scale are not supported: each rank's part has a scale of its own, which another topology cannot take over.
    exp_avg_dtype: str = limited("float32", Choice("float32", "bfloat16"))
    # Dtype of Adam's average of squared gradients, as for `exp_avg_dtype`. An average that decays more slowly than
    # bfloat16 can resolve (betas[1] above 0.996) stops shrinking.
    exp_avg_sq_dtype: str = limited("float32", Choice("float32", "bfloat16"))
    # Keep of each float32 main weight only the 16 bits that its bfloat16 weight lacks; nothing is lost. Needs a GPU and
    # model.dtype=bfloat16.
    store_param_remainders: bool = False
    # Share of main weights and moments that are in host memory and updated there, by the CPU; 0 for none, 1 for all.
    # Needs a GPU and trainer.distributed_optimizer, and moments in float32: docs/launching.md has its costs.
    offload: float = limited(0.0, Range(0, 1))

    @property
    def precision_aware(self) -> bool:
        """Whether Transformer Engine's Adam holds main weights and moments, in these dtypes."""
        return self.store_param_remainders or {self.exp_avg_dtype, self.exp_avg_sq_dtype} != {"float32"}


@dataclass
class CriticConfig:
    """A value model on the trainer's ranks, for `algorithm.advantage=gae`: docs/algorithms.md#critic.

    By default `critic.optimizer.lr` is 1e-5.
    """

    # Train a critic. It has the trainer's topology and the model's dtype.
    enabled: bool = False
    # Hugging Face folder of its initial weights, for the same tokenizer; null takes model.path. Without a value head in
    # it, that starts from random weights.
    path: str | None = limited(None, PATH)
    # First training steps in which only the critic learns. The policy's learning rate begins its course after them.
    warmup_steps: int = limited(0, NOT_NEGATIVE)
    # A value that moved further than this from its old one is clipped in the loss; null turns it off.
    clip: float | None = limited(0.5, POSITIVE)
    # Keep gradients and optimizer state on the device only of the model that learns, the critic or the policy; the
    # other's are in host memory.
    offload: bool = False
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class MegatronConfig:
    """Fields of Megatron's own classes that no key of megasync decides: docs/megatron_options.md."""

    # Fields of TransformerConfig, with latent attention of MLATransformerConfig.
    model: dict[str, Any] = field(default_factory=dict)
    # Fields of DistributedDataParallelConfig.
    ddp: dict[str, Any] = field(default_factory=dict)
    # Fields of OptimizerConfig.
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoraConfig:
    """Low-rank adapters that are trained in place of all weights: docs/adapters.md."""

    # Rank of the adapters; 0 trains all weights instead.
    rank: int = limited(0, NOT_NEGATIVE)
    # An adapter is multiplied by alpha / rank.
    alpha: float = limited(32.0, POSITIVE)
    # Names of the linear projections that get adapters, such as o_proj; empty is all of attention and MLPs, experts
    # included. What Megatron fuses (q_proj, k_proj, v_proj; gate_proj, up_proj) is named together.
    targets: list[str] = field(default_factory=list)
    # PEFT folder to start from, of the same rank, alpha and targets; null starts new ones.
    path: str | None = limited(None, PATH)


@dataclass
class TrainerConfig:
    """The Megatron ranks; their number is tensor x context x pipeline x data."""

    # Tensor-parallel size: ranks that share each layer.
    tensor_parallel: int = limited(1, PROCESSES)
    # Pipeline-parallel size: stages that the layers are split into.
    pipeline_parallel: int = limited(1, PROCESSES)
    # Data-parallel size: replicas of the model that share the batch.
    data_parallel: int = limited(1, PROCESSES)
    # Smallest data-parallel size with which training goes on while nodes of the trainer are lost, on the same batches;
    # it grows back when they return. null waits for the nodes, until `max_restarts` is used up.
    min_data_parallel: int | None = limited(None, PROCESSES)
    # Context-parallel size: ranks that share the tokens of each sequence, for long contexts.
    context_parallel: int = limited(1, PROCESSES)
    # How context-parallel ranks on GPUs exchange keys and values: in a ring (p2p), all at once (all_gather), or by
    # exchanging heads for tokens (a2a). Ranks on CPUs gather them.
    context_parallel_comm: str = limited("p2p", Choice("p2p", "all_gather", "a2a"))
    # Expert-parallel size: ranks that the experts of a layer are distributed over, taken from a stage's tensor, context
    # and data ranks.
    expert_parallel: int = limited(1, PROCESSES)
    # Expert tensor-parallel size: ranks that share one expert; null takes `tensor_parallel`, as Megatron does.
    expert_tensor_parallel: int | None = limited(None, PROCESSES)
    # Chunks of layers per pipeline stage (interleaved schedule); 1 is the plain schedule.
    virtual_pipeline: int = limited(1, AT_LEAST_ONE)
    # Layers of the first pipeline stage if the split is uneven; null splits evenly.
    first_stage_layers: int | None = limited(None, AT_LEAST_ONE)
    # Layers of the last pipeline stage if the split is uneven; null splits evenly.
    last_stage_layers: int | None = limited(None, AT_LEAST_ONE)
    # Layers of each chunk of the pipeline, in the model's order, `pipeline_parallel` x `virtual_pipeline` numbers: the
    # first chunks of all stages, then their second ones. Instead of `first_stage_layers` and `last_stage_layers`.
    pipeline_layout: list[int] = field(default_factory=list)
    # Split activations between layers over the tensor-parallel ranks.
    sequence_parallel: bool = False
    # Shard the optimizer state over the data-parallel ranks.
    distributed_optimizer: bool = True
    # Packed tokens per microbatch and rank. A longer sequence gets a microbatch of its own.
    tokens_per_microbatch: int = limited(8192, AT_LEAST_ONE)
    # Pad every microbatch to `tokens_per_microbatch`, so that all have one length; no sequence may be longer. Padding
    # costs time, but changes no loss or gradient: docs/launching.md#microbatches-of-one-length.
    pad_microbatches: bool = False
    # Overlap the exchange of tokens between tensor-parallel ranks with matrix products, in buffers of Transformer
    # Engine. Needs GPUs, `sequence_parallel` and `pad_microbatches`: docs/launching.md#microbatches-of-one-length.
    tp_comm_overlap: bool = False
    # Launch the forward and backward pass of each decoder layer as one CUDA graph. Needs GPUs, a dense model and
    # `pad_microbatches`: docs/launching.md#cuda-graphs.
    cuda_graphs: bool = False
    # Optimizer steps per batch. With more than one, proximal log-probs are computed first.
    minibatches: int = limited(1, AT_LEAST_ONE)
    # Activations that are computed again in the backward pass: null (none), full (of whole layers) or selective (of
    # `recompute_modules`).
    recompute: str | None = limited(None, Choice("full", "selective"))
    # full: the number of layers of each chunk of a stage that are recomputed; null is all of them.
    recompute_layers: int | None = limited(None, AT_LEAST_ONE)
    # selective: modules of each layer, by Megatron's names: mlp (dense MLPs), moe (whole expert layers), moe_act (the
    # activation of experts), shared_experts, layernorm (norms that are not fused with a linear layer), core_attn.
    recompute_modules: list[str] = field(default_factory=list)
    # Reduce gradients over data-parallel ranks while the backward pass of the last microbatch still runs.
    overlap_grad_reduce: bool = False
    # Gather updated weights from data-parallel ranks while the next minibatch's forward pass already runs. After the
    # last minibatch of a step they are gathered at once, because the weight sync reads them. Needs
    # `overlap_grad_reduce`, the distributed optimizer and several minibatches.
    overlap_param_gather: bool = False
    # Compute logits, log-probs and their gradients from the last hidden states in float32, whatever `model.dtype` is.
    # Servers must too: rollout.server_args={"--enable-fp32-lm-head": true}.
    float32_head: bool = False
    # Compute the linear layers in 8-bit floats from weights in bfloat16: null does not, tensorwise takes one scale for
    # each tensor, blockwise one for 128 values (128 x 128 of a weight). Needs a GPU.
    fp8: str | None = limited(None, Choice("tensorwise", "blockwise"))
    # Add gradients of weights to Megatron's float32 buffer within the matrix product. Needs a GPU.
    gradient_accumulation_fusion: bool = False
    # Fused kernels that sort tokens by experts. Needs a GPU.
    moe_permute_fusion: bool = False
    # Exchange tokens between ranks of different experts with DeepEP's kernels (Megatron's dispatcher `flex`) instead of
    # all-to-all. Needs a GPU and the package deep_ep.
    moe_deepep: bool = False
    # Compute shared experts while tokens are exchanged between expert-parallel ranks. Needs a GPU.
    moe_shared_expert_overlap: bool = False
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    # Coefficient of the auxiliary loss that balances load over experts; 0 turns it off.
    moe_aux_loss: float = limited(0.0, NOT_NEGATIVE)
    # Maximum number of consecutive non-finite steps, which are skipped; one more stops the run.
    max_skipped_steps: int = limited(3, NOT_NEGATIVE)
    # Attempts at a step that raises an error, on the same groups. After that the groups are dropped as failed_step,
    # with a record in RUN/failed_steps/. The count survives restarts of the run.
    step_attempts: int = limited(2, AT_LEAST_ONE)
    # Maximum number of consecutive batches that are dropped after failed steps; one more stops the run, because an
    # error on different batches is not caused by them. 0 drops none.
    max_failed_steps: int = limited(1, NOT_NEGATIVE)
    # Maximum number of restarts of lost ranks (dead, or hung past a deadline) without a new trained step in between,
    # each from the newest checkpoint; one more loss stops the run. 0 stops it at the first loss.
    max_restarts: int = limited(3, NOT_NEGATIVE)


@dataclass
class CheckpointConfig:
    """Training checkpoints, and the export at the end."""

    # Training steps between checkpoints; 0 saves only at the end and on Ctrl-C.
    every_steps: int = limited(50, NOT_NEGATIVE)
    # Write checkpoints while training goes on; it waits only until everything is copied to host memory.
    background: bool = True
    # Checkpoints to keep, newest first. The disk needs room for one more, because older ones are deleted last.
    keep: int = limited(2, AT_LEAST_ONE)
    # Training steps between exports as a Hugging Face folder, RUN/exports/step-N, a multiple of every_steps; 0: none.
    export_every: int = limited(0, NOT_NEGATIVE)
    # Export a Hugging Face checkpoint when the run ends.
    export: bool = True
