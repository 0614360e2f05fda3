"""The options of other libraries and their keys here: the data of the translation, of docs/knobs.md and of its tests.

A `Row` is one option (or several spellings of it) and the key that it becomes; a row without a key is an option that
has no counterpart, and says why. `Column` does the same for columns of data. Names were read in the libraries' sources.
The libraries in `TABLES` are translated; those of `SHOWN` are for readers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megasync.translate import values as v
from megasync.translate.values import Convert, Options, always, flag, inverse, on, scaled, without, words

# A row whose option has megasync's default in its library too.
SAME: Any = object()


@dataclass(frozen=True, slots=True)
class Row:
    """An option and its key.

    ``names`` are spellings of the option, separated by blanks, and the first that the file has counts; a * is any text,
    also in the key. Without names the row says what holds for every file. ``value`` makes the key's value, and without
    one it is the same. ``default`` is the option's own, if megasync's differs: it is translated where the file is
    silent. ``where`` is the condition under which the option counts. ``sft`` says of which training the row is: None of
    both. ``silent`` is to be said where the file does not have the option.
    """

    names: str
    key: str = ""
    value: Convert | None = None
    note: str = ""
    default: Any = SAME
    where: Callable[[Options], bool] | None = None
    sft: bool | None = False
    silent: str = ""

    @property
    def spellings(self) -> list[str]:
        return self.names.split()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of another library's rows: what says its name, the name by default, and what it is here."""

    said_by: str
    column: str
    here: str


_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_MG = f"{_A}.megatron"
_TC = f"{_MG}.override_transformer_config"
_OO = f"{_A}.optim.override_optimizer_config"
_RC = "algorithm.rollout_correction"


def _all(section: str, names: str) -> str:
    """Names of options below a section."""
    return " ".join(f"{section}.{name}" for name in names.split())


_TWICE = "On one node trainer and servers take turns on all devices; of several nodes each gets half if a copy fits"
_SYNC = "generation and training take turns, as there; 1 or more lets the servers generate while the ranks train"
_STEPS = "steps are counted here: passes x rows / `schedule.groups_per_step`"
_KL = words(kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3")
_GAE = on("algorithm.adv_estimator", "gae")
_OPTIONS_OF_LOSS = {
    "clip_cov_ratio": ("clip_cov", "share"),
    "clip_cov_lb": ("clip_cov", "least"),
    "clip_cov_ub": ("clip_cov", "most"),
    "kl_cov_ratio": ("kl_cov", "share"),
    "ppo_kl_coef": ("kl_cov", "coef"),
    "dro_beta": ("dro", "beta"),
}

# fmt: off
VERL = (
    # The model
    Row(f"{_M}.path", "model.path"),
    Row(f"{_M}.lora.rank {_M}.lora_rank", "trainer.lora.rank"),
    Row(f"{_M}.lora.alpha {_M}.lora_alpha", "trainer.lora.alpha"),
    Row(f"{_M}.lora.target_modules {_M}.target_modules", "trainer.lora.targets", v.lora_targets),
    Row(f"{_M}.lora.adapter_path {_M}.lora_adapter_path", "trainer.lora.path"),
    Row(f"{_M}.enable_gradient_checkpointing", "trainer.recompute", lambda x, o: "full" if flag(x) else None),
    Row(f"{_M}.override_config.*", note="edit config.json in the model's folder"),
    # Data
    Row("data.train_files", "data.train", v.files("data.train", "data.sets", "data."),
        "several files become `data.sets` of equal weight; verl draws from them by their sizes"),
    Row("data.val_files", "data.eval", v.files("data.eval", "eval.sets", "data."), "several files become `eval.sets`"),
    Row("", "data.prompt.format", always("chat"), "prompts are messages"),
    Row("data.prompt_key", "data.columns.prompt", v.unless("prompt")),
    Row("data.max_prompt_length", "data.prompt.max_tokens", note="a longer prompt is an error at start, never cut",
        default=512),
    Row("data.max_response_length", "rollout.sampling.max_new_tokens", default=512),
    Row("data.train_max_samples", "data.train.size", without(-1, None), "the first rows; verl draws them"),
    Row("data.val_max_samples", "eval.samples", without(-1, None, instead=128), "by default 128 of the rows, not all"),
    Row("data.shuffle", "data.shuffle"),
    Row("data.seed", "seed", without(None, instead=0)),
    Row("data.apply_chat_template_kwargs.*", "rollout.chat.template_options.*"),
    Row("data.filter_overlong_prompts* data.truncation",
        note="a prompt over `data.prompt.max_tokens` is an error at start: leave such rows out"),
    # Batches and asynchrony
    Row("data.train_batch_size", "schedule.groups_per_step", v.verl_groups,
        f"asynchronous runs: `{_A}.ppo_mini_batch_size` x `async_training.require_batches`", default=1024),
    Row(f"{_A}.ppo_mini_batch_size", "trainer.minibatches", v.verl_minibatches,
        "verl counts the prompts of each, here their number; asynchronous runs: `require_batches`", default=256),
    Row(f"{_R}.n rollout.n", "schedule.samples_per_group", v.verl_samples, default=1),
    Row("async_training.staleness_threshold", "schedule.max_staleness", v.verl_staleness,
        "verl's is a share of a batch, here whole versions, rounded up. Synchronous runs: 0", default=0.1),
    Row("async_training.trigger_parameter_sync_step", "schedule.weight_sync_steps", default=4, where=v.is_asynchronous),
    Row("async_training.require_batches", "trainer.minibatches", where=v.is_asynchronous),
    Row("async_training.partial_rollout", "schedule.partial_rollout", where=v.is_asynchronous),
    Row("trainer.total_training_steps", "schedule.total_steps"),
    Row("rollout.total_rollout_steps", "schedule.total_steps", v.verl_steps, "verl counts prompts"),
    Row("trainer.total_epochs", "schedule.total_steps",
        v.epochs("data.train_files", v.verl_groups, "trainer.total_training_steps"), _STEPS, where=v.is_synchronous),
    Row("trainer.total_epochs", note="the number of rollout steps counts"),
    # Devices
    Row("trainer.n_gpus_per_node", "cluster.devices_per_node", v.verl_devices, default=8),
    Row("trainer.nnodes", "trainer.data_parallel", v.trainer_of(v.verl_shares, v.verl_copies),
        f"nodes x GPUs / (tensor x pipeline x context). {_TWICE}", default=1),
    Row("rollout.nnodes", "rollout.servers", v.servers_of(v.verl_shares, v.verl_server),
        "nodes x GPUs / GPUs of a server. Synchronous runs: those of the trainer", default=1),
    Row("rollout.n_gpus_per_node", "rollout.servers", v.servers_of(v.verl_shares, v.verl_server)),
    Row("actor_rollout_ref.hybrid_engine", "cluster.colocate", v.colocated(v.verl_shares), _TWICE, default=True),
    Row("", "cluster.device", always("cuda")),
    Row("trainer.device", "cluster.device", words(cuda="cuda", cpu="cpu"), "NPUs are not supported"),
    # Megatron
    Row(f"{_MG}.tensor_model_parallel_size", "trainer.tensor_parallel"),
    Row(f"{_MG}.pipeline_model_parallel_size", "trainer.pipeline_parallel"),
    Row(f"{_MG}.virtual_pipeline_model_parallel_size", "trainer.virtual_pipeline", without(None, instead=1)),
    Row(f"{_MG}.context_parallel_size", "trainer.context_parallel"),
    Row(f"{_MG}.expert_model_parallel_size", "trainer.expert_parallel"),
    Row(f"{_MG}.expert_tensor_parallel_size", "trainer.expert_tensor_parallel"),
    Row(f"{_MG}.sequence_parallel", "trainer.sequence_parallel", v.verl_parallel, default=True, where=v.is_megatron),
    Row(f"{_MG}.use_distributed_optimizer", "trainer.distributed_optimizer"),
    Row(f"{_A}.ulysses_sequence_parallel_size", "trainer.context_parallel",
        note="Ulysses exchanges heads: `trainer.context_parallel_comm=a2a` does"),
    Row(f"{_A}.strategy",
        note="Megatron trains: where FSDP shards weights, choose `trainer.tensor_parallel` by `megasync plan`"),
    Row(f"{_A}.fsdp_config.*", note="Megatron trains, without FSDP"),
    Row(f"{_A}.use_dynamic_bsz", note="microbatches always hold tokens, not sequences"),
    Row(f"{_A}.ppo_max_token_len_per_gpu", "trainer.tokens_per_microbatch", where=on(f"{_A}.use_dynamic_bsz")),
    Row(f"{_A}.ppo_micro_batch_size*", note="microbatches hold tokens: `trainer.tokens_per_microbatch`"),
    Row(f"{_TC}.recompute_granularity", "trainer.recompute"),
    Row(f"{_TC}.recompute_modules", "trainer.recompute_modules", where=on(f"{_TC}.recompute_granularity", "selective")),
    Row(f"{_TC}.recompute_num_layers", "trainer.recompute_layers", where=on(f"{_TC}.recompute_method", "block")),
    Row(f"{_TC}.recompute_method", note="`full` recomputes whole layers, `trainer.recompute_layers` of a stage"),
    Row(f"{_TC}.num_layers_in_first_pipeline_stage", "trainer.first_stage_layers"),
    Row(f"{_TC}.num_layers_in_last_pipeline_stage", "trainer.last_stage_layers"),
    Row(f"{_TC}.moe_permute_fusion", "trainer.moe_permute_fusion"),
    Row(f"{_TC}.moe_shared_expert_overlap", "trainer.moe_shared_expert_overlap"),
    Row(f"{_TC}.moe_enable_deepep", "trainer.moe_deepep"),
    Row(f"{_TC}.moe_token_dispatcher_type", note="all-to-all, or `trainer.moe_deepep`"),
    Row(f"{_TC}.moe_aux_loss_coeff", "trainer.moe_aux_loss"),
    Row(f"{_TC}.gradient_accumulation_fusion", "trainer.gradient_accumulation_fusion"),
    Row(f"{_TC}.*", "trainer.megatron.model.*", note="fields that [megatron_options.md](megatron_options.md) lists"),
    Row(f"{_MG}.override_ddp_config.*", "trainer.megatron.ddp.*"),
    Row(f"{_MG}.param_offload {_MG}.grad_offload {_MG}.optimizer_offload",
        note="colocated servers give their memory back; ranks keep theirs ([colocation.md](colocation.md))"),
    Row(f"{_MG}.router_replay.mode", "rollout.routing_replay", words(disabled=False, r3=True)),
    Row(f"{_MG}.*", note="weights are read from and written to Hugging Face folders by megasync's own layout"),
    # The optimizer
    Row(f"{_A}.optim.lr", "trainer.optimizer.lr"),
    Row(f"{_A}.optim.lr_warmup_steps", "trainer.optimizer.warmup_steps", without(-1, None, instead=0)),
    Row(f"{_A}.optim.lr_warmup_steps_ratio", "trainer.optimizer.warmup_steps", v.warmup(v.verl_total),
        "a share of the steps"),
    Row(f"{_A}.optim.lr_decay_style {_A}.optim.lr_scheduler_type {_A}.optim.warmup_style", "trainer.optimizer.decay",
        words(constant="constant", linear="linear", cosine="cosine")),
    Row(f"{_A}.optim.lr_decay_steps", note="the rate falls until the last step"),
    Row(f"{_A}.optim.min_lr", "trainer.optimizer.min_lr"),
    Row(f"{_A}.optim.min_lr_ratio", "trainer.optimizer.min_lr", v.share_of(f"{_A}.optim.lr")),
    Row(f"{_A}.optim.weight_decay", "trainer.optimizer.weight_decay", default=0.01),
    Row(f"{_A}.optim.betas", "trainer.optimizer.betas", v.listed, default=[0.9, 0.999]),
    Row(f"{_A}.optim.clip_grad {_A}.grad_clip", "trainer.optimizer.clip_grad"),
    Row(f"{_OO}.optimizer_offload_fraction", "trainer.optimizer.offload", where=on(f"{_OO}.optimizer_cpu_offload")),
    Row(f"{_OO}.optimizer_cpu_offload", "trainer.optimizer.offload", v.part),
    Row(f"{_OO}.use_precision_aware_optimizer", note="`trainer.optimizer.exp_avg_dtype` says the dtype of moments"),
    Row(f"{_OO}.*", "trainer.megatron.optimizer.*"),
    Row(f"{_A}.optim.*", note="Adam with decoupled weight decay"),
    # Advantages and loss
    Row("algorithm.adv_estimator", "algorithm.advantage",
        v.advantage(
            grpo_vectorized="grpo", rloo_vectorized="rloo", tir_optimal_token_baseline="optimal_token_baseline"
        ),
        "`gpg` follows the paper, not verl: [advantages.md](advantages.md#advantages)", default="gae"),
    Row("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std",
        where=on("algorithm.adv_estimator", "grpo", "grpo_passk", "grpo_vectorized")),
    Row("algorithm.gamma", "algorithm.advantage_options.gamma", where=_GAE),
    Row("algorithm.lam", "algorithm.advantage_options.lam", where=_GAE),
    Row(f"{_A}.policy_loss.loss_mode", "algorithm.loss", v.loss),
    *(
        Row(
            f"{_A}.policy_loss.{name}",
            f"algorithm.loss_options.{option}",
            where=on(f"{_A}.policy_loss.loss_mode", loss),
        )
        for name, (loss, option) in _OPTIONS_OF_LOSS.items()
    ),
    Row(f"{_A}.tau_pos", "algorithm.loss_options.tau_positive", where=on(f"{_A}.policy_loss.loss_mode", "sapo")),
    Row(f"{_A}.tau_neg", "algorithm.loss_options.tau_negative", where=on(f"{_A}.policy_loss.loss_mode", "sapo")),
    Row(f"{_A}.clip_ratio_low {_A}.clip_ratio", "algorithm.clip_low"),
    Row(f"{_A}.clip_ratio_high {_A}.clip_ratio", "algorithm.clip_high", default=0.2),
    Row(f"{_A}.clip_ratio_c", "algorithm.dual_clip"),
    Row(f"{_A}.loss_agg_mode", "algorithm.aggregation",
        words(token_mean="token", seq_mean_token_mean="sequence", seq_mean_token_sum_norm="constant"),
        "`seq-mean-token-sum` has no counterpart"),
    Row(f"{_A}.use_token_level_loss", "algorithm.aggregation", lambda x, o: "token" if flag(x) else "sequence"),
    Row(f"{_A}.entropy_coeff", "algorithm.entropy_coef"),
    Row(f"{_A}.use_kl_loss", "algorithm.kl_coef", v.part),
    Row(f"{_A}.kl_loss_coef", "algorithm.kl_coef", default=0.001, where=on(f"{_A}.use_kl_loss")),
    Row(f"{_A}.kl_loss_type", "algorithm.kl_kind", _KL, where=on(f"{_A}.use_kl_loss")),
    Row("algorithm.use_kl_in_reward", "algorithm.kl_in", lambda x, o: "reward" if flag(x) else "loss"),
    Row("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", default=0.001, where=on("algorithm.use_kl_in_reward")),
    Row("algorithm.kl_penalty", "algorithm.kl_kind", _KL, default="kl", where=on("algorithm.use_kl_in_reward")),
    Row("algorithm.kl_ctrl.*", note="the coefficient does not change"),
    Row(f"{_RC}.bypass_mode", "algorithm.ratio", lambda x, o: "behaviour" if flag(x) else "trainer"),
    Row("async_training.use_rollout_log_probs", "algorithm.ratio",
        lambda x, o: "behaviour" if flag(x) and not flag(o["async_training.compute_prox_log_prob"]) else "trainer",
        default=True, where=v.is_asynchronous),
    Row("async_training.compute_prox_log_prob", note="`algorithm.ratio: trainer` computes them"),
    Row(f"{_RC}.rollout_is", "algorithm.correction",
        words(none="none", token="token", sequence="product", geometric="sequence"),
        "off by default there, `token` by default here", default="none"),
    Row(f"{_RC}.rollout_is_threshold", "algorithm.correction_cap",
        v.bounds("algorithm.correction_floor", "algorithm.correction_cap", **{"algorithm.correction_outside": "mask"}),
        where=on(f"{_RC}.rollout_is", "token", "sequence", "geometric")),
    Row(f"{_RC}.rollout_rs", "algorithm.rejection", v.rejection),
    Row(f"{_RC}.rollout_rs_threshold", "algorithm.rejection_cap",
        v.bounds("algorithm.rejection_floor", "algorithm.rejection_cap"),
        where=lambda o: o[f"{_RC}.rollout_rs"] is not None),
    Row("algorithm.filter_groups.enable", "rollout.groups.drop_uniform"),
    Row("algorithm.filter_groups.*", note="another prompt is drawn for each dropped one, without a limit of batches"),
    Row(f"{_A}.ppo_epochs", note="a batch is trained once: lower `schedule.groups_per_step` instead"),
    # The critic
    Row("algorithm.adv_estimator", "critic.enabled", always(True), default="gae", where=_GAE),
    Row("critic.optim.lr", "critic.optimizer.lr", where=_GAE),
    Row("critic.optim.weight_decay", "critic.optimizer.weight_decay", default=0.01, where=_GAE),
    Row("critic.model.path", "critic.path", lambda x, o: None if x == o[f"{_M}.path"] else x, where=_GAE),
    Row("critic.cliprange_value", "critic.clip", where=_GAE),
    Row("trainer.critic_warmup", "critic.warmup_steps", where=_GAE),
    Row("critic.*", note="a critic has the trainer's topology and minibatches"),
    # Servers
    Row(f"{_R}.tensor_model_parallel_size", "rollout.tensor_parallel", default=2),
    Row(f"{_R}.pipeline_model_parallel_size", "rollout.pipeline_parallel"),
    Row(f"{_R}.expert_parallel_size", "rollout.expert_parallel"),
    Row(f"{_R}.gpu_memory_utilization", "rollout.mem_fraction", default=0.5),
    Row(f"{_R}.max_model_len", "rollout.context_length"),
    Row(f"{_R}.max_num_seqs", "rollout.max_running_requests"),
    Row(f"{_R}.temperature", "rollout.sampling.temperature"),
    Row(f"{_R}.top_p", "rollout.sampling.top_p", v.top_p(f"{_R}.top_k"), "below 1 with `top_k: 4096`"),
    Row(f"{_R}.top_k", "rollout.sampling.top_k", without(0, instead=-1)),
    Row(f"{_R}.full_determinism", "rollout.deterministic"),
    Row(f"{_R}.enable_rollout_routing_replay", "rollout.routing_replay"),
    Row(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes", "sync.bucket_mb"),
    Row(f"{_R}.enforce_eager", "rollout.server_args.--disable-cuda-graph", lambda x, o: True if flag(x) else v.Keys()),
    Row(f"{_R}.engine_kwargs.sglang.*", "rollout.server_args.--*", note="SGLang's own flags"),
    Row(f"{_R}.name", note="SGLang serves"),
    Row(f"{_R}.multi_turn.*", note="name tools in `rollout.tools`, or a workflow: [workflows.md](workflows.md)"),
    Row(f"{_R}.agent.*", note="name a workflow or an agent: [workflows.md](workflows.md)"),
    Row(f"{_R}.quantization", note="`rollout.fp8` serves a folder in block FP8"),
    Row(f"{_R}.log_prob_*", note="log-probs are computed in the microbatches that train"),
    Row("actor_rollout_ref.ref.*", note="the reference has the trainer's topology"),
    # Evaluation
    Row("trainer.test_freq rollout.test_freq", "eval.every_steps", without(-1, instead=0),
        "`rollout.test_freq` counts weight syncs", default=-1),
    Row(f"{_R}.val_kwargs.temperature", "eval.temperatures",
        lambda x, o: [x] if flag(o[f"{_R}.val_kwargs.do_sample"]) else [0.0], where=lambda o: "data.val_files" in o),
    Row(f"{_R}.val_kwargs.do_sample", "eval.temperatures", v.part, "`eval.temperatures: [0]` is greedy"),
    Row(f"{_R}.val_kwargs.n", "eval.repeats"),
    Row(f"{_R}.val_kwargs.top_p", "eval.sampling.top_p"),
    Row(f"{_R}.val_kwargs.top_k", "eval.sampling.top_k", without(0, instead=-1)),
    Row("trainer.val_before_train", note="an evaluation precedes the first step, unless `eval.every_steps` is 0"),
    # Rewards
    Row("", "rollout.reward", always("math"), "verl chooses a rule by `data_source`: this is the one of mathematics",
        where=v.has_verls_reward),
    Row("", "data.columns.answer", always("reward_model.ground_truth"), where=v.has_verls_reward),
    Row("reward.custom_reward_function.path custom_reward_function.path", "rollout.reward",
        v.reward_file("reward.custom_reward_function.name", "custom_reward_function.name"),
        "verl's signature works unchanged; the file must be importable from where the run starts"),
    Row("reward.custom_reward_function.name custom_reward_function.name", "rollout.reward", v.part),
    Row("reward.reward_model.enable reward_model.enable", "rollout.rewards.reward.model",
        v.verl_reward_model,
        "a model on devices of its own, of kind `classifier`"),
    Row("reward.reward_model.model_path reward_model.model.path", "reward_models.reward.path",
        where=v.has_reward_model),
    Row("reward.reward_model.rollout.tensor_model_parallel_size reward_model.rollout.tensor_model_parallel_size",
        "reward_models.reward.tensor_parallel", where=v.has_reward_model),
    Row("*overlong_buffer*.enable", "rollout.groups.overlong", lambda x, o: "punish" if flag(x) else "keep"),
    Row("*overlong_buffer*.len", "rollout.groups.overlong_tokens"),
    Row("*overlong_buffer*.penalty_factor", "rollout.groups.overlong_penalty"),
    Row("*overlong_buffer*.log *max_resp_len", note="part of `rollout.groups.overlong: punish`"),
    Row("reward.reward_manager* reward_model.reward_manager", note="`rollout.reward` and `rollout.groups` do this"),
    Row("reward.sandbox_fusion.* reward_model.sandbox_fusion.* sandbox_fusion.*",
        note="`rollout.reward: code` runs code in a sandbox of its own"),
    Row("reward.num_workers reward_model.num_workers", "rollout.reward_processes"),
    Row("reward.* reward_model.*", note="name reward functions in `rollout.rewards`: [rewards.md](rewards.md)"),
    # The run
    Row("trainer.experiment_name", "name", v.run_name),
    Row("trainer.save_freq", "checkpoint.every_steps", without(-1, instead=0), default=-1),
    Row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", without(None, instead=2), "all by default there"),
    Row("trainer.project_name trainer.logger",
        note="metrics go to TensorBoard; `observe.wandb` and `observe.mlflow` add trackers"),
    Row("trainer.default_local_dir trainer.resume_*", note="runs are below `run_root`; `megasync resume RUN` goes on"),
    Row("trainer.balance_batch", note="packing always balances tokens"),
    Row("data.return_* data.gen_batch_size data.val_batch_size data.reward_fn_key data.*_key data.image_patch_size "
        "data.custom_cls.* data.dataloader_* data.trust_remote_code data.use_shm data.validation_shuffle "
        "data.mm_processor_kwargs* data.tool_config_path data.function_tool_path data.tokenizer",
        note="rows are read as they are, with all of their columns"),
    Row(_all(_M, "use_* trust_remote_code fused_kernel_options.* tiled_mlp.* external_lib enable_activation_offload"),
        note="sequences are packed, and kernels chosen by Megatron"),
    Row(_all(_M, "lora.* exclude_modules"), note="plain adapters: `trainer.lora`"),
    Row(_all(_M, "mtp.* tokenizer_path hf_config_path custom_chat_template"), note="the model's folder says it"),
    Row(_all(_R, "mode calculate_log_probs do_sample dtype enable_chunked_prefill enable_prefix_caching "
        "free_cache_engine ignore_eos layered_summon load_format logprobs_mode max_num_batched_tokens mtp* moe_load_* "
        "multi_stage_wake_up over_sample_rate profiler.* prometheus.* prompt_length response_length scheduling_policy "
        "seed skip_tokenizer_init trace.* disaggregation.* data_parallel_size checkpoint_engine.* engine_kwargs.* "
        "cudagraph_capture_sizes disable_log_stats router_config_path quantization_config_file limit_images"),
        note="SGLang's own defaults, or a key of `rollout`"),
    Row(_all(_A, "calculate_* checkpoint.* data_loader_seed entropy_* freeze_vision_tower loss_scale_factor "
        "pad_to_length profiler.* qat.* rollout_n shuffle use_* recompute_*"), note="the trainer decides it"),
    Row("actor_rollout_ref.nccl_timeout", note="`timeouts` has the deadlines"),
    Row(_all("trainer", "log_val_generations rollout_data_dir validation_data_dir val_only default_hdfs_dir "
        "del_local_ckpt_after_load max_critic_ckpt_to_keep checkpoint_callback_class esi_redundant_time "
        "ray_wait_register_center_timeout use_v1 v1.* use_legacy_worker_impl val_generations_to_log_to_wandb "
        "remove_previous_ckpt_in_save")
        + " ray_kwargs.* ray_init.* global_profiler.* profiler.* hydra.* transfer_queue.* skip.*",
        note="[launching.md](launching.md) and [watching.md](watching.md) say how runs are started and watched"),
    Row("algorithm.use_pf_ppo algorithm.pf_ppo.* algorithm.rollout_correction.loss_type "
        "algorithm.rollout_correction.rollout_is_batch_normalize distillation.* async_training.use_* "
        "async_training.dynamic_* async_training.concurrent_*", note="no key does this"),
    # Supervised training
    Row("model.path model.partial_pretrain", "model.path", sft=True),
    Row("data.train_files", "sft.train", v.files("sft.train", "", ""), "one file", sft=True),
    Row("data.val_files", "sft.validation", v.files("sft.validation", "", ""), "one file", sft=True),
    Row("data.train_batch_size", "sft.rows_per_step", default=256, sft=True),
    Row("data.max_length", "sft.max_tokens", default=1024, sft=True),
    Row("data.truncation", note="a longer row is an error, or left out: `sft.drop_long_rows`", sft=True),
    Row("data.prompt_key", "data.columns.prompt", v.unless("prompt"), sft=True),
    Row("data.response_key", "sft.answer", sft=True),
    Row("data.multiturn.messages_key data.messages_key", "data.columns.messages", v.unless("messages"), sft=True),
    Row("", "data.prompt.format", always("chat"), sft=True),
    Row("", "cluster.device", always("cuda"), sft=True),
    Row("optim.lr", "trainer.optimizer.lr", default=1e-5, sft=True),
    Row("optim.weight_decay", "trainer.optimizer.weight_decay", default=0.01, sft=True),
    Row("optim.betas", "trainer.optimizer.betas", v.listed, default=[0.9, 0.999], sft=True),
    Row("optim.clip_grad", "trainer.optimizer.clip_grad", sft=True),
    Row("trainer.total_epochs", "sft.epochs", default=4, sft=True),
    Row("trainer.test_freq", "sft.validate_every_steps", without(-1, instead=0), default=-1, sft=True),
    Row("trainer.save_freq", "checkpoint.every_steps", without(-1, instead=0), default=-1, sft=True),
    Row("trainer.experiment_name", "name", v.run_name, sft=True),
    Row("model.* data.* optim.* trainer.* engine.* checkpoint.* use_* ulysses_* hydra.* defaults", sft=True,
        note="[supervised.md](supervised.md) says what there is"),
)

SLIME = (
    # The model
    Row("hf-checkpoint", "model.path", sft=None),
    Row("ref-load load", note="weights are read from the Hugging Face folder, for training and as reference", sft=None),
    Row("lora-rank", "trainer.lora.rank", default=32, where=on("use-lora")),
    Row("lora-alpha", "trainer.lora.alpha", where=on("use-lora")),
    Row("use-lora", "trainer.lora.rank", v.part),
    Row("lora-*", note="adapters are on all projections; `trainer.lora.targets` names some"),
    # Data
    Row("prompt-data", "data.train", v.files("data.train", "data.sets", "data.")),
    Row("prompt-data", "sft.train", v.files("sft.train", "", ""), sft=True),
    Row("input-key", "data.columns.prompt", v.unless("prompt"), default="input"),
    Row("input-key", "data.columns.messages", v.unless("messages"), default="input", sft=True),
    Row("label-key", "data.columns.answer", v.unless("answer")),
    Row("apply-chat-template", "data.prompt.format", lambda x, o: "chat" if flag(x) else "raw", default=False,
        sft=None),
    Row("apply-chat-template-kwargs", "rollout.chat.template_options"),
    Row("rollout-max-prompt-len", "data.prompt.max_tokens",
        note="a longer prompt is an error at start; slime leaves it out"),
    Row("rollout-shuffle", "data.shuffle", default=False),
    Row("rollout-seed", "seed"),
    Row("metadata-key tool-key multimodal-keys", note="every column reaches rewards and workflows under its own name",
        sft=None),
    # Batches and asynchrony
    Row("num-rollout", "schedule.total_steps"),
    Row("num-epoch", "schedule.total_steps", v.epochs("prompt-data", v.slime_groups, "num-rollout"), _STEPS),
    Row("num-epoch", "sft.epochs", sft=True),
    Row("rollout-batch-size", "schedule.groups_per_step"),
    Row("rollout-batch-size", "sft.rows_per_step", sft=True),
    Row("n-samples-per-prompt", "schedule.samples_per_group", default=1),
    Row("global-batch-size", "trainer.minibatches", v.slime_minibatches,
        "slime counts the responses of each, here their number"),
    Row("num-steps-per-rollout", "trainer.minibatches"),
    Row("update-weights-interval", "schedule.weight_sync_steps"),
    Row("rollout-function-path", "schedule.max_staleness", v.slime_staleness,
        f"asynchronous programs: 1. Others: 0, and {_SYNC}", default=""),
    Row("partial-rollout", "schedule.partial_rollout",
        note="slime puts unfinished samples back into its buffer; here requests go on after the sync"),
    Row("mask-offpolicy-in-partial-rollout", "schedule.stale", lambda x, o: "mask" if flag(x) else "regenerate",
        "slime masks all tokens of earlier versions, here only those over the bound"),
    Row("over-sampling-batch-size", note="the buffer's capacity follows from `schedule`"),
    Row("dynamic-sampling-filter-path", "rollout.groups.drop_uniform", v.nonzero_std, "`check_reward_nonzero_std`"),
    Row("balance-data", note="packing always balances tokens", sft=None),
    # Devices
    Row("num-gpus-per-node", "cluster.devices_per_node"),
    Row("actor-num-gpus-per-node", "cluster.devices_per_node",
        v.slime_devices,
        default=8),
    Row("actor-num-nodes", "trainer.data_parallel", v.trainer_of(v.slime_shares, v.slime_copies),
        f"nodes x GPUs / (tensor x pipeline x context). With `--colocate`: {_TWICE}", default=1),
    Row("actor-num-nodes", "trainer.data_parallel",
        v.trainer_of(v.slime_sft_shares, v.slime_copies),
        default=1, sft=True),
    Row("actor-num-gpus-per-node", "cluster.devices_per_node", default=8, sft=True),
    Row("rollout-num-gpus", "rollout.servers", v.servers_of(v.slime_shares, v.slime_server), "GPUs / GPUs of a server",
        default=None),
    Row("rollout-num-gpus-per-engine", "rollout.tensor_parallel", default=1),
    Row("colocate", "cluster.colocate", v.colocated(v.slime_shares), _TWICE, default=False),
    Row("", "cluster.device", always("cuda"), sft=None),
    # Megatron
    Row("tensor-model-parallel-size", "trainer.tensor_parallel", sft=None),
    Row("pipeline-model-parallel-size", "trainer.pipeline_parallel", sft=None),
    Row("context-parallel-size", "trainer.context_parallel", sft=None),
    Row("expert-model-parallel-size", "trainer.expert_parallel", sft=None),
    Row("expert-tensor-parallel-size", "trainer.expert_tensor_parallel",
        lambda x, o: v.Keys() if o.whole("expert-model-parallel-size", 1) == 1 else x, "counts for models with experts",
        sft=None),
    Row("num-layers-per-virtual-pipeline-stage", note="`trainer.virtual_pipeline` counts the chunks of a stage",
        sft=None),
    Row("sequence-parallel", "trainer.sequence_parallel", v.slime_parallel, sft=None),
    Row("decoder-first-pipeline-num-layers", "trainer.first_stage_layers", sft=None),
    Row("decoder-last-pipeline-num-layers", "trainer.last_stage_layers", sft=None),
    Row("recompute-granularity", "trainer.recompute", sft=None),
    Row("recompute-modules", "trainer.recompute_modules", v.listed, where=on("recompute-granularity", "selective"),
        sft=None),
    Row("recompute-num-layers", "trainer.recompute_layers", where=on("recompute-method", "block"), sft=None),
    Row("recompute-method", note="`full` recomputes whole layers, `trainer.recompute_layers` of a stage", sft=None),
    Row("max-tokens-per-gpu", "trainer.tokens_per_microbatch", sft=None),
    Row("use-dynamic-batch-size micro-batch-size", note="microbatches always hold tokens, not sequences", sft=None),
    Row("no-gradient-accumulation-fusion", "trainer.gradient_accumulation_fusion", always(False), sft=None),
    Row("attention-backend", "trainer.megatron.model.attention_backend", sft=None),
    Row("attention-softmax-in-fp32", "trainer.megatron.model.attention_softmax_in_fp32", sft=None),
    Row("moe-router-dtype", "trainer.megatron.model.moe_router_dtype", sft=None),
    Row("deterministic-mode", "trainer.megatron.model.deterministic_mode", sft=None),
    Row("moe-enable-deepep", "trainer.moe_deepep", sft=None),
    Row("moe-permute-fusion", "trainer.moe_permute_fusion", sft=None),
    Row("moe-token-dispatcher-type", note="all-to-all, or `trainer.moe_deepep`", sft=None),
    Row("overlap-grad-reduce", "trainer.overlap_grad_reduce", sft=None),
    Row("fp8-recipe", "trainer.fp8", words(blockwise="blockwise", tensorwise="tensorwise"), where=on("fp8-format"),
        sft=None),
    Row("fp8-format", "trainer.fp8", v.part, sft=None),
    Row("use-rollout-routing-replay", "rollout.routing_replay"),
    Row("attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 bf16 transformer-impl train-backend",
        note="no dropout, gradients summed in float32, bfloat16 and Transformer Engine are what there is", sft=None),
    # The optimizer
    Row("lr", "trainer.optimizer.lr", sft=None),
    Row("lr-decay-style", "trainer.optimizer.decay", words(constant="constant", linear="linear", cosine="cosine"),
        default="linear", sft=None),
    Row("min-lr", "trainer.optimizer.min_lr", sft=None),
    Row("lr-warmup-iters", "trainer.optimizer.warmup_steps", sft=None),
    Row("lr-warmup-fraction", "trainer.optimizer.warmup_steps", v.warmup(lambda o: o.number("num-rollout")),
        "a share of the steps", sft=None),
    Row("lr-decay-iters lr-warmup-init lr-wsd-*", note="the rate falls until the last step, and rises from 0",
        sft=None),
    Row("weight-decay", "trainer.optimizer.weight_decay", default=0.01, sft=None),
    Row("adam-beta1", "trainer.optimizer.betas", lambda x, o: [o["adam-beta1"], o["adam-beta2"]], default=0.9,
        sft=None),
    Row("adam-beta2", "trainer.optimizer.betas", lambda x, o: [o["adam-beta1"], o["adam-beta2"]], default=0.999,
        sft=None),
    Row("adam-eps", "trainer.optimizer.eps", sft=None),
    Row("clip-grad", "trainer.optimizer.clip_grad", sft=None),
    Row("optimizer-cpu-offload", "trainer.optimizer.offload",
        lambda x, o: o["optimizer-offload-fraction"] if flag(x) else 0.0, sft=None),
    Row("optimizer-offload-fraction", "trainer.optimizer.offload", v.part, default=1.0, sft=None),
    Row("optimizer overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer use-distributed-optimizer",
        note="Adam, its state distributed; `trainer.optimizer` has its dtypes", sft=None),
    # Advantages and loss
    Row("advantage-estimator", "algorithm.advantage", v.advantage(gspo="grpo", cispo="grpo", ppo="gae"),
        "`gspo` and `cispo` are losses here, `ppo` is `gae`"),
    Row("advantage-estimator", "algorithm.loss", lambda x, o: x if x in ("gspo", "cispo") else "vanilla"),
    Row("advantage-estimator", "critic.enabled", lambda x, o: x == "ppo"),
    Row("disable-grpo-std-normalization", "algorithm.normalize_std", inverse),
    Row("gamma", "algorithm.advantage_options.gamma", where=on("advantage-estimator", "ppo")),
    Row("lambd", "algorithm.advantage_options.lam", where=on("advantage-estimator", "ppo")),
    Row("num-critic-only-steps", "critic.warmup_steps", where=on("advantage-estimator", "ppo")),
    Row("value-clip", "critic.clip", default=0.2, where=on("advantage-estimator", "ppo")),
    Row("eps-clip", "algorithm.clip_low", default=0.2),
    Row("eps-clip-high", "algorithm.clip_high", v.slime_clip_high, "that of `eps-clip` by default", default=None),
    Row("eps-clip-c", "algorithm.dual_clip", note="on by default here", default=None),
    Row("entropy-coef", "algorithm.entropy_coef"),
    Row("use-kl-loss", "algorithm.kl_coef", v.part),
    Row("kl-loss-coef", "algorithm.kl_coef", where=on("use-kl-loss")),
    Row("kl-loss-type", "algorithm.kl_kind", _KL, default="k1",
        where=lambda o: flag(o["use-kl-loss"]) and bool(o["kl-loss-coef"])),
    Row("kl-coef", "algorithm.kl_coef",
        v.slime_kl_in_reward,
        "with `kl_in: reward`"),
    Row("ref-update-interval", "algorithm.reference_every"),
    Row("use-rollout-logprobs", "algorithm.ratio", lambda x, o: "behaviour" if flag(x) else "trainer"),
    Row("use-tis", "algorithm.correction", lambda x, o: "token" if flag(x) else "none", "on by default here",
        default=False),
    Row("tis-clip", "algorithm.correction_cap", where=on("use-tis")),
    Row("tis-clip-low", "algorithm.correction_floor", where=on("use-tis")),
    Row("calculate-per-token-loss", "algorithm.aggregation", lambda x, o: "token" if flag(x) else "sequence",
        "slime's default is the mean over samples", default=False),
    Row("normalize-advantages", note="`gae`, `reinforce_plus_plus` and its baseline always do"),
    Row("loss-type disable-compute-advantages-and-returns debug-train-only calculate-per-token-loss",
        note="`megasync sft` trains on answers", sft=True),
    Row("loss-type custom-*",
        note="name a function of your own: [adding_an_algorithm.md](adding_an_algorithm.md), "
        "[rewards.md](rewards.md), [workflows.md](workflows.md). Signatures differ"),
    # Servers
    Row("rollout-temperature", "rollout.sampling.temperature"),
    Row("rollout-top-p", "rollout.sampling.top_p", v.top_p("rollout-top-k"), "below 1 with `top_k: 4096`"),
    Row("rollout-top-k", "rollout.sampling.top_k"),
    Row("rollout-max-response-len", "rollout.sampling.max_new_tokens"),
    Row("rollout-max-context-len", "rollout.context_length"),
    Row("rollout-stop", "rollout.sampling.stop", v.listed),
    Row("rollout-stop-token-ids",
        note="servers end at the model's own end tokens (generation_config.json); `rollout.sampling.stop` takes text"),
    Row("sglang-mem-fraction-static", "rollout.mem_fraction"),
    Row("sglang-server-concurrency", "rollout.max_running_requests"),
    Row("sglang-context-length", "rollout.context_length"),
    Row("sglang-enable-deterministic-inference", "rollout.deterministic"),
    Row("sglang-expert-parallel-size sglang-ep-size", "rollout.expert_parallel"),
    Row("sglang-dp-size", "rollout.attention_data_parallel", where=on("sglang-enable-dp-attention")),
    Row("sglang-enable-dp-attention", "rollout.attention_data_parallel", v.part),
    Row("sglang-router-*", note="`rollout.router_policy` says how requests are balanced"),
    Row("sglang-*", "rollout.server_args.--*", note="SGLang's own flags"),
    Row("update-weight-buffer-size", "sync.bucket_mb", scaled(1 / 2**20), "slime's is in bytes"),
    Row("update-weight-transport", "sync.transport", words(nccl="auto", disk="disk")),
    Row("update-weight-mode", "sync.delta", words(full=False, delta=True), "slime's goes through files"),
    Row("rollout-external-engine-addrs", "rollout.external",
        lambda x, o: [str(each) if "://" in str(each) else f"http://{each}" for each in v.listed(x, o)]),
    Row("rollout-health-check-*", note="`rollout.health` has the deadlines of servers"),
    # Evaluation
    Row("eval-interval", "eval.every_steps", default=0),
    Row("eval-prompt-data", "data.eval", v.slime_eval, "several become `eval.sets`"),
    Row("n-samples-per-eval-prompt", "eval.repeats", default=1),
    Row("eval-temperature rollout-temperature", "eval.temperatures", lambda x, o: [float(x)], default=1.0,
        note="those of training by default", where=lambda o: "eval-prompt-data" in o),
    Row("eval-top-p", "eval.sampling.top_p"),
    Row("eval-top-k", "eval.sampling.top_k"),
    Row("eval-max-response-len", "eval.sampling.max_new_tokens"),
    Row("eval-* skip-eval-before-train", note="held-out rows are read as the training rows are", sft=None),
    # Rewards
    Row("rm-type", "rollout.reward", v.slime_reward, "`math`, `dapo` and `deepscaler`"),
    Row("reward-key", note="a reward is a number, or a dict with `score`"),
    Row("custom-rm-path", "rollout.reward", v.slime_function,
        "slime calls `f(args, sample)`: [rewards.md](rewards.md) has the signatures here"),
    # The run
    Row("save-interval", "checkpoint.every_steps", default=0, sft=None),
    Row("save save-* async-save no-save-optim", note="runs are below `run_root`, with an export at the end", sft=None),
    Row("wandb-group", "name", v.run_name, "the run's name", where=on("use-wandb"), sft=None),
    Row("use-wandb wandb-* use-tensorboard tb-*", note="metrics go to TensorBoard; `observe.wandb` adds a tracker",
        sft=None),
    Row("seed", "seed", sft=None),
    Row("rollout-function-path", note="`megasync sft` reads the rows", sft=True),
    Row("use-fault-tolerance use-slime-router rollout-skip-special-tokens rollout-data-* rollout-sample-hook-path "
        "rollout-storage-* rollout-queue-* rollout-io-* rollout-session-id rollout-cleanup-timeout router-* buffer-* "
        "debug-* log-* load-debug-* dump-* data-source-path offload* distributed-*",
        note="megasync decides it", sft=None),
    Row("swiglu num-layers hidden-size ffn-hidden-size num-attention-heads use-rotary-position-embeddings "
        "disable-bias-linear normalization norm-epsilon rotary-base group-query-attention num-query-groups "
        "kv-channels qk-layernorm vocab-size add-qkv-bias untie-embeddings-and-output-weights "
        "make-vocab-size-divisible-by seq-length max-position-embeddings moe-* mtp-* enable-mtp-training "
        "multi-latent-attention q-lora-rank kv-lora-rank qk-* v-head-dim spec model-name",
        note="the model's config.json says it", sft=None),
    Row("use-unbiased-kl use-rollout-entropy use-routing-replay use-opsm opsm-* use-opd opd-* use-stateless-adam "
        "use-score-centering score-centering-* log-probs-* get-mismatch-metrics reset-optimizer-states pg-loss-type "
        "recompute-loss-function disable-rewards-normalization tis-level", note="no key does this"),
    Row("global-batch-size n-samples-per-prompt", note="`sft.rows_per_step` counts rows", sft=True),
)

TRL = (
    # The model
    Row("model_name_or_path model", "model.path", sft=None),
    Row("model_revision", note="write it after the name: OWNER/NAME@REVISION", sft=None),
    Row("dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype", "model.dtype",
        words(bfloat16="bfloat16", float32="float32"), "float16 has no counterpart", sft=None),
    Row("lora_r", "trainer.lora.rank", default=16, where=on("use_peft"), sft=None),
    Row("lora_alpha", "trainer.lora.alpha", where=on("use_peft"), sft=None),
    Row("lora_target_modules", "trainer.lora.targets", v.lora_targets,
        "what Megatron computes as one projection is named together", where=on("use_peft"), sft=None),
    Row("use_peft", "trainer.lora.rank", v.part, sft=None),
    Row("lora_* use_dora use_rslora load_in_* bnb_* use_bnb_*", note="plain adapters of unquantized weights", sft=None),
    Row("gradient_checkpointing", "trainer.recompute", lambda x, o: "full" if flag(x) else None, default=True,
        sft=None),
    # Data
    Row("dataset_name", "data.train", v.training),
    Row("dataset_name", "sft.train", v.training, sft=True),
    Row("dataset_train_split", "data.train.split", v.part, default="train", sft=None),
    Row("dataset_config dataset_configs", "data.train.options.name", v.part, sft=None),
    Row("dataset_test_split", "data.eval", v.held_out,
        where=lambda o: "dataset_test_split" in o or o["eval_strategy"] not in (None, "no"), default="test"),
    Row("dataset_streaming dataset_num_proc", note="rows are read whole before the start", sft=None),
    Row("", "data.prompt.format", always("chat"), "for prompts that are messages", sft=None),
    Row("system_prompt", "data.prompt.system", sft=None),
    Row("max_prompt_length", "data.prompt.max_tokens", note="a longer prompt is an error at start; TRL cuts it"),
    Row("chat_template_kwargs.*", "rollout.chat.template_options.*", sft=None),
    Row("shuffle_dataset", "data.shuffle"),
    Row("seed", "seed", sft=None),
    # Batches and asynchrony
    Row("max_steps", "schedule.total_steps", v.unless(-1)),
    Row("num_train_epochs", "schedule.total_steps", v.hub_epochs, _STEPS),
    Row("num_train_epochs", "sft.epochs", without(None, instead=3), default=3, sft=True),
    Row("max_steps", note="`sft.epochs` says how long", sft=True),
    Row("per_device_train_batch_size", "schedule.groups_per_step", v.trl_groups,
        "x `gradient_accumulation_steps` x processes / `num_generations`: TRL counts responses", default=8),
    Row("per_device_train_batch_size", "sft.rows_per_step", v.trl_rows, "x `gradient_accumulation_steps` x processes",
        default=8, sft=True),
    Row("gradient_accumulation_steps", "trainer.minibatches", v.trl_minibatches, "`steps_per_generation` / this one",
        default=1),
    Row("steps_per_generation generation_batch_size", "trainer.minibatches", v.part),
    Row("gradient_accumulation_steps", "sft.rows_per_step", v.part, default=1, sft=True),
    Row("num_generations", "schedule.samples_per_group", default=8),
    Row("num_iterations", note="a batch is trained once"),
    Row("max_staleness", "schedule.max_staleness", lambda x, o: x if v.is_async_trl(o) else 0,
        f"TRL discards older samples, here `schedule.stale` decides. Other trainers: 0, and {_SYNC}", default=4),
    Row("weight_sync_steps", "schedule.weight_sync_steps", where=v.is_async_trl),
    Row("max_inflight_tasks", "schedule.max_inflight_groups",
        lambda x, o: None if int(x) < 0 else max(1, int(x) // o.whole("num_generations")),
        "TRL counts tasks (responses), here groups"),
    # Devices
    Row("num_processes", "trainer.data_parallel", note="1 where the file does not say it: accelerate's own file does",
        default=1, sft=None, silent="the file does not say how many processes there are: sizes are those of one; "
        "multiply trainer.data_parallel and the batch by their number"),
    Row("vllm_tensor_parallel_size", "rollout.tensor_parallel", default=1),
    Row("use_vllm", "rollout.servers", v.servers_of(v.trl_shares, v.trl_server),
        "one server for `vllm_mode=server`, otherwise as many as there are devices for", default=False),
    Row("vllm_mode", "cluster.colocate", v.colocated(v.trl_shares),
        "trainer and servers take turns on the devices of one node", default="colocate"),
    Row("use_cpu", "cluster.device", lambda x, o: "cpu" if flag(x) else "cuda", default=False, sft=None),
    Row("token_budget", "trainer.tokens_per_microbatch", without(None, instead=8192)),
    Row("num_machines machine_rank main_process_* config_file accelerate_config deepspeed* fsdp* rdzv_* "
        "mixed_precision", note="Megatron trains: [launching.md](launching.md)", sft=None),
    # The optimizer
    Row("learning_rate", "trainer.optimizer.lr"),
    Row("learning_rate", "trainer.optimizer.lr", default=2e-5, sft=True),
    Row("lr_scheduler_type", "trainer.optimizer.decay",
        v.trl_decay,
        "TRL's default is `linear`, that of `AsyncGRPOConfig` `constant`", default=None, sft=None),
    Row("lr_scheduler_kwargs.min_lr", "trainer.optimizer.min_lr", sft=None),
    Row("lr_scheduler_kwargs.min_lr_rate", "trainer.optimizer.min_lr", v.share_of("learning_rate"), sft=None),
    Row("warmup_steps", "trainer.optimizer.warmup_steps",
        lambda x, o: int(x) if float(x) >= 1 or not x else max(1, round(float(x) * o.number("max_steps"))), sft=None),
    Row("warmup_ratio", "trainer.optimizer.warmup_steps",
        v.warmup(v.trl_steps),
        "a share of the steps", sft=None),
    Row("weight_decay", "trainer.optimizer.weight_decay", sft=None),
    Row("adam_beta1", "trainer.optimizer.betas", lambda x, o: [o["adam_beta1"], o["adam_beta2"]], default=0.9,
        sft=None),
    Row("adam_beta2", "trainer.optimizer.betas", lambda x, o: [o["adam_beta1"], o["adam_beta2"]], default=0.999,
        sft=None),
    Row("adam_epsilon", "trainer.optimizer.eps", sft=None),
    Row("max_grad_norm", "trainer.optimizer.clip_grad", sft=None),
    Row("optim", note="Adam with decoupled weight decay", sft=None),
    # Advantages and loss
    Row("beta", "algorithm.kl_coef"),
    Row("epsilon", "algorithm.clip_low"),
    Row("epsilon_high", "algorithm.clip_high", v.trl_clip_high, "that of `epsilon` by default", default=None),
    Row("delta", "algorithm.dual_clip", note="on by default here", default=None),
    Row("epsilon", default=0.2, note="both bounds"),
    Row("loss_type", "algorithm.aggregation", v.trl_loss,
        "`grpo` is `sequence`, `dapo` and `bnpo` are `token`, `dr_grpo` is `constant`; `cispo` and `sapo` are losses",
        default="dapo", where=lambda o: not v.is_async_trl(o)),
    Row("importance_sampling_level", "algorithm.loss", v.part, "`sequence` is the loss `gspo`", default="token"),
    Row("scale_rewards", "algorithm.normalize_std", words(true=True, group=True, false=False, none=False),
        "`batch` has no counterpart"),
    Row("mask_truncated_completions", "rollout.groups.overlong", lambda x, o: "mask" if flag(x) else "keep"),
    Row("entropy_coef", "algorithm.entropy_coef"),
    Row("use_vllm", "algorithm.ratio", lambda x, o: "behaviour" if v.is_async_trl(o) else "trainer",
        "the asynchronous trainer takes the server's log-probs", default=False),
    Row("vllm_importance_sampling_correction", "algorithm.correction",
        lambda x, o: "none" if v.is_async_trl(o) or (flag(o["use_vllm"]) and not flag(x)) else v.Keys(),
        "without vLLM there is nothing to correct in TRL; here there is, so the default stays", default=True),
    Row("vllm_importance_sampling_mode", "algorithm.correction", v.is_method, default="sequence_mask",
        where=v.trl_corrects),
    Row("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "algorithm.correction_cap", default=3.0,
        where=v.trl_corrects),
    Row("vllm_importance_sampling_clip_min", "algorithm.correction_floor",
        where=v.trl_corrects),
    Row("sync_ref_model ref_model_*", note="`algorithm.reference_every` replaces the reference; TRL mixes it"),
    Row("top_entropy_quantile use_adaptive_entropy entropy_* off_policy_mask_threshold use_bias_correction_kl "
        "vespo_* multi_objective_aggregation reward_clip_range", note="no key does this"),
    Row("sapo_temperature_pos", "algorithm.loss_options.tau_positive", where=on("loss_type", "sapo")),
    Row("sapo_temperature_neg", "algorithm.loss_options.tau_negative", where=on("loss_type", "sapo")),
    # Servers
    Row("max_completion_length", "rollout.sampling.max_new_tokens",
        lambda x, o: x if x is not None else 2048 if v.is_async_trl(o) else 512, default=None),
    Row("temperature", "rollout.sampling.temperature"),
    Row("top_p", "rollout.sampling.top_p", v.top_p("top_k"), "below 1 with `top_k: 4096`"),
    Row("top_k", "rollout.sampling.top_k", without(0, None, instead=-1)),
    Row("min_p", "rollout.sampling.min_p", without(None, instead=0.0)),
    Row("repetition_penalty generation_kwargs* cache_implementation",
        note="sampling has temperature, top_p, top_k and min_p: the trainer scores the same distribution"),
    Row("vllm_gpu_memory_utilization", "rollout.mem_fraction", default=0.3,
        where=lambda o: flag(o["use_vllm"]) and o["vllm_mode"] == "colocate" and not v.is_async_trl(o)),
    Row("vllm_max_model_length vllm_max_model_len", "rollout.context_length"),
    Row("request_timeout", "timeouts.request"),
    Row("vllm_* use_transformers_* transformers_* ds3_* fork_threshold_tokens queue_maxsize heartbeat_* "
        "weight_sync_timeout", note="SGLang serves, and the run starts it"),
    Row("tools max_tool_calling_iterations environment_factory rollout_func",
        note="name tools in `rollout.tools`, or a workflow: [workflows.md](workflows.md)"),
    # Evaluation
    Row("eval_steps", "eval.every_steps", where=on("eval_strategy", "steps")),
    Row("eval_strategy do_eval num_generations_eval per_device_eval_batch_size eval_*",
        note="`eval` has the held-out sets", sft=None),
    # Rewards
    Row("reward_funcs", "rollout.reward", v.trl_rewards,
        "TRL's signature works unchanged; `accuracy_reward` is `math`"),
    Row("reward_weights", "rollout.rewards", v.part),
    Row("reward_model_name_or_path", note="add it to `reward_models`: [reward_models.md](reward_models.md)"),
    # Supervised training
    Row("max_length max_seq_length", "sft.max_tokens", default=1024, sft=True),
    Row("packing* padding_free eval_packing", note="rows are always packed into microbatches of tokens", sft=True),
    Row("dataset_text_field", note="rows have messages, or a prompt and an answer", sft=True),
    Row("completion_only_loss assistant_only_loss", note="the answer alone is trained", sft=True),
    Row("", "sft.answer", always("completion"), "in rows with a prompt", sft=True),
    # The run
    Row("run_name output_dir", "name", v.run_name, sft=None),
    Row("save_steps", "checkpoint.every_steps", v.save_steps,
        where=lambda o: o["save_strategy"] in (None, "steps"), sft=None),
    Row("save_total_limit", "checkpoint.keep", without(None, instead=2), "all by default there", sft=None),
    Row("report_to logging_* log_* num_completions_to_print project trackio_* wandb_* hub_* push_to_hub save_* "
        "overwrite_output_dir resume_from_checkpoint disable_tqdm",
        note="runs are below `run_root`; [watching.md](watching.md) has trackers, `megasync export` makes folders",
        sft=None),
    Row("bf16 fp16 tf32 attn_implementation gradient_checkpointing_kwargs.* remove_unused_columns trust_remote_code "
        "disable_dropout model_init_kwargs.* use_liger* ignore_* dataloader_* cast_lm_head_to_fp32 pad_* eos_token "
        "router_aux_loss_coef torch_* ddp_* optim_* group_by_length chat_template* neftune_* activation_offloading "
        "benchmarks callbacks env.* do_train", note="sequences are packed, and kernels chosen by Megatron",
        sft=None),
)

# fmt: on
# Libraries whose names are shown and not translated.
_SHARE = "a share of a batch there, which may be a fraction; whole versions here"
AREAL = (
    Row(
        "rollout.max_head_offpolicyness",
        "schedule.max_staleness",
        note="bounds the version a rollout starts with; here "
        "the oldest trained token, plus the window's slack ([buffer.md](buffer.md))",
    ),
    Row("train_dataset.batch_size", "schedule.groups_per_step", note="weights are published after every step"),
    Row("gconfig.n_samples", "schedule.samples_per_group"),
    Row("rollout.max_concurrent_rollouts", "schedule.max_inflight_groups"),
    Row("total_train_steps", "schedule.total_steps"),
    Row("gconfig.max_new_tokens", "rollout.sampling.max_new_tokens"),
    Row("gconfig.temperature", "rollout.sampling.temperature"),
    Row(
        "actor.dynamic_sampling",
        "rollout.groups.drop_uniform",
        note="AReaL masks such groups; here another prompt is drawn",
    ),
    Row("actor.ppo_n_minibatches", "trainer.minibatches"),
    Row("actor.mb_spec.max_tokens_per_mb", "trainer.tokens_per_microbatch"),
    Row("actor.eps_clip", "algorithm.clip_low"),
    Row("actor.eps_clip_higher", "algorithm.clip_high"),
    Row("actor.c_clip", "algorithm.dual_clip", note="on by default here"),
    Row(
        "actor.use_decoupled_loss",
        "algorithm.correction",
        note="true is `token`, the default here; false with "
        "`actor.recompute_logprob: false` is `algorithm.ratio: behaviour`",
    ),
    Row(
        "actor.behav_imp_weight_cap",
        "algorithm.correction_cap",
        note="AReaL leaves tokens over the cap out of the loss; here `correction_outside` says what they get",
    ),
    Row("actor.kl_ctl", "algorithm.kl_coef", note="in the reward: `algorithm.kl_in: reward`, with `kl_kind: k1`"),
    Row("actor.kl_estimator", "algorithm.kl_kind"),
)
PRIME_RL = (
    Row(
        "orchestrator.max_off_policy_steps",
        "schedule.max_staleness",
        note="bounds the version a rollout starts with; older releases also `max_async_level`",
    ),
    Row(
        "orchestrator.batch_size",
        "schedule.groups_per_step",
        note="counts responses: / `group_size`. Weights are published after every step",
    ),
    Row("orchestrator.group_size", "schedule.samples_per_group", note="formerly `rollouts_per_example`"),
    Row("orchestrator.max_inflight_rollouts", "schedule.max_inflight_groups", note="counts responses"),
    Row("orchestrator.max_steps", "schedule.total_steps"),
    Row("orchestrator.filters", "rollout.groups.drop_uniform", note="the filter `zero_advantage`"),
)
RLLM = (
    Row("rllm.async_training.staleness_threshold", "schedule.max_staleness", note=_SHARE),
    Row("rllm.async_training.trigger_parameter_sync_step", "schedule.weight_sync_steps"),
    Row("rllm.async_training.mini_batch_size", "schedule.groups_per_step"),
    Row("rllm.rollout.n", "schedule.samples_per_group"),
    Row("rllm.workflow.n_parallel_tasks", "schedule.max_inflight_groups", note="counts tasks (responses)"),
    Row("rllm.async_training.partial_rollout", "schedule.partial_rollout"),
    Row("rllm.data.max_response_length", "rollout.sampling.max_new_tokens"),
    Row("rllm.data.max_prompt_length", "data.prompt.max_tokens", note="longer prompts are refused, never cut"),
    Row("rllm.rejection_sample.filter_uniform_groups", "rollout.groups.drop_uniform"),
    Row("rllm.algorithm.adv_estimator", "algorithm.advantage"),
    Row("rllm.algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std"),
    Row("rllm.algorithm.eps_clip", "algorithm.clip_low"),
    Row("rllm.algorithm.rollout_correction.bypass_mode", "algorithm.ratio", note="`behaviour`"),
    Row("rllm.algorithm.rollout_correction.tis_mode", "algorithm.correction"),
)

TABLES = {"verl": VERL, "slime": SLIME, "trl": TRL}
SHOWN = {"AReaL": AREAL, "prime-rl": PRIME_RL, "rLLM": RLLM}

COLUMNS = {
    "verl": (
        Column("`data.prompt_key`", "prompt", "the prompt: messages"),
        Column("", "reward_model.ground_truth", "`data.columns: {answer: reward_model.ground_truth}`"),
        Column("`data.reward_fn_key`", "data_source", "reaches reward functions and workflows as it is; names the rows "
               "of a teacher"),
        Column("", "extra_info", "reaches reward functions and workflows as it is"),
    ),
    "slime": (
        Column("`--input-key`", "input", "the prompt: messages with `--apply-chat-template`, text without"),
        Column("`--label-key`", "label", "`data.columns: {answer: label}`"),
        Column("`--metadata-key`", "metadata", "reaches reward functions and workflows as it is"),
    ),
    "trl": (
        Column("", "prompt", "the prompt: messages, or text with `data.prompt.format: raw`"),
        Column("", "solution", "`data.columns: {answer: solution}`, for `accuracy_reward`"),
        Column("", "messages", "a conversation, for supervised training"),
        Column("", "completion", "the answer to a prompt, for supervised training: `sft.answer: completion`"),
    ),
}  # fmt: skip
