#!/usr/bin/env bash
# GRPO by verl's own trainer on this machine's CPU: two Megatron ranks and one SGLang server, the digits of the quickstart.
# Needs what launch/test.sh installs. FOLDER=... chooses where data and checkpoints go; arguments are overrides of verl's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=$PWD/examples/verl
folder=$(realpath -m "${FOLDER:-runs/verl-digits}")
# verl has no CPU of its own: megasync's plugin brings the platform, cpu_servers the rollout.
export VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=cpu_servers PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::UserWarning VERL_LOGGING_LEVEL=ERROR

.venv/bin/python "$here/digits.py" "$folder"
engine=megasync.integrations.verl.MegasyncEngineConfig
settings=(
    model_engine=megatron
    # The line that makes verl train with megasync, for the actor and for the reference policy.
    actor_rollout_ref.actor.megatron._target_="$engine"
    actor_rollout_ref.ref.megatron._target_="$engine"

    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=false
    data.train_files="$folder/train.parquet"
    data.val_files="$folder/test.parquet"
    data.train_batch_size=16
    data.max_prompt_length=16
    data.max_response_length=5
    data.dataloader_num_workers=0
    reward.num_workers=1
    reward.custom_reward_function.path="$here/digits.py"

    actor_rollout_ref.model.path="$folder/model"
    +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.actor.megatron.dtype=float32
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.dtype=float32
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.0001
    actor_rollout_ref.actor.entropy_coeff=0.006
    actor_rollout_ref.actor.optim.lr=1.3e-3
    actor_rollout_ref.actor.optim.lr_decay_style=constant
    actor_rollout_ref.actor.optim.clip_grad=0.3
    "actor_rollout_ref.actor.optim.betas=[0.8,0.99]"
    actor_rollout_ref.actor.optim.weight_decay=0

    actor_rollout_ref.rollout.name=sglang_cpu
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.agent.num_workers=1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1

    hydra.run.dir="$folder/hydra"
    trainer.device=cpu
    trainer.nnodes=1
    trainer.n_gpus_per_node=2
    trainer.total_training_steps=100
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.default_local_dir="$folder/checkpoints"
    trainer.resume_mode=disable
    trainer.val_before_train=false
    "trainer.logger=[console]"
    # verl counts GPUs before it starts, and reserves CPUs for its workers; these are names, not the machine's.
    +ray_kwargs.ray_init.address=local
    ray_kwargs.ray_init.num_cpus=32
    +ray_kwargs.ray_init.num_gpus=2
    +ray_kwargs.ray_init.include_dashboard=false
)
exec .venv/bin/python -m verl.trainer.main_ppo "${settings[@]}" "$@"
