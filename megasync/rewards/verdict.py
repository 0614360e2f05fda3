"""How a score is read from a reward model's answer. Pure: what to ask for, and what the answer says."""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import msgspec

from megasync.config.schema import RewardModelConfig
from megasync.errors import ConfigError, InvalidAnswer
from megasync.serving.answers import parse_as


class Verdict(Protocol):
    """`path` is the endpoint, `room` the tokens that the answer takes beyond those of the question."""

    path: str
    room: int

    def body(self, ids: list[int]) -> dict[str, Any]: ...

    def read(self, answer: Any) -> float | None:
        """None when the model's answer holds no score. Raises InvalidAnswer for one of another form."""


class _Classified(msgspec.Struct):
    embedding: list[float]


class _Written(msgspec.Struct):
    text: str


class _WeighedMeta(msgspec.Struct):
    # By token of the answer: log-prob, id and text of each that was asked for.
    output_token_ids_logprobs: list[list[tuple[float, int, Any]]]


class _Weighed(msgspec.Struct):
    meta_info: _WeighedMeta


class ClassifierScore:
    """One of the outputs of a classification head, as it is."""

    path, room = "/classify", 0

    def __init__(self, label: int) -> None:
        self._label = label

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": ids}

    def read(self, answer: Any) -> float | None:
        outputs = parse_as(answer, _Classified, "/classify").embedding
        if len(outputs) <= self._label or not math.isfinite(outputs[self._label]):
            raise InvalidAnswer(f"/classify gave no output number {self._label}: {answer!r:.200}")
        return outputs[self._label]


class NumberWritten:
    """The last number that a judge writes, scaled from `low`..`high` to 0..1; one outside is none."""

    path = "/generate"

    def __init__(self, config: RewardModelConfig) -> None:
        self.room = config.max_new_tokens
        self._pattern = re.compile(config.pattern)
        self._low, self._high = config.low, config.high
        self._sampling = {"max_new_tokens": config.max_new_tokens, "temperature": config.temperature}

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": self._sampling}

    def read(self, answer: Any) -> float | None:
        text = parse_as(answer, _Written, "/generate").text
        found = list(self._pattern.finditer(text))
        if not found:
            return None
        last = found[-1]
        try:
            number = float(last.group(1) if self._pattern.groups else last.group())
        except (TypeError, ValueError):
            return None
        return (number - self._low) / (self._high - self._low) if self._low <= number <= self._high else None


class YesOrNo:
    """How likely the judge's next token is yes, of yes and no together."""

    path, room = "/generate", 1

    def __init__(self, yes: int, no: int) -> None:
        """Token ids."""
        self._yes, self._no = yes, no

    def body(self, ids: list[int]) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "token_ids_logprob": [self._yes, self._no],
        }

    def read(self, answer: Any) -> float | None:
        tokens = parse_as(answer, _Weighed, "/generate").meta_info.output_token_ids_logprobs
        found = {token: logprob for logprob, token, _ in tokens[0]} if tokens else {}
        yes, no = found.get(self._yes, math.nan), found.get(self._no, math.nan)
        if not (math.isfinite(yes) and math.isfinite(no)):
            raise InvalidAnswer(f"/generate gave no log-probs of {self._yes} and {self._no}: {answer!r:.200}")
        return 1 / (1 + math.exp(min(700.0, no - yes)))


def verdict_of(key: str, config: RewardModelConfig, tokenizer: Any) -> Verdict:
    """The one that the configuration asks for. Raises ConfigError for a word that is no single token."""
    if config.kind == "classifier":
        return ClassifierScore(config.label)
    if config.read == "number":
        return NumberWritten(config)
    return YesOrNo(*(_token(key, name, getattr(config, name), tokenizer) for name in ("yes_token", "no_token")))


def _token(key: str, name: str, word: str, tokenizer: Any) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigError(
            f"{key}.{name}={word!r} is {len(ids)} tokens of the tokenizer of {key}.path={tokenizer.name_or_path!r}; choose "
            f"a word that is one token, perhaps with a space before it"
        )
    return ids[0]
