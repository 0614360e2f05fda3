"""A reasoning-gym task as a one-turn environment: a question, then the score of the task's own verifier."""

from __future__ import annotations

from typing import Any

from megasync.data.reasoning_gym import GymReward
from megasync.environments.protocol import Step
from megasync.errors import DataError

COLUMNS = ("prompt", "answer", "metadata")


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
