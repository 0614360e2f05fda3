"""The sections of the trainer ranks and their optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OptimizerConfig:
    """Adam."""

    # Learning rate.
    lr: float = 1e-6
    # constant, linear or cosine, after `warmup_steps`; the last two fall to `min_lr` at `schedule.total_steps`.
    decay: str = "constant"
    # Steps over which the learning rate rises from 0.
    warmup_steps: int = 0
    # Learning rate at the end of linear or cosine decay.
    min_lr: float = 0.0
    # Adam's two decay rates.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    # Adam's epsilon.
    eps: float = 1e-8
    # Decoupled weight decay.
    weight_decay: float = 0.0
    # Largest norm of the gradient; 0 does not clip.
    clip_grad: float = 1.0


@dataclass
class TrainerConfig:
    """The Megatron ranks: tensor x pipeline x data of them."""

    # Ranks that share each layer.
    tensor_parallel: int = 1
    # Stages that the layers are cut into.
    pipeline_parallel: int = 1
    # Copies of the model that share the batch.
    data_parallel: int = 1
    # Ranks among which the experts of a layer are dealt out; they are taken from the tensor and data ranks of a stage.
    expert_parallel: int = 1
    # Ranks that share one expert; null takes `tensor_parallel`, as Megatron does.
    expert_tensor_parallel: int | None = None
    # Chunks of layers per pipeline stage (interleaved schedule); 1 is the plain schedule.
    virtual_pipeline: int = 1
    # Layers of the first pipeline stage when the split is uneven; null splits evenly.
    first_stage_layers: int | None = None
    # Layers of the last pipeline stage when the split is uneven; null splits evenly.
    last_stage_layers: int | None = None
    # Split activations between layers over the tensor-parallel ranks.
    sequence_parallel: bool = False
    # Split the optimizer's state over the data-parallel ranks.
    distributed_optimizer: bool = True
    # Packed tokens per microbatch and rank. A longer sequence gets a microbatch of its own.
    tokens_per_microbatch: int = 8192
    # Optimizer steps per batch. With more than one, proximal log-probs are computed first.
    minibatches: int = 1
    # null or "full" (recompute each layer's activations in the backward pass).
    recompute: str | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # Weight of the loss that balances load over experts, in the loss of each step; 0 trains the policy's loss alone.
    moe_aux_loss: float = 0.0
    # Non-finite steps that may be skipped in a row before the run stops.
    max_skipped_steps: int = 3
    # Attempts of a step that raises an error, on the same groups. After these the groups are set aside: dropped as
    # failed_step, with a record in RUN/failed_steps/. The count survives restarts of the run.
    step_attempts: int = 2
    # Batches that are set aside in a row before the run stops: an error on different batches is not the batches'. 0 sets
    # none aside.
    max_failed_steps: int = 1
    # Times in a row that lost ranks (dead, or hung past a deadline) are started again from the newest checkpoint
    # without a new step being trained in between; then the run stops. 0 stops at the first loss.
    max_restarts: int = 3
