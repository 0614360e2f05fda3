"""Refuses held-out sets that contradict themselves or other keys; a part of `check`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megasync.config.limits import LARGEST, refuse_unused
from megasync.config.schema import Config, DatasetConfig, EvalConfig, EvalSamplingConfig
from megasync.errors import ConfigError

# The name of the set under data.eval in `megasync eval`.
_TAKEN = "eval"


def check_evaluation(config: Config, own_eval_rows: bool, training: bool = True) -> None:
    """Raises ConfigError for the first contradiction."""
    held_out, evaluation, target = config.data.eval, config.eval, config.schedule.stop_at_score
    if held_out is None and not own_eval_rows and not evaluation.sets:
        if target is not None:
            raise ConfigError(
                f"schedule.stop_at_score={target} needs a held-out set, but there is none; name one under data.eval, "
                f"or set schedule.stop_at_score=null"
            )
        if evaluation != EvalConfig():
            raise ConfigError(
                f"the eval section is set (eval.every_steps={evaluation.every_steps}), but data.eval is null, so "
                f"nothing is evaluated; name a held-out set under data.eval or eval.sets, or set eval=null"
            )
        return
    if training and target is not None and not evaluation.every_steps:
        raise ConfigError(
            f"schedule.stop_at_score={target} needs evaluations, but eval.every_steps=0 turns them off; set "
            f"eval.every_steps above 0, or schedule.stop_at_score=null"
        )
    deterministic = config.rollout.deterministic
    _check_answers("eval", evaluation.temperatures, evaluation.repeats, evaluation.sampling, deterministic)
    for name in evaluation.sets:
        _check_set(config, name)
    first = evaluation.temperatures
    if held_out is None and not own_eval_rows:
        first = next(iter(evaluation.sets.values())).temperatures or first
    if target is not None and first[0] != 0:
        raise ConfigError(
            f"schedule.stop_at_score={target} uses greedy accuracy, but the first of eval.temperatures={list(first)} "
            f"is not 0; put 0 first"
        )
    if held_out is not None and not own_eval_rows:
        _check_size("data.eval", held_out, "eval", evaluation.samples)
    if training:
        _check_exact(config)


def _check_exact(config: Config) -> None:
    """Servers that only evaluate are taken from those that generate, so some must be left."""
    evaluation, servers = config.eval, config.rollout.servers
    reason = None
    if not evaluation.exact:
        reason = "with eval.exact=false; set exact=true"
    elif config.cluster.colocate:
        reason = "with cluster.colocate=true, where training waits for evaluations; set colocate=false"
    elif config.sync.transport == "adapters":
        reason = "with sync.transport=adapters, where all servers keep the evaluated version; set another transport"
    if reason is not None:
        refuse_unused(evaluation, "eval", ("servers",), reason)
    elif evaluation.servers >= max(2, servers):
        raise ConfigError(
            f"eval.servers={evaluation.servers} leaves none of rollout.servers={servers} to generate; set eval.servers "
            f"to {max(1, servers - 1)} or less, or rollout.servers to {evaluation.servers + 1} or more"
        )


def _check_set(config: Config, name: str) -> None:
    key, evaluation, held_out = f"eval.sets.{name}", config.eval, config.eval.sets[name]
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"{key}: a set's name in the metrics may have letters, digits, '_' and '-' only")
    if name == _TAKEN:
        raise ConfigError(f"{key}: the set under data.eval is called {_TAKEN!r}; choose another name")
    temperatures = evaluation.temperatures if held_out.temperatures is None else held_out.temperatures
    repeats = held_out.repeats or evaluation.repeats
    _check_answers(key, temperatures, repeats, held_out.sampling, config.rollout.deterministic)
    _check_size(f"{key}.data", held_out.data, key, held_out.samples or evaluation.samples)


def _check_answers(
    key: str, temperatures: Sequence[float], repeats: int, sampling: EvalSamplingConfig, deterministic: bool
) -> None:
    if not temperatures or not all(0 <= temperature <= LARGEST for temperature in temperatures):
        raise ConfigError(
            f"{key}.temperatures={list(temperatures)} must hold at least one number, each finite and at least 0"
        )
    if len(set(temperatures)) != len(temperatures):
        raise ConfigError(f"{key}.temperatures={list(temperatures)} names a temperature twice")
    if repeats > 1 and max(temperatures) == 0:
        raise ConfigError(
            f"{key}.repeats={repeats} would repeat the same greedy response, because {key}.temperatures="
            f"{list(temperatures)}; add a temperature above 0, or set repeats to 1"
        )
    check_seeded(f"{key}.sampling", sampling.min_p or 0.0, deterministic)
    if sampling.top_k is not None and (sampling.top_k == 0 or sampling.top_k < -1):
        raise ConfigError(f"{key}.sampling.top_k={sampling.top_k} must be -1 (all tokens) or at least 1")


def check_seeded(key: str, min_p: float, deterministic: bool) -> None:
    """SGLang stops at a request for min_p if its sampling has seeds."""
    if deterministic and min_p > 0:
        raise ConfigError(
            f"{key}.min_p={min_p:g} cannot be sampled with seeds, which rollout.deterministic=true needs; use top_p "
            f"instead, or set rollout.deterministic=false"
        )


def _check_size(data_key: str, data: DatasetConfig, key: str, samples: int) -> None:
    if data.size is not None and data.size < samples:
        raise ConfigError(
            f"{key}.samples={samples} is more than {data_key}.size={data.size}; lower one or raise the other"
        )
