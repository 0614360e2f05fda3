"""The workload of a run: rendered prompts, the reward, the rollout function.

Every mistake in data or functions that can be detected early is refused here, before the first process starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from megasync.base.importing import check_call, load_callable, load_function, name_of
from megasync.concurrency.foreign import explain, is_async, run
from megasync.concurrency.threads import DaemonThreads
from megasync.config import Config
from megasync.config.builtin import ENVIRONMENTS, EXTERNAL, TOOL_SERVERS, WORKFLOWS
from megasync.config.schema import DataConfig, RolloutConfig
from megasync.data import PromptSource, Renderer, as_rows, load_dataset, load_training_sets, split_examples
from megasync.data.chat_template import ChatTemplate
from megasync.data.curriculum import Curriculum, curriculum_of
from megasync.data.datasets import default_reward, no_default_reward, warn_of_missing_answers
from megasync.data.tokenizer import load_tokenizer
from megasync.errors import ConfigError, DataError, TemplateRefused, raised_as
from megasync.evaluation.held_out import HeldOutSet, held_out_sets, sets_of_worker
from megasync.layout.model_files import end_tokens, read_hf_config
from megasync.layout.routes import RouteFormat
from megasync.models.hub import title, with_names
from megasync.rewards import RewardRunner, check_columns, reward_functions
from megasync.rewards.function import Given
from megasync.rewards.model_reward import ModelReward
from megasync.rewards.scoring import Scoring
from megasync.rollout.auxiliary import AuxiliaryModel, load_auxiliary_models
from megasync.rollout.reply_parser import tool_format
from megasync.rollout.teachers import Teacher, Teachers, load_teachers
from megasync.rollout.tool_agent import ToolAgent, tool_agent
from megasync.rollout.workflow import OpenedWorkflow, single_turn

log = logging.getLogger(__name__)

# Seconds for a workflow's `close`. The environments of a pool have a deadline each, `timeouts.environment`.
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PythonArguments:
    """The arguments that a caller passed from Python instead of naming them in the configuration."""

    reward: Given | None = None
    rollout: Callable | str | None = None
    agent: Callable | str | None = None
    train_dataset: Sequence[dict] | None = None
    eval_dataset: Sequence[dict] | None = None

    def described(self) -> dict[str, str]:
        """Describes what was passed, by the names of the fields: the functions' names, and the numbers of rows."""
        passed = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if self.reward is not None:
            passed["reward"] = ", ".join(name_of(function.call) for function in reward_functions(self.reward))
        rows = {name: f"{len(value):,} rows" for name, value in passed.items() if name.endswith("_dataset")}
        others = {name: value for name, value in passed.items() if name not in rows}
        return {name: name_of(value) if callable(value) else value for name, value in others.items()} | rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The parts of a workload that evaluation and training both need."""

    tokenizer: Any
    vocab_size: int
    # Longest prompt plus response, in tokens.
    context_length: int
    eval_sets: list[HeldOutSet]
    workflow: Callable
    scoring: Scoring
    # The rewards of the training data; of a task without any, those that the configuration names.
    rewards: RewardRunner
    # Models that the workflow asks, by name; their servers are added later.
    auxiliary: Mapping[str, AuxiliaryModel]
    # Models that score the policy's tokens for training; None in an evaluation.
    teachers: Teachers | None = None
    # Tokens that end any response.
    stop_ids: frozenset[int] = frozenset()
    # The format of routes, if trained responses need them.
    routes: RouteFormat | None = None

    async def open(self) -> None:
        """Opens the gateway's port and the servers of tools and environments, before any other process starts.

        Raises ConfigError when one of them refuses.
        """
        if isinstance(self.workflow, OpenedWorkflow):
            await self.workflow.open()

    async def close(self) -> None:
        """Closes what the rollout function and the rewards keep open: environments, an agent's gateway, connections,
        processes.
        """
        if (close := getattr(self.workflow, "close", None)) is not None:
            await _closed(close)
        await self.scoring.close()

    @property
    def frozen_clients(self) -> dict[str, ModelReward | AuxiliaryModel | Teacher]:
        """The clients of the servers of each frozen model, by the model's configuration key."""
        rewards = {f"reward_models.{name}": model for name, model in self.scoring.models.items()}
        auxiliary = {f"auxiliary_models.{name}": model for name, model in self.auxiliary.items()}
        teachers = self.teachers.by_name if self.teachers else {}
        return rewards | auxiliary | {f"teachers.{name}": teacher for name, teacher in teachers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Task):
    """A task with what training needs besides: the prompts and their rewards."""

    source: PromptSource
    curriculum: Curriculum | None
    # The reward function of the training data, if that is what scores it.
    verifier: Callable | None

    def probes(self, count: int) -> list[list[int]]:
        """Token ids of up to `count` prompts with at least two tokens each, whose log-probs can be compared."""
        prompts = self.eval_sets[0].prompts if self.eval_sets else None
        prompts = prompts or [self.source.get(f"0:{row}") for row in range(min(count, len(self.source)))]
        return [list(p.prompt_ids) for p in prompts if len(p.prompt_ids) > 1][:count]


async def _closed(close: Callable[[], Any]) -> None:
    """Calls a workflow's `close`, sync or async, within a deadline. Its errors are logged: the run is over."""
    name = f"close of the workflow ({name_of(close)})"
    try:
        if is_async(close):
            await run(close, name, CLOSE_SECONDS)
        else:
            await DaemonThreads(1).call(close, name, CLOSE_SECONDS)
    except Exception as error:  # a user's workflow may raise anything
        log.warning("%s failed: %s", name, explain(error), exc_info=error)


def prepare_workload(config: Config, custom: PythonArguments) -> Workload:
    """Loads tokenizer and datasets, renders every prompt, resolves the functions. Raises ConfigError or DataError."""
    scoring = Scoring(config, custom.reward)
    sets = None
    if config.data.sets and custom.train_dataset is None:
        rows, verifier, sets = load_training_sets(config.data.sets, config.data)
    else:
        rows, verifier = _rows(config.data, custom.train_dataset)
    examples, rows = split_examples(rows, config.data.prompt)
    model = _model(config)
    renderer = Renderer(model.tokenizer, config.data.prompt, model.vocab_size, examples)
    reward = scoring.named or verifier
    itself = _scores_itself(config, custom)
    if reward is None and not itself:
        raise ConfigError(
            f"there is no reward: {no_default_reward(rows)}. Name the column with the references in data.columns, such "
            f"as {{answer: solution}}, or a reward in rollout.reward as math, code or 'package.module:function'; pass "
            f"reward= from Python; or use a rollout function that scores its own trajectories"
        )
    check_columns(reward_functions(reward), {name for row in rows for name in row}, "the training data")
    warn_of_missing_answers(rows, reward)
    rewards = scoring.runner(reward)
    rewards.check_rows(rows, "the training data")
    policy = curriculum_of(config.data)
    source = PromptSource(rows, renderer, config.data.shuffle, config.seed, sets)
    held_out = held_out_sets(config, renderer, scoring, verifier, custom.eval_dataset, scores_itself=itself)
    task = _task(config, custom, model, scoring, held_out, rewards)
    if config.rollout.workers:
        _check_travels(task, custom)
    return Workload(
        **{field.name: getattr(task, field.name) for field in fields(Task)},
        curriculum=None if policy is None else Curriculum(policy, len(rows)),
        source=source,
        verifier=None if scoring.named else verifier,
    )


def _check_travels(task: Task, custom: PythonArguments) -> None:
    """Raises ConfigError, before anything starts, for functions and rows that cannot be sent to a worker."""
    # Imports Ray, for which a plan of a run without workers should not wait.
    from megasync.cluster.rollout_workers import check_travels

    for name in ("reward", "rollout", "agent"):
        passed = getattr(custom, name)
        # Of several rewards, name the one that cannot be sent.
        for value in [each.call for each in reward_functions(passed)] if name == "reward" else [passed]:
            if value is not None:
                check_travels(f"{name}=", value)
    for held_out in task.eval_sets:
        check_travels("a verifier", held_out.verifier)
        if custom.eval_dataset is not None:
            for prompt in held_out.prompts:
                check_travels("the rows of eval_dataset", dict(prompt.columns))
    for row in custom.train_dataset or ():
        check_travels("the rows of train_dataset", dict(row))


def prepare_worker(
    config: Config, custom: PythonArguments, verifier: Callable | None, verifiers: Mapping[str, Callable | None]
) -> Task:
    """Loads the tokenizer and resolves the functions in a worker's process.

    `verifier` is the workload's, `verifiers` those of its evaluation sets by name. The sets have no prompts: these come
    from the driver. Raises as `prepare_workload` does.
    """
    scoring = Scoring(config, custom.reward)
    sets = list(sets_of_worker(config, scoring, verifiers).values())
    return _task(config, custom, _model(config), scoring, sets, scoring.runner(scoring.named or verifier))


def prepare_task(config: Config, only: Collection[str] = ()) -> Task:
    """The task of an evaluation without a trainer. `only` names the held-out sets; empty means all. Raises as above."""
    custom, model = PythonArguments(), _model(config)
    examples: list[dict] = []
    if config.data.prompt.examples:
        if config.data.train is None:
            raise ConfigError(
                f"data.prompt.examples={config.data.prompt.examples} takes examples from data.train; set that"
            )
        examples, _ = split_examples(_rows(config.data, None)[0], config.data.prompt)
    renderer = Renderer(model.tokenizer, config.data.prompt, model.vocab_size, examples)
    scoring = Scoring(config)
    sets = held_out_sets(config, renderer, scoring, only=only, scores_itself=_scores_itself(config, custom))
    if not sets:
        raise ConfigError("nothing to evaluate: name a held-out set in data.eval or eval.sets")
    return _task(config, custom, model, scoring, sets, scoring.runner(scoring.named), trains=False)


def _task(
    config: Config,
    custom: PythonArguments,
    model: _Model,
    scoring: Scoring,
    eval_sets: list[HeldOutSet],
    rewards: RewardRunner,
    trains: bool = True,
) -> Task:
    return Task(
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        eval_sets=eval_sets,
        workflow=load_workflow(config, custom, model.tokenizer),
        scoring=scoring,
        rewards=rewards,
        auxiliary=load_auxiliary_models(config),
        teachers=load_teachers(config, model.tokenizer) if trains else None,
        stop_ids=run_stop_ids(config, custom, model.tokenizer),
        routes=RouteFormat.of(read_hf_config(config.model.path)) if trains and config.rollout.routing_replay else None,
    )


class _Model(NamedTuple):
    tokenizer: Any
    vocab_size: int
    # Longest prompt plus response, in tokens.
    context_length: int


def _model(config: Config) -> _Model:
    model = read_hf_config(config.model.path)
    context_length = config.rollout.context_length or model["max_position_embeddings"]
    if config.data.prompt.max_tokens + 1 > context_length:
        raise ConfigError(
            f"data.prompt.max_tokens={config.data.prompt.max_tokens} leaves no room for an answer within the context "
            f"of {context_length} tokens; lower it or raise rollout.context_length"
        )
    return _Model(load_tokenizer(config.model.path), model["vocab_size"], context_length)


def run_stop_ids(config: Config, custom: PythonArguments, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a response of this run: the model's, and the one that ends a turn of its chat template."""
    ids = stop_ids(config.model.path, tokenizer)
    rollout = config.rollout
    tools = rollout.tools.functions or rollout.tools.mcp
    chats = config.data.prompt.format == "chat" or tools or _scores_itself(config, custom)
    if not (chats and tokenizer.chat_template):
        return ids
    end = ChatTemplate(tokenizer, rollout.chat.template_options).turn_end(ids)
    if end is None or end in ids:
        return ids
    log.warning(
        "The chat template ends a turn with %r, which is not in eos_token_id of %s: responses end with it too",
        *(tokenizer.convert_ids_to_tokens(end), config.model.path),
    )
    return ids | {end}


def stop_ids(path: str, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a response of this model in SGLang, from its configuration files and its tokenizer."""
    tokens = (tokenizer.eos_token_id, tokenizer.get_added_vocab().get("<|eom_id|>"))
    return end_tokens(path) | {token for token in tokens if token is not None}


def _rows(config: DataConfig, rows: Sequence[dict] | None) -> tuple[list[dict], Callable | None]:
    if rows is not None:
        rows = as_rows(rows, "train_dataset", config)
        return rows, default_reward(rows)
    assert config.train is not None  # `check_config` has refused the configuration otherwise
    return load_dataset(config.train, config)


def _scores_itself(config: Config, custom: PythonArguments) -> bool:
    rollout = config.rollout
    return bool(custom.rollout or custom.agent or rollout.workflow or rollout.agent or rollout.environment)


def load_workflow(config: Config, custom: PythonArguments, tokenizer: Any) -> Callable:
    """The function that makes the samples. Without a `tokenizer` its chat template is not checked.

    Raises ConfigError, and DataError for tools whose calls could not be recognised.
    """
    agent: Callable | str | None = _loaded(custom.agent)
    if agent is None and custom.rollout is None and config.rollout.agent is not None:
        agent = EXTERNAL if config.rollout.agent == EXTERNAL else load_function(config.rollout.agent)
    if agent is not None:
        if tokenizer is not None and not tokenizer.chat_template:
            raise ConfigError(
                f"agents use chat messages, but the tokenizer of model.path={config.model.path!r} has no chat template"
            )
        name = title(with_names(config).model.path)
        gateway, sampling, timeouts = config.rollout.gateway, config.rollout.sampling, config.timeouts
        if isinstance(agent, str):
            external = load_function(WORKFLOWS[EXTERNAL])
            return external(gateway, sampling, name, timeouts, score_late=_scores_late(config))
        workflow = load_function(WORKFLOWS["agent"])
        return workflow(agent, gateway, sampling, name, timeouts.agent, score_late=_scores_late(config))
    if custom.rollout is None and config.rollout.environment is not None:
        timeouts = config.timeouts
        if config.rollout.environment.kind == "verifiers":
            gateway, sampling = config.rollout.gateway, config.rollout.sampling
            return load_function(ENVIRONMENTS["verifiers"])(
                config.rollout.environment, gateway, sampling, config.model.path, timeouts, config.data.train
            )
        play: Any = load_function(WORKFLOWS["environment"])
        starting = timeouts.server_start
        return play.of(config.rollout.environment, timeouts.environment, starting, score_late=_scores_late(config))
    workflow = _loaded(custom.rollout) or _configured_workflow(config.rollout)
    form = f"the rollout function {name_of(workflow)} must be written as `async def rollout(client, sample)`"
    if not is_async(workflow):
        raise ConfigError(form)
    check_call(workflow, form, None, {})
    if tokenizer is not None and isinstance(workflow, ToolAgent):
        tool_format(config.rollout.chat.tool_format, str(tokenizer.chat_template))
        template = ChatTemplate(tokenizer, config.rollout.chat.template_options)
        what = "tools need a chat template that writes their results, but that"
        fix = "use a model with such a template, or a workflow of your own"
        with raised_as(DataError, f"{what} of model.path={config.model.path!r} cannot", fix, of=TemplateRefused):
            template.check_tools([tool.schema for tool in workflow.offered])
    return workflow


def _scores_late(config: Config) -> bool:
    return config.rollout.at_deadline == "score"


def _loaded(function: Callable | str | None) -> Callable | None:
    """A function from Python, which may be given by its name."""
    return load_callable(function) if isinstance(function, str) else function


def _configured_workflow(rollout: RolloutConfig) -> Callable:
    if rollout.workflow:
        return load_callable(rollout.workflow, rollout.workflow_options)
    tools = rollout.tools
    if not tools.functions and not tools.mcp:
        return single_turn
    servers = [
        load_function(TOOL_SERVERS["mcp"])(
            name,
            server.command,
            server.url or "",
            environment=server.environment,
            headers=server.headers,
            tools=server.tools,
            prefix=server.prefix,
            shared=server.shared,
            pool=server.pool,
        )
        for name, server in tools.mcp.items()
    ]
    return tool_agent(
        [*(load_function(reference) for reference in tools.functions), *servers],
        max_turns=tools.max_turns,
        timeout=tools.timeout,
        max_output=tools.max_output,
    )
