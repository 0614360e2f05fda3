"""How a user's reward function is called: as megasync does it, as TRL does, or as verl does.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasync.base.importing import name_of
from megasync.concurrency.foreign import invoke, is_async
from megasync.concurrency.tasks import gather_or_cancel
from megasync.data.rows import is_messages
from megasync.errors import ConfigError

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
        """Calls the function for a group; returns one score per completion, or an awaitable of that."""
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
    if is_async(function):
        return _gathered(function, rows)
    return [_score(function(**row)) for row in rows]


async def _gathered(function: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [_score(answer) for answer in await gather_or_cancel(*(function(**row) for row in rows))]


async def _later(answers: Any) -> list[Any]:
    return [_score(answer) for answer in await answers]


def _score(answer: Any) -> Any:
    """A function for verl may return a dictionary of its score and of what else it has found."""
    return answer["score"] if isinstance(answer, Mapping) and "score" in answer else answer
