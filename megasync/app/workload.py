"""The workload of a run: rendered prompts, the reward, the rollout function.

Every mistake in data or functions that can be detected early is refused here, before the first process starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasync.config import Config
from megasync.config.schema import RolloutConfig
from megasync.data import PromptSource, Renderer, as_rows, load_dataset, load_training_sets, split_examples
from megasync.data.curriculum import Curriculum, curriculum_of
from megasync.data.render import load_tokenizer
from megasync.environments import Play
from megasync.errors import ConfigError
from megasync.evaluation.held_out import HeldOutSet, held_out_sets, sets_of_worker
from megasync.gateway import AgentWorkflow
from megasync.importing import load_callable, load_function
from megasync.layout.model_files import end_tokens, read_hf_config
from megasync.layout.routes import RouteFormat
from megasync.rewards import RewardRunner
from megasync.rewards.model_reward import ModelReward
from megasync.rewards.scoring import Scoring
from megasync.rollout.auxiliary import AuxiliaryModel, load_auxiliary_models
from megasync.rollout.reply_formats import tool_format
from megasync.rollout.teachers import Teacher, Teachers, load_teachers
from megasync.rollout.tool_agent import TOOLS, tool_agent
from megasync.rollout.workflow import single_turn


@dataclass(frozen=True, slots=True)
class Custom:
    """What the caller passed from Python instead of naming it in the configuration."""

    reward: Callable | Mapping[Callable, float] | None = None
    rollout: Callable | None = None
    agent: Callable | None = None
    train_dataset: Sequence[dict] | None = None
    eval_dataset: Sequence[dict] | None = None

    def names(self) -> list[str]:
        return [name for name in self.__slots__ if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What evaluation and training both need."""

    tokenizer: Any
    vocab_size: int
    # Longest prompt plus response, in tokens.
    context_length: int
    eval_sets: list[HeldOutSet]
    workflow: Callable
    scoring: Scoring
    # Models that the workflow asks, by name; their servers are added later.
    auxiliary: Mapping[str, AuxiliaryModel]
    # Models that score the policy's tokens for training; None in an evaluation.
    teachers: Teachers | None = None
    # Tokens that end any response.
    stop_ids: frozenset[int] = frozenset()
    # The format of routes, if trained responses need them.
    routes: RouteFormat | None = None

    async def open(self) -> None:
        """Opens the gateway's port, which may be refused, before any process starts."""
        if isinstance(self.workflow, AgentWorkflow):
            await self.workflow.open()

    async def close(self) -> None:
        """Closes what the rollout function and the rewards keep open: environments, an agent's gateway, connections,
        processes.
        """
        if (close := getattr(self.workflow, "close", None)) is not None:
            await close()
        await self.scoring.close()

    @property
    def frozen_clients(self) -> dict[str, ModelReward | AuxiliaryModel | Teacher]:
        """What sends requests to the servers of each frozen model, by the model's configuration key."""
        rewards = {f"reward_models.{name}": model for name, model in self.scoring.models.items()}
        auxiliary = {f"auxiliary_models.{name}": model for name, model in self.auxiliary.items()}
        teachers = self.teachers.by_name if self.teachers else {}
        return rewards | auxiliary | {f"teachers.{name}": teacher for name, teacher in teachers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Task):
    """What training needs besides: the prompts and their rewards."""

    source: PromptSource
    curriculum: Curriculum | None
    rewards: RewardRunner
    # The reward function of the training data, if that is what scores it.
    verifier: Callable | None

    def probes(self, count: int) -> list[list[int]]:
        """Token ids of up to `count` prompts with at least two tokens each, whose log-probs can be compared."""
        prompts = self.eval_sets[0].prompts if self.eval_sets else None
        prompts = prompts or [self.source.get(f"0:{row}") for row in range(min(count, len(self.source)))]
        return [list(p.prompt_ids) for p in prompts if len(p.prompt_ids) > 1][:count]


def prepare_workload(config: Config, custom: Custom) -> Workload:
    """Loads tokenizer and datasets, renders every prompt, resolves the functions. Raises ConfigError or DataError."""
    scoring = Scoring(config, custom.reward)
    sets = None
    if config.data.sets and custom.train_dataset is None:
        rows, verifier, sets = load_training_sets(config.data.sets)
    else:
        rows, verifier = _rows(config.data.train, custom.train_dataset)
    examples, rows = split_examples(rows, config.data.prompt)
    tokenizer, vocab_size, context_length = _model(config)
    renderer = Renderer(tokenizer, config.data.prompt, vocab_size, examples)
    reward = scoring.named or verifier
    if reward is None and not _scores_itself(config, custom):
        raise ConfigError(
            "there is no reward: the training data has no verifier. Name a reward in rollout.reward as math, code or "
            "'package.module:function', pass reward= from Python, add an \"answer\" column to the rows, or use a "
            "rollout function that scores its own trajectories"
        )
    policy = curriculum_of(config.data)
    return Workload(
        curriculum=None if policy is None else Curriculum(policy, len(rows)),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_length=context_length,
        source=PromptSource(rows, renderer, config.data.shuffle, config.seed, sets),
        eval_sets=held_out_sets(
            config, renderer, scoring, verifier, custom.eval_dataset, scores_itself=_scores_itself(config, custom)
        ),
        rewards=scoring.runner(reward),
        verifier=None if scoring.named else verifier,
        workflow=load_workflow(config, custom, tokenizer),
        scoring=scoring,
        auxiliary=load_auxiliary_models(config),
        teachers=load_teachers(config, tokenizer),
        routes=route_format(config),
        stop_ids=stop_ids(config.model.path, tokenizer),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask(Task):
    """What a rollout worker needs. `eval_sets` have no prompts: they come from the driver."""

    rewards: RewardRunner


def prepare_worker(
    config: Config, custom: Custom, verifier: Callable | None, verifiers: Mapping[str, Callable | None]
) -> WorkerTask:
    """Loads the tokenizer and resolves the functions in a worker's process.

    `verifier` is the workload's, `verifiers` those of its evaluation sets by name. Raises as `prepare_workload` does.
    """
    scoring = Scoring(config, custom.reward)
    tokenizer, vocab_size, context_length = _model(config)
    return WorkerTask(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_length=context_length,
        eval_sets=list(sets_of_worker(config, scoring, verifiers).values()),
        workflow=load_workflow(config, custom, tokenizer),
        scoring=scoring,
        auxiliary=load_auxiliary_models(config),
        teachers=load_teachers(config, tokenizer),
        routes=route_format(config),
        stop_ids=stop_ids(config.model.path, tokenizer),
        rewards=scoring.runner(scoring.named or verifier),
    )


def prepare_task(config: Config, only: Collection[str] = ()) -> Task:
    """The task of an evaluation without a trainer. `only` names the held-out sets; empty means all. Raises as above."""
    custom = Custom()
    tokenizer, vocab_size, context_length = _model(config)
    examples: list[dict] = []
    if config.data.prompt.examples:
        if config.data.train is None:
            raise ConfigError(
                f"data.prompt.examples={config.data.prompt.examples} takes examples from data.train; set that"
            )
        examples, _ = split_examples(_rows(config.data.train, None)[0], config.data.prompt)
    renderer = Renderer(tokenizer, config.data.prompt, vocab_size, examples)
    scoring = Scoring(config)
    itself = _scores_itself(config, custom)
    sets = held_out_sets(config, renderer, scoring, only=only, scores_itself=itself)
    if not sets:
        raise ConfigError("nothing to evaluate: name a held-out set in data.eval or eval.sets")
    return Task(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_length=context_length,
        eval_sets=sets,
        workflow=load_workflow(config, custom, tokenizer),
        scoring=scoring,
        auxiliary=load_auxiliary_models(config),
        stop_ids=stop_ids(config.model.path, tokenizer),
    )


def _model(config: Config) -> tuple[Any, int, int]:
    """Tokenizer, size of the vocabulary, and the longest prompt plus response in tokens."""
    model = read_hf_config(config.model.path)
    context_length = config.rollout.context_length or model["max_position_embeddings"]
    if config.data.prompt.max_tokens + 1 > context_length:
        raise ConfigError(
            f"data.prompt.max_tokens={config.data.prompt.max_tokens} leaves no room for an answer within the context "
            f"of {context_length} tokens; lower it or raise rollout.context_length"
        )
    return load_tokenizer(config.model.path), model["vocab_size"], context_length


def route_format(config: Config) -> RouteFormat | None:
    """The format of the routes that servers report; None without `rollout.routing_replay`."""
    return RouteFormat.of(read_hf_config(config.model.path)) if config.rollout.routing_replay else None


def stop_ids(path: str, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a response of this model in SGLang, from its configuration files and its tokenizer."""
    own = (tokenizer.eos_token_id, tokenizer.get_added_vocab().get("<|eom_id|>"))
    return end_tokens(path) | {token for token in own if token is not None}


def _rows(dataset: Any, own: Sequence[dict] | None) -> tuple[list[dict], Callable | None]:
    return (as_rows(own, "train_dataset"), None) if own is not None else load_dataset(dataset)


def _scores_itself(config: Config, custom: Custom) -> bool:
    rollout = config.rollout
    return bool(custom.rollout or custom.agent or rollout.workflow or rollout.agent or rollout.environment)


def load_workflow(config: Config, custom: Custom, tokenizer: Any) -> Callable:
    """The function that makes the samples. Without a `tokenizer` its chat template is not checked.

    Raises ConfigError, and DataError for tools whose calls could not be recognised.
    """
    agent = custom.agent
    if agent is None and custom.rollout is None and config.rollout.agent is not None:
        agent = load_function(config.rollout.agent)
    if agent is not None:
        if tokenizer is not None and not tokenizer.chat_template:
            raise ConfigError(
                f"agents use chat messages, but the tokenizer of model.path={config.model.path!r} has no chat template"
            )
        name = Path(config.model.path).name
        return AgentWorkflow(agent, config.rollout.gateway, config.rollout.sampling, name, config.timeouts.agent)
    if custom.rollout is None and config.rollout.environment is not None:
        return Play.of(config.rollout.environment, config.timeouts.environment)
    workflow = custom.rollout or _configured_workflow(config.rollout)
    if not (inspect.iscoroutinefunction(workflow) or inspect.iscoroutinefunction(type(workflow).__call__)):
        raise ConfigError(f"the rollout function {workflow!r} must be written as `async def rollout(client, sample)`")
    if tokenizer is not None and getattr(workflow, TOOLS, ()):
        tool_format(config.rollout.chat.tool_format, str(tokenizer.chat_template))
    return workflow


def _configured_workflow(rollout: RolloutConfig) -> Callable:
    if rollout.workflow:
        return load_callable(rollout.workflow, rollout.workflow_options)
    tools = rollout.tools
    if not tools.functions:
        return single_turn
    return tool_agent(
        [load_function(reference) for reference in tools.functions],
        max_turns=tools.max_turns,
        timeout=tools.timeout,
        max_output=tools.max_output,
    )
