"""A reward model as a reward function: `f(completions, **columns) -> list[float | None]`.

A response is scored None when the model's answer contains no score, or when prompt and response exceed the model's
context. Both are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasync.concurrency.tasks import gather_or_cancel
from megasync.config.schema import RewardModelConfig
from megasync.errors import ConfigError
from megasync.rewards.model_prompt import ModelPrompt
from megasync.rewards.score_reader import ScoreReader, score_reader
from megasync.serving.control import ServerControl
from megasync.serving.frozen_client import FrozenModelClient
from megasync.serving.frozen_folder import read_frozen_model


class ModelReward:
    """Scores responses with the model's servers. Calls wait until their owner has added a server to `client`."""

    # Each request has its own deadline, which does not include the time in the queue.
    keeps_own_deadlines = True

    def __init__(
        self, name: str, prompt: ModelPrompt, reader: ScoreReader, client: FrozenModelClient, context_length: int
    ) -> None:
        self.__name__ = name
        self.client = client
        self._prompt = prompt
        self._reader = reader
        self._context_length = context_length
        self._unread = 0
        self._too_long = 0

    def add_server(self, server: ServerControl) -> None:
        self.client.add_server(server)

    def remove_server(self, url: str) -> None:
        self.client.remove_server(url)

    def metrics(self) -> dict[str, float]:
        """The client's metrics, and the numbers of responses without a score: `unread` and `too_long`."""
        return self.client.metrics() | {"unread": float(self._unread), "too_long": float(self._too_long)}

    async def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completions))]
        pairs = zip(rows, completions, strict=True)
        return await gather_or_cancel(*(self._score(row, completion) for row, completion in pairs))

    async def _score(self, row: Mapping[str, Any], completion: str) -> float | None:
        ids = self._prompt.ids(row, completion)
        if len(ids) + self._reader.answer_tokens > self._context_length:
            self._too_long += 1
            return None
        score = await self.client.ask(self._reader.path, self._reader.body(ids), self._reader.read)
        if score is None:
            self._unread += 1
        return score


def load_model_reward(name: str, config: RewardModelConfig, timeout: float) -> ModelReward:
    """The reward function of `reward_models.<name>`, not connected yet. `timeout` is in seconds, per request.

    Raises ConfigError when the tokenizer cannot be loaded or lacks what the configuration requires.
    """
    from transformers import AutoTokenizer

    key = f"reward_models.{name}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(config.path).expanduser(), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}.path={config.path!r} has no loadable tokenizer: {error}") from error
    limit = config.context_length or read_frozen_model(key, config)["max_position_embeddings"]
    client = FrozenModelClient(f"reward model {name!r}", config.max_inflight, timeout)
    return ModelReward(name, ModelPrompt(key, config, tokenizer), score_reader(key, config, tokenizer), client, limit)
