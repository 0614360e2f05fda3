"""Score readers: the request that asks a reward model for a score, and how the score is read from the answer. Pure."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.config.schema import RewardModelConfig
from megasync.data.final_answer import CUT_OFF, outside_reasoning
from megasync.data.written_number import written_number
from megasync.errors import ConfigError, InvalidAnswer
from megasync.rewards.written_score import written_score
from megasync.serving.answers import Finish, parse_as


class ScoreReader(Protocol):
    """`path` is the endpoint; `answer_tokens` is the number of tokens that the answer needs beyond the prompt."""

    @property
    def path(self) -> str: ...
    @property
    def answer_tokens(self) -> int: ...

    def body(self, ids: list[int]) -> dict[str, Any]: ...

    def read(self, answer: Any) -> float | None:
        """The score; None when the model wrote none. Raises InvalidAnswer for an answer of another form."""
        ...


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
