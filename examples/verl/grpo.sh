#!/usr/bin/env bash
# GRPO by verl's own trainer on one node of eight GPUs, with megasync's engine in place of verl's Megatron.
#   MODEL=/models/Qwen3-8B DATA=/data/gsm8k bash examples/verl/grpo.sh [overrides of verl's configuration]
# DATA holds train.parquet and test.parquet as verl's examples/data_preprocess/gsm8k.py writes them.
set -euo pipefail
engine=megasync.integrations.verl.MegasyncEngineConfig
settings=(
    model_engine=megatron
    # The line that makes verl train with megasync, for the actor and for the reference policy.
    actor_rollout_ref.actor.megatron._target_="$engine"
    actor_rollout_ref.ref.megatron._target_="$engine"

    algorithm.adv_estimator=grpo
    data.train_files="${DATA:?the folder of train.parquet and test.parquet}/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024

    actor_rollout_ref.model.path="${MODEL:?the folder of a Hugging Face model}"
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.param_offload=true
    actor_rollout_ref.actor.megatron.optimizer_offload=true
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.ref.megatron.param_offload=true
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_decay_style=constant

    actor_rollout_ref.rollout.name="${ROLLOUT:-vllm}"
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5

    trainer.nnodes=1
    trainer.n_gpus_per_node=8
    trainer.total_epochs=15
    "trainer.logger=[console]"
)
exec python -m verl.trainer.main_ppo "${settings[@]}" "$@"
