"""Refuses configurations that contradict themselves, their model or their machine, before any process starts.

`check_config` first checks each key alone (`limits`), so the checks here can rely on valid single values. A check is
one function. Its error names all keys involved, their values, and a change that resolves the contradiction.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megasync.base.confidential import masked
from megasync.base.importing import keyword_options, load_function
from megasync.config import builtin
from megasync.config.access import EXTERNAL_KEY_VARIABLE, check_access, given_external_key
from megasync.config.deadlines import check_deadlines
from megasync.config.host import is_loopback, is_wildcard
from megasync.config.limits import SHOWN_CHARACTERS, as_typed, check_limits, path_problem, refuse_unused
from megasync.config.megatron_options import check_megatron
from megasync.config.pacing import Pacing
from megasync.config.pools import (
    PoolSpec,
    engine_nodes,
    frozen_models,
    nodes_needed,
    pool_specs,
    server_devices,
    trainer_pool,
)
from megasync.config.schema import (
    Config,
    DataConfig,
    DatasetConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainerConfig,
)
from megasync.config.server_args import OF_ROLLOUT, check_head, check_server_args, check_trained_args
from megasync.config.supervised import is_supervised
from megasync.data.curriculum import by_success
from megasync.errors import ConfigError
from megasync.layout.adapter import adapter_layout
from megasync.layout.adapter_files import check_adapter_folder
from megasync.layout.families import Sizes
from megasync.layout.layout import Layout
from megasync.layout.model_files import (
    check_model_folder,
    find_hf_config,
    read_hf_config,
)
from megasync.layout.topology import Topology
from megasync.preflight.check_adapters import check_lora, check_served_adapters
from megasync.preflight.check_algorithm import (
    check_algorithm,
    check_critic,
    check_critic_model,
    check_objective,
    check_optimizer,
)
from megasync.preflight.check_attention_groups import check_attention_groups
from megasync.preflight.check_evaluation import check_evaluation, check_seeded
from megasync.preflight.check_fp8_servers import check_fp8_servers
from megasync.preflight.check_frozen_models import check_frozen_models
from megasync.preflight.check_observe import check_observe
from megasync.preflight.check_pipelined_servers import check_pipelined_servers
from megasync.preflight.check_rollout import check_agent, check_chat, check_environment, check_groups, check_rewards
from megasync.preflight.check_server_engines import check_server_engines
from megasync.preflight.check_vision import check_vision_folder, check_vision_policy
from megasync.preflight.check_weights import check_weights
from megasync.trainer.architecture import (
    check_adapters,
    check_architecture,
    check_context,
    check_experts,
    check_fp8,
    check_graphs,
    check_overlap,
    chunks_of,
)
from megasync.trajectory.support import MAX_SUPPORT


def check_config(
    config: Config,
    *,
    planning: bool = False,
    own_rows: bool = False,
    own_eval_rows: bool = False,
    own_agent: bool = False,
    training: bool = True,
) -> None:
    """Raises ConfigError for the first contradiction in a configuration that is to be started.

    With `planning`, `model.config` alone may describe the model, and data files may be missing. `own_rows` and
    `own_eval_rows` say that a Python caller passes rows that replace `data.train` and `data.eval`, `own_agent` that it
    passes an agent that replaces `rollout.agent`. Without `training` only servers are started.
    """
    check_limits(config)
    _check_schedule(config)
    check_algorithm(config)
    check_critic(config)
    check_objective(config)
    check_optimizer(config)
    _check_sync(config)
    _check_exports(config)
    check_evaluation(config, own_eval_rows, training)
    _check_prompt(config)
    check_chat(config)
    check_rewards(config)
    check_groups(config)
    check_environment(config)
    check_agent(config, own_agent)
    if training:
        check_deadlines(config, own_agent)
    _check_servers(config)
    check_frozen_models(config, planning)
    _check_trainer(config)
    longest = config.data.prompt.max_tokens + config.rollout.sampling.max_new_tokens
    _check_padding(config.trainer, longest, "data.prompt.max_tokens + rollout.sampling.max_new_tokens")
    _check_cluster(config, training)
    check_access(config.cluster, planning=planning)
    _check_model(config, planning)
    _check_data(config, planning, own_rows or not training, own_eval_rows)
    _check_folder("run_root", config.run_root)
    if training:
        check_observe(config, planning)


def check_supervised(config: Config, *, planning: bool = False) -> None:
    """Raises ConfigError for a configuration that `megasync sft` cannot run; names the key and the fix.

    With `planning`, `model.config` alone may describe the model, and data files may be missing.
    """
    check_limits(config)
    _check_trainer(config)
    sft, trainer = config.sft, config.trainer
    if sft.train is None:
        raise ConfigError("sft.train is not set; name a dataset with sft.train.kind and sft.train.source")
    for name, dataset in (("train", sft.train), ("validation", sft.validation)):
        if dataset is not None:
            _check_dataset(f"sft.{name}", dataset, planning)
    if {*_columns("sft.answer_template", sft.answer_template)} != {"answer"}:
        raise ConfigError(
            f"sft.answer_template={sft.answer_template!r} must have {{answer}}, and no other column; write {{{{ and "
            f"}}}} for literal braces"
        )
    if sft.rows_per_step < trainer.data_parallel:
        raise ConfigError(
            f"sft.rows_per_step={sft.rows_per_step} is less than trainer.data_parallel={trainer.data_parallel}; each "
            f"rank needs at least one row"
        )
    if trainer.minibatches > 1:
        raise ConfigError(f"trainer.minibatches={trainer.minibatches} is for policies; set it to 1 for megasync sft")
    if config.data.prompt.examples:
        raise ConfigError(
            f"data.prompt.examples={config.data.prompt.examples} is not used by megasync sft; set it to 0"
        )
    check_access(config.cluster, planning=planning)
    layout, source = model_layout(config, planning=planning)
    limit = layout.hf_config.get("max_position_embeddings")
    if limit is None and sft.max_tokens is None:
        raise ConfigError(f"{source} has no max_position_embeddings, so sft.max_tokens must say how long a row may be")
    if limit is not None and (sft.max_tokens or 0) > limit:
        raise ConfigError(
            f"sft.max_tokens={sft.max_tokens} exceeds max_position_embeddings={limit} of {source}; lower it"
        )
    if sft.max_tokens is not None:
        _check_padding(trainer, sft.max_tokens, "sft.max_tokens")
    elif limit is not None:
        _check_padding(trainer, limit, "max_position_embeddings, in place of sft.max_tokens,")
    check_megatron(vars(trainer.megatron), latent=layout.family.latent)
    _check_experts(trainer, layout)
    if not planning:
        check_model_folder(config.model)
    check_vision_folder(source, layout)
    check_weights(source.parent, layout)
    _check_nodes(config, {"trainer": trainer_pool(config)})
    _check_folder("run_root", config.run_root)
    check_observe(config, planning)


def check_as_run(config: Config, *, planning: bool = False) -> None:
    """Raises ConfigError as the command does that the configuration is for: `megasync sft` or `megasync train`."""
    (check_supervised if is_supervised(config) else check_config)(config, planning=planning)


def check_steps(config: Config) -> None:
    """Raises ConfigError if the learning rate does not fit the number of steps, `schedule.total_steps`."""
    check_optimizer(config)


def _check_schedule(config: Config) -> None:
    schedule, trainer = config.schedule, config.trainer
    capacity = Pacing.of(schedule).capacity
    inflight = schedule.max_inflight_groups
    if inflight is not None and inflight > capacity:
        raise ConfigError(
            f"schedule.max_inflight_groups={inflight} exceeds the capacity of the buffer, {capacity} = "
            f"(max_staleness + 1) x groups_per_step x weight_sync_steps; lower it or set it to null"
        )
    responses = schedule.groups_per_step * schedule.samples_per_group
    if responses < trainer.data_parallel * trainer.minibatches:
        raise ConfigError(
            f"schedule.groups_per_step={schedule.groups_per_step} x samples_per_group={schedule.samples_per_group} "
            f"gives {responses} responses a step, fewer than trainer.data_parallel={trainer.data_parallel} x "
            f"trainer.minibatches={trainer.minibatches}; each rank needs at least one per minibatch"
        )
    if schedule.weight_sync_steps > schedule.total_steps:
        raise ConfigError(
            f"schedule.weight_sync_steps={schedule.weight_sync_steps} exceeds schedule.total_steps="
            f"{schedule.total_steps}, so no sync would ever happen; lower it"
        )


def _check_exports(config: Config) -> None:
    every, saved = config.checkpoint.export_every, config.checkpoint.every_steps
    if every and (not saved or every % saved):
        raise ConfigError(
            f"checkpoint.export_every={every} exports checkpoints, but checkpoint.every_steps={saved} saves none after "
            f"these steps; make export_every a multiple of every_steps"
        )


def _check_sync(config: Config) -> None:
    sync = config.sync
    if sync.parity_every == 0 and sync.parity_threshold is not None:
        raise ConfigError(
            f"sync.parity_threshold={sync.parity_threshold} is not used while sync.parity_every=0; set parity_every to "
            f"at least 1, or parity_threshold to null"
        )
    if sync.transport in ("broadcast", "disk", "adapters"):
        reason = f"with sync.transport={sync.transport}; set transport=p2p or auto"
        refuse_unused(sync, "sync", ("arena", "arena_mb", "wave", "delta", "delta_full_every"), reason)
    if sync.delta and sync.wave is not None:
        raise ConfigError(
            f"sync.delta=true and sync.wave={sync.wave} exclude each other: ranks keep one version to compute deltas "
            f"against, and waves would hold different ones; set wave to null or delta to false"
        )
    if sync.disk_dir is not None:
        if sync.transport not in ("disk", "adapters"):
            raise ConfigError(
                f"sync.disk_dir={sync.disk_dir!r} is not used by sync.transport={sync.transport}; set transport=disk "
                f"or adapters, or disk_dir to null"
            )
        _check_folder("sync.disk_dir", sync.disk_dir)


def _check_prompt(config: Config) -> None:
    prompt = config.data.prompt
    for key in ("template", "example_template"):
        if not all(columns := _columns(f"data.prompt.{key}", getattr(prompt, key))) or not columns:
            raise ConfigError(
                f"data.prompt.{key}={getattr(prompt, key)!r} must name the columns it shows, such as {{prompt}}; write "
                f"{{{{ and }}}} for literal braces"
            )
    if prompt.examples and prompt.format == "chat":
        raise ConfigError(
            f"data.prompt.examples={prompt.examples} is for raw prompts, but data.prompt.format=chat; set examples=0 "
            f"or format=raw"
        )


def _columns(key: str, template: str) -> list[str]:
    """The columns that a format string names."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{key}={template!r} is not a valid format string ({error}); write {{{{ and }}}} for literal braces"
        ) from None


def _check_external(config: Config) -> None:
    urls, servers = config.rollout.external, config.rollout.servers
    for url in urls:
        if not _is_server_url(url):
            raise ConfigError(f"rollout.external names {url!r}, which is not of the form http://host:port")
    if doubled := {url for url in urls if urls.count(url) > 1}:
        raise ConfigError(f"rollout.external names {', '.join(sorted(doubled))} more than once; name each server once")
    if servers != len(urls):
        raise ConfigError(f"rollout.external names {len(urls)} servers, but rollout.servers={servers}; make them equal")
    if is_loopback(config.cluster.host) and (
        far := [url for url in urls if not is_loopback(urlsplit(url).hostname or "")]
    ):
        raise ConfigError(
            f"rollout.external names {far[0]}, which cannot reach the trainer ranks at cluster.host="
            f"{config.cluster.host}; set cluster.host=auto"
        )
    if config.cluster.share_device:
        raise ConfigError(
            "cluster.share_device=true puts a trainer rank and a server on one device, but rollout.external names "
            "servers that run already; set it to false"
        )
    for key, model in frozen_models(config).items():
        if model.pool != "own":
            raise ConfigError(
                f"{key}.pool={model.pool} takes devices of the rollout servers, which others have started "
                f"(rollout.external); set it to own"
            )
    if config.rollout.server_args:
        raise ConfigError(
            "rollout.server_args are for servers that the run starts, not for rollout.external; drop them"
        )
    if config.cluster.generation_key == "never" and given_external_key() is not None:
        raise ConfigError(
            f"cluster.generation_key=never, but {EXTERNAL_KEY_VARIABLE} is set; unset it, or set generation_key=auto"
        )


def _is_server_url(url: Any) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.username
            and not (parts.path.strip("/") or parts.query or parts.fragment)
        )
    except (ValueError, TypeError, AttributeError):
        return False


def _check_servers(config: Config) -> None:
    rollout = config.rollout
    if rollout.external:
        _check_external(config)
    elif (nodes := engine_nodes(config)) > 1:
        for key, model in frozen_models(config).items():
            if model.pool != "own":
                raise ConfigError(
                    f"{key}.pool={model.pool} takes devices of a rollout server, but those are on {nodes} nodes each "
                    f"({server_devices(rollout)} devices each, cluster.devices_per_node="
                    f"{config.cluster.devices_per_node}); set it to own"
                )
    if rollout.min_servers > rollout.servers:
        raise ConfigError(
            f"rollout.min_servers={rollout.min_servers} exceeds rollout.servers={rollout.servers}, so the run could "
            f"never start; lower it"
        )
    if rollout.save_partials_seconds and not rollout.stream_interval:
        raise ConfigError(
            f"rollout.save_partials_seconds={rollout.save_partials_seconds:g} has nothing to save with "
            f"rollout.stream_interval=0, because requests stream nothing before they end; set it to 0, or "
            f"stream_interval to at least 1"
        )
    _check_truncation(config)
    if "" in rollout.sampling.stop:
        raise ConfigError(
            "rollout.sampling.stop contains an empty string, which would end every response at once; remove it"
        )
    check_server_args("rollout", rollout.server_args, OF_ROLLOUT)
    check_trained_args("rollout", rollout.server_args)
    if not rollout.external:
        check_head(config.trainer.float32_head, config.model.dtype, rollout.server_args)
    longest = config.data.prompt.max_tokens + rollout.sampling.max_new_tokens
    for key in ("context_length", "max_total_tokens"):
        room = getattr(rollout, key)
        if room is not None and longest > room:
            raise ConfigError(
                f"data.prompt.max_tokens={config.data.prompt.max_tokens} + rollout.sampling.max_new_tokens="
                f"{rollout.sampling.max_new_tokens} do not fit into rollout.{key}={room}; raise it or lower one of them"
            )


def _check_trainer(config: Config) -> None:
    trainer = config.trainer
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        raise ConfigError(
            "trainer.sequence_parallel=true splits activations over tensor-parallel ranks, but "
            "trainer.tensor_parallel=1; set sequence_parallel=false or raise tensor_parallel"
        )
    for key in ("first_stage_layers", "last_stage_layers"):
        if getattr(trainer, key) is not None and trainer.pipeline_parallel == 1:
            raise ConfigError(
                f"trainer.{key}={getattr(trainer, key)} needs several pipeline stages, but "
                f"trainer.pipeline_parallel=1; set it to null or raise pipeline_parallel"
            )

    _check_recompute(trainer)
    _check_smallest(trainer)
    check_lora(trainer)
    if trainer.overlap_grad_reduce and trainer.data_parallel * trainer.context_parallel == 1:
        raise ConfigError(
            "trainer.overlap_grad_reduce=true reduces gradients over data-parallel ranks, but trainer.data_parallel=1; "
            "set it to false"
        )
    _check_param_gather(trainer)
    if trainer.tp_comm_overlap and trainer.tensor_parallel > config.cluster.devices_per_node:
        raise ConfigError(
            f"trainer.tp_comm_overlap=true needs all ranks of trainer.tensor_parallel={trainer.tensor_parallel} on one "
            f"node, but cluster.devices_per_node={config.cluster.devices_per_node}; set it to false"
        )
    if trainer.cuda_graphs:
        for key, moves in (("cluster.colocate", config.cluster.colocate), ("critic.offload", config.critic.offload)):
            if moves:
                raise ConfigError(
                    f"trainer.cuda_graphs=true keeps weights and gradients at their addresses, but {key}=true moves "
                    f"them; set one to false"
                )
    _check_precision(config)
    _check_optimizer_offload(config, "trainer.optimizer", trainer.optimizer)
    if config.critic.enabled:
        _check_optimizer_offload(config, "critic.optimizer", config.critic.optimizer)
    if config.cluster.device == "cpu":
        for key in ("moe_permute_fusion", "moe_deepep", "moe_shared_expert_overlap", "gradient_accumulation_fusion"):
            if getattr(trainer, key):
                raise ConfigError(f"trainer.{key}=true needs a GPU, but cluster.device=cpu; set it to false")


def _check_padding(trainer: TrainerConfig, longest: int, name: str) -> None:
    """Raises ConfigError if a sequence may be longer than a padded microbatch. ``name`` says what ``longest`` is."""
    room = trainer.tokens_per_microbatch * trainer.context_parallel
    if trainer.pad_microbatches and longest > room:
        raise ConfigError(
            f"trainer.pad_microbatches=true pads microbatches to trainer.tokens_per_microbatch="
            f"{trainer.tokens_per_microbatch} x trainer.context_parallel={trainer.context_parallel} tokens, but {name} "
            f"is {longest}; raise tokens_per_microbatch, or set pad_microbatches to false"
        )


def _check_param_gather(trainer: TrainerConfig) -> None:
    if not trainer.overlap_param_gather:
        return
    for key, value, fix in (
        ("overlap_grad_reduce", trainer.overlap_grad_reduce, "set both to true"),
        ("distributed_optimizer", trainer.distributed_optimizer, "set both to true"),
        ("minibatches", trainer.minibatches > 1, "set it to false, or raise minibatches"),
    ):
        if not value:
            raise ConfigError(
                f"trainer.overlap_param_gather=true has no effect with trainer.{key}="
                f"{as_typed(getattr(trainer, key))}; {fix}"
            )


def _check_precision(config: Config) -> None:
    """Raises ConfigError for states of the optimizer that Transformer Engine's Adam would not hold in their dtypes."""
    optimizer, default = config.trainer.optimizer, OptimizerConfig()
    names = ("exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    for name in names:
        value, usual = getattr(optimizer, name), getattr(default, name)
        if value == usual:
            continue
        key = f"trainer.optimizer.{name}={as_typed(value)}"
        for refused, needed, fix in (
            (config.cluster.device == "cpu", "a GPU, but cluster.device=cpu", f"set it to {as_typed(usual)}"),
            (
                config.model.dtype != "bfloat16",
                f"a bfloat16 model, but model.dtype={config.model.dtype}",
                "set model.dtype=bfloat16",
            ),
            (
                not config.trainer.distributed_optimizer,
                "Megatron's distributed optimizer, but trainer.distributed_optimizer=false",
                "set distributed_optimizer to true",
            ),
        ):
            if refused:
                raise ConfigError(f"{key} needs {needed}; {fix}")


def _check_optimizer_offload(config: Config, section: str, optimizer: OptimizerConfig) -> None:
    if not optimizer.offload:
        return
    key = f"{section}.offload={optimizer.offload:g}"
    if config.cluster.device == "cpu":
        raise ConfigError(
            f"{key} needs a GPU, but cluster.device=cpu, where the optimizer's state is in host memory; set it to 0"
        )
    if not config.trainer.distributed_optimizer:
        raise ConfigError(
            f"{key} needs Megatron's distributed optimizer, but trainer.distributed_optimizer=false; set "
            f"distributed_optimizer to true"
        )
    if config.trainer.megatron.optimizer.get("decoupled_weight_decay") is False:
        raise ConfigError(
            f"{key} decouples weight decay from gradients, as AdamW does, but "
            f"trainer.megatron.optimizer.decoupled_weight_decay=false; remove that, or set offload=0"
        )
    default = OptimizerConfig()
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders"):
        if (value := getattr(optimizer, name)) != getattr(default, name):
            raise ConfigError(
                f"{key} keeps moments and main weights in float32, but {section}.{name}={as_typed(value)}; set "
                f"{name}={as_typed(getattr(default, name))}, or offload=0"
            )


def _check_smallest(trainer: TrainerConfig) -> None:
    least = trainer.min_data_parallel
    if least is None:
        return
    if least > trainer.data_parallel:
        raise ConfigError(
            f"trainer.min_data_parallel={least} exceeds trainer.data_parallel={trainer.data_parallel}; lower it, or "
            f"set it to null"
        )
    try:
        replace(Topology.from_config(trainer), data=least)
    except ConfigError as error:
        raise ConfigError(f"trainer.min_data_parallel={least} as trainer.data_parallel: {error}") from None


# Megatron's names of the modules that selective recomputation may recompute.
_MODULES = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj")


def _check_recompute(trainer: TrainerConfig) -> None:
    modules = list(trainer.recompute_modules)
    if trainer.recompute != "selective":
        reason = f"with trainer.recompute={as_typed(trainer.recompute)}; set recompute=selective"
        refuse_unused(trainer, "trainer", ("recompute_modules",), reason)
    if trainer.recompute != "full":
        reason = f"with trainer.recompute={as_typed(trainer.recompute)}; set recompute=full"
        refuse_unused(trainer, "trainer", ("recompute_layers",), reason)
    unknown = next((name for name in modules if name not in _MODULES), None)
    if unknown is not None or (trainer.recompute == "selective" and not modules):
        raise ConfigError(f"trainer.recompute_modules={modules} must name some of {', '.join(_MODULES)}")


def _check_experts(trainer: TrainerConfig, layout: Layout) -> None:
    """Refuses options for modules that the model does not have."""
    present = {
        "moe": layout.sizes.experts > 0,
        "moe_act": layout.sizes.experts > 0 and layout.spec == "te",
        "shared_experts": layout.sizes.shared_intermediate > 0,
        "mlp": len(layout.sizes.sparse_layers) < layout.sizes.layers,
        # Megatron discards and restores outputs of norms with Transformer Engine only.
        "layernorm": layout.spec == "te",
    }
    if trainer.recompute == "selective":
        for name in trainer.recompute_modules:
            if not present.get(name, True):
                raise ConfigError(
                    f"trainer.recompute_modules={list(trainer.recompute_modules)} names {name}, which the layers of "
                    f"this model do not have; remove it"
                )
    for key in ("moe_permute_fusion", "moe_deepep"):
        if getattr(trainer, key) and not present["moe"]:
            raise ConfigError(f"trainer.{key}=true, but the model has no experts; set it to false")
    if trainer.moe_deepep:
        if layout.topology.expert * layout.topology.expert_tensor_size == 1:
            raise ConfigError(
                "trainer.moe_deepep=true exchanges tokens between ranks of different experts, but "
                "trainer.expert_parallel=1; raise it, or set moe_deepep=false"
            )
        if trainer.moe_shared_expert_overlap:
            raise ConfigError(
                "trainer.moe_deepep=true and trainer.moe_shared_expert_overlap=true exclude each other: Megatron "
                "overlaps shared experts with all-to-all only; set one of them to false"
            )
    if trainer.moe_shared_expert_overlap and not present["shared_experts"]:
        raise ConfigError(
            "trainer.moe_shared_expert_overlap=true, but the model has no shared experts; set it to false"
        )
    if trainer.moe_shared_expert_overlap and "shared_experts" in trainer.recompute_modules:
        raise ConfigError(
            "trainer.moe_shared_expert_overlap=true and shared_experts in trainer.recompute_modules exclude each "
            "other; remove one"
        )


def _check_cluster(config: Config, training: bool) -> None:
    cluster = config.cluster
    if is_wildcard(cluster.host):
        raise ConfigError(
            f"cluster.host={cluster.host} binds to every interface, but other nodes need an address to connect to; "
            f"name one, or set auto for each node's own"
        )
    if training and cluster.colocate:
        _check_colocated(config)
    specs = pool_specs(config, training=training)
    if training and cluster.share_device and config.sync.transport not in ("disk", "adapters"):
        raise ConfigError(
            f"cluster.share_device=true needs sync.transport=disk instead of {config.sync.transport}: by "
            f"default NCCL refuses to connect two processes on one GPU"
        )
    _check_nodes(config, specs)


def _check_nodes(config: Config, specs: Mapping[str, PoolSpec]) -> None:
    """Refuses pools on several nodes without a cluster that has them, or without addresses to reach them."""
    cluster = config.cluster
    nodes = nodes_needed(specs, cluster.devices_per_node)
    if nodes == 1:
        return
    need = " + ".join(f"{spec.total_devices:g} for the {name}" for name, spec in specs.items())
    fewer = "trainer.data_parallel or rollout.servers" if "rollout" in specs else "trainer.data_parallel"
    if cluster.address is None:
        raise ConfigError(
            f"the pools need {need} devices, but one node has fewer (cluster.devices_per_node="
            f"{cluster.devices_per_node}) and cluster.address=null starts Ray on this machine only; lower {fewer}, "
            f"or join a cluster of {nodes} nodes with cluster.address=auto"
        )
    if cluster.host != "auto":
        only = "reachable from one machine only" if is_loopback(cluster.host) else "the address of one node"
        raise ConfigError(
            f"the pools span {nodes} nodes, but cluster.host={cluster.host} is {only}; set cluster.host=auto, and "
            f"every process binds to its own node's address"
        )


def _check_colocated(config: Config) -> None:
    """Refuses what needs ranks and servers to compute at the same time, or memory that is not given back."""
    needs = "cluster.colocate=true lets trainer ranks and servers compute in turns"
    for name, value in (("max_staleness", 0), ("weight_sync_steps", 1)):
        if (given := getattr(config.schedule, name)) != value:
            raise ConfigError(f"{needs}, but schedule.{name}={given} is for both at once; set it to {value}")
    if config.cluster.share_device:
        raise ConfigError(f"{needs}, and cluster.share_device=true side by side; set one of them to false")
    if config.rollout.external:
        raise ConfigError(f"{needs}, but rollout.external names servers that run already; set it to false")
    if config.sync.transport == "broadcast":
        raise ConfigError(
            f"{needs} on the same devices, between which broadcast has no links; set sync.transport=p2p or auto"
        )
    if config.sync.transport == "adapters":
        raise ConfigError(
            f"{needs}, and servers that give their memory back are not known to keep adapters; set sync.transport=p2p "
            f"or auto"
        )
    reason = "with cluster.colocate=true, whose syncs are copies on the device; set colocate=false"
    refuse_unused(config.sync, "sync", ("arena", "arena_mb", "wave", "delta", "delta_full_every"), reason)
    for key, model in frozen_models(config).items():
        if model.pool != "own":
            raise ConfigError(f"{needs}, but {key}.pool={model.pool} would keep its memory; set it to own")


def _check_model(config: Config, planning: bool) -> None:
    layout, source = model_layout(config, planning=planning)
    check_megatron(vars(config.trainer.megatron), latent=layout.family.latent)
    _check_experts(config.trainer, layout)
    _check_context(config, layout.hf_config.get("max_position_embeddings"), source)
    _check_chunks(config, layout, source)
    _check_server_experts(config, layout.sizes.experts)
    check_pipelined_servers(config, layout)
    check_attention_groups(config, layout)
    check_server_engines(config, layout, planning=planning)
    _check_routing_replay(config, layout.sizes.experts, source)
    _check_server_split(config.rollout, layout.sizes, source)
    check_vision_policy(config, layout)
    check_served_adapters(config, layout)
    check_fp8_servers(config, layout, source)
    check_vision_folder(source, layout)
    if config.critic.enabled:
        check_critic_model(config, layout)
    if not planning:
        check_model_folder(config.model)
    check_weights(source.parent, layout)


def _check_server_experts(config: Config, experts: int) -> None:
    tensor, expert = config.rollout.tensor_parallel, config.rollout.expert_parallel
    if expert == 1:
        return
    given = f"rollout.expert_parallel={expert}"
    if not experts:
        raise ConfigError(f"{given} distributes experts, but the model has none; set it to 1")
    for name, size in (("rollout.tensor_parallel", tensor), ("the model's experts", experts)):
        if size % expert:
            raise ConfigError(f"{given} does not divide {name}={size}; choose a divisor of both")
    if config.cluster.device == "cpu":
        raise ConfigError(f"{given} needs GPUs: SGLang computes distributed experts on no CPU; set it to 1")


def _check_truncation(config: Config) -> None:
    """Training rollouts may be truncated where servers report the support of each token."""
    sampling = config.rollout.sampling
    given = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k != -1, "min_p": sampling.min_p > 0}
    set_ = [f"rollout.sampling.{name}={getattr(sampling, name)}" for name, truncates in given.items() if truncates]
    if not set_:
        return
    if not 1 < sampling.top_k <= MAX_SUPPORT:
        raise ConfigError(
            f"{' and '.join(set_)} needs a rollout.sampling.top_k of 2 to {MAX_SUPPORT}, not {sampling.top_k}: servers "
            f"report which tokens could be sampled, at most that many for each; set it, or drop {' and '.join(set_)}. "
            f"Evaluation may truncate in any way (eval.sampling)"
        )
    check_seeded("rollout.sampling", sampling.min_p, config.rollout.deterministic)
    if config.teachers:
        raise ConfigError(
            f"{set_[0]} samples from a part of the vocabulary, and teachers score all of it, so their log-probs could "
            f"not be compared; drop {' and '.join(set_)}, or teachers"
        )
    for argument in config.rollout.server_args:
        if argument.startswith("--speculative-"):
            raise ConfigError(
                f"{set_[0]} needs the support of each token, which servers with speculative decoding do not report for "
                f"every sampler; drop rollout.server_args {argument}, or {' and '.join(set_)}"
            )


def _check_routing_replay(config: Config, experts: int, source: Path) -> None:
    if not config.rollout.routing_replay:
        return
    given = "rollout.routing_replay=true"
    if not experts:
        raise ConfigError(f"{given} needs a model with experts, but {source} describes one without; set it to false")
    if config.trainer.megatron.model.get("moe_router_fusion"):
        raise ConfigError(
            f"{given} replaces the trainer's choice of experts, which trainer.megatron.model.moe_router_fusion=true "
            f"puts into one kernel; drop one of them"
        )
    for argument in config.rollout.server_args:
        if argument.startswith("--speculative-"):
            raise ConfigError(
                f"{given} needs the routes of all tokens, and SGLang does not report those of speculative decoding "
                f"reliably; drop rollout.server_args {argument} or set it to false"
            )


def model_layout(config: Config, *, planning: bool = False) -> tuple[Layout, Path]:
    """The model's layout over the trainer ranks, and the config.json that it was read from.

    Raises ConfigError for a missing or unsupported model, for options that the trainer does not implement, and for a
    parallel split that Megatron would refuse.
    """
    source = find_hf_config(config.model, planning=planning)
    values = read_hf_config(source)
    try:
        # A rank on a GPU has Transformer Engine's layers, which split some parameters differently.
        spec = "local" if config.cluster.device == "cpu" else "te"
        layout = Layout(values, Topology.from_config(config.trainer), spec)
        check_architecture(values)
        check_experts(layout, config.trainer)
        check_context(layout, config.trainer, config.model.dtype)
        check_fp8(layout, config.trainer, config.model.dtype)
        check_overlap(layout, config.trainer, config.model.dtype)
        check_graphs(layout, config.trainer)
        if (adapters := adapter_layout(layout, config.trainer)) is not None:
            check_adapters(adapters, config.trainer)
            path = config.trainer.lora.path
            if path is not None and (not planning or Path(path).expanduser().exists()):
                check_adapter_folder(path, adapters)
        return layout, source
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # Values that no table of types knows, such as a text where only a family's own rule expects a number.
        raise ConfigError(
            f"{source} cannot be read as a model of type {values.get('model_type')!r}: {type(error).__name__}: "
            f"{error}; copy it again from where the model is from"
        ) from error


def _check_context(config: Config, limit: int | None, source: Path) -> None:
    if limit is None:
        raise ConfigError(f"{source} has no max_position_embeddings; the model folder is incomplete")
    asked = config.rollout.context_length
    if asked is not None and asked > limit:
        raise ConfigError(
            f"rollout.context_length={asked} exceeds the model's max_position_embeddings={limit} ({source}); lower it"
        )
    prompt, response = config.data.prompt.max_tokens, config.rollout.sampling.max_new_tokens
    if prompt + response > limit:
        raise ConfigError(
            f"data.prompt.max_tokens={prompt} + rollout.sampling.max_new_tokens={response} exceed the model's "
            f"max_position_embeddings={limit} ({source}); lower one of them"
        )


def _check_chunks(config: Config, layout: Layout, source: Path) -> None:
    """Servers need not end attention at a chunk, and megasync's class of the model is the one that is tested."""
    chunks = chunks_of(layout.hf_config)
    if chunks is None:
        return
    if config.rollout.external:
        raise ConfigError(
            f"rollout.external={config.rollout.external} names servers that others have started, which do not serve "
            f"{layout.hf_config['model_type']} ({source}) by megasync's class; let megasync start servers"
        )
    room = config.rollout.context_length or layout.hf_config["max_position_embeddings"]
    if room > chunks.size:
        raise ConfigError(
            f"rollout.context_length={config.rollout.context_length} allows {room} tokens, more than "
            f"attention_chunk_size={chunks.size} ({source}): servers of {layout.hf_config['model_type']} may "
            f"not end attention at a chunk, and then compute other log-probs; set it to at most {chunks.size}"
        )


def _check_server_split(rollout: RolloutConfig, sizes: Sizes, source: Path) -> None:
    """Applies SGLang's rules for splitting a decoder over the tensor-parallel ranks of one server."""
    tensor, sharing = rollout.tensor_parallel, rollout.tensor_parallel // rollout.expert_parallel
    if sizes.sparse_layers and sizes.moe_intermediate % sharing:
        raise ConfigError(
            f"rollout.tensor_parallel={tensor} / expert_parallel={rollout.expert_parallel} does not divide the model's "
            f"moe_intermediate_size={sizes.moe_intermediate} ({source}); choose a quotient that does"
        )
    for name, count in {"num_attention_heads": sizes.heads, **sizes.widths}.items():
        if count % tensor:
            raise ConfigError(
                f"rollout.tensor_parallel={tensor} does not divide the model's {name}={count} ({source}); choose a "
                f"divisor of it"
            )
    if sizes.groups % tensor and tensor % sizes.groups:
        raise ConfigError(
            f"rollout.tensor_parallel={tensor} and the model's num_key_value_heads={sizes.groups} ({source}) must "
            f"divide one another; choose a divisor or a multiple of {sizes.groups}"
        )


def _check_data(config: Config, planning: bool, own_rows: bool, own_eval_rows: bool) -> None:
    data = config.data
    _check_curriculum(data)
    for name, each in data.sets.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"data.sets.{name}: a set's name may have letters, digits, '_' and '-' only")
        if not own_rows:
            _check_dataset(f"data.sets.{name}.data", each.data, planning)
    if data.sets and data.train is not None:
        raise ConfigError(
            f"data.train and data.sets ({', '.join(data.sets)}) both name training rows; set data.train=null, or move "
            f"it to data.sets"
        )
    if data.sets and data.prompt.examples:
        raise ConfigError(
            f"data.prompt.examples={data.prompt.examples} takes the first rows of data.train, but data.sets replaces "
            f"that; set examples=0"
        )
    if data.train is None and not data.sets and not own_rows:
        raise ConfigError(
            "data.train is not set; name a dataset with data.train.kind and data.train.source, or pass rows to "
            "AsyncTrainer(train_dataset=...)"
        )
    for name, dataset, replaced in (("train", data.train, own_rows), ("eval", data.eval, own_eval_rows)):
        if dataset is not None and not replaced:
            _check_dataset(f"data.{name}", dataset, planning)
    for name, held_out in config.eval.sets.items():
        _check_dataset(f"eval.sets.{name}.data", held_out.data, planning)


def _check_curriculum(data: DataConfig) -> None:
    policy, options = data.curriculum, data.curriculum_options
    if policy is None:
        refuse_unused(data, "data", ("curriculum_options",), "with data.curriculum=null; name one")
        return
    known = keyword_options(load_function(builtin.CURRICULA.get(policy, policy)))
    for name, value in options.items():
        if name not in known:
            said = f"its options are {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"data.curriculum_options.{name}: data.curriculum={policy} has no such option; {said}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if policy in builtin.CURRICULA and not number:
            raise ConfigError(f"data.curriculum_options.{name}={as_typed(value)} must be a finite number")
    if policy == "by_success":
        _check_by_success(**{**(by_success.__kwdefaults__ or {}), **options})


def _check_by_success(solved: float, hopeless: float, patience: float, postpone: float) -> None:
    """Refuses options with which `data.curriculum.by_success` would do nothing, or call a row both."""
    key = "data.curriculum_options"
    if not isinstance(patience, int) or patience < 1:
        raise ConfigError(f"{key}.patience={patience} must be a whole number of at least 1: it counts groups")
    if postpone < 0:
        raise ConfigError(f"{key}.postpone={postpone} must be at least 0: it counts epochs; 0 postpones nothing")
    if hopeless >= solved:
        raise ConfigError(
            f"{key}.hopeless={hopeless} must be below {key}.solved={solved}: a row cannot be both; change one of them"
        )


def _check_dataset(key: str, dataset: DatasetConfig, planning: bool) -> None:
    if dataset.kind not in ("jsonl", "parquet"):
        return
    if dataset.options:
        raise ConfigError(
            f"{key}.options={masked(dataset.options)} is for generated tasks and hf datasets, but {key}.kind="
            f"{dataset.kind}; remove it"
        )
    if (problem := path_problem(dataset.source)) is not None:
        raise ConfigError(f"{key}.source={dataset.source!r:.{SHOWN_CHARACTERS}} is not a usable path: {problem}")
    if not planning and not Path(dataset.source).expanduser().exists():
        raise ConfigError(f"{key}.source={dataset.source!r} is neither a file nor a folder; check the path")


def _check_folder(key: str, path: str) -> None:
    """Raises ConfigError for a folder that cannot be created."""
    folder = Path(path).expanduser()
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not existing.is_dir():
        raise ConfigError(f"{key}={path!r} cannot be created: {existing} is a file; choose another folder")
