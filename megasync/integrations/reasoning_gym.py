"""Joins reasoning-gym: its tasks as rows, and as environments of one turn, scored by each task's own verifier.

Invariant: the hash of a question decides whether it belongs to the training or the held-out split, and it occurs once
per split. The package seeds item i with `seed + i`, so without this split, datasets with neighbouring seeds would share
nearly all their rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from megasync.base.missing import require_extra
from megasync.config.schema import DatasetConfig
from megasync.data.rows import HELD_OUT_SHARE, split_of
from megasync.environments.protocol import Step
from megasync.errors import DataError, raised_as

# Items generated per requested row before the task is reported to have too few distinct questions.
PATIENCE = 8
# What the verifier needs of a row.
COLUMNS = ("prompt", "answer", "metadata")


def _first_line(completion: str) -> str:
    return completion.strip().split("\n", 1)[0].strip()


def _last_line(completion: str) -> str:
    return completion.strip().rsplit("\n", 1)[-1].strip()


def _tagged(completion: str) -> str:
    """The text inside the last <answer>...</answer>; empty without one."""
    _, opened, rest = completion.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if opened and closed else ""


EXTRACTORS: dict[str, Callable[[str], str]] = {
    "first_line": _first_line,
    "last_line": _last_line,
    "tag": _tagged,
    "all": str.strip,
}


def gym_rows(config: DatasetConfig) -> tuple[list[dict[str, Any]], GymReward]:
    """`size` rows with the columns prompt, answer and metadata, and the reward function that scores them.

    In addition to the task's own options, `options` accepts `extract` (first_line, last_line, tag, all; default
    first_line) and `strict` (default true: 1.0 only for an answer with full marks, else 0.0). Raises DataError for
    unknown tasks, invalid options, and tasks with too few distinct questions.
    """
    if config.size is None:
        raise DataError(f"reasoning_gym:{config.source} is unbounded; set size to the number of rows")
    if config.split not in ("train", "test"):
        raise DataError(f"reasoning_gym has the splits train and test, not {config.split!r}")
    options = dict(config.options)
    reward = GymReward(config.source, extract=options.pop("extract", "first_line"), strict=options.pop("strict", True))
    # The held-out split receives only one in HELD_OUT_SHARE items, so that many more are generated.
    items = config.size * PATIENCE * HELD_OUT_SHARE
    task = _create(config.source, {**options, "seed": config.seed, "size": items})
    rows: dict[str, dict[str, Any]] = {}
    for number in range(items):
        item = task[number]
        question = item["question"]
        if question not in rows and split_of(question) == config.split:
            rows[question] = {"prompt": question, "answer": item["answer"], "metadata": item["metadata"]}
            if len(rows) == config.size:
                return list(rows.values()), reward
    raise DataError(
        f"reasoning_gym:{config.source} has only {len(rows)} distinct {config.split} questions with {options}, fewer "
        f"than size={config.size}; lower the size or widen the task's options"
    )


class GymReward:
    """Scores completions with the task's verifier. Picklable, so that it can run in a process pool."""

    def __init__(self, task: str, extract: str, strict: bool) -> None:
        if extract not in EXTRACTORS:
            raise DataError(f"options.extract must be one of {', '.join(EXTRACTORS)}, got {extract!r}")
        if not isinstance(strict, bool):
            raise DataError(f"options.strict must be true or false, got {strict!r}")
        self.task, self.extract, self.strict = task, extract, strict
        self.__name__ = f"reasoning_gym:{task}"
        self._verifier: Any = None

    def __call__(
        self,
        completions: Sequence[str],
        *,
        prompt: Sequence[str],
        answer: Sequence[str | None],
        metadata: Sequence[dict[str, Any]],
        **columns: object,
    ) -> list[float]:
        """One score per completion, 0 to 1; exactly 0.0 or 1.0 when strict."""
        if self._verifier is None:
            self._verifier = _create(self.task, {"seed": 0, "size": 1})
        extract = EXTRACTORS[self.extract]
        scores = [
            float(self._verifier.score_answer(extract(text), {"question": question, "answer": right, "metadata": meta}))
            for text, question, right, meta in zip(completions, prompt, answer, metadata, strict=True)
        ]
        return [float(score >= 1.0) for score in scores] if self.strict else scores

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_verifier": None}


class ReasoningGymTask:
    """Plays rows of `data.train.kind: reasoning_gym` with the same `task`.

    `extract` and `strict` are as in that dataset's options. Raises DataError for invalid options, and for rows of
    another kind.
    """

    def __init__(self, task: str, extract: str = "tag", strict: bool = True) -> None:
        self._reward = GymReward(task, extract, strict)
        self._row: dict[str, list[Any]] = {}

    def reset(self, sample: dict[str, Any]) -> str:
        if missing := [column for column in COLUMNS if column not in sample]:
            raise DataError(
                f"a row has no {', '.join(missing)}; the environment reasoning_gym needs rows of data.train.kind="
                f"reasoning_gym"
            )
        self._row = {column: [sample[column]] for column in COLUMNS}
        return str(sample["prompt"])

    def step(self, action: str) -> Step:
        return Step("", self._reward([action], **self._row)[0], True)

    def close(self) -> None:
        """Does nothing: there are no resources to release."""


def _create(task: str, options: dict[str, Any]) -> Any:
    require_extra("tasks", "reasoning_gym", "data kind reasoning_gym", kind=DataError)
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {len(DATASETS)}, such as chain_sum"
        raise DataError(f"reasoning-gym has no task {task!r}; {hint}")
    what = f"reasoning_gym:{task} rejects its options {options}"
    with raised_as(DataError, what, of=(TypeError, AssertionError, ValueError)):
        return create_dataset(task, **options)
