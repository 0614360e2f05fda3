"""A reward model as a reward function: `f(completions, **columns) -> list[float | None]`.

A response is scored None when the model's answer contains no score, or when prompt and response exceed the model's
context. Both are counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config.schema import RewardModelConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.final_answer import CUT_OFF, outside_reasoning
from megasync.data.messages import as_messages
from megasync.data.outside_text import OutsideText
from megasync.data.rows import fill, is_messages
from megasync.data.written_number import written_number
from megasync.errors import ConfigError, InvalidAnswer, raised_as
from megasync.rewards.written_score import written_score
from megasync.serving.answers import Finish, parse_as
from megasync.serving.frozen_client import FrozenModelClient
from megasync.serving.frozen_folder import read_frozen_model

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
    """The prompt of a reward model: prompt and response as token ids of its own tokenizer and chat template.

    Special tokens come from templates, never from the prompt or the response (`OutsideText`). Otherwise a response
    could end its own judgement and begin another. `key` is the model's configuration section. Raises ConfigError if a
    required chat template is missing.
    """

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


@prepared
class _ClassifierAnswer(msgspec.Struct):
    embedding: list[float]


@prepared
class _End(msgspec.Struct):
    finish_reason: Finish | str | None = None


@prepared
class _TextAnswer(msgspec.Struct):
    text: str
    meta_info: _End | None = None

    @property
    def cut_off(self) -> bool:
        reason = self.meta_info and self.meta_info.finish_reason
        return (reason.type if isinstance(reason, Finish) else reason) == CUT_OFF


@prepared
class _TokenLogprobs(msgspec.Struct):
    # For each token of the answer: the log-prob, id and text of each requested token.
    output_token_ids_logprobs: list[list[tuple[float, int, Any]]]


@prepared
class _JudgeAnswer(msgspec.Struct):
    meta_info: _TokenLogprobs


class ClassifierScore:
    """One output of a classification head, unchanged."""

    path, answer_tokens = "/classify", 0

    def __init__(self, label: int) -> None:
        self._label = label

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": ids}

    def read(self, answer: Any) -> float | None:
        outputs = parse_as(answer, _ClassifierAnswer, "/classify").embedding
        if len(outputs) <= self._label or not math.isfinite(outputs[self._label]):
            raise InvalidAnswer(f"/classify gave no output number {self._label}: {answer!r:.200}")
        return outputs[self._label]


class WrittenNumber:
    """The score that a judge writes behind its reasoning, scaled from [`low`, `high`] to [0, 1].

    None without a score in that range, and for an answer that was cut off: its numbers are those of the reasoning.
    """

    path = "/generate"

    def __init__(self, config: RewardModelConfig) -> None:
        self.answer_tokens = config.max_new_tokens
        self._pattern = None if config.pattern is None else re.compile(config.pattern)
        self._low, self._high = config.low, config.high
        self._sampling = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature}

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": self._sampling}

    def read(self, answer: Any) -> float | None:
        answer = parse_as(answer, _TextAnswer, "/generate")
        text = outside_reasoning(answer.text)
        if text is None or answer.cut_off:
            return None
        if self._pattern is None:
            return written_score(text, self._low, self._high)
        matches = list(self._pattern.finditer(text))
        last = (matches[-1].group(1) if self._pattern.groups else matches[-1].group()) if matches else None
        number = written_number(last) if last else None
        if number is None or not self._low <= number.value <= self._high:
            return None
        return (float(number.value) - self._low) / (self._high - self._low)


class YesProbability:
    """The probability that the judge's next token is yes, given that it is yes or no."""

    path, answer_tokens = "/generate", 1

    def __init__(self, yes: int, no: int) -> None:
        """`yes` and `no` are token ids."""
        self._yes, self._no = yes, no

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "token_ids_logprob": [self._yes, self._no],
        }

    def read(self, answer: Any) -> float | None:
        tokens = parse_as(answer, _JudgeAnswer, "/generate").meta_info.output_token_ids_logprobs
        logprobs = {token: logprob for logprob, token, _ in tokens[0]} if tokens else {}
        yes, no = logprobs.get(self._yes, math.nan), logprobs.get(self._no, math.nan)
        if not (math.isfinite(yes) and math.isfinite(no)):
            raise InvalidAnswer(f"/generate gave no log-probs of {self._yes} and {self._no}: {answer!r:.200}")
        return 1 / (1 + math.exp(min(700.0, no - yes)))


# The request that asks a reward model for a score, and how the score is read from the answer. `path` is the endpoint;
# `answer_tokens` are those that the answer needs beyond the prompt. `read` returns None when the model wrote no score,
# and raises InvalidAnswer for an answer of another form.
ScoreReader = ClassifierScore | WrittenNumber | YesProbability


def score_reader(key: str, config: RewardModelConfig, tokenizer: Any) -> ScoreReader:
    """The score reader of a configuration. Raises ConfigError for a yes or no word that is not a single token."""
    if config.kind == "classifier":
        return ClassifierScore(config.label)
    if config.read == "number":
        return WrittenNumber(config)
    return YesProbability(*(_token(key, name, getattr(config, name), tokenizer) for name in ("yes_token", "no_token")))


def _token(key: str, name: str, word: str, tokenizer: Any) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigError(
            f"{key}.{name}={word!r} is {len(ids)} tokens for the tokenizer of {key}.path={tokenizer.name_or_path!r}; "
            f"choose a word that is a single token, perhaps with a leading space"
        )
    return ids[0]


class ModelReward(FrozenModelClient):
    """Scores responses with the model's servers. Calls wait until their owner has added a server."""

    # Each request has its own deadline, which does not include the time in the queue.
    keeps_own_deadlines = True

    def __init__(
        self,
        name: str,
        prompt: ModelPrompt,
        reader: ScoreReader,
        *,
        max_inflight: int,
        timeout: float,
        context_length: int,
    ) -> None:
        super().__init__(f"reward model {name!r}", max_inflight, timeout)
        self.__name__ = name
        self._prompt = prompt
        self._reader = reader
        self._context_length = context_length
        self._unread = 0
        self._too_long = 0

    def metrics(self) -> dict[str, float]:
        """The client's metrics, and the numbers of responses without a score: `unread` and `too_long`."""
        return super().metrics() | {"unread": float(self._unread), "too_long": float(self._too_long)}

    async def __call__(self, completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completions))]
        pairs = zip(rows, completions, strict=True)
        return await gather_or_cancel(*(self._score(row, completion) for row, completion in pairs))

    async def _score(self, row: Mapping[str, Any], completion: str) -> float | None:
        ids = self._prompt.ids(row, completion)
        if len(ids) + self._reader.answer_tokens > self._context_length:
            self._too_long += 1
            return None
        score = await self.ask(self._reader.path, self._reader.body(ids), self._reader.read)
        if score is None:
            self._unread += 1
        return score


def load_model_reward(name: str, config: RewardModelConfig, timeout: float) -> ModelReward:
    """The reward function of `reward_models.<name>`, not connected yet. `timeout` is in seconds, per request.

    Raises ConfigError when the tokenizer cannot be loaded or lacks what the configuration requires.
    """
    from transformers import AutoTokenizer

    key = f"reward_models.{name}"
    with raised_as(ConfigError, f"{key}.path={config.path!r} has no loadable tokenizer", of=(OSError, ValueError)):
        tokenizer = AutoTokenizer.from_pretrained(Path(config.path).expanduser(), local_files_only=True)
    limit = config.context_length or read_frozen_model(key, config)["max_position_embeddings"]
    options = {"max_inflight": config.max_inflight, "timeout": timeout, "context_length": limit}
    return ModelReward(name, ModelPrompt(key, config, tokenizer), score_reader(key, config, tokenizer), **options)
