"""From the configuration to the held-out sets of a run: their prompts, and who scores the answers to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from megasync.config import Config
from megasync.config.schema import DatasetConfig, EvalSetConfig
from megasync.data import Renderer, as_rows, load_dataset, render_rows
from megasync.errors import ConfigError
from megasync.evaluation.evaluate import HeldOutSet
from megasync.observe.names import UNNAMED_SET
from megasync.rewards import load_reward
from megasync.rewards.scoring import Scoring


def held_out_sets(
    config: Config,
    renderer: Renderer,
    scoring: Scoring,
    verifier: Callable | None = None,
    own_rows: Sequence[dict] | None = None,
    only: Collection[str] = (),
    scores_itself: bool = False,
) -> list[HeldOutSet]:
    """The set without a name (`data.eval`, or a Python caller's rows) and those of `eval.sets`, in this order.

    Answers are scored by the set's own reward, else the run's, else the verifier of the set's task, else the training
    set's `verifier`. `only` names those that are wanted; none means all. With `scores_itself` the workflow may do without.
    Raises ConfigError for a name that is not there and for a set that nobody would score, DataError for bad data.
    """
    sets: dict[str, tuple[DatasetConfig | None, EvalSetConfig]] = {}
    if config.data.eval is not None or own_rows is not None:
        sets[UNNAMED_SET] = (config.data.eval, EvalSetConfig())
    sets |= {name: (held_out.data, held_out) for name, held_out in config.eval.sets.items()}
    if unknown := [name for name in only if name not in sets]:
        raise ConfigError(f"there is no held-out set {unknown[0]!r}; there are: {', '.join(sets) or 'none'}")
    found = []
    for name, (dataset, settings) in sets.items():
        if only and name not in only:
            continue
        unnamed = settings is not config.eval.sets.get(name)
        rows, its_verifier = (
            (as_rows(own_rows, "eval_dataset"), None) if unnamed and own_rows is not None else load_dataset(dataset)
        )
        reward = load_reward(settings.reward) if settings.reward else scoring.named or its_verifier or verifier
        if reward is None and not scores_itself:
            raise ConfigError(
                f"nobody would score the held-out set {name!r}: its data brings no verifier. Name a reward in "
                f'rollout.reward{"" if unnamed else f" or eval.sets.{name}.reward"}, or give the rows an "answer" column'
            )
        found.append(
            HeldOutSet(
                name="" if unnamed else name,
                prompts=render_rows(rows[: settings.samples or config.eval.samples], renderer),
                rewards=scoring.runner(reward),
                temperatures=tuple(
                    config.eval.temperatures if settings.temperatures is None else settings.temperatures
                ),
                repeats=settings.repeats or config.eval.repeats,
                sampling=_sampling(config, settings),
            )
        )
    return found


def _sampling(config: Config, settings: EvalSetConfig) -> dict[str, Any]:
    """What is set for the set, or else for all evaluation; the rest is as in training."""
    common, own = asdict(config.eval.sampling), asdict(settings.sampling)
    merged = {name: common[name] if own[name] is None else own[name] for name in common}
    return {name: value for name, value in merged.items() if value is not None}
