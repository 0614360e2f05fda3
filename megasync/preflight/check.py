"""Refuses configurations that contradict themselves, their model or their machine, before any process starts.

`check_config` checks each key alone (`config.limits`), then the rules that stand at the keys (`config.rules`), and last
what only a function can say: what depends on a model's layout, on files, on the machine, or on names of a user's own.
Each error names the keys involved, their values, and a change that resolves the contradiction. Of weights only the
headers of safetensors files are read, so a folder of a thousand files takes seconds. That alone needs torch, so what
reads them is imported there: a plan for a config.json works where torch is not installed.
"""

from __future__ import annotations

import configparser
import math
import netrc
import os
import socket
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megasync.algorithms.choose import takes_tokens
from megasync.base.importing import keyword_options, load_function
from megasync.base.missing import require_extra
from megasync.config import builtin
from megasync.config.access import SESSIONS_KEY_VARIABLE, check_access, given_key
from megasync.config.builtin import ADVANTAGES, EXTERNAL, LOSSES, Algorithm
from megasync.config.commands import is_served
from megasync.config.host import is_loopback, resolve_host
from megasync.config.limits import REWARD, SHOWN_CHARACTERS, as_typed, check_limits, path_problem
from megasync.config.megatron_options import check_megatron
from megasync.config.pools import (
    PoolSpec,
    attention_ranks,
    engine_nodes,
    frozen_models,
    nodes_needed,
    pool_specs,
    trainer_pool,
)
from megasync.config.rules import check_rules
from megasync.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    DatasetConfig,
    EvalConfig,
    FrozenModelConfig,
    MlflowConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainerConfig,
    WandbConfig,
)
from megasync.data.curriculum import by_success
from megasync.errors import CheckpointError, ConfigError, raised_as
from megasync.layout.adapter import SERVED_TARGETS, UNEMBED, adapter_layout
from megasync.layout.block_fp8 import Block
from megasync.layout.families import FAMILIES, Sizes, Split, language_model
from megasync.layout.families.rules import HEAD
from megasync.layout.families.value_head import BIAS, WEIGHT
from megasync.layout.layout import Layout
from megasync.layout.model_files import check_model_folder, find_hf_config, read_hf_config, read_storage
from megasync.layout.quantized import QuantizedLayout, linear_matrices
from megasync.layout.storage import storage_of
from megasync.layout.topology import Topology
from megasync.rollout.reply_parser import check_formats
from megasync.serving.frozen_folder import read_frozen_model
from megasync.trainer.architecture import check_architecture, check_trainer, chunks_of, model_facts

# Classes for which SGLang returns scores of a text instead of tokens.
CLASSIFIERS = (
    *("LlamaForSequenceClassification", "LlamaForSequenceClassificationWithNormal_Weights"),
    *("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification", "Gemma2ForSequenceClassification"),
    *("Qwen2ForRewardModel", "Qwen3ForRewardModel", "InternLM2ForRewardModel"),
)
# Sizes that the config.json of every decoder states.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# On CPUs, SGLang pads the width of MLPs to a multiple of this on each rank.
_CPU_WIDTH = 32
WANDB_HOST = "https://api.wandb.ai"
# Schemes of MLflow's databases, which the small package mlflow-skinny cannot open.
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# What `megasync sft` reads besides data and model.
SUPERVISED = ("trainer", "sft", "cluster.tls_cert", "cluster.tls_key", "cluster.tls_ca")


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
    if training and is_served(config):
        raise ConfigError(
            "serve is set, so this is a configuration of `megasync serve CONFIG`: start it with that command, or set "
            "serve=null to train with it"
        )
    check_limits(config)
    own_rows = own_rows or not training
    facts, passed = run_facts(config), ["sft", "serve"]
    if own_rows:
        passed += ["data.train", *(f"data.sets.{name}" for name in config.data.sets)]
    if own_eval_rows:
        facts |= {"run's held-out sets": 1, "data.eval.size": None}
        passed.append("data.eval")
    if own_agent:
        facts |= {"rollout.agent": "the caller's", "run's rollout.agent or verifiers environment": True}
        passed.append("rollout.agent")
    check_rules(config, facts, without=passed, training=training)
    for key, table in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        _check_options(config.algorithm, key, table)
    _check_token_estimates(config)
    _check_evaluation(config, own_eval_rows)
    check_formats(config.rollout.chat)
    _check_rewards(config)
    _check_frozen_models(config, planning)
    _check_nodes(config, pool_specs(config, training=training))
    check_access(config.cluster, external=bool(config.rollout.external), planning=planning)
    if config.rollout.agent == EXTERNAL:
        given_key(SESSIONS_KEY_VARIABLE)
    _check_model(config, facts, passed, planning, training)
    _check_data(config, planning, own_rows, own_eval_rows)
    _check_folder("run_root", config.run_root)
    if config.sync.disk_dir is not None:
        _check_folder("sync.disk_dir", config.sync.disk_dir)
    if training:
        check_observe(config, planning)


def check_supervised(config: Config, *, planning: bool = False) -> None:
    """Raises ConfigError for a configuration that `megasync sft` cannot run; names the key and the fix.

    With `planning`, `model.config` alone may describe the model, and data files may be missing.
    """
    check_limits(config)
    check_rules(config, within=SUPERVISED)
    _check_smallest(config.trainer)
    sft = config.sft
    if sft.train is None:
        raise ConfigError("sft.train is not set; name a dataset with sft.train.kind and sft.train.source")
    for name, dataset in (("train", sft.train), ("validation", sft.validation)):
        if dataset is not None:
            _check_dataset(f"sft.{name}", dataset, planning)
    check_access(config.cluster, planning=planning)
    layout, source = model_layout(config, planning=planning)
    check_rules(config, model_facts(layout), within=SUPERVISED)
    limit = layout.hf_config.get("max_position_embeddings")
    if sft.max_tokens is None:
        if limit is None:
            raise ConfigError(
                f"{source} has no max_position_embeddings, so sft.max_tokens must say how long a row may be"
            )
        check_rules(replace(config, sft=replace(sft, max_tokens=limit)), within=("sft.max_tokens",))
    _check_model_folder(config, layout, source, planning)
    _check_nodes(config, {"trainer": trainer_pool(config)})
    _check_folder("run_root", config.run_root)
    check_observe(config, planning)


def run_facts(config: Config) -> dict[str, Any]:
    """The facts about a run as a whole that the rules of keys (`config.rules`) read."""
    models = frozen_models(config).values()
    return {
        "run's held-out sets": (config.data.eval is not None) + len(config.eval.sets),
        "run's other models": len(models),
        "run's rollout.agent or verifiers environment": config.rollout.agent is not None
        or (config.rollout.environment is not None and config.rollout.environment.kind == "verifiers"),
        "run's models on rollout servers": sum(model.pool != "own" for model in models),
        "server's number of nodes": engine_nodes(config),
    }


# Names of a user's own, and entries of sections


def _check_options(algorithm: AlgorithmConfig, key: str, table: Mapping[str, Algorithm]) -> None:
    """Refuses options that the estimator or loss does not take."""
    name, options = getattr(algorithm, key), getattr(algorithm, f"{key}_options")
    if name not in table:
        # As the ranks load it: its signature is checked too. Imports torch, which a user's own function does as well.
        from megasync.algorithms.choose import estimator_of, loss_of

        (loss_of if table is LOSSES else estimator_of)(algorithm)
        return
    item = table[name]
    _check_option_names(f"algorithm.{key}", name, options, item.options)
    for option, value in options.items():
        option_text = f"algorithm.{key}_options.{option}={as_typed(value)}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{option_text} must be a number above 0")
        if item.critic and value > 1:
            raise ConfigError(f"{option_text} must be at most 1")


def _check_option_names(key: str, name: str, options: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Refuses options that what the key names does not take."""
    if unknown := next((option for option in options if option not in accepted), None):
        said = f"its options are {', '.join(accepted)}" if accepted else "it has none"
        raise ConfigError(
            f"{key}_options.{unknown}={as_typed(options[unknown])}: {key}={name} has no such option; {said}"
        )


def _check_token_estimates(config: Config) -> None:
    """Refuses a loss of whole responses with an estimator of a user's own whose advantages are of tokens."""
    algorithm, loss = config.algorithm, LOSSES.get(config.algorithm.loss)
    custom = bool(algorithm.reward_coef) and algorithm.advantage not in ADVANTAGES
    if loss is not None and loss.responses and custom and takes_tokens(algorithm, config.critic.enabled):
        raise ConfigError(
            f"algorithm.loss={algorithm.loss} gives all tokens of a response the same gradient, but "
            f"algorithm.advantage={algorithm.advantage} estimates one for each token; choose an estimator of "
            f"responses, such as rloo, or a loss of tokens, such as vanilla"
        )


def _check_evaluation(config: Config, own_rows: bool) -> None:
    held_out, evaluation, target = config.data.eval, config.eval, config.schedule.stop_at_score
    if held_out is None and not own_rows and not evaluation.sets:
        if evaluation != EvalConfig():
            raise ConfigError(
                f"the eval section is set (eval.every_steps={evaluation.every_steps}), but data.eval is null, so "
                f"nothing is evaluated; name a held-out set under data.eval or eval.sets, or set eval=null"
            )
        return
    _check_repeats("eval", evaluation.repeats, evaluation.temperatures)
    for name, each in evaluation.sets.items():
        key, samples = f"eval.sets.{name}", each.samples or evaluation.samples
        _check_repeats(key, each.repeats or evaluation.repeats, each.temperatures or evaluation.temperatures)
        if each.data.size is not None and each.data.size < samples:
            raise ConfigError(
                f"{key}.samples={samples} is more than {key}.data.size={each.data.size}; lower one or raise the other"
            )
    first = evaluation.temperatures
    if held_out is None and not own_rows:
        first = next(iter(evaluation.sets.values())).temperatures or first
    if target is not None and first[0] != 0:
        raise ConfigError(
            f"schedule.stop_at_score={target} uses greedy accuracy, but the first of eval.temperatures={list(first)} "
            f"is not 0; put 0 first"
        )


def _check_repeats(key: str, repeats: int, temperatures: Sequence[float]) -> None:
    if repeats > 1 and max(temperatures) == 0:
        raise ConfigError(
            f"{key}.repeats={repeats} would repeat the same greedy response, because {key}.temperatures="
            f"{list(temperatures)}; add a temperature above 0, or set repeats to 1"
        )


def _check_rewards(config: Config) -> None:
    for name, reward in config.rollout.rewards.items():
        key, function = f"rollout.rewards.{name}", reward.function or name
        if reward.model is None and (refusal := REWARD.refusal(function)):
            raise ConfigError(f"{key}.function={function!r} {refusal}")
        if reward.model is not None and reward.model not in config.reward_models:
            names = ", ".join(config.reward_models) or "none"
            raise ConfigError(f"{key}.model={reward.model!r} is not among reward_models ({names}); name one of them")
    asked = {reward.model for reward in config.rollout.rewards.values()}
    if idle := next((name for name in config.reward_models if name not in asked), None):
        raise ConfigError(
            f"reward_models.{idle} would be started but never used; name it in a reward, such as "
            f"rollout.rewards.{idle}.model={idle}, or remove it"
        )


def _check_frozen_models(config: Config, planning: bool) -> None:
    """Checks what models beside the policy share, and their folders; with `planning` these may be missing."""
    taught: dict[str, str] = {}
    for name, teacher in config.teachers.items():
        for source in teacher.sources or [""]:
            if (other := taught.setdefault(source, name)) != name:
                what = f"rows of data_source={source}" if source else "all other rows (sources is empty)"
                raise ConfigError(
                    f"teachers.{other} and teachers.{name} both teach {what}; give each of them other "
                    f"teachers.<name>.sources"
                )
    for key, model in frozen_models(config).items():
        if isinstance(model, RewardModelConfig) and model.read == "yes_no" and model.yes_token == model.no_token:
            raise ConfigError(f"{key}.yes_token and {key}.no_token are both {model.yes_token!r}; they must differ")
        if not planning or any(Path(model.path).expanduser().glob("*.safetensors")):
            _check_frozen_folder(key, model)
    shared = {key: model for key, model in frozen_models(config).items() if model.pool == "rollout"}
    total = config.rollout.mem_fraction + sum(model.mem_fraction for model in shared.values())
    if shared and total >= 1:
        parts = " + ".join(f"{key}.mem_fraction={m.mem_fraction:g}" for key, m in shared.items())
        raise ConfigError(
            f"rollout.mem_fraction={config.rollout.mem_fraction:g} + {parts} are shares of the same devices and sum to "
            f"{total:g}; they must sum to less than 1"
        )


def _check_smallest(trainer: TrainerConfig) -> None:
    least = trainer.min_data_parallel
    if least is None:
        return
    with raised_as(ConfigError, f"trainer.min_data_parallel={least} as trainer.data_parallel", of=ConfigError):
        replace(Topology.from_config(trainer), data=least)


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


# The model


def _check_model(
    config: Config, facts: Mapping[str, Any], passed: Sequence[str], planning: bool, training: bool
) -> None:
    _check_smallest(config.trainer)
    layout, source = model_layout(config, planning=planning)
    facts = {**facts, **model_facts(layout), "model's vision tower": bool(layout.frozen_tensors)}
    if facts["model's max_position_embeddings"] is None:
        raise ConfigError(f"{source} has no max_position_embeddings; the model folder is incomplete")
    check_rules(config, facts, without=passed, training=training)
    _check_chunks(config, layout, source)
    _check_server_split(config.rollout, layout.sizes, source)
    prefill, decode = config.rollout.prefill_engines, config.rollout.decode_engines
    if (prefill or decode) and not planning:
        moved = f"rollout.prefill_engines={prefill} with decode_engines={decode}, which moves caches,"
        require_extra("engines", "nixl", moved, ", or set both to 0")
    if config.sync.transport == "adapters":
        _check_served_adapters(config, layout)
    if config.rollout.fp8:
        _check_fp8_servers(config, layout, source)
    if config.critic.enabled:
        _check_critic_model(config, layout)
    _check_model_folder(config, layout, source, planning)


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
        check_trainer(layout, config.trainer, config.model)
        if (adapters := adapter_layout(layout, config.trainer)) is not None:
            if UNEMBED in adapters.shape.targets and config.sync.transport != "adapters":
                raise ConfigError(
                    f"trainer.lora.targets names {UNEMBED}, whose adapters are not merged into the weights that "
                    f"servers get, because it may be the embedding too; leave it out"
                )
            path = config.trainer.lora.path
            if path is not None and (not planning or Path(path).expanduser().exists()):
                from megasync.layout.adapter_files import check_adapter_folder

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


def _check_chunks(config: Config, layout: Layout, source: Path) -> None:
    """Servers need not end attention at a chunk, and megasync's class of the model is the one that is tested."""
    chunks = chunks_of(layout.hf_config)
    if chunks is None:
        return
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
    ranks = attention_ranks(rollout)
    if sizes.groups % ranks and ranks % sizes.groups:
        raise ConfigError(
            f"rollout.attention_data_parallel={rollout.attention_data_parallel} leaves {ranks} ranks for attention "
            f"with num_key_value_heads={sizes.groups} ({source}); choose numbers that divide one another"
        )


def _check_served_adapters(config: Config, layout: Layout) -> None:
    """Refuses adapters that servers cannot compute beside the model."""
    adapters = adapter_layout(layout, config.trainer)
    assert adapters is not None, "a rule of sync.transport has refused a run without adapters"
    from megasync.layout.adapter_files import check_served_folder

    for name, each in config.eval.sets.items():
        if each.adapter is not None:
            check_served_folder(f"eval.sets.{name}.adapter", each.adapter, adapters)
    targets = adapters.shape.targets
    if others := sorted(set(targets) - SERVED_TARGETS):
        raise ConfigError(
            f"sync.transport=adapters serves adapters of {', '.join(sorted(SERVED_TARGETS))}, but trainer.lora.targets "
            f"includes {others[0]}; leave it out, or set transport=auto, which merges them"
        )
    tensor, padded = config.rollout.tensor_parallel, _CPU_WIDTH * config.rollout.tensor_parallel
    mlps = any(target in ("gate_proj", "up_proj", "down_proj") for target in targets)
    for name, count in layout.sizes.widths.items() if mlps else ():
        if config.cluster.device == "cpu" and tensor > 1 and count % padded:
            raise ConfigError(
                f"sync.transport=adapters on a CPU needs {name} to be a multiple of {padded}, since servers of "
                f"rollout.tensor_parallel={tensor} pad it, but not its adapters; it is {count}: set tensor_parallel=1, "
                f"transport=auto, or name the projections of attention in trainer.lora.targets"
            )
    if any(each.item.ep is not None for each in adapters.adapted(0)):
        raise ConfigError(
            "sync.transport=adapters does not serve adapters of experts: SGLang computes them with kernels for GPUs "
            "only, which megasync has not compared with its own layers; name the projections of attention in "
            "trainer.lora.targets, or set transport=auto, which merges them"
        )


def planned_fp8(layout: Layout, source: Path) -> QuantizedLayout | None:
    """The weights as servers of a folder in block FP8 keep them, from its config.json alone; None for other folders."""
    block = read_storage(source)
    return QuantizedLayout(layout, block, linear_matrices(layout, block)) if isinstance(block, Block) else None


def _check_fp8_servers(config: Config, layout: Layout, source: Path) -> None:
    """Applies SGLang's rule that a block belongs to one rank of a server."""
    quantized = planned_fp8(layout, source)
    if quantized is None:
        raise ConfigError(
            f"rollout.fp8=true needs a model folder in block FP8, and model.path={config.model.path!r} is not: make "
            f"one with `megasync quantize {config.model.path} OUT`, and set model.path to it"
        )
    tensor, expert, block = config.rollout.tensor_parallel, config.rollout.expert_parallel, quantized.block
    if tensor == 1:
        return
    for item in quantized.quantized(0):
        ranks = tensor if item.ep is None else tensor // expert
        for name, shape in item.tensors:
            rows = item.split is not Split.ROW
            size, edge = (shape[0], block.rows) if rows else (shape[1], block.cols)
            # Ranks beyond the number of key-value heads hold copies of whole heads.
            share = max(size // ranks, layout.sizes.head_dim) if item.split is Split.QKV else size // ranks
            if item.split is not Split.REPLICATED and ranks > 1 and share % edge:
                raise ConfigError(
                    f"rollout.fp8=true with rollout.tensor_parallel={tensor}: each rank of a server would have {share} "
                    f"{'rows' if rows else 'columns'} of {name!r}, which is not a multiple of its blocks' {edge}; "
                    f"lower rollout.tensor_parallel"
                )


def _check_critic_model(config: Config, policy: Layout) -> None:
    """Raises ConfigError if the critic starts from a folder of another architecture than the policy's."""
    if (path := config.critic.path) is None:
        return
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"critic.path={path!r} has no config.json or no *.safetensors files; give a Hugging Face folder, or null"
        )
    values = read_hf_config(find_hf_config(replace(config.model, path=path)))
    layout = Layout(values, policy.topology, policy.spec, value_head=True)
    if replace(layout.sizes, tied=policy.sizes.tied) != policy.sizes:
        raise ConfigError(
            f"critic.path={path!r} has other sizes than model.path={config.model.path!r}: policy and critic compute "
            f"the same microbatches, so give a folder of the same architecture, or null"
        )
    with raised_as(ConfigError, "critic.path", of=ConfigError):
        check_weights(folder, layout, absent=(WEIGHT, BIAS))


def _check_model_folder(config: Config, layout: Layout, source: Path, planning: bool) -> None:
    """Checks Megatron's fields and the files beside ``source``, a config.json; with `planning` they may be missing."""
    check_megatron(vars(config.trainer.megatron))
    if layout.frozen_tensors and read_storage(source) is not None:
        raise ConfigError(
            f"{source} describes a quantized model with a vision tower, which has not been tested; give an unquantized "
            f"folder"
        )
    if not planning:
        check_model_folder(config.model)
    check_weights(source.parent, layout)


# Folders and files


def check_weights(folder: Path, layout: Layout, absent: Container[str] = ()) -> None:
    """Raises ConfigError unless the folder has every tensor of the layout, in its shape and a dtype that can be read.

    Those of ``absent`` may be missing. A folder without any weights, as a plan may have it, passes.
    """
    if not any(folder.glob("*.safetensors*")):
        return
    from megasync.layout.shards import HfFolder

    try:
        with HfFolder(folder) as files:
            files.check({**layout.hf_tensors, **layout.frozen_tensors}, absent)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _expected(values: Mapping[str, Any], generates: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that servers look for, for families that megasync trains; a scorer has another head."""
    try:
        if values.get("model_type") not in FAMILIES or storage_of(values) is not None:
            return {}
        shapes = Layout(language_model(values), Topology()).hf_tensors
    except ConfigError:
        # A quantization, or an option of the model, that servers may know although the trainer does not.
        return {}
    heads = {tensor.name for tensor in HEAD.tensors}
    return {name: shape for name, shape in shapes.items() if generates or name not in heads}


def _check_frozen_folder(key: str, model: FrozenModelConfig) -> None:
    """Refuses a folder that holds no model of the configured kind, or whose files lack tensors or cannot be read."""
    folder = Path(model.path).expanduser()
    values = read_frozen_model(key, model)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}.path={model.path!r} has a config.json but no *.safetensors weights; add them")
    architectures = values.get("architectures") or []
    classes = ", ".join(architectures) or "no named class"
    classifies = any(name in CLASSIFIERS for name in architectures)
    scores = isinstance(model, RewardModelConfig)
    if scores and model.kind == "classifier":
        _check_classifier(key, model, values, classes, classifies)
    elif not any(name.endswith("ForCausalLM") for name in architectures):
        said = f"{key}.kind=generative, but {key}" if scores else key
        raise ConfigError(
            f"{said}.path={model.path!r} contains {classes}, which generates no text"
            + ("; set kind=classifier" if classifies and scores else "")
        )
    if missing := [name for name in _SIZES if not isinstance(values.get(name), int)]:
        raise ConfigError(f"{key}.path={model.path!r} has a config.json without {', '.join(missing)}; it is incomplete")
    heads, tensor = values["num_attention_heads"], model.tensor_parallel
    if heads % tensor:
        raise ConfigError(f"{key}.tensor_parallel={tensor} does not divide the model's num_attention_heads={heads}")
    limit = values["max_position_embeddings"]
    if (model.context_length or 0) > limit:
        raise ConfigError(f"{key}.context_length={model.context_length} exceeds the model's {limit}; lower it")
    chunks = chunks_of(values) if values.get("model_type") in FAMILIES else None
    if chunks and (model.context_length or limit) > chunks.size:
        raise ConfigError(
            f"{key}.context_length={model.context_length} allows more than attention_chunk_size={chunks.size} tokens, "
            f"but servers of {values['model_type']} do not end attention at a chunk; set it to at most {chunks.size}"
        )
    from megasync.layout.shards import stored_shapes

    with raised_as(ConfigError, f"{key}.path", "copy the model again", of=CheckpointError):
        stored = stored_shapes(folder)
        for name, shape in _expected(values, generates=not (scores and model.kind == "classifier")).items():
            if name not in stored:
                raise CheckpointError(f"{folder} has no tensor {name!r}, which its config.json requires")
            if stored[name] != shape:
                raise CheckpointError(
                    f"{name!r} in {folder} has shape {list(stored[name])}, but its config.json requires {list(shape)}"
                )


def _check_classifier(
    key: str, model: RewardModelConfig, values: dict[str, Any], classes: str, classifies: bool
) -> None:
    if not classifies:
        raise ConfigError(
            f"{key}.kind=classifier, but {key}.path={model.path!r} contains {classes}; SGLang classifies with "
            f"{', '.join(CLASSIFIERS)}. Set kind=generative for a model that generates text"
        )
    default = 1 if "RewardModel" in str(values["architectures"]) else 2
    labels = len(values.get("id2label") or {}) or values.get("num_labels", default)
    if model.label >= labels:
        raise ConfigError(f"{key}.label={model.label} exceeds the {labels} output(s) of {key}.path={model.path!r}")


def _check_data(config: Config, planning: bool, own_rows: bool, own_eval_rows: bool) -> None:
    data = config.data
    _check_curriculum(data)
    for name, each in data.sets.items():
        if not own_rows:
            _check_dataset(f"data.sets.{name}.data", each.data, planning)
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
        return
    parameters = keyword_options(load_function(builtin.CURRICULA.get(policy, policy)))
    _check_option_names("data.curriculum", policy, options, parameters)
    for name, value in options.items():
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


# Trackers and monitoring


def check_observe(config: Config, planning: bool) -> None:
    """Raises ConfigError for the first problem. With `planning`, the run may start on another machine than this."""
    observe = config.observe
    if observe.wandb is not None and observe.wandb.mode != "disabled" and not planning:
        _check_wandb(observe.wandb)
    if observe.mlflow is not None:
        _check_mlflow(observe.mlflow, planning)
    if observe.prometheus is not None and not planning:
        check_port("observe.prometheus", observe.prometheus.host, observe.prometheus.port)


def _check_wandb(wandb: WandbConfig) -> None:
    require_extra("trackers", "wandb", "observe.wandb", ", or set it to null")
    if wandb.mode == "online" and not _has_wandb_key():
        raise ConfigError(
            "observe.wandb.mode=online, but there is no key for Weights & Biases; run `wandb login`, set "
            "WANDB_API_KEY, or set mode=offline"
        )


def _check_mlflow(mlflow: MlflowConfig, planning: bool) -> None:
    uri = mlflow.tracking_uri
    address = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    try:
        urlsplit(address)
    except ValueError as error:
        key = "MLFLOW_TRACKING_URI" if uri is None else "observe.mlflow.tracking_uri"
        raise ConfigError(f"{key}={address} is not an address: {error}; correct it") from None
    if uri is not None and urlsplit(uri).password:
        raise ConfigError(
            "observe.mlflow.tracking_uri contains a password, which must not be in a file; set it as "
            "MLFLOW_TRACKING_URI, or set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if planning:
        return
    require_extra("trackers", "mlflow", "observe.mlflow", ", or set it to null")
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            "observe.mlflow.tracking_uri is null and MLFLOW_TRACKING_URI is not set; name the tracking server in one"
        )
    if urlsplit(uri).scheme.partition("+")[0] in DATABASES and find_spec("sqlalchemy") is None:
        raise ConfigError(
            f"observe.mlflow.tracking_uri is a {urlsplit(uri).scheme} database, which the package mlflow-skinny cannot "
            f"open; install the package mlflow, or name a tracking server"
        )


def check_port(section: str, host: str, port: int) -> None:
    """Raises ConfigError if this machine cannot listen at the host and port of a section."""
    host = resolve_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    what = f"{section} cannot listen at host={host}, port={port}"
    with raised_as(ConfigError, what, "set another port, or 0 for a free one"), socket.socket(family) as probe:
        # As endpoints do: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _has_wandb_key() -> bool:
    """Whether wandb will find a key where it looks: the environment, or the netrc file that `wandb login` writes."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    settings = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeError):
        settings.read(os.path.expanduser("~/.config/wandb/settings"))
    configured = settings.get("default", "base_url", fallback=WANDB_HOST)
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or configured).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host) is not None
    except (OSError, UnicodeError, netrc.NetrcParseError):
        return False
