"""What is trained and how: schedule, loss, trainer ranks, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megasync.config.builtin import ADVANTAGES, LOSSES, Algorithm
from megasync.config.limits import (
    ADVANTAGE,
    AT_LEAST_ONE,
    BETAS,
    FRACTION,
    LOSS,
    MODULES,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    PROCESSES,
    Choice,
    Range,
)
from megasync.config.rules import (
    GPU,
    SET,
    Condition,
    above,
    at_least,
    at_most,
    below,
    divides,
    excludes,
    having,
    key,
    multiple_of,
    needs,
    none_of,
    section,
    unused_without,
    when,
)

_RESPONSES = "it gives all tokens of a response the same gradient"
_UNCHANGED = "it penalises what has changed since, and nothing has, so it would be loss=gpg"
_FLOAT32 = "it keeps moments and main weights in float32"
_HEAD_RANKS = ".tensor_parallel * .context_parallel"
_A2A = "context_parallel_comm=a2a exchanges heads; p2p does not"
_BY_HEADS = {".context_parallel_comm": "a2a"}
_MOVED = "it keeps weights and gradients at their addresses, and that moves them"
CORRECTED = unused_without("algorithm.correction", none_of("none", instead="token"))
REJECTED = unused_without("algorithm.rejection", none_of("none", instead="sequence"))
OF_CRITIC = unused_without("critic.enabled", True)
OF_ADAPTERS = unused_without("trainer.lora.rank", above(0))
# Dtypes that Transformer Engine's Adam holds states of the optimizer in.
OF_PRECISION = (
    needs("cluster.device", GPU),
    needs("model.dtype", "bfloat16"),
    needs("trainer.distributed_optimizer", True),
)


def those(table: Mapping[str, Algorithm], quality: str) -> tuple[str, ...]:
    """The estimators or losses with a quality."""
    return tuple(name for name, each in table.items() if getattr(each, quality))


def unlike(table: Mapping[str, Algorithm], quality: str) -> tuple[str, ...]:
    """The others; functions of a user's own are in neither."""
    return tuple(name for name, each in table.items() if not getattr(each, quality))


def readers(table: Mapping[str, Algorithm], name: str) -> Condition:
    """Estimators or losses that read a key, or functions of a user's own."""
    reading = [each for each in table if name in table[each].keys]
    words = f"{', '.join(reading)} or a function of your own"
    return replace(none_of(*(set(table) - set(reading)), instead=reading[0]), words=words)


@dataclass
class ScheduleConfig:
    """How much is trained, and how far generation may run ahead of training: docs/buffer.md."""

    # Number of training steps.
    total_steps: int = key(
        100,
        AT_LEAST_ONE,
        at_least(
            "trainer.optimizer.warmup_steps + critic.warmup_steps",
            because="the policy does not learn while the critic warms up, and its own warmup follows",
        ),
        at_least("critic.optimizer.warmup_steps", where={"critic.enabled": True}),
    )
    # Prompts (groups) per training step.
    groups_per_step: int = key(16, AT_LEAST_ONE)
    # Responses sampled per prompt.
    samples_per_group: int = key(
        8,
        AT_LEAST_ONE,
        at_least(
            "trainer.data_parallel * trainer.minibatches",
            left=".groups_per_step * .samples_per_group",
            because="each rank needs at least one response per minibatch",
        ),
    )
    # Maximum age of a trained token, in published versions. A straggler that others overtook in the look-ahead window
    # may be older (`megasync plan` shows the bound). 0 is synchronous training.
    max_staleness: int = key(1, NOT_NEGATIVE)
    # Training steps between two weight syncs, each of which publishes one version.
    weight_sync_steps: int = key(1, AT_LEAST_ONE, at_most(".total_steps", because="no sync would ever happen"))
    # Maximum number of prompts in generation; null leaves it to the buffer's capacity.
    max_inflight_groups: int | None = key(
        None,
        AT_LEAST_ONE,
        at_most(
            ".max_staleness * .groups_per_step * .weight_sync_steps + .groups_per_step * .weight_sync_steps",
            because="that is the capacity of the buffer",
        ),
    )
    # true: requests survive a weight sync and continue under the new version. false: a sync waits until they are done.
    partial_rollout: bool = True
    # Look-ahead window of the batcher as a fraction of the buffer's capacity; null is strict FIFO.
    window_fraction: float | None = key(0.3, FRACTION)
    # What to do with a finished group over the staleness bound: mask its stale tokens, regenerate it or drop it.
    stale: str = key("regenerate", Choice("mask", "regenerate", "drop"))
    # Stop the run once the held-out score (greedy accuracy) exceeds this; null never does.
    stop_at_score: float | None = key(
        None,
        Range(0, 1, open_high=True),
        needs("run's held-out sets", because="name one under data.eval"),
        needs("eval.every_steps", above(0), training=True),
    )


@dataclass
class AlgorithmConfig:
    """Advantages and loss: docs/advantages.md, docs/losses.md."""

    # Estimator of advantages from the rewards of a step; docs/advantages.md#advantages lists them.
    advantage: str = key(
        "grpo",
        ADVANTAGE,
        when(
            those(ADVANTAGES, "relative"),
            needs(
                "schedule.samples_per_group",
                above(1),
                because="it compares the samples of one prompt",
                where={".reward_coef": above(0)},
            ),
        ),
        when(those(ADVANTAGES, "critic"), needs("critic.enabled", True, because="it takes the values of a critic")),
        when(
            "dpo",
            *(
                replace(
                    rule, where={".reward_coef": above(0)}, because=f"it weighs both responses of a pair alike, {why}"
                )
                for rule, why in (
                    (excludes(".aggregation", "sequence"), "and that divides each by its length"),
                    (excludes(".correction", none_of("none")), "and that weighs each by ratios of its own"),
                    (excludes(".ratio", "behaviour"), "and that weighs each by ratios of its own"),
                    (excludes(".rejection", none_of("none")), "and that may leave out one of them"),
                    (excludes(".loss", "clip_cov"), "and that leaves out tokens of one of them"),
                    (excludes("schedule.stale", "mask"), "and that leaves out stale tokens of one of them"),
                )
            ),
        ),
    )
    # Options of the estimator, by name.
    advantage_options: dict[str, Any] = key(dict)
    # grpo, grpo_passk, grpo_process and gdpo: divide advantages by the standard deviation of the group's rewards. gae:
    # shift and scale them to mean 0 and variance 1 over the trained tokens of a step.
    normalize_std: bool = key(True, unused_without(".advantage", readers(ADVANTAGES, "normalize_std")))
    # Weight of these advantages; 0 trains on `teachers` alone.
    reward_coef: float = key(
        1.0,
        NOT_NEGATIVE,
        unused_without("teachers"),
        when(0.0, excludes("critic.enabled", because="teachers alone are trained on, without advantages of rewards")),
    )
    # Weight of the log-ratio of a teacher and the policy, which is added to the advantage of each token that has one.
    teacher_coef: float = key(1.0, POSITIVE, unused_without("teachers"))
    # Loss of a token; docs/losses.md#policy-losses lists them.
    loss: str = key(
        "vanilla",
        LOSS,
        MODULES,
        when(
            those(LOSSES, "responses"),
            excludes("teachers", because=f"{_RESPONSES}, and teachers say something else of each token"),
            excludes(".correction", "token", because=f"{_RESPONSES}, and that weighs each token by its own ratio"),
            excludes(
                ".advantage",
                *those(ADVANTAGES, "tokens"),
                because=f"{_RESPONSES}, and that estimates an advantage for each token",
                where={".reward_coef": above(0)},
            ),
        ),
        when(
            those(LOSSES, "penalty"),
            needs("trainer.minibatches", above(1), because=_UNCHANGED, where={".ratio": "trainer"}),
            needs(
                "trainer.minibatches",
                above(1),
                because=_UNCHANGED,
                where={"schedule.max_staleness": 0, "schedule.weight_sync_steps": 1},
            ),
        ),
    )
    # Options of the loss, by name.
    loss_options: dict[str, Any] = key(dict)
    # What the loss of a step is the mean of: token (all trained tokens alike), sequence (means over the tokens of
    # sequences), or constant (sums over the tokens of sequences, divided by the longest response).
    aggregation: str = key("token", Choice("token", "sequence", "constant"))
    # What sequence and constant count as one sequence where the conversation of a sample forked: sample (all tokens of
    # the sample, so that it weighs as one that did not fork) or trajectory (each of its trajectories).
    sample_weight: str = key(
        "sample", Choice("trajectory", "sample"), unused_without(".aggregation", "sequence", "constant")
    )
    # PPO clips the ratio below 1 - clip_low; with 1 there is no lower bound.
    clip_low: float = key(0.2, FRACTION, unused_without(".loss", readers(LOSSES, "clip_low")))
    # PPO clips the ratio above 1 + clip_high.
    clip_high: float = key(0.28, POSITIVE, unused_without(".loss", readers(LOSSES, "clip_high")))
    # Dual clip: bounds the surrogate of a token with a negative advantage at `dual_clip` times that advantage, where
    # PPO has no bound; null turns it off.
    dual_clip: float | None = key(3.0, Range(1, open_low=True), unused_without(".loss", readers(LOSSES, "dual_clip")))
    # Denominator of the PPO ratio. trainer: the trainer's own log-probs before the step (decoupled PPO). behaviour: the
    # server's log-probs.
    ratio: str = key(
        "trainer",
        Choice("trainer", "behaviour"),
        when(
            "behaviour",
            needs(".correction", "none", because="both correct for stale samples"),
            unused_without(".loss", none_of(*unlike(LOSSES, "ratio"), instead="vanilla"), because="it takes no ratio"),
        ),
    )
    # Off-policy correction by importance sampling against the server's log-probs: none, token, sequence (the geometric
    # mean over a response) or product (of all its tokens).
    correction: str = key("token", Choice("none", "token", "sequence", "product"))
    # Upper bound of the importance ratio.
    correction_cap: float = key(2.0, Range(1), CORRECTED)
    # Lower bound of the importance ratio.
    correction_floor: float = key(0.0, Range(0, 1), CORRECTED)
    # What a token or sequence gets whose ratio is outside of these bounds: the bound (cap), or no gradient (mask).
    correction_outside: str = key("cap", Choice("cap", "mask"), CORRECTED)
    # Responses left out of the policy loss whose ratio is outside of the next two bounds: none; by the geometric mean
    # (sequence), by the product, or by any single token.
    rejection: str = key(
        "none",
        Choice("none", "sequence", "product", "token"),
        needs(
            ".rejection_floor", above(0), because="nothing is rejected without bounds", where={".rejection_cap": None}
        ),
    )
    # Lower bound of that ratio; 0 for none.
    rejection_floor: float = key(0.0, Range(0, 1), REJECTED)
    # Upper bound of that ratio; null for none.
    rejection_cap: float | None = key(None, Range(1), REJECTED)
    # Coefficient of the KL penalty to the initial weights; 0 turns it off.
    kl_coef: float = key(0.0, NOT_NEGATIVE)
    # Where that penalty is: a term of the loss, or subtracted from the rewards before advantages are estimated.
    kl_in: str = key(
        "loss",
        Choice("loss", "reward"),
        when(
            "reward",
            needs(".kl_coef", above(0)),
            needs(".kl_kind", "k1", because="k2 and k3 are zero near the reference together with their slopes"),
            needs(
                ".reward_coef",
                above(0),
                because="the penalty is subtracted from rewards, which would not be trained on",
            ),
            excludes(
                ".advantage", "dpo", because="it uses the order of rewards alone; its options.beta is the penalty"
            ),
            excludes(".advantage", "gdpo", because="it normalises the scores of each reward function alone"),
            excludes(".advantage", "gpg", because="it scales by the share of groups whose rewards differ: all would"),
            excludes(
                ".advantage",
                "grpo_passk",
                because="it trains the best response of a group alone, which would be pulled away from the reference",
            ),
        ),
    )
    # Training steps after which the current weights take the place of the initial ones in the KL penalty; 0 never. A
    # multiple of checkpoint.every_steps, so that a resumed run finds them in a checkpoint.
    reference_every: int = key(
        0,
        NOT_NEGATIVE,
        needs(
            ".kl_coef",
            above(0),
            because="it renews the reference of the KL penalty",
            where={".advantage": none_of(*those(ADVANTAGES, "reference"))},
        ),
        multiple_of("checkpoint.every_steps", because="the reference comes from checkpoints"),
    )
    # Estimator of that KL: k1, k2 or k3.
    kl_kind: str = key(
        "k3",
        Choice("k1", "k2", "k3"),
        when(
            "k1",
            needs(
                ".kl_in",
                "reward",
                because="in the loss its expected gradient is zero: noise and no penalty",
                where={".kl_coef": above(0)},
            ),
        ),
    )
    # Coefficient of the entropy bonus in the loss.
    entropy_coef: float = key(0.0, NOT_NEGATIVE)


@dataclass
class OptimizerConfig:
    """The Adam optimizer and its schedule."""

    # Learning rate.
    lr: float = key(1e-6, POSITIVE)
    # constant, linear or cosine, after `warmup_steps`; linear and cosine fall to `min_lr` over the steps that are left.
    decay: str = key("constant", Choice("constant", "linear", "cosine"))
    # Steps of linear warmup from 0.
    warmup_steps: int = key(0, NOT_NEGATIVE)
    # Learning rate at which linear or cosine decay ends, after the last step.
    min_lr: float = key(
        0.0, NOT_NEGATIVE, at_most(".lr"), needs(".decay", "linear", "cosine", because="it is never reached")
    )
    # Adam's two decay rates.
    betas: list[float] = key(lambda: [0.9, 0.99], BETAS, megatron="adam_beta1 adam_beta2")
    # Adam's epsilon.
    eps: float = key(1e-8, POSITIVE, megatron="adam_eps")
    # Decoupled weight decay.
    weight_decay: float = key(0.0, NOT_NEGATIVE)
    # Maximum gradient norm; 0 turns clipping off.
    clip_grad: float = key(1.0, NOT_NEGATIVE)
    # Dtype of Adam's average of gradients. bfloat16 needs a GPU and model.dtype=bfloat16. 16- and 8-bit floats with a
    # scale are not supported: each rank's part has a scale of its own, which another topology cannot take over.
    exp_avg_dtype: str = key("float32", Choice("float32", "bfloat16"), *OF_PRECISION)
    # Dtype of Adam's average of squared gradients, as for `exp_avg_dtype`. An average that decays more slowly than
    # bfloat16 can resolve (betas[1] above 0.996) stops shrinking.
    exp_avg_sq_dtype: str = key("float32", Choice("float32", "bfloat16"), *OF_PRECISION)
    # Keep of each float32 main weight only the 16 bits that its bfloat16 weight lacks; nothing is lost. Needs a GPU and
    # model.dtype=bfloat16.
    store_param_remainders: bool = key(False, *OF_PRECISION)
    # Share of main weights and moments that are in host memory and updated there, by the CPU; 0 for none, 1 for all.
    # Needs a GPU and trainer.distributed_optimizer, and moments in float32: docs/launching.md has its costs.
    offload: float = key(
        0.0,
        Range(0, 1),
        needs("cluster.device", GPU, because="on a CPU the optimizer's state is in host memory anyway"),
        needs("trainer.distributed_optimizer", True),
        excludes(
            "trainer.megatron.optimizer.decoupled_weight_decay",
            False,
            because="it decouples weight decay from gradients, as AdamW does",
        ),
        excludes(".exp_avg_dtype", because=_FLOAT32),
        excludes(".exp_avg_sq_dtype", because=_FLOAT32),
        excludes(".store_param_remainders", because=_FLOAT32),
        megatron="optimizer_cpu_offload optimizer_offload_fraction pin_cpu_*",
    )

    @property
    def precision_aware(self) -> bool:
        """Whether Transformer Engine's Adam holds main weights and moments, in these dtypes."""
        return self.store_param_remainders or {self.exp_avg_dtype, self.exp_avg_sq_dtype} != {"float32"}


@dataclass
class CriticConfig:
    """A value model on the trainer's ranks, for `algorithm.advantage=gae`: docs/advantages.md#critic.

    By default `critic.optimizer.lr` is 1e-5.
    """

    # Train a critic. It has the trainer's topology and the model's dtype.
    enabled: bool = key(
        False,
        needs(
            "algorithm.advantage",
            none_of(*unlike(ADVANTAGES, "critic"), instead="gae"),
            because="it does not use a critic's values",
        ),
        excludes("model's vision tower", because="such a value model has no Hugging Face class to be exported as"),
        fixed="the run's checkpoints have one, or have none; start a new run from an export of the newest checkpoint",
    )
    # Hugging Face folder of its initial weights, or a name as in model.path, for the same tokenizer; null takes
    # model.path. Without a value head in it, that starts from random weights.
    path: str | None = key(
        None,
        PATH,
        OF_CRITIC,
        fixed="the critic's weights come from the checkpoint, not from that folder; leave it as it was",
    )
    # First training steps in which only the critic learns. The policy's learning rate begins its course after them.
    warmup_steps: int = key(
        0,
        NOT_NEGATIVE,
        OF_CRITIC,
        *when(above(0), below("schedule.total_steps", because="no step would be left to the policy")),
    )
    # A value that moved further than this from its old one is clipped in the loss; null turns it off.
    clip: float | None = key(0.5, POSITIVE, OF_CRITIC)
    # Keep gradients and optimizer state on the device only of the model that learns, the critic or the policy; the
    # other's are in host memory.
    offload: bool = key(False, OF_CRITIC)
    optimizer: OptimizerConfig = section(lambda: OptimizerConfig(lr=1e-5), read_where={"critic.enabled": True})


@dataclass
class MegatronConfig:
    """Fields of Megatron's own classes for which there is no key: docs/megatron_options.md lists them."""

    # Fields of TransformerConfig, with latent attention of MLATransformerConfig.
    model: dict[str, Any] = key(dict)
    # Fields of DistributedDataParallelConfig.
    ddp: dict[str, Any] = key(dict)
    # Fields of OptimizerConfig.
    optimizer: dict[str, Any] = key(dict)


@dataclass
class LoraConfig:
    """Low-rank adapters that are trained in place of all weights: docs/adapters.md."""

    # Rank of the adapters; 0 trains all weights instead.
    rank: int = key(
        0,
        NOT_NEGATIVE,
        excludes("trainer.fp8", because="adapters are not computed in it"),
        excludes("trainer.moe_shared_expert_overlap", because="adapters are not computed with it"),
    )
    # An adapter is multiplied by alpha / rank.
    alpha: float = key(32.0, POSITIVE, OF_ADAPTERS)
    # Names of the linear projections that get adapters, such as o_proj; empty is all of attention and MLPs, experts
    # included. What Megatron fuses (q_proj, k_proj, v_proj; gate_proj, up_proj) is named together.
    targets: list[str] = key(list, OF_ADAPTERS)
    # PEFT folder to start from, of the same rank, alpha and targets; null starts new ones.
    path: str | None = key(None, PATH, OF_ADAPTERS)


@dataclass
class TrainerConfig:
    """The Megatron ranks; their number is tensor x context x pipeline x data."""

    # Tensor-parallel size: ranks that share each layer.
    tensor_parallel: int = key(
        1,
        PROCESSES,
        needs(
            ".sequence_parallel",
            True,
            because="Megatron dispatches tokens to experts per tensor-parallel rank",
            where={"model's experts": ()},
        ),
        at_most("cluster.devices_per_node", because="ranks that share a layer must be on one node", training=True),
        megatron="tensor_model_parallel_size",
    )
    # Pipeline-parallel size: stages that the layers are split into.
    pipeline_parallel: int = key(1, PROCESSES, megatron="pipeline_model_parallel_size")
    # Data-parallel size: replicas of the model that share the batch.
    data_parallel: int = key(1, PROCESSES)
    # Smallest data-parallel size with which training goes on while nodes of the trainer are lost, on the same batches;
    # it grows back when they return. null waits for the nodes, until `max_restarts` is used up.
    min_data_parallel: int | None = key(None, PROCESSES, at_most(".data_parallel"))
    # Context-parallel size: ranks that share the tokens of each sequence, for long contexts.
    context_parallel: int = key(
        1,
        PROCESSES,
        *when(
            above(1), divides("model's linear_num_key_heads", left=_HEAD_RANKS, because="ranks exchange these heads")
        ),
        *when(
            above(1),
            *(
                replace(rule, where={"cluster.device": GPU, **rule.where})
                for rule in (
                    excludes("model's attention in chunks"),
                    needs("model.dtype", "bfloat16", because="Transformer Engine has no attention in float32 for it"),
                    needs(
                        ".context_parallel_comm",
                        "a2a",
                        because="others do not compute the model's windows and sinks",
                        where={"model's windows and sinks": ()},
                    ),
                    divides("model's num_attention_heads", left=_HEAD_RANKS, because=_A2A, where=_BY_HEADS),
                    divides("model's num_key_value_heads", left=_HEAD_RANKS, because=_A2A, where=_BY_HEADS),
                )
            ),
        ),
        megatron="context_parallel_size",
    )
    # How context-parallel ranks on GPUs exchange keys and values: in a ring (p2p), all at once (all_gather), or by
    # exchanging heads for tokens (a2a). Ranks on CPUs gather them.
    context_parallel_comm: str = key("p2p", Choice("p2p", "all_gather", "a2a"), megatron="cp_comm_type")
    # Expert-parallel size: ranks that the experts of a layer are distributed over, taken from a stage's tensor, context
    # and data ranks.
    expert_parallel: int = key(1, PROCESSES, megatron="expert_model_parallel_size")
    # Expert tensor-parallel size: ranks that share one expert; null takes `tensor_parallel`, as Megatron does.
    expert_tensor_parallel: int | None = key(None, PROCESSES, megatron="expert_tensor_parallel_size moe_extended_tp")
    # Chunks of layers per pipeline stage (interleaved schedule); 1 is the plain schedule.
    virtual_pipeline: int = key(1, AT_LEAST_ONE, megatron="virtual_pipeline_model_parallel_size *_per_vp_stage")
    # Layers of the first pipeline stage if the split is uneven; null splits evenly.
    first_stage_layers: int | None = key(
        None, AT_LEAST_ONE, needs(".pipeline_parallel", above(1)), megatron="num_layers_in_first_pipeline_stage"
    )
    # Layers of the last pipeline stage if the split is uneven; null splits evenly.
    last_stage_layers: int | None = key(
        None, AT_LEAST_ONE, needs(".pipeline_parallel", above(1)), megatron="num_layers_in_last_pipeline_stage"
    )
    # Layers of each chunk of the pipeline, in the model's order, `pipeline_parallel` x `virtual_pipeline` numbers: the
    # first chunks of all stages, then their second ones. Instead of `first_stage_layers` and `last_stage_layers`.
    pipeline_layout: list[int] = key(list, megatron="pipeline_model_parallel_layout")
    # Split activations between layers over the tensor-parallel ranks.
    sequence_parallel: bool = key(False, needs(".tensor_parallel", above(1)))
    # Shard the optimizer state over the data-parallel ranks.
    distributed_optimizer: bool = key(True, megatron="use_distributed_optimizer")
    # Packed tokens per microbatch and rank. A longer sequence gets a microbatch of its own.
    tokens_per_microbatch: int = key(8192, AT_LEAST_ONE)
    # Pad every microbatch to `tokens_per_microbatch`, so that all have one length; no sequence may be longer. Padding
    # costs time, but changes no loss or gradient: docs/launching.md#microbatches-of-one-length.
    pad_microbatches: bool = key(False, megatron="variable_seq_lengths")
    # Overlap the exchange of tokens between tensor-parallel ranks with matrix products, in buffers of Transformer
    # Engine. Needs GPUs, `sequence_parallel` and `pad_microbatches`: docs/launching.md#microbatches-of-one-length.
    tp_comm_overlap: bool = key(
        False,
        needs("cluster.device", GPU),
        needs("model.dtype", "bfloat16"),
        needs(".tensor_parallel", above(1)),
        needs(".sequence_parallel", True),
        needs(".pad_microbatches", True),
        excludes(".fp8", "blockwise", because="Transformer Engine has no buffers for it"),
        excludes(".lora.rank"),
        excludes("model's latent attention", because="Megatron has no buffers for its projections"),
        excludes("model's gated delta nets", because="there are no buffers for their projections"),
        megatron="tp_comm_*",
    )
    # Launch the forward and backward pass of each decoder layer as one CUDA graph. Needs GPUs, a dense model and
    # `pad_microbatches`: docs/launching.md#cuda-graphs.
    cuda_graphs: bool = key(
        False,
        needs("cluster.device", GPU),
        needs(".pad_microbatches", True),
        excludes("cluster.colocate", because=_MOVED),
        excludes("critic.offload", because=_MOVED),
        *(excludes(f".{name}") for name in ("pipeline_parallel", "context_parallel", "recompute", "fp8", "lora.rank")),
        excludes(".tp_comm_overlap"),
        excludes("model's experts"),
        excludes("model's latent attention"),
        excludes("model's gated delta nets"),
        excludes("model's attention in chunks"),
        excludes("model's rotated pairs of adjacent channels", because="Megatron reads lengths on the host for them"),
        megatron="enable_cuda_graph external_cuda_graph cuda_graph_*",
    )
    # Optimizer steps per batch. With more than one, proximal log-probs are computed first.
    minibatches: int = key(1, AT_LEAST_ONE)
    # Activations that are computed again in the backward pass: null (none), full (of whole layers) or selective (of
    # `recompute_modules`).
    recompute: str | None = key(
        None,
        Choice("full", "selective"),
        when("selective", needs(".recompute_modules", none_of([], instead=["core_attn"]))),
        megatron="recompute_granularity recompute_method moe_layer_recompute",
    )
    # full: the number of layers of each chunk of a stage that are recomputed; null is all of them.
    recompute_layers: int | None = key(
        None, AT_LEAST_ONE, unused_without(".recompute", "full"), megatron="recompute_num_layers"
    )
    # selective: modules of each layer, by Megatron's names: mlp (dense MLPs), moe (whole expert layers), moe_act (the
    # activation of experts), shared_experts, layernorm (norms that are not fused with a linear layer), core_attn.
    recompute_modules: list[str] = key(
        list,
        MODULES,
        unused_without(".recompute", "selective"),
        when(having("moe"), needs("model's experts")),
        when(having("moe_act"), needs("model's experts"), needs("cluster.device", GPU)),
        when(having("shared_experts"), needs("model's shared experts")),
        when(having("mlp"), needs("model's dense layers")),
        when(having("layernorm"), needs("cluster.device", GPU, because="Megatron restores norms of GPUs only")),
    )
    # Reduce gradients over data-parallel ranks while the backward pass of the last microbatch still runs.
    overlap_grad_reduce: bool = key(
        False,
        *when(SET, at_least("2", left=".data_parallel * .context_parallel", because="it reduces over these ranks")),
    )
    # Gather updated weights from data-parallel ranks while the next minibatch's forward pass already runs. After the
    # last minibatch of a step they are gathered at once, because the weight sync reads them. Needs
    # `overlap_grad_reduce`, the distributed optimizer and several minibatches.
    overlap_param_gather: bool = key(
        False,
        unused_without(".overlap_grad_reduce", True),
        unused_without(".distributed_optimizer", True),
        unused_without(".minibatches", above(1)),
    )
    # Compute logits, log-probs and their gradients from the last hidden states in float32, whatever `model.dtype` is.
    # Servers must too: rollout.server_args={"--enable-fp32-lm-head": true}.
    float32_head: bool = False
    # Compute the linear layers in 8-bit floats from weights in bfloat16: null does not, tensorwise takes one scale for
    # each tensor, blockwise one for 128 values (128 x 128 of a weight). Needs a GPU.
    fp8: str | None = key(
        None,
        Choice("tensorwise", "blockwise"),
        needs("cluster.device", GPU),
        needs("model.dtype", "bfloat16"),
        megatron="fp8_*",
    )
    # Add gradients of weights to Megatron's float32 buffer within the matrix product. Needs a GPU.
    gradient_accumulation_fusion: bool = key(False, needs("cluster.device", GPU))
    # Fused kernels that sort tokens by experts. Needs a GPU.
    moe_permute_fusion: bool = key(False, needs("cluster.device", GPU), needs("model's experts"))
    # Exchange tokens between ranks of different experts with DeepEP's kernels (Megatron's dispatcher `flex`) instead of
    # all-to-all. Needs a GPU and the package deep_ep.
    moe_deepep: bool = key(
        False,
        needs("cluster.device", GPU),
        needs("model's experts"),
        needs("trainer's ranks of an expert layer", above(1), because="they exchange tokens; raise expert_parallel"),
        excludes(".moe_shared_expert_overlap", because="Megatron overlaps shared experts with all-to-all only"),
        megatron="moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
    )
    # Compute shared experts while tokens are exchanged between expert-parallel ranks. Needs a GPU.
    moe_shared_expert_overlap: bool = key(
        False,
        needs("cluster.device", GPU),
        needs("model's shared experts"),
        excludes(".recompute_modules", having("shared_experts")),
    )
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = section(
        LoraConfig,
        fixed="the run's checkpoints hold adapters of that rank and projections, or all weights; start a new run from "
        "an export of the newest checkpoint",
    )
    # Coefficient of the auxiliary loss that balances load over experts; 0 turns it off.
    moe_aux_loss: float = key(
        0.0, NOT_NEGATIVE, needs("model's experts"), megatron="moe_aux_loss_coeff moe_router_load_balancing_type"
    )
    # Maximum number of consecutive non-finite steps, which are skipped; one more stops the run.
    max_skipped_steps: int = key(3, NOT_NEGATIVE, megatron="grad_norm_skip_threshold")
    # Attempts at a step that raises an error, on the same groups. After that the groups are dropped as failed_step,
    # with a record in RUN/failed_steps/. The count survives restarts of the run.
    step_attempts: int = key(2, AT_LEAST_ONE)
    # Maximum number of consecutive batches that are dropped after failed steps; one more stops the run, because an
    # error on different batches is not caused by them. 0 drops none.
    max_failed_steps: int = key(1, NOT_NEGATIVE)
    # Maximum number of restarts of lost ranks (dead, or hung past a deadline) without a new trained step in between,
    # each from the newest checkpoint; one more loss stops the run. 0 stops it at the first loss.
    max_restarts: int = key(3, NOT_NEGATIVE)


@dataclass
class CheckpointConfig:
    """Training checkpoints, and the export at the end."""

    # Training steps between checkpoints; 0 saves only at the end and on Ctrl-C.
    every_steps: int = key(50, NOT_NEGATIVE)
    # Write checkpoints while training goes on; it waits only until everything is copied to host memory.
    background: bool = True
    # Checkpoints to keep, newest first. The disk needs room for one more, because older ones are deleted last.
    keep: int = key(2, AT_LEAST_ONE)
    # Training steps between exports as a Hugging Face folder, RUN/exports/step-N, a multiple of every_steps; 0: none.
    export_every: int = key(0, NOT_NEGATIVE, multiple_of(".every_steps", because="exports are made of checkpoints"))
    # Export a Hugging Face checkpoint when the run ends.
    export: bool = True
