"""Reward functions with names and weights: how they are found, how they are called, and how their scores are combined.

A user's function is called as megasync does it, as TRL does, or as verl does:

    convention   recognised by                  called once per   with                                    returns
    -----------  -----------------------------  ----------------  --------------------------------------  -----------
    group        none of the others             group             completions, then columns by name       scores
    trl          a parameter `prompts`          group             everything by name                      scores
    verl         `solution_str`,                response          data_source, solution_str,              a score, or
                 `ground_truth`                                   ground_truth, extra_info by name        {"score": }
    verl_batch   `solution_strs`,               group             their plurals                           a list of
                 `ground_truths`                                                                          these

The signature decides, when the function is loaded. A function without `**columns` gets the columns that it names.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megasync.base.importing import load_callable, name_of
from megasync.concurrency.foreign import invoke, is_async, shown
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config.builtin import REWARDS
from megasync.data.rows import is_messages
from megasync.errors import ConfigError, ServerError
from megasync.trajectory.runs import FloatArray

# What a function can ask for beside the columns of the rows; messages where prompts are chats.
ADDED = ("completion_ids", "finish_reasons", "prompts", "messages")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
# Columns of which the first one that a row has holds verl's ground truth; see `ground_truth_of`.
GROUND_TRUTHS = ("reward_model", "ground_truth", "answer", "solution")
SHAPES = (
    "write it as `def reward(completions, **columns)`, with one score per completion; TRL's "
    "`(prompts, completions, **columns)` and verl's `(data_source, solution_str, ground_truth, extra_info)` work too"
)

Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Convention:
    """How a reward function is called."""

    kind: str = "group"
    # The columns that the function takes; None for any.
    accepts: frozenset[str] | None = None
    # The columns without a default.
    requires: tuple[str, ...] = ()
    # Whether a function of the kind "group" takes the completions by their name only.
    by_name: bool = False

    def call(self, function: Callable[..., Any], completions: Sequence[str], columns: Columns) -> Any:
        """Calls the function for a group; returns one score per completion, or an awaitable of that.

        A function that is called once per completion gives an error in place of the score of a call that raised.
        """
        if self.kind == "verl":
            return _each(function, [self._taken(row) for row in _verl_rows(completions, columns)])
        if self.kind == "verl_batch":
            rows = _verl_rows(completions, columns)
            answer = function(**self._taken({f"{name}s": [row[name] for row in rows] for name in VERL}))
            return _later(answer) if inspect.isawaitable(answer) else [_score(each) for each in answer]
        arguments = self._taken({**self._prompts(columns), **columns})
        if self.kind == "trl":
            return function(completions=_as_trl(completions, columns), **arguments)
        return function(completions=completions, **arguments) if self.by_name else function(completions, **arguments)

    def missing(self, columns: Collection[str]) -> list[str]:
        """The columns that the function requires and rows with these columns lack."""
        if self.kind.startswith("verl"):
            return [] if any(name in columns for name in GROUND_TRUTHS) else ["ground_truth"]
        return [name for name in self.requires if name not in columns and name not in ADDED]

    def _prompts(self, columns: Columns) -> dict[str, Any]:
        return {"prompts": columns["prompt"]} if "prompt" in columns else {}

    def _taken(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values for name, values in columns.items() if self.accepts is None or name in self.accepts}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function that scores a group, sync or async; `name` appears in metrics and errors.

    `convention` says how it is called. Raises ConfigError for a function that cannot be called so.
    """

    name: str
    call: Callable[..., Any]
    weight: float = 1.0
    convention: Convention = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "convention", convention_of(self.call))

    @property
    def is_async(self) -> bool:
        return is_async(self.call)

    @property
    def needs_main_thread(self) -> bool:
        """Whether the function can keep its deadlines on a main thread only, which a worker process has."""
        return bool(getattr(self.call, "needs_main_thread", False))

    @property
    def keeps_own_deadlines(self) -> bool:
        """Whether the function bounds every wait itself, so that the runner must not count the time in its queue."""
        return bool(getattr(self.call, "keeps_own_deadlines", False))


def load_reward(reference: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The reward of a built-in name or of "package.module:function". Instantiates a class with `options`.

    Raises ConfigError.
    """
    return load_callable(REWARDS.get(reference, reference), options, reference)


# A function, or how the configuration would name it.
Named = Callable[..., Any] | str
# One, several, or several with weights: what `reward=` takes.
Given = Named | Mapping[Named, float] | Sequence[Named | tuple[Named, float] | RewardFunction] | RewardFunction


def reward_functions(reward: Given | None) -> tuple[RewardFunction, ...]:
    """Normalises one function, several, or several with weights; each may be a name, as in the configuration.

    Raises ConfigError for one that cannot be loaded or called, and for an invalid weight or name.
    """
    if reward is None:
        return ()
    if isinstance(reward, Mapping):
        items: Sequence[Any] = list(reward.items())
    else:
        items = list(reward) if isinstance(reward, list | tuple) else [reward]
    functions = tuple(map(_function, items))
    if not functions:
        raise ConfigError(f"reward={shown(reward)} names no function; pass one, or None if the workflow sets rewards")
    for function in functions:
        if not 0 < function.weight < float("inf"):
            raise ConfigError(
                f"the weight of the reward {function.name!r} is {function.weight}; it must be above 0 and finite. A "
                f"penalty is a function whose scores are negative"
            )
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ConfigError(f"{count} reward functions have the name {name!r}; their metrics need different names")
    return functions


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str], rows: str) -> None:
    """Raises ConfigError for a function that requires a column that no row has. `rows` names them."""
    for function in functions:
        if missing := function.convention.missing(columns):
            raise ConfigError(
                f"the reward function {name_of(function.call)} requires {', '.join(missing)}, but {rows} has the "
                f"columns {', '.join(sorted(columns))}; add the column, give the parameter a default, or {SHAPES}"
            )


def _function(item: Any) -> RewardFunction:
    if isinstance(item, RewardFunction):
        return item
    call, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
    if isinstance(call, str):
        call = load_reward(call)
    if not callable(call):
        raise ConfigError(
            f"reward={shown(item)} is not a function, a name such as 'package.module:function', or a list "
            f"or dictionary of these with weights"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"the weight of the reward {_short_name(call)!r} is {shown(weight)}, which is no number")
    return RewardFunction(_short_name(call), call, float(weight))


def combine(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """The weighted sum of one response's scores, one per function; None if all scores are None.

    A None is left out: the weights of the other functions are scaled up so that the sum of weights stays the same. With
    s_i the scores and A the functions that returned one, the reward is sum(w) / sum_A(w) * sum_A(w_i s_i), which is the
    plain weighted sum if all of them did. `weights` are above 0.
    """
    present = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score is not None]
    if not present:
        return None
    total = sum(weight * score for weight, score in present)
    if len(present) == len(weights):
        # Not scaled by a quotient that is 1 only up to rounding: equal scores must give exactly equal rewards.
        return total
    return total * sum(weights) / sum(weight for weight, _ in present)


def combine_tokens(weights: Sequence[float], scores: Sequence[float | FloatArray | None]) -> FloatArray | None:
    """The rewards of one response's tokens, weighted as by `combine`; None if no function scored tokens.

    A score is that of the response or of its tokens, then with NaN for tokens without one.
    """
    each = [(weight, score) for weight, score in zip(weights, scores, strict=True) if isinstance(score, np.ndarray)]
    if not each:
        return None
    present = sum(weight for weight, score in zip(weights, scores, strict=True) if score is not None)
    values = np.stack([np.float32(weight * sum(weights) / present) * score for weight, score in each])
    none = np.isnan(values).all(axis=0)
    return np.where(none, np.float32("nan"), np.nansum(values, axis=0)).astype(np.float32)


def _short_name(call: Callable[..., Any]) -> str:
    # A partial is called as what it fills in.
    call = getattr(call, "func", call)
    return str(getattr(call, "__name__", None) or type(call).__name__)


def convention_of(function: Callable[..., Any]) -> Convention:
    """How to call the function. Raises ConfigError, naming it, for one that no convention can call."""
    try:
        parameters = list(invoke(inspect.signature, function).parameters.values())
    except (TypeError, ValueError):
        return Convention()
    what = f"the reward function {name_of(function)}{_written(parameters)}"
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepts = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(names)
    for kind, plural in (("verl", ""), ("verl_batch", "s")):
        columns = {f"{name}{plural}" for name in VERL}
        if {f"solution_str{plural}", f"ground_truth{plural}"} <= names:
            if others := [p.name for p in _required(parameters) if p.name not in columns]:
                raise ConfigError(
                    f"{what} requires {', '.join(others)}, which verl's convention does not pass; {SHAPES}"
                )
            return Convention(kind, accepts)
    trl = "prompts" in names
    if "completions" in names:
        rest = [p for p in _required(parameters) if p.name != "completions"]
        by_name = trl or by_position[:1] != [p for p in parameters if p.name == "completions"]
    elif by_position and not trl:
        rest, by_name = [p for p in _required(parameters) if p is not by_position[0]], False
        accepts = accepts and accepts - {by_position[0].name}
    elif not trl and inspect.Parameter.VAR_POSITIONAL in kinds:
        rest, by_name = _required(parameters), False
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        rest, by_name = _required(parameters), True
    else:
        raise ConfigError(f"{what} takes no completions; {SHAPES}")
    if unnamed := [p.name for p in rest if p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError(
            f"{what} takes {', '.join(unnamed)} by position only, but columns are passed by name; {SHAPES}"
        )
    return Convention("trl" if trl else "group", accepts, tuple(p.name for p in rest), by_name)


def _required(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is p.empty and p.kind not in starred]


def _written(parameters: Sequence[inspect.Parameter]) -> str:
    """The signature without annotations and defaults, which may be long."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(p.kind, '') + p.name for p in parameters)})"


def _as_trl(completions: Sequence[str], columns: Columns) -> list[Any]:
    """The completions as TRL passes them: as messages where prompts are messages."""
    prompts = columns.get("prompt", ())
    if not prompts or not is_messages(prompts[0]):
        return list(completions)
    return [[{"role": "assistant", "content": completion}] for completion in completions]


def _verl_rows(completions: Sequence[str], columns: Columns) -> list[dict[str, Any]]:
    rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completions))]
    return [
        {
            "data_source": row.get("data_source", ""),
            "solution_str": completion,
            "ground_truth": ground_truth_of(row),
            "extra_info": row.get("extra_info") or {},
        }
        for row, completion in zip(rows, completions, strict=True)
    ]


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """Returns the reference answer of a row, or None.

    Rows for verl hold it in `reward_model: {style, ground_truth}`; others in a column.
    """
    if isinstance(model := row.get("reward_model"), Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return next((row[name] for name in GROUND_TRUTHS[1:] if name in row), None)


def _each(function: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> Any:
    """One score per row, or the error of its call."""
    if is_async(function):
        return gather_or_cancel(*(_awaited(function, row) for row in rows))
    return [_called(function, row) for row in rows]


def _called(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    try:
        return _score(function(**row))
    except ServerError:
        raise
    except Exception as error:  # noqa: BLE001 - of a user's function, of which the other rows know nothing
        return error


async def _awaited(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    try:
        return _score(await function(**row))
    except ServerError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return error


async def _later(answers: Any) -> list[Any]:
    return [_score(answer) for answer in await answers]


def _score(answer: Any) -> Any:
    """A function for verl may return a dictionary of its score and of what else it has found."""
    return answer["score"] if isinstance(answer, Mapping) and "score" in answer else answer
