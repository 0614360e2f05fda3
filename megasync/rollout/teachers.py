"""Teachers: frozen models whose log-probs of the policy's own tokens are trained on (on-policy distillation).

A teacher reads each response once, when its group is complete, and the log-probs travel with the trajectory as the
array `TEACHER`. A response that is longer than the teacher's context, or of a row that no teacher teaches, has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.data.datasets import SET
from megasync.data.tokenizer import load_tokenizer
from megasync.errors import ConfigError
from megasync.observe import trace
from megasync.serving.answers import read_scored
from megasync.serving.frozen_client import FrozenModelClient
from megasync.serving.frozen_folder import read_frozen_model
from megasync.trajectory import TEACHER, Ids, Trajectory
from megasync.trajectory.runs import FloatArray

# Column of a row that says where it comes from; without it, that of its training set does.
SOURCE = "data_source"


class Teacher(FrozenModelClient):
    """One of `teachers`. Requests wait until their owner has added a server."""

    def __init__(self, name: str, max_inflight: int, timeout: float, context_length: int) -> None:
        super().__init__(f"teacher {name!r}", max_inflight, timeout)
        self._context_length = context_length
        self._too_long = 0

    def metrics(self) -> dict[str, float]:
        """The client's metrics, and the number of responses without log-probs: `too_long`."""
        return super().metrics() | {"too_long": float(self._too_long)}

    async def logprobs(self, prompt_ids: Ids, response_ids: Ids) -> FloatArray | None:
        """Log-probs of the response at temperature 1, [response tokens]; None if it is longer than the context.

        Raises DataError when a server refuses the request, and ServerError when none answers within
        `timeouts.request`.
        """
        ids = [*map(int, prompt_ids), *map(int, response_ids)]
        # One token is sampled and discarded; the log-probs of the input come with it.
        if len(ids) + 1 > self._context_length:
            self._too_long += 1
            return None
        first = len(prompt_ids) - 1
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": first,
        }
        scored = await self.ask("/generate", body, lambda answer: read_scored(answer, ids[first:]))
        return np.array(scored, dtype=np.float32)


class Teachers:
    """The teachers of a run by name, and which rows each of them teaches."""

    def __init__(self, by_name: Mapping[str, Teacher], sources: Mapping[str, Sequence[str]]) -> None:
        self.by_name = by_name
        self._of_source = {source: by_name[name] for name, known in sources.items() for source in known}
        self._of_others = next((by_name[name] for name, known in sources.items() if not known), None)

    async def teach(self, trajectories: Sequence[Trajectory], columns: Mapping[str, Any]) -> list[Trajectory]:
        """The trajectories of a row with the log-probs of its teacher. Raises as `Teacher.logprobs` does."""
        teacher = self._of_source.get(str(columns.get(SOURCE, columns.get(SET))), self._of_others)
        if teacher is None:
            return [*trajectories]
        with trace.span("teacher", "teach", responses=len(trajectories)):
            scores = await gather_or_cancel(*(teacher.logprobs(t.prompt_ids, t.response_ids) for t in trajectories))
        return [
            t if logprobs is None else replace(t, arrays=t.arrays | {TEACHER: logprobs})
            for t, logprobs in zip(trajectories, scores, strict=True)
        ]


def check_tokenizer(config: Config, name: str, tokenizer: Any) -> None:
    """Raises as `load_teachers` does if the teacher of this name does not have the tokens of the policy's tokenizer."""
    key, path = f"teachers.{name}.path", config.teachers[name].path
    vocabulary, needed = load_tokenizer(str(Path(path).expanduser()), key).get_vocab(), tokenizer.get_vocab()
    if vocabulary != needed:
        token = next(iter(vocabulary.items() ^ needed.items()))
        raise ConfigError(
            f"{key}={path!r} has another tokenizer than model.path={config.model.path!r} (they differ in "
            f"{token[0]!r}), so it cannot score the policy's tokens; choose a teacher with the same vocabulary"
        )


def load_teachers(config: Config, tokenizer: Any) -> Teachers:
    """The teachers of a configuration, not connected yet. ``tokenizer`` is the policy's.

    Raises ConfigError if a teacher's tokenizer has other tokens, so that its log-probs would be of another text, and
    DataError if it cannot be loaded.
    """
    teachers = {}
    for name, model in config.teachers.items():
        key = f"teachers.{name}"
        check_tokenizer(config, name, tokenizer)
        limit = model.context_length or read_frozen_model(key, model)["max_position_embeddings"]
        teachers[name] = Teacher(name, model.max_inflight, config.timeouts.request, limit)
    return Teachers(teachers, {name: model.sources for name, model in config.teachers.items()})
