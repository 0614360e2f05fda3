"""The held-out sets of a run: their prompts, sampling and reward, as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megasync.config import Config
from megasync.config.schema import DatasetConfig, EvalSetConfig
from megasync.data import Renderer, as_rows, load_dataset, render_rows
from megasync.data.datasets import default_reward, no_default_reward, warn_of_missing_answers
from megasync.errors import ConfigError
from megasync.observe.names import UNNAMED_SET
from megasync.rewards import RewardRunner, check_columns, load_reward, reward_functions
from megasync.rewards.scoring import Scoring
from megasync.serving.plugin_protocol import EVAL_ADAPTER
from megasync.trajectory import Prompt


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """A held-out set of prompts, and how it is answered and scored."""

    # Empty for the unnamed set.
    name: str
    prompts: Sequence[Prompt]
    rewards: RewardRunner
    temperatures: Sequence[float] = (0.0,)
    # Answers to each prompt at temperatures above 0. Greedy answers are all the same, so there is one.
    repeats: int = 1
    # Overrides the run's sampling parameters, except the temperature.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    # The adapter of the servers that answers; None for the policy.
    adapter: str | None = None
    # The reward function of its data, if that is what scores it.
    verifier: Callable[..., Any] | None = None

    def repeats_at(self, temperature: float) -> int:
        return self.repeats if temperature > 0 else 1


def held_out_sets(
    config: Config,
    renderer: Renderer,
    scoring: Scoring,
    verifier: Callable[..., Any] | None = None,
    own_rows: Sequence[dict[str, Any]] | None = None,
    only: Collection[str] = (),
    scores_itself: bool = False,
) -> list[HeldOutSet]:
    """Loads the unnamed set (`data.eval`, or a Python caller's rows) and those of `eval.sets`, in this order.

    A set is scored by its own reward, else the run's, else the verifier of the set's task, else the training set's
    `verifier`. `only` names the wanted sets; empty means all. With `scores_itself` the workflow needs no reward.

    Raises ConfigError for an unknown name and for a set without a reward, DataError for bad data.
    """
    sets: dict[str, tuple[DatasetConfig | None, EvalSetConfig]] = {}
    if config.data.eval is not None or own_rows is not None:
        sets[UNNAMED_SET] = (config.data.eval, EvalSetConfig())
    sets |= {name: (held_out.data, held_out) for name, held_out in config.eval.sets.items()}
    if unknown := [name for name in only if name not in sets]:
        raise ConfigError(f"unknown held-out set {unknown[0]!r}; known sets: {', '.join(sets) or 'none'}")
    loaded: list[HeldOutSet] = []
    for name, (dataset, settings) in sets.items():
        if only and name not in only:
            continue
        unnamed = settings is not config.eval.sets.get(name)
        if unnamed and own_rows is not None:
            rows = as_rows(own_rows, "eval_dataset", config.data)
            own_verifier = verifier or default_reward(rows)
        else:
            assert dataset is not None
            rows, own_verifier = load_dataset(dataset, config.data)
        own_verifier = own_verifier or verifier
        if not (settings.reward or scoring.named or own_verifier or scores_itself):
            raise ConfigError(
                f"the held-out set {name!r} has no reward function: {no_default_reward(rows)}. Name a reward in "
                f"rollout.reward{'' if unnamed else f' or eval.sets.{name}.reward'}, or the column with the references "
                f"in data.columns"
            )
        warn_of_missing_answers(rows, settings.reward or scoring.named or own_verifier)
        rows = rows[: settings.samples or config.eval.samples]
        prompts = render_rows(rows, renderer, f"the prompts of the held-out set {name!r}")
        loaded.append(_held_out_set(config, "" if unnamed else name, prompts, scoring, own_verifier))
        loaded[-1].rewards.check_rows(rows, f"the held-out set {name!r}")
    return loaded


def sets_of_worker(
    config: Config, scoring: Scoring, verifiers: Mapping[str, Callable[..., Any] | None]
) -> dict[str, HeldOutSet]:
    """The sets of these names without their prompts, to answer prompts that another process sends.

    `verifiers` are those of the loaded sets.
    """
    return {name: _held_out_set(config, name, (), scoring, verifier) for name, verifier in verifiers.items()}


def _held_out_set(
    config: Config, name: str, prompts: Sequence[Prompt], scoring: Scoring, verifier: Callable[..., Any] | None
) -> HeldOutSet:
    settings = config.eval.sets[name] if name else EvalSetConfig()
    if settings.reward or scoring.named:
        verifier = None
    reward = load_reward(settings.reward) if settings.reward else scoring.named or verifier
    if prompts:
        columns = {column for prompt in prompts for column in prompt.columns}
        check_columns(reward_functions(reward), columns, f"the held-out set {name!r}")
    return HeldOutSet(
        name=name,
        prompts=prompts,
        rewards=scoring.runner(reward),
        temperatures=tuple(config.eval.temperatures if settings.temperatures is None else settings.temperatures),
        repeats=settings.repeats or config.eval.repeats,
        sampling=_sampling(config, settings),
        adapter=None if settings.adapter is None else EVAL_ADAPTER + name,
        verifier=verifier,
    )


def _sampling(config: Config, settings: EvalSetConfig) -> dict[str, Any]:
    """The set's own values, else those of all evaluation. Unset parameters are as in training."""
    common, set_values = asdict(config.eval.sampling), asdict(settings.sampling)
    merged = {name: common[name] if set_values[name] is None else set_values[name] for name in common}
    return {name: value for name, value in merged.items() if value is not None}
