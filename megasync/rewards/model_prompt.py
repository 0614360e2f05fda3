"""The prompt of a reward model: prompt and response as token ids of its own tokenizer and chat template.

Special tokens come from templates, never from the prompt or the response (`OutsideText`). Otherwise a response could
end its own judgement and begin another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasync.config.schema import RewardModelConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import as_messages
from megasync.data.outside_text import OutsideText
from megasync.data.rows import is_messages
from megasync.data.template import fill
from megasync.errors import ConfigError

JUDGE_NUMBER = """Judge how well the response answers the prompt, on a scale from {low:g} to {high:g}.

Prompt:
{prompt}

Response:
{completion}

End with the number alone."""
JUDGE_YES_NO = """Prompt:
{prompt}

Response:
{completion}

Is this a good and correct response to the prompt? Answer {yes} or {no}."""


class ModelPrompt:
    """`key` is the model's configuration section. Raises ConfigError if a required chat template is missing."""

    def __init__(self, key: str, config: RewardModelConfig, tokenizer: Any) -> None:
        self._key = key
        self._system = config.system
        self._outside = OutsideText(tokenizer)
        self._template = config.template
        self._words = {"low": config.low, "high": config.high, "yes": config.yes_token, "no": config.no_token}
        if config.template is None and config.kind == "generative":
            self._template = JUDGE_YES_NO if config.read == "yes_no" else JUDGE_NUMBER
        chat = config.format == "chat"
        if chat and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{key}.format=chat, but the tokenizer of {key}.path={config.path!r} has no chat template; set "
                f"{key}.format=raw"
            )
        self._chat = ChatTemplate(tokenizer) if chat else None

    def ids(self, row: Mapping[str, Any], completion: str) -> list[int]:
        """Token ids, [tokens].

        Raises DataError for a template that names a column that the row lacks, and for messages that cannot be shown.
        """
        row, completion = self._outside.guard(dict(row)), self._outside.guard(completion)
        if self._chat is None:
            if self._template is None:
                # Guarded again: the end of one and the start of the other may form the name of a special token.
                text = self._outside.guard(_text(row["prompt"]) + completion)
            else:
                text = self._fill(self._template, row, completion)
            return self._outside.encode(text, add_special_tokens=True)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        if self._template is not None:
            messages.append({"role": "user", "content": self._fill(self._template, row, completion)})
        else:
            prompt = row["prompt"]
            messages += as_messages(prompt if is_messages(prompt) else [{"role": "user", "content": prompt}])
            messages.append({"role": "assistant", "content": completion})
        return self._chat.encode(self._chat.render(messages, [], answer=self._template is not None))

    def _fill(self, template: str, row: Mapping[str, Any], completion: str) -> str:
        shown = self._words | dict(row) | {"prompt": _text(row["prompt"]), "completion": completion}
        return fill(f"{self._key}.template", template, shown)


def _text(prompt: Any) -> str:
    """A prompt as plain text; a chat as lines of role and content."""
    if not is_messages(prompt):
        return str(prompt)
    return "\n".join(f"{message['role']}: {message['content']}" for message in as_messages(prompt))
