#!/usr/bin/env bash
# As grpo_cpu.sh, by verl's asynchronous trainer: the server is beside the trainer, generates while it trains, and gets its
# weights out of the trainer's shards by megasync's transfer.
set -euo pipefail
settings=(
    trainer.v1.trainer_mode=separate_async
    # No server on the trainer's own devices.
    actor_rollout_ref.hybrid_engine=false
    # Weights go to the server after every optimizer step.
    trainer.v1.separate_async.parameter_sync_step=1
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.checkpoint_engine.backend=megasync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=megasync.integrations.verl.checkpoint_engine
)
exec bash "$(dirname "${BASH_SOURCE[0]}")/grpo_cpu.sh" "${settings[@]}" "$@"
