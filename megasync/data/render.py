"""Renders rows to token ids, with a raw template and solved examples, or with the chat template of the tokenizer.

Invariant: every prompt from this module is non-empty, has at most `prompt.max_tokens` tokens, and contains only ids of
the model's vocabulary. `Renderer.prompts` checks this for the whole dataset before anything starts. Special tokens come
from a template, never from a row (`OutsideText`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from megasync.base.importing import quick_imports
from megasync.config.schema import PromptConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import Message, as_messages, as_tools
from megasync.data.outside_text import OutsideText, plain
from megasync.data.rows import is_messages, place
from megasync.data.template import fill
from megasync.errors import DataError

log = logging.getLogger(__name__)

T = TypeVar("T")


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of the model folder that the configuration's `key` names. Raises DataError."""
    with quick_imports():
        from transformers import AutoConfig, AutoTokenizer, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

    # transformers reads config.json to load a tokenizer, and does not know this name of DeepSeek-V3's architecture.
    AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its parser does
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{key}={path!r} has a tokenizer in Python code, which is not run; add its tokenizer.json"
            ) from error
        raise DataError(f"{key}={path!r} has no tokenizer that can be loaded: {error}") from error


def split_examples(
    rows: Sequence[dict[str, Any]], config: PromptConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(solved examples, training rows): the first `examples` rows are shown in prompts, so they are not trained on."""
    if config.examples >= len(rows):
        raise DataError(
            f"data.prompt.examples={config.examples} leaves nothing of {len(rows)} training rows; lower it or add rows"
        )
    return list(rows[: config.examples]), list(rows[config.examples :])


class Renderer:
    """Renders rows to token ids. `tokenizer` is a Hugging Face tokenizer; ids must be below `vocab_size`."""

    def __init__(
        self, tokenizer: Any, config: PromptConfig, vocab_size: int, examples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        if len(examples) != config.examples:
            raise DataError(f"data.prompt.examples={config.examples}, but {len(examples)} solved rows were given")
        if config.format == "chat" and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"data.prompt.format=chat, but the tokenizer {tokenizer.name_or_path!r} has no chat template; use "
                f"data.prompt.format=raw or a model with a chat template"
            )
        if config.format == "chat" and config.examples:
            raise DataError("data.prompt.examples requires data.prompt.format=raw; change one of the two")
        self._template = ChatTemplate(tokenizer, config.template_options) if config.format == "chat" else None
        self._config = config
        self._vocab_size = vocab_size
        self._outside = OutsideText(tokenizer)
        shown = "".join(_example(config, self._outside, row, n) for n, row in enumerate(examples))
        self._preamble = config.system + shown

    @property
    def chat(self) -> bool:
        return self._template is not None

    def text(self, row: Mapping[str, Any]) -> str:
        """The prompt text as the model sees it, including special tokens of the chat template."""
        return plain(self._guarded(row))

    def _guarded(self, row: Mapping[str, Any]) -> str:
        if self._template is not None:
            messages = self._template.guard(self.messages(row))
            return self._template.render(messages, as_tools(row.get("tools")), answer=True)
        if is_messages(row["prompt"]):
            raise DataError("a row's prompt is a list of chat messages; set data.prompt.format=chat")
        return self._preamble + fill("data.prompt.template", self._config.template, self._outside.guard(row))

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The prompt as chat messages (`data/messages.py`), the system message first. Raises DataError."""
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        prompt = row["prompt"]
        if not is_messages(prompt):
            prompt = [{"role": "user", "content": fill("data.prompt.template", self._config.template, row)}]
        return [*system, *as_messages(prompt)]

    def prompt_ids(self, row: Mapping[str, Any]) -> list[int]:
        """Token ids, [tokens]. Raises DataError for an empty prompt and for ids outside the vocabulary."""
        # A chat template writes its own special tokens; for plain text the tokenizer adds them.
        ids = self._outside.encode(self._guarded(row), add_special_tokens=not self.chat)
        if not ids:
            raise DataError(f"the prompt {row['prompt']!r:.80} has no tokens; a prompt needs at least one")
        if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise DataError(
                f"the prompt {row['prompt']!r:.80} has token id {wrong[0]}, outside the model's vocabulary of "
                f"{self._vocab_size}; the tokenizer does not belong to this model"
            )
        return ids

    def prompts(self, rows: Sequence[Mapping[str, Any]], name: str = "the prompts") -> list[list[int]]:
        """Token ids of every row of the dataset `name`.

        Raises DataError that names the row, and for prompts that are too long their number and the first.
        """
        rendered = [_placed(self.prompt_ids, row, number, name) for number, row in enumerate(rows)]
        if marked := sum(self._outside.guard(row["prompt"]) is not row["prompt"] for row in rows):
            log.warning(
                "%d of %d prompts contain names of special tokens, which are encoded as text; put special tokens "
                "that a prompt needs into data.prompt.template",
                *(marked, len(rows)),
            )
        limit = self._config.max_tokens
        if long := [number for number, ids in enumerate(rendered) if len(ids) > limit]:
            first = long[0]
            raise DataError(
                f"{len(long)} of {len(rows)} prompts are longer than data.prompt.max_tokens={limit}; the first is "
                f"{place(rows[first], first)} with {len(rendered[first])} tokens: {rows[first]['prompt']!r:.80}. Raise "
                f"the limit or remove those rows"
            )
        return rendered


def _example(config: PromptConfig, outside: OutsideText, row: Mapping[str, Any], number: int) -> str:
    if row.get("answer") is None:
        raise DataError(
            f"data.prompt.examples={config.examples}, but training {place(row, number)} has no answer to show"
        )
    write = partial(fill, "data.prompt.example_template", config.example_template)
    return _placed(lambda row: write(outside.guard(row)), row, number)


def _placed(
    render: Callable[[Mapping[str, Any]], T], row: Mapping[str, Any], number: int, name: str = "the prompts"
) -> T:
    """Renders a row of the dataset `name`. A DataError says which row it is."""
    try:
        return render(row)
    except DataError as error:
        raise DataError(f"{place(row, number, name)}: {error}") from error.__cause__
