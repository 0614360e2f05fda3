"""Auxiliary models: frozen models that workflows ask by name, such as one that condenses search results.

    notes = await client.ask("refiner", [{"role": "user", "content": passages}], max_new_tokens=64)

Invariant: their text is never trained. It enters a trajectory only as an observation, when the workflow puts it into a
message. Special tokens come from the model's chat template, never from the messages (`OutsideText`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.config import Config
from megasync.config.schema import AuxiliaryModelConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import as_messages
from megasync.data.tokenizer import load_tokenizer
from megasync.errors import ConfigError, DataError, raised_as
from megasync.serving.answers import parse_as
from megasync.serving.frozen_client import FrozenModelClient
from megasync.serving.frozen_folder import read_frozen_model


@prepared
class _TextAnswer(msgspec.Struct):
    text: str


class AuxiliaryModel(FrozenModelClient):
    """One of `auxiliary_models`. Requests wait until their owner has added a server."""

    def __init__(
        self, name: str, config: AuxiliaryModelConfig, tokenizer: Any, context_length: int, timeout: float
    ) -> None:
        """Raises DataError if the tokenizer has no chat template."""
        super().__init__(f"auxiliary model {name!r}", config.max_inflight, timeout)
        self._key = f"auxiliary_models.{name}"
        self._template = ChatTemplate(tokenizer)
        self._context_length = context_length
        self._defaults = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature}

    async def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> str:
        """The model's answer. `sampling` are parameters of SGLang, such as `max_new_tokens` or `stop`.

        Raises DataError when messages and answer exceed the model's context or a server refuses the request, and
        ServerError when no server answers within `timeouts.request`; megasync then retries the sample.
        """
        guarded = self._template.guard(as_messages(messages))
        ids = self._template.encode(self._template.render(guarded, [], answer=True))
        params = self._defaults | sampling
        if len(ids) + params["max_new_tokens"] > self._context_length:
            raise DataError(
                f"{self._key}: {len(ids)} tokens and an answer of up to {params['max_new_tokens']} exceed its context "
                f"of {self._context_length}; send it less text, or lower max_new_tokens"
            )
        return await self.ask("/generate", {"input_ids": ids, "sampling_params": params}, _text)


def _text(answer: Any) -> str:
    return parse_as(answer, _TextAnswer, "/generate").text


def load_auxiliary_models(config: Config) -> dict[str, AuxiliaryModel]:
    """The auxiliary models of a configuration by name, not connected yet.

    Raises ConfigError when a tokenizer cannot be loaded or has no chat template.
    """
    models = {}
    for name, model in config.auxiliary_models.items():
        key = f"auxiliary_models.{name}"
        limit = model.context_length or read_frozen_model(key, model)["max_position_embeddings"]
        with raised_as(ConfigError, f"{key} cannot answer chat messages", of=DataError):
            tokenizer = load_tokenizer(str(Path(model.path).expanduser()), f"{key}.path")
            models[name] = AuxiliaryModel(name, model, tokenizer, limit, config.timeouts.request)
    return models
