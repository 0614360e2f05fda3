"""A configuration that contradicts itself, its model or its machine is refused with all keys and the fix."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
from fp8_folders import write_fp8
from header_files import write_headers
from random_models import write_model

from megasync.config.schema import Config, RewardModelConfig
from megasync.config.server_args import OF_FROZEN_MODELS, OF_ROLLOUT, RESERVED
from megasync.errors import ConfigError
from megasync.layout.model_files import FETCHABLE
from megasync.preflight.check import check_config, model_layout

# overrides -> what the message must name
COLOCATED = ["cluster.colocate=true", "schedule.max_staleness=0"]
MORE = "data.sets.more.data={kind: digits, source: copy}"
TEACHER = "teachers.one.path=/nowhere"
GAE = ["algorithm.advantage=gae", "critic.enabled=true"]
OVERLAP = [
    *("trainer.tp_comm_overlap=true", "trainer.pad_microbatches=true", "trainer.tensor_parallel=2"),
    *("trainer.sequence_parallel=true", "cluster.device=cuda", "model.dtype=bfloat16"),
]
GRAPHS = ["trainer.cuda_graphs=true", "trainer.pad_microbatches=true", "cluster.device=cuda", "model.dtype=bfloat16"]
CONTRADICTIONS = [
    (["schedule.max_inflight_groups=33"], ["max_inflight_groups=33", "32 = (", "null"]),
    (
        ["schedule.groups_per_step=1", "schedule.samples_per_group=2", "trainer.data_parallel=4"],
        ["groups_per_step=1", "samples_per_group=2", "trainer.data_parallel=4"],
    ),
    (["trainer.minibatches=200"], ["trainer.minibatches=200", "128 responses"]),
    (["schedule.weight_sync_steps=101"], ["weight_sync_steps=101", "total_steps=100"]),
    (["schedule.samples_per_group=1"], ["samples_per_group=1", "algorithm.advantage=grpo"]),
    (["algorithm.advantage=rloo", "schedule.samples_per_group=1"], ["algorithm.advantage=rloo", "at least 2"]),
    (["algorithm.loss=sapo", "algorithm.loss_options={tau: 1.0}"], ["loss_options.tau=1.0", "tau_positive"]),
    (["algorithm.loss=sapo", "algorithm.loss_options={tau_positive: 0}"], ["tau_positive=0 must be a number above"]),
    (["algorithm.loss_options={beta: 1.0}"], ["algorithm.loss=vanilla has no such option; it has none"]),
    (["algorithm.loss=gpg", "algorithm.clip_low=0.1"], ["clip_low=0.1 has no effect with algorithm.loss=gpg"]),
    (["algorithm.advantage=rloo", "algorithm.normalize_std=false"], ["normalize_std=false has no effect"]),
    (["algorithm.loss=no_such.module:loss"], ["there is no module 'no_such'"]),
    (["algorithm.correction=none", "algorithm.correction_outside=mask"], ["correction_outside=mask has no effect"]),
    (["algorithm.ratio=behaviour"], ["algorithm.ratio=behaviour", "algorithm.correction=token", "correction=none"]),
    (["trainer.optimizer.betas=[0.9]"], ["betas=[0.9]", "two numbers"]),
    (["trainer.optimizer.betas=[0.9,1.0]"], ["betas=[0.9, 1.0]", "below 1"]),
    (["trainer.optimizer.warmup_steps=101"], ["warmup_steps=101", "total_steps=100"]),
    (["trainer.optimizer.min_lr=1", "trainer.optimizer.decay=linear"], ["min_lr=1", "lr=1e-06"]),
    (["trainer.optimizer.min_lr=1e-7"], ["min_lr=1e-07", "decay=constant"]),
    (["trainer.recompute_layers=1"], ["recompute_layers=1 has no effect", "trainer.recompute=null"]),
    (["trainer.recompute=full", "trainer.recompute_modules=[mlp]"], ["recompute_modules=['mlp'] has no effect"]),
    (["trainer.recompute=selective"], ["recompute_modules=[]", "mlp", "shared_experts"]),
    (["trainer.recompute=selective", "trainer.recompute_modules=[mpl]"], ["recompute_modules=['mpl']", "core_attn"]),
    (["trainer.recompute=selective", "trainer.recompute_modules=[moe]"], ["names moe", "do not have"]),
    (
        ["trainer.recompute=selective", "trainer.recompute_modules=[layernorm]", "cluster.device=cpu"],
        ["names layernorm"],
    ),
    (["trainer.overlap_grad_reduce=true"], ["overlap_grad_reduce=true", "trainer.data_parallel=1"]),
    (
        ["trainer.data_parallel=2", "trainer.overlap_param_gather=true"],
        ["overlap_param_gather=true has no effect", "trainer.overlap_grad_reduce=false", "set both to true"],
    ),
    (
        [f"trainer.{key}" for key in ("data_parallel=2", "overlap_grad_reduce=true", "overlap_param_gather=true")],
        ["overlap_param_gather=true has no effect", "trainer.minibatches=1"],
    ),
    (["rollout.external=[host:1]", "rollout.servers=1"], ["rollout.external names 'host:1'", "http://host:port"]),
    (["rollout.external=[http://a:1,http://a:1]"], ["http://a:1 more than once"]),
    (
        ["rollout.external=[http://10.0.0.5:1]", "rollout.servers=1"],
        ["http://10.0.0.5:1, which cannot reach", "cluster.host=auto"],
    ),
    (["rollout.external=[http://a:1]"], ["names 1 servers, but rollout.servers=2"]),
    (
        ["rollout.external=[http://localhost:1]", "rollout.servers=1", "rollout.server_args.--foo=1"],
        ["rollout.server_args", "rollout.external"],
    ),
    (["trainer.min_data_parallel=2"], ["min_data_parallel=2", "data_parallel=1", "null"]),
    (
        [f"trainer.{key}" for key in ("data_parallel=4", "expert_parallel=4", "min_data_parallel=2")],
        ["min_data_parallel=2 as trainer.data_parallel", "expert_parallel=4"],
    ),
    (["trainer.moe_permute_fusion=true", "cluster.device=cpu"], ["moe_permute_fusion=true needs a GPU"]),
    (["trainer.lora.alpha=8"], ["trainer.lora.alpha=8", "trainer.lora.rank=0", "set rank above 0"]),
    (["trainer.lora.rank=4", "trainer.lora.targets=[wo]"], ["trainer.lora.targets names 'wo'", "o_proj"]),
    (["trainer.lora.rank=4", "trainer.lora.path=configs"], ["trainer.lora.path='configs'", "adapter_config.json"]),
    (["sync.transport=adapters"], ["sync.transport=adapters", "trainer.lora.rank=0", "transport=auto"]),
    (
        [
            "sync.transport=adapters",
            "trainer.lora.rank=4",
            "rollout.external=[http://localhost:1]",
            "rollout.servers=1",
        ],
        ["sync.transport=adapters", "rollout.external", "transport=disk"],
    ),
    (
        ["eval.sets.old={data: {kind: digits, source: copy}, adapter: /nowhere}"],
        ["eval.sets.old.adapter='/nowhere'", "sync.transport=adapters"],
    ),
    (
        ["sync.transport=adapters", "trainer.lora.rank=4", "sync.delta=true"],
        ["sync.delta=true", "sync.transport=adapters"],
    ),
    (["trainer.fp8=blockwise", "cluster.device=cpu"], ["trainer.fp8=blockwise needs a GPU", "set it to null"]),
    (
        ["trainer.fp8=tensorwise", "cluster.device=cuda", "model.dtype=float32"],
        ["trainer.fp8=tensorwise", "set model.dtype=bfloat16"],
    ),
    (
        ["trainer.fp8=blockwise", "cluster.device=cuda", "model.dtype=bfloat16", "trainer.tensor_parallel=4"],
        ["trainer.fp8=blockwise needs multiples of 16", "linear_fc2.weight is 64 x 24", "trainer.tensor_parallel=4"],
    ),
    (
        ["trainer.tp_comm_overlap=true", "cluster.device=cpu", "model.dtype=float32"],
        [
            "trainer.tp_comm_overlap=true needs cluster.device=cuda, model.dtype=bfloat16, ",
            "trainer.tensor_parallel above 1, trainer.sequence_parallel=true, trainer.pad_microbatches=true; set that",
        ],
    ),
    ([*OVERLAP, "trainer.pad_microbatches=false"], ["tp_comm_overlap=true needs trainer.pad_microbatches=true; set"]),
    ([*OVERLAP, "trainer.fp8=blockwise"], ["tp_comm_overlap=true does not support trainer.fp8=blockwise"]),
    ([*OVERLAP, "trainer.lora.rank=4"], ["tp_comm_overlap=true does not support trainer.lora.rank=4"]),
    (
        [*OVERLAP, "cluster.devices_per_node=1"],
        ["tp_comm_overlap=true needs all ranks of trainer.tensor_parallel=2", "cluster.devices_per_node=1"],
    ),
    (
        ["trainer.cuda_graphs=true", "cluster.device=cpu"],
        ["trainer.cuda_graphs=true needs cluster.device=cuda, trainer.pad_microbatches=true; set that, or cuda"],
    ),
    *(
        ([*GRAPHS, refused], [f"cuda_graphs=true does not support {refused}; set it to false"])
        for refused in (
            "trainer.pipeline_parallel=2",
            "trainer.context_parallel=2",
            "trainer.recompute=full",
            "trainer.fp8=tensorwise",
            "trainer.lora.rank=4",
        )
    ),
    (
        [*GRAPHS, *GAE, "critic.offload=true"],
        ["trainer.cuda_graphs=true keeps weights and gradients", "critic.offload=true moves them; set one to false"],
    ),
    (
        ["trainer.pad_microbatches=true", "trainer.tokens_per_microbatch=64", "data.prompt.max_tokens=100"],
        ["pads microbatches to trainer.tokens_per_microbatch=64", "max_new_tokens is", "raise tokens_per_microbatch"],
    ),
    (
        ["trainer.gradient_accumulation_fusion=true", "cluster.device=cpu"],
        ["gradient_accumulation_fusion=true needs a"],
    ),
    (
        ["trainer.optimizer.exp_avg_dtype=bfloat16", "cluster.device=cpu"],
        ["exp_avg_dtype=bfloat16 needs a GPU", "set it to float32"],
    ),
    (
        ["trainer.optimizer.store_param_remainders=true", "cluster.device=cuda", "model.dtype=float32"],
        ["store_param_remainders=true needs a bfloat16 model", "set model.dtype=bfloat16"],
    ),
    (
        [
            "trainer.optimizer.exp_avg_sq_dtype=bfloat16",
            "trainer.distributed_optimizer=false",
            *("cluster.device=cuda", "model.dtype=bfloat16"),
        ],
        ["exp_avg_sq_dtype=bfloat16 needs Megatron's distributed optimizer", "set distributed_optimizer to true"],
    ),
    (["trainer.optimizer.offload=1.5"], ["trainer.optimizer.offload=1.5"]),
    (
        ["trainer.optimizer.offload=0.5", "cluster.device=cpu"],
        ["trainer.optimizer.offload=0.5 needs a GPU", "set it to 0"],
    ),
    (
        ["trainer.optimizer.offload=1", "trainer.distributed_optimizer=false", "cluster.device=cuda"],
        ["trainer.optimizer.offload=1 needs Megatron's distributed optimizer", "set distributed_optimizer to true"],
    ),
    (
        [
            *("trainer.optimizer.offload=0.5", "trainer.optimizer.exp_avg_dtype=bfloat16"),
            *("cluster.device=cuda", "model.dtype=bfloat16"),
        ],
        ["trainer.optimizer.offload=0.5", "trainer.optimizer.exp_avg_dtype=bfloat16; set exp_avg_dtype=float32"],
    ),
    (
        [
            *("trainer.optimizer.offload=0.5", "trainer.optimizer.store_param_remainders=true"),
            *("cluster.device=cuda", "model.dtype=bfloat16"),
        ],
        ["trainer.optimizer.store_param_remainders=true; set store_param_remainders=false", "offload=0"],
    ),
    (
        [
            *("trainer.optimizer.offload=0.5", "trainer.megatron.optimizer.decoupled_weight_decay=false"),
            "cluster.device=cuda",
        ],
        ["trainer.optimizer.offload=0.5", "decoupled_weight_decay=false; remove that"],
    ),
    (
        [*GAE, "critic.optimizer.offload=0.5", "cluster.device=cpu"],
        ["critic.optimizer.offload=0.5 needs a GPU", "set it to 0"],
    ),
    (["trainer.moe_permute_fusion=true", "cluster.device=cuda"], ["moe_permute_fusion=true", "no experts"]),
    (["algorithm.reference_every=50"], ["reference_every=50", "kl_coef=0"]),
    (["data.curriculum_options.solved=0.5"], ["curriculum_options", "data.curriculum=null"]),
    (["data.curriculum=by_success", "data.curriculum_options.solve=0.5"], ["no such option", "solved, hopeless"]),
    *(
        (["data.curriculum=by_success", f"data.curriculum_options.{option}"], wanted)
        for option, wanted in (
            ("patience=0", ["patience=0 must be a whole number of at least 1"]),
            ("patience=1.5", ["patience=1.5 must be a whole number"]),
            ("postpone=-1", ["postpone=-1 must be at least 0"]),
            ("hopeless=1.0", ["hopeless=1.0 must be below", "solved=1.0"]),
            ("solved=x", ["solved=x must be a finite number"]),
            ("solved=.nan", ["solved=nan must be a finite number"]),
        )
    ),
    (["data.curriculum=no.module:at_all"], ["no module 'no'"]),
    ([MORE], ["data.train and data.sets (more)", "data.train=null"]),
    ([MORE, "data.train=null", "data.prompt.examples=1"], ["examples=1", "data.sets"]),
    ([MORE, "data.train=null", "data.sets.more.weight=0"], ["data.sets.more.weight=0", "above 0"]),
    (
        ["data.sets.more.data={kind: jsonl, source: /none}", "data.train=null"],
        ["data.sets.more.data.source='/none'"],
    ),
    (["algorithm.reward_coef=0"], ["reward_coef=0", "without teachers"]),
    ([TEACHER, "algorithm.reward_coef=0", "rollout.groups.drop_uniform=true"], ["drop_uniform=true", "reward_coef=0"]),
    ([TEACHER, *GAE, "algorithm.reward_coef=0"], ["reward_coef=0", "critic.enabled=true"]),
    ([TEACHER, "teachers.other.path=/nowhere"], ["teachers.one", "teachers.other", "all other rows"]),
    (
        ["teachers.a={path: /a, sources: [maths]}", "teachers.b={path: /b, sources: [code, maths]}"],
        ["teachers.a and teachers.b both teach rows of data_source=maths"],
    ),
    ([TEACHER], ["teachers.one.path='/nowhere'"]),
    (["algorithm.kl_in=reward"], ["kl_in=reward", "kl_coef=0"]),
    (["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.advantage=gdpo"], ["kl_in=reward", "gdpo"]),
    (["algorithm.advantage=dpo", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"], ["kl_in=reward", "dpo"]),
    (["algorithm.advantage=gpg", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"], ["kl_in=reward", "gpg"]),
    (
        ["algorithm.advantage=gdpo", "rollout.groups.overlong=punish", "rollout.groups.overlong_tokens=1"],
        ["overlong=punish", "advantage=gdpo", "score the length in one of rollout.rewards"],
    ),
    (["algorithm.sample_weight=trajectory"], ["sample_weight=trajectory has no effect", "aggregation=token"]),
    (
        ["algorithm.advantage=reinforce_plus_plus", "schedule.samples_per_group=1", "rollout.groups.drop_uniform=true"],
        ["drop_uniform=true", "samples_per_group=1"],
    ),
    (["algorithm.advantage=dpo", "schedule.samples_per_group=1"], ["algorithm.advantage=dpo", "at least 2"]),
    *(
        ([f"algorithm.{each}" for each in overrides], wanted)
        for overrides, wanted in (
            (["loss=geo_mean"], ["loss=geo_mean", "correction=token"]),
            (["loss=dro"], ["loss=dro", "trainer.minibatches=1"]),
            (["loss=gpg", "ratio=behaviour", "correction=none"], ["ratio=behaviour", "loss=gpg"]),
            (["kl_coef=0.1", "kl_kind=k1"], ["kl_kind=k1", "kl_in=loss"]),
            (["kl_coef=0.1", "kl_in=reward"], ["kl_kind=k3", "kl_in=reward"]),
            (["advantage=dpo"], ["advantage=dpo", "correction=token"]),
            (["advantage=dpo", "correction=none", "ratio=behaviour"], ["advantage=dpo", "ratio=behaviour"]),
            (["advantage=dpo", "correction=none", "aggregation=sequence"], ["advantage=dpo", "aggregation=sequence"]),
            (["advantage=dpo", "correction=none", "loss=clip_cov"], ["advantage=dpo", "loss=clip_cov"]),
            (
                ["advantage=dpo", "correction=none", "rejection=token", "rejection_floor=0.1"],
                ["advantage=dpo", "rejection=token"],
            ),
        )
    ),
    (
        ["algorithm.advantage=dpo", "algorithm.correction=none", "schedule.stale=mask"],
        ["advantage=dpo", "schedule.stale=mask"],
    ),
    (
        ["algorithm.loss=kl_cov", "algorithm.ratio=behaviour", "algorithm.correction=none", "schedule.max_staleness=0"],
        ["loss=kl_cov", "schedule.max_staleness=0"],
    ),
    ([TEACHER, "algorithm.loss=geo_mean", "algorithm.correction=none"], ["loss=geo_mean", "teachers"]),
    (
        [TEACHER, "algorithm.reward_coef=0", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_kind=k1"],
        ["kl_in=reward", "reward_coef=0", "kl_coef=0.1"],
    ),
    ([*GAE, "algorithm.loss=geo_mean", "algorithm.correction=none"], ["loss=geo_mean", "advantage=gae"]),
    (
        [*GAE, "critic.warmup_steps=10", "trainer.optimizer.warmup_steps=95"],
        ["trainer.optimizer.warmup_steps=95", "schedule.total_steps=100", "critic.warmup_steps=10"],
    ),
    (
        ["trainer.float32_head=true", "model.dtype=bfloat16"],
        ["float32_head=true", "model.dtype=bfloat16", "--enable-fp32-lm-head"],
    ),
    (
        ["rollout.server_args={--enable-fp32-lm-head: true}", "model.dtype=bfloat16"],
        ["--enable-fp32-lm-head", "float32_head=false"],
    ),
    (["algorithm.advantage=gae"], ["algorithm.advantage=gae", "critic.enabled=false"]),
    (["critic.enabled=true"], ["critic.enabled=true", "algorithm.advantage=grpo"]),
    (["critic.clip=0.3"], ["critic.clip=0.3 has no effect with critic.enabled=false"]),
    ([*GAE, "critic.warmup_steps=100"], ["critic.warmup_steps=100", "schedule.total_steps=100"]),
    ([*GAE, "algorithm.advantage_options.lam=1.5"], ["advantage_options.lam=1.5 must be at most 1"]),
    ([*GAE, "critic.path=/nowhere"], ["critic.path='/nowhere'"]),
    ([*GAE, "critic.optimizer.min_lr=1"], ["critic.optimizer.min_lr=1", "critic.optimizer.lr=1e-05"]),
    (
        ["algorithm.reference_every=60", "algorithm.kl_coef=0.1", "checkpoint.every_steps=50"],
        ["reference_every=60", "checkpoint.every_steps=50"],
    ),
    (["trainer.moe_deepep=true", "cluster.device=cuda"], ["moe_deepep=true", "no experts"]),
    (["trainer.moe_deepep=true", "cluster.device=cpu"], ["moe_deepep=true needs a GPU"]),
    (["trainer.moe_shared_expert_overlap=true", "cluster.device=cuda"], ["no shared expert"]),
    (["trainer.megatron.model.tensor_model_parallel_size=2"], ["set trainer.tensor_parallel instead"]),
    (["trainer.megatron.optimizer.lr=1"], ["trainer.megatron.optimizer.lr", "set trainer.optimizer.lr instead"]),
    (["trainer.megatron.ddp.buket_size=1"], ["buket_size is not a field", "did you mean 'bucket_size'"]),
    (["trainer.megatron.model.mscale_all=1"], ["mscale_all is not a field"]),
    (["trainer.moe_aux_loss=0.01"], ["trainer.moe_aux_loss=0.01", "the model has none"]),
    (["trainer.virtual_pipeline=2"], ["trainer.virtual_pipeline=2", "trainer.pipeline_parallel=1"]),
    (["trainer.data_parallel=2", "trainer.expert_parallel=2"], ["trainer.expert_parallel=2", "the model has none"]),
    (["sync.parity_every=0", "sync.parity_threshold=0.1"], ["parity_threshold=0.1", "parity_every=0"]),
    (["sync.disk_dir=/tmp/shared"], ["sync.disk_dir='/tmp/shared'", "sync.transport=auto", "transport=disk"]),
    (["sync.transport=broadcast", "sync.delta=true"], ["sync.delta=true has no effect", "transport=p2p or auto"]),
    (["sync.delta=true", "sync.wave=1"], ["sync.delta=true and sync.wave=1 exclude each other", "wave to null"]),
    (["cluster.colocate=true"], ["schedule.max_staleness=1 is for both at once", "set it to 0"]),
    ([*COLOCATED, "schedule.weight_sync_steps=2"], ["schedule.weight_sync_steps=2", "set it to 1"]),
    ([*COLOCATED, "cluster.share_device=true"], ["cluster.share_device=true", "set one of them to false"]),
    ([*COLOCATED, "sync.transport=broadcast"], ["broadcast has no links", "sync.transport=p2p or auto"]),
    (
        [*COLOCATED, "sync.transport=adapters", "trainer.lora.rank=4"],
        ["cluster.colocate=true", "sync.transport=p2p or auto"],
    ),
    ([*COLOCATED, "sync.arena=device"], ["sync.arena=device has no effect with cluster.colocate=true"]),
    ([*COLOCATED, "rollout.external=[http://127.0.0.1:1]", "rollout.servers=1"], ["rollout.external", "already"]),
    (["sync.transport=disk", "sync.wave=2"], ["sync.wave=2 has no effect with sync.transport=disk"]),
    (["sync.transport=disk", "sync.disk_dir=/dev/null/v"], ["sync.disk_dir='/dev/null/v'", "/dev/null is a file"]),
    (["data.eval=null", "schedule.stop_at_score=0.9"], ["stop_at_score=0.9", "data.eval", "there is none"]),
    (
        ["checkpoint.export_every=3", "checkpoint.every_steps=2"],
        ["checkpoint.export_every=3", "checkpoint.every_steps=2", "a multiple of"],
    ),
    (["data.eval=null", "eval.every_steps=5"], ["eval.every_steps=5", "data.eval is null"]),
    (["eval.temperatures=[]"], ["eval.temperatures=[]"]),
    (["eval.temperatures=[-1]"], ["eval.temperatures=[-1.0]"]),
    (["eval.temperatures=[1,1]"], ["twice"]),
    (["eval.temperatures=[1,0]", "schedule.stop_at_score=0.5"], ["stop_at_score=0.5", "[1.0, 0.0]", "put 0 first"]),
    (["data.eval.size=5"], ["eval.samples=128", "data.eval.size=5"]),
    (["data.prompt.template=hello"], ["data.prompt.template='hello'", "{prompt}"]),
    (["data.prompt.template='{prompt} {'"], ["data.prompt.template", "{{"]),
    (["data.prompt.template='{prompt} {}'"], ["data.prompt.template", "{{"]),
    (["data.prompt.format=chat", "data.prompt.examples=2"], ["examples=2", "format=chat", "format=raw"]),
    (["rollout.sampling.top_k=0"], ["rollout.sampling.top_k=0", "2 to 4096", "drop rollout.sampling.top_k=0"]),
    (["rollout.sampling.top_k=1"], ["rollout.sampling.top_k=1", "2 to 4096"]),
    (["rollout.sampling.top_k=5000"], ["rollout.sampling.top_k=5000", "2 to 4096"]),
    (["rollout.sampling.top_p=0.95"], ["rollout.sampling.top_p=0.95", "top_k of 2 to 4096", "not -1", "eval.sampling"]),
    (
        ["rollout.sampling.top_k=50", "rollout.sampling.min_p=0.1", "rollout.deterministic=true"],
        ["rollout.sampling.min_p=0.1", "rollout.deterministic=true", "top_p"],
    ),
    (["eval.sampling.min_p=0.1", "rollout.deterministic=true"], ["eval.sampling.min_p=0.1", "rollout.deterministic"]),
    (
        ["rollout.sampling.top_k=50", "rollout.server_args={--speculative-algorithm: NGRAM}"],
        ["rollout.sampling.top_k=50", "--speculative-algorithm", "drop"],
    ),
    (["rollout.fp8=true"], ["rollout.fp8=true", "model.path=", "`megasync quantize"]),
    (["rollout.server_args={--quantization: fp8}"], ["--quantization='fp8'", "model.dtype", "drop it"]),
    (["rollout.server_args={--torchao-config=int4wo: true}"], ["--torchao-config=int4wo", "drop it"]),
    (["rollout.server_args={--json-model-override-args: x}"], ["--json-model-override-args='x'", "JSON object"]),
    (
        ["rollout.server_args={--json-model-override-args: '{\"quantization_config\": {}}'}"],
        ["quantization_config", "would quantize the policy"],
    ),
    (
        ["rollout.server_args={--preferred-sampling-params: '{\"min_p\": 0.1}'}"],
        ["--preferred-sampling-params", "the trainer", "drop it"],
    ),
    (
        ["rollout.server_args={--speculative-accept-threshold-acc: 0.9}"],
        ["--speculative-accept-threshold-acc=0.9", "set it to 1"],
    ),
    (["rollout.sampling.stop=['']"], ["rollout.sampling.stop", "empty"]),
    (["rollout.server_args={port: 1}"], ["'port'", "--chunked-prefill-size"]),
    (["rollout.server_args={--tp-size: 2}"], ["--tp-size", "rollout.tensor_parallel"]),
    (["rollout.server_args={--port: 2}"], ["--port"]),
    # A key on the command line, however it is written, and what would stand beside the guarded server.
    (["rollout.server_args={--admin-api-key=k: true}"], ["--admin-api-key=k", "megasync chooses it"]),
    (["rollout.server_args={--api-key: k}"], ["--api-key", "cluster.generation_key"]),
    (["rollout.server_args={--tokenizer-worker-num: 2}"], ["--tokenizer-worker-num"]),
    (["rollout.server_args={--grpc-port: 2}"], ["--grpc-port"]),
    (["cluster.tls_ca=/absent.pem"], ["cluster.tls_ca=/absent.pem", "cluster.tls_cert is not set"]),
    (["cluster.tls_cert=/absent.pem"], ["cluster.tls_cert=/absent.pem", "cluster.tls_key=None"]),
    (
        ["rollout.context_length=1200"],
        ["data.prompt.max_tokens=1024", "rollout.sampling.max_new_tokens=256", "rollout.context_length=1200"],
    ),
    (["rollout.max_total_tokens=1000"], ["rollout.max_total_tokens=1000", "max_new_tokens=256"]),
    (["trainer.sequence_parallel=true"], ["sequence_parallel=true", "tensor_parallel=1"]),
    (["trainer.first_stage_layers=2"], ["first_stage_layers=2", "pipeline_parallel=1"]),
    (["trainer.last_stage_layers=2"], ["last_stage_layers=2", "pipeline_parallel=1"]),
    (["trainer.pipeline_layout=[1,3]"], ["pipeline_layout=[1, 3]", "pipeline_parallel=1"]),
    (["trainer.pipeline_layout=[1,2,1]", "trainer.pipeline_parallel=2"], ["has 3 numbers; it needs 2"]),
    (["trainer.pipeline_layout=[0,4]", "trainer.pipeline_parallel=2"], ["[0, 4] leaves a chunk without a layer"]),
    (["trainer.pipeline_layout=[9,9]", "trainer.pipeline_parallel=2"], ["has 18 layers, but the model has"]),
    (
        ["trainer.pipeline_layout=[1,3]", "trainer.pipeline_parallel=2", "trainer.last_stage_layers=3"],
        ["pipeline_layout=[1, 3]", "last_stage_layers=3"],
    ),
    (["rollout.tensor_parallel=12"], ["rollout.tensor_parallel=12", "cluster.devices_per_node=8", "multiple of 8"]),
    (["trainer.tensor_parallel=16"], ["trainer.tensor_parallel=16", "cluster.devices_per_node=8"]),
    (["trainer.data_parallel=12"], ["12 ranks", "cluster.devices_per_node=8", "trainer.data_parallel"]),
    (["rollout.expert_parallel=2"], ["rollout.expert_parallel=2", "the model has none"]),
    (["rollout.server_args={--attn-dp-size: 2}"], ["--attn-dp-size", "set rollout.attention_data_parallel"]),
    (
        ["rollout.attention_data_parallel=2"],
        ["rollout.attention_data_parallel=2", "does not divide", "choose a divisor"],
    ),
    *(
        (
            ["rollout.tensor_parallel=2", "rollout.attention_data_parallel=2", *other],
            ["attention_data_parallel=2", part],
        )
        for part, other in {
            "sync.transport=adapters": ["sync.transport=adapters", "trainer.lora.rank=4"],
            "deterministic=true": ["rollout.deterministic=true"],
            "colocate=true": [
                *("rollout.servers=1", "trainer.data_parallel=2", "cluster.colocate=true", "schedule.max_staleness=0")
            ],
            "more than a node": ["rollout.tensor_parallel=16", "cluster.address=auto", "cluster.host=auto"],
        }.items()
    ),
    (
        ["rollout.tensor_parallel=4", "rollout.pipeline_parallel=3"],
        ["rollout.tensor_parallel=4 x pipeline_parallel=3", "multiple of 8"],
    ),
    (["rollout.pipeline_parallel=7", "rollout.servers=1"], ["rollout.pipeline_parallel=7", "6 layers"]),
    (
        ["rollout.pipeline_parallel=2", "sync.transport=broadcast"],
        ["rollout.pipeline_parallel=2", "sync.transport=broadcast", "p2p or disk"],
    ),
    (
        [
            "rollout.pipeline_parallel=2",
            "rollout.servers=1",
            "trainer.data_parallel=2",
            *("cluster.colocate=true", "schedule.max_staleness=0"),
        ],
        ["rollout.pipeline_parallel=2", "cluster.colocate=true"],
    ),
    (["rollout.server_args={--pp-size: 2}"], ["--pp-size", "set rollout.pipeline_parallel"]),
    (
        ["rollout.server_args={--disaggregation-mode: decode}"],
        ["rollout.server_args", "--disaggregation-mode", "set rollout.prefill_engines instead"],
    ),
    (["rollout.server_args={--disaggregation-mod=prefill: true}"], ["abbreviates --disaggregation-mode"]),
    (["rollout.server_args={--api-k: k}"], ["--api-k", "abbreviates --api-key"]),
    (["rollout.server_args={--enable-waterm: true}"], ["abbreviates --enable-watermark"]),
    (["rollout.routing_replay=true"], ["rollout.routing_replay=true", "describes one without", "set it to false"]),
    (["rollout.servers=12"], ["rollout.servers=12", "multiple of 8"]),
    (["trainer.data_parallel=8"], ["8 for the trainer + 2 for the rollout", "cluster.address=null", "auto"]),
    (["trainer.data_parallel=8", "cluster.address=auto"], ["cluster.host=127.0.0.1", "cluster.host=auto"]),
    (["cluster.host=0.0.0.0"], ["cluster.host=0.0.0.0", "every interface", "auto"]),
    (["cluster.host='::'"], ["cluster.host=::", "every interface", "auto"]),
    (
        ["trainer.data_parallel=8", "cluster.address=auto", "cluster.host=10.0.0.3"],
        ["cluster.host=10.0.0.3", "one node", "auto"],
    ),
    (["rollout.reward=math", "rollout.rewards.code.weight=1"], ["rollout.reward=math", "rollout.rewards (code)"]),
    (["rollout.rewards.nothing.weight=1"], ["rollout.rewards.nothing.function='nothing'", "math, code or"]),
    (["rollout.rewards.math.weight=-1"], ["rollout.rewards.math.weight=-1", "negative"]),
    (["rollout.rewards={'a/b': {function: math}}"], ["rollout.rewards.a/b", "letters, digits"]),
    (["rollout.groups.keep=spread"], ["groups.keep=spread", "extra_samples=0"]),
    (
        ["rollout.groups.extra_samples=2", "rollout.deterministic=true"],
        ["deterministic=true", "extra_samples=2", "keep=spread"],
    ),
    (["rollout.groups.overlong=punish"], ["overlong=punish", "overlong_tokens", "max_new_tokens=256", "got 0"]),
    (["rollout.groups.overlong=punish", "rollout.groups.overlong_tokens=257"], ["got 257"]),
    (["rollout.groups.overlong=mask", "rollout.groups.overlong_tokens=9"], ["overlong_tokens=9", "overlong=mask"]),
    (["rollout.groups.overlong_penalty=2"], ["overlong_penalty=2", "overlong=keep"]),
    (
        ["rollout.environment.kind=gymnasium", "rollout.workflow=m:f"],
        ["environment.kind=gymnasium", "rollout.workflow=m:f", "remove one"],
    ),
    (["rollout.environment.kind=gymnasium", "rollout.reward=math"], ["environment.kind=gymnasium", "reward math"]),
    (["rollout.environment.kind=gymnasium"], ["environment.kind=gymnasium", "data.prompt.format=raw", "format=chat"]),
    (["rollout.context_length=4096"], ["context_length=4096", "max_position_embeddings=2048"]),
    (["rollout.sampling.max_new_tokens=2000"], ["max_new_tokens=2000", "max_position_embeddings=2048"]),
    (
        ["trainer.tensor_parallel=8", "cluster.devices_per_node=16"],
        ["trainer.tensor_parallel=8", "num_attention_heads=4"],
    ),
    (["rollout.tensor_parallel=3"], ["rollout.tensor_parallel=3", "num_attention_heads=4"]),
    (["trainer.pipeline_parallel=4"], ["pipeline_parallel=4", "6 layers"]),
    (["trainer.pipeline_parallel=2", "trainer.first_stage_layers=6"], ["trainer.pipeline_parallel=2"]),
    (["trainer.pipeline_parallel=3", "trainer.first_stage_layers=3"], ["first_stage_layers=3"]),
    (["data.train.kind=jsonl", "data.train.source=/nowhere.jsonl"], ["data.train.source='/nowhere.jsonl'"]),
    (["data.train.kind=jsonl", "data.train.options={a: 1}"], ["data.train.options", "data.train.kind=jsonl"]),
    (["data.train=null"], ["data.train", "train_dataset"]),
]


def refused(config: Config, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, **kwargs)
    return str(caught.value)


def test_a_sound_configuration_passes(make):
    assert check_config(make()) is None


def test_dual_clip_is_above_one_or_off(make):
    assert check_config(make("algorithm.dual_clip=null")) is None
    assert refused(make("algorithm.dual_clip=1.0")) == "algorithm.dual_clip=1.0 must be above 1"


@pytest.mark.parametrize(("overrides", "parts"), CONTRADICTIONS, ids=[" ".join(c[0]) for c in CONTRADICTIONS])
def test_a_contradiction_names_all_sides(make, overrides, parts):
    message = refused(make(*overrides))
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.eval=null"],
        ["schedule.max_inflight_groups=32"],
        ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"],
        ["trainer.tensor_parallel=4"],  # twice the KV heads
        ["trainer.pipeline_parallel=3", "trainer.first_stage_layers=1", "trainer.last_stage_layers=1"],
        ["trainer.data_parallel=8", "cluster.address=auto", "cluster.host=auto"],
        ["algorithm.ratio=behaviour", "algorithm.correction=none"],
        [*GAE, "schedule.samples_per_group=1"],
        ["schedule.stop_at_score=0.9"],
        ["schedule.max_staleness=0"],
    ],
)
def test_an_unusual_but_valid_configuration_is_accepted(make, overrides):
    check_config(make(*overrides))


def test_rows_from_python_replace_datasets(make):
    config = make("data.train=null", "data.eval=null", "schedule.stop_at_score=0.9")
    check_config(config, own_rows=True, own_eval_rows=True)


def test_reserved_server_arguments_point_to_keys_that_exist():
    from megasync.config.load import schema_keys

    keys = {key for key, _ in schema_keys()}
    assert {key.format(servers="rollout") for key in (RESERVED | OF_ROLLOUT).values() if key} <= keys
    own = {f"servers.{item.name}" for item in fields(RewardModelConfig)}
    reserved = {key.format(servers="servers") for key in (RESERVED | OF_FROZEN_MODELS).values() if key}
    assert {key for key in reserved if key.startswith("servers.")} <= own


# The model


def test_the_error_of_a_missing_model_folder_says_how_to_create_it(make, tmp_path):
    assert "megasync fetch digits" in refused(make(f"model.path={tmp_path}/digits"))
    assert "model.path='/no/such'" in refused(make("model.path=/no/such"))


def test_the_error_names_the_models_that_can_be_fetched():
    from megasync.models import MODELS

    assert set(FETCHABLE) == set(MODELS)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dtype=float32"], ["rollout.fp8=true with model.dtype=float32", "bfloat16"]),
        (
            ["sync.transport=adapters", "trainer.lora.rank=4", "trainer.lora.targets=[q_proj, k_proj, v_proj]"],
            ["rollout.fp8=true with sync.transport=adapters", "sync.transport=auto"],
        ),
        (
            ["rollout.tensor_parallel=4", "rollout.servers=1"],
            ["16 rows of 'model.layers.0.self_attn.q_proj.weight'", "its blocks' 32"],
        ),
    ],
)
def test_servers_that_cannot_keep_block_fp8_are_refused(make, model, tmp_path, overrides, words):
    fp8 = ["rollout.fp8=true", "model.dtype=bfloat16"]
    source = write_model(tmp_path / "source", json.loads((model / "config.json").read_text()))
    folder, _ = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", (32, 32))
    (folder / "tokenizer.json").touch()
    check_config(make(*fp8, f"model.path={folder}"))
    with pytest.raises(ConfigError) as refused:
        check_config(make(*fp8, f"model.path={folder}", *overrides))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("planning", [False, True])
def test_a_folder_in_block_fp8_is_checked_with_its_scales(make, model, tmp_path, planning):
    config = make()
    plain = model_layout(config)[0]
    values = json.loads((model / "config.json").read_text())
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(values | {"quantization_config": stated}))
    assert model_layout(config)[0].hf_config == plain.hf_config
    source = write_model(tmp_path / "source", values)
    fp8, _ = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", (20, 28))
    (fp8 / "tokenizer.json").write_text("{}")
    config.model.path = str(fp8)
    check_config(config, planning=planning)
    (fp8 / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        check_config(config, planning=planning)


def test_model_config_is_sufficient_for_a_plan_only(make, model):
    config = make("model.path=elsewhere", f"model.config={model / 'config.json'}")
    check_config(config, planning=True)
    assert "megasync plan" in refused(config)
    assert "model.config" in refused(make("model.path=elsewhere", "model.config=gone.json"), planning=True)


def test_missing_files_of_a_model_folder_are_named(make, model):
    for name, part in (
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "safetensors"),
        ("config.json", "config.json"),
    ):
        (model / name).unlink()
        assert part in refused(make())


def test_models_that_sglang_has_no_pipeline_for_are_refused(make, model):
    values = json.loads((model / "config.json").read_text())
    check_config(make("rollout.pipeline_parallel=2"))
    (model / "config.json").write_text(json.dumps(values | {"model_type": "llama", "tie_word_embeddings": True}))
    assert "for llama with tied embeddings" in refused(make("rollout.pipeline_parallel=2"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["trainer.tensor_parallel=2"], ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"]),
        (["trainer.data_parallel=3", "trainer.expert_parallel=3"], ["4 experts", "trainer.expert_parallel=3"]),
        (["rollout.tensor_parallel=4", "rollout.servers=1"], ["rollout.tensor_parallel=4", "moe_intermediate_size=6"]),
        (
            ["rollout.routing_replay=true", "trainer.megatron={model: {moe_router_fusion: true}}"],
            ["rollout.routing_replay=true", "moe_router_fusion=true"],
        ),
        (
            ["rollout.routing_replay=true", "rollout.server_args={--speculative-algorithm: NGRAM}"],
            ["rollout.routing_replay=true", "rollout.server_args --speculative-algorithm"],
        ),
        (["sync.transport=adapters", "trainer.lora.rank=4"], ["adapters of experts", "projections of attention"]),
        (
            ["trainer.fp8=tensorwise", "cluster.device=cuda", "model.dtype=bfloat16"],
            ["experts.linear_fc1.weight0 is 12 x 64", "trainer.expert_tensor_parallel=1"],
        ),
        (
            ["rollout.routing_replay=true", "rollout.pipeline_parallel=2"],
            ["rollout.pipeline_parallel=2", "routing_replay=true", "first pipeline stage"],
        ),
    ],
)
def test_invalid_options_of_experts_are_refused(make, model, overrides, parts):
    values = json.loads((model / "config.json").read_text())
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    (model / "config.json").write_text(json.dumps(values | experts))
    message = refused(make(*overrides))
    assert all(part in message for part in parts), message


def test_a_plan_reads_the_adapter_that_is_there(make, tmp_path):
    lora = ["trainer.lora.rank=4", f"trainer.lora.path={tmp_path}"]
    assert "adapter_config.json" in refused(make(*lora), planning=True)
    gone = make(*lora[:1], f"trainer.lora.path={tmp_path / 'gone'}")
    check_config(gone, planning=True)
    assert "gone" in refused(gone)


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (None, ["is not a PEFT folder"]),
        ({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}, ["has rank 8", "trainer.lora.rank=4"]),
        ({"peft_type": "LORA", "r": 4, "target_modules": ["lm_head"]}, ["adapts lm_head", "trainer.lora.targets"]),
        ({"peft_type": "IA3", "target_modules": ["q_proj"]}, ["peft_type='IA3'"]),
    ],
)
def test_adapters_of_held_out_sets_must_fit_those_of_the_policy(make, tmp_path, found, parts):
    folder = tmp_path / "old"
    folder.mkdir()
    if found is not None:
        (folder / "adapter_config.json").write_text(json.dumps(found))
    held_out = f"eval.sets.old={{data: {{kind: digits, source: copy}}, adapter: {folder}}}"
    message = refused(make("sync.transport=adapters", "trainer.lora.rank=4", held_out))
    assert all(part in message for part in ["eval.sets.old.adapter", *parts]), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["context_length=None allows 2048 tokens", "attention_chunk_size=1536", "at most 1536"]),
        (["rollout.context_length=1537"], ["context_length=1537", "attention_chunk_size=1536"]),
        (["rollout.external=[http://127.0.0.1:9]", "rollout.servers=1"], ["rollout.external", "megasync's class"]),
        (
            ["rollout.context_length=1536", "sync.transport=adapters", "trainer.lora.rank=4"],
            ["sync.transport=adapters is not supported for llama4_text", "transport=auto"],
        ),
    ],
)
def test_what_servers_do_not_compute_of_llama_4_is_refused(make, model, overrides, parts):
    values = json.loads((model / "config.json").read_text()) | {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 1536,
        "rope_theta": 1e4,
    }
    (model / "config.json").write_text(json.dumps(values))
    write_headers(model)
    check_config(make("rollout.context_length=1536"))
    message = refused(make(*overrides))
    assert all(part in message for part in parts), message


def test_adapters_that_servers_on_a_cpu_would_pad_are_refused(make, model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"intermediate_size": 48}))
    adapters = ["sync.transport=adapters", "trainer.lora.rank=4", "rollout.tensor_parallel=2", "cluster.device=cpu"]
    message = refused(make(*adapters))
    assert "intermediate_size to be a multiple of 64" in message and "it is 48" in message
    make(*adapters, "trainer.lora.targets=[q_proj, k_proj, v_proj]")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "gpt_neox"}, ["gpt_neox", "qwen3"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quant_method='awq'", "block FP8"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size=None", "[128, 128]"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["'dynamic'"]),
        ({"hidden_size": "64"}, ["hidden_size='64'", "whole number"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "whole number"]),
        ({"num_attention_heads": 10**18}, [f"num_attention_heads={10**18}", "whole number"]),
        ({"rope_parameters": [1]}, ["rope_parameters=[1]", "object"]),
        ({"model_type": ["qwen3"]}, ["model_type=['qwen3']", "text"]),
    ],
)
def test_an_unsupported_model_is_refused_with_its_file(make, model, change, parts):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refused(make())
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_config_that_is_not_json_is_refused_with_its_file(make, model):
    (model / "config.json").write_text("{")
    assert str(model / "config.json") in refused(make())


def test_a_run_root_below_a_file_is_refused(make, tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(make(f"run_root={tmp_path}/file/runs"))


@pytest.mark.processes
def test_checking_loads_neither_torch_nor_ray():
    code = "import sys, megasync.config; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "key",
    [
        *("run_root", "model.path", "model.config", "sync.disk_dir", "trainer.lora.path", "critic.path"),
        *("cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca"),
    ],
)
@pytest.mark.parametrize("address", ["s3://bucket/a", "hf://x/y", "gs://a", "file:///tmp/x", "abfs+x://a"])
def test_addresses_are_no_paths(make, key, address):
    said = refused(make(f"{key}={address}"))
    assert f"{key}='{address}'" in said and "addresses are not supported" in said


def test_addresses_are_no_files_of_rows_or_models(make):
    for override in (
        "data.train={kind: jsonl, source: 's3://bucket/rows.jsonl'}",
        "teachers.one.path=s3://bucket/model",
        "eval.sets.a={data: {kind: digits, source: copy}, adapter: 's3://a/b'}",
    ):
        assert "addresses are not supported" in refused(make(override))
