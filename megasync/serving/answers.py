"""What a server answered, checked at the door: typed, bounded, and within what was asked.

Invariant: nothing of an answer is used before all of it was checked, and an answer that makes no sense leaves this
module as InvalidAnswer only, which callers treat as a failure of that server: it is asked for again, and reaches no
training. `read_generated`, `read_scored` and `converted` guarantee it. The checks of each token are made by msgspec
while it parses, and by `min`, `max` and `==` over whole lists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from megasync.errors import InvalidAnswer

T = TypeVar("T")

# Log-probs outside are no rounding: above, a probability greater than 1; below, a token that cannot have been sampled.
_LOGPROBS = (-1000.0, 1e-3)
# A version needs fewer digits than this.
_VERSION_DIGITS = 15
# Bytes of an answer: its frame, and each token with its log-prob, text, and its share of a streamed piece's frame.
_FRAME_BYTES = 1 << 20
_TOKEN_BYTES = 4096
_SHOWN = 300

_Entry = tuple[float, int, Any]


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    # The token id or the text that a "stop" was matched by.
    matched: Any = None
    status_code: int | None = None
    message: Any = None


class _Meta(msgspec.Struct):
    finish_reason: Finish | None
    weight_version: str | int | None = None
    output_token_logprobs: list[_Entry] | None = None
    weight_versions: list[_Span] | None = None


class _Error(msgspec.Struct):
    code: Any = None
    message: Any = None


class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    text: str | None = None
    output_ids: list[int] | None = None
    error: _Error | None = None


class _ScoredMeta(msgspec.Struct):
    # The first token has none.
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


_generated = msgspec.json.Decoder(_Generated)
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Asked:
    """What bounds the answer to one request: `tokens` are the most that it may have; `newest` is asked, at each piece, for
    the newest weight version that any server can hold now, None where that is not known."""

    vocab_size: int
    tokens: int
    stop: Collection[str] = ()
    newest: Callable[[], int | None] = lambda: None

    @property
    def most_bytes(self) -> int:
        return _FRAME_BYTES + _TOKEN_BYTES * self.tokens


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole answer, or a streamed piece of one; lists are per token. `finish` comes with the last piece, and only that
    one says which token has which version (`spans`, as (version, tokens)); the others say the version at their sending."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish: Finish | None
    version: int
    spans: list[tuple[int, int]]


class AnsweredError(Exception):
    """An error that a server sent as an event of a stream."""

    def __init__(self, code: Any, message: Any) -> None:
        super().__init__(str(message)[:_SHOWN])
        self.status = code if isinstance(code, int) else None


def read_generated(raw: bytes, asked: Asked) -> Generated:
    """An answer to /generate. Raises InvalidAnswer, AnsweredError."""
    try:
        answer = _generated.decode(raw)
    except _BROKEN as error:
        raise InvalidAnswer(f"{error}: {raw[:_SHOWN]!r}") from error
    if answer.error is not None:
        raise AnsweredError(answer.error.code, answer.error.message)
    meta = answer.meta_info
    if meta is None:
        raise InvalidAnswer(f"no meta_info: {raw[:_SHOWN]!r}")
    entries = meta.output_token_logprobs or []
    token_ids = [entry[1] for entry in entries]
    logprobs = [entry[0] for entry in entries]
    if answer.output_ids is not None and answer.output_ids != token_ids:
        raise InvalidAnswer(f"{len(answer.output_ids)} output_ids and other log-probs, of {len(token_ids)} tokens")
    if token_ids:
        _check_tokens(token_ids, logprobs, asked)
    finish = meta.finish_reason
    if finish is not None and isinstance(finish.matched, str) and finish.matched not in asked.stop:
        # SGLang ends a response like this whose logits are NaN.
        raise InvalidAnswer(f"it stopped at the text {finish.matched[:_SHOWN]!r}, which is no stop text of the request")
    return Generated(
        token_ids,
        logprobs,
        answer.text or "",
        finish,
        _version(meta.weight_version, asked) if finish is None else -1,
        _spans(meta.weight_versions or [], asked),
    )


def read_scored(answer: Any, ids: list[int]) -> list[float]:
    """The log-prob of each of `ids` but the first, from an answer to /generate without new tokens. Raises InvalidAnswer."""
    entries = converted(answer, _Scored, "the scores").meta_info.input_token_logprobs
    if [entry[1] for entry in entries] != ids:
        raise InvalidAnswer(f"it scored {len(entries)} tokens, not the {len(ids)} that it was given")
    logprobs = [entry[0] for entry in entries[1:]]
    if None in logprobs:
        raise InvalidAnswer(f"token {logprobs.index(None) + 1} has no log-prob")
    _check_logprobs(logprobs)
    return logprobs


def converted(answer: Any, form: type[T], what: str) -> T:
    """A parsed answer as `form`, a type that msgspec knows; `what` says whose answer it is. Raises InvalidAnswer."""
    try:
        return msgspec.convert(answer, form)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidAnswer(f"{what}: {error}: {answer!r:.{_SHOWN}}") from error


async def read_bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises InvalidAnswer when it has more than `most` bytes, aiohttp.ClientError when the connection breaks."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            raise InvalidAnswer(f"it has more than {most} bytes, which is too long")
    return b"".join(chunks)


def _check_tokens(token_ids: list[int], logprobs: list[float], asked: Asked) -> None:
    if len(token_ids) > asked.tokens:
        raise InvalidAnswer(f"{len(token_ids)} tokens, and {asked.tokens} at most were asked for")
    if min(token_ids) < 0 or max(token_ids) >= asked.vocab_size:
        bad = next(i for i in token_ids if not 0 <= i < asked.vocab_size)
        raise InvalidAnswer(f"token id {bad} is outside the vocabulary [0, {asked.vocab_size})")
    _check_logprobs(logprobs)


def _check_logprobs(logprobs: list[float]) -> None:
    low, high = _LOGPROBS
    # Neither NaN nor infinity can be written in JSON.
    if min(logprobs) < low or max(logprobs) > high:
        bad = next(value for value in logprobs if not low <= value <= high)
        raise InvalidAnswer(f"the log-prob {bad:g} of a sampled token is outside [{low:g}, 0]")


def _spans(spans: list[_Span], asked: Asked) -> list[tuple[int, int]]:
    found, at = [], 0
    for span in spans:
        if span.start != at or span.end < span.start:
            raise InvalidAnswer(f"weight_versions overlap or have a gap at token {at}: {span.start} to {span.end}")
        found.append((_version(span.version, asked), span.end - span.start))
        at = span.end
    return found


def _version(value: str | int | None, asked: Asked) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= _VERSION_DIGITS):
        raise InvalidAnswer(
            f"weight version {text[:_SHOWN]!r} is not an integer of 0 or more; start the server with --weight-version 0"
        )
    version = int(text)
    newest = asked.newest()
    if newest is not None and version > newest:
        raise InvalidAnswer(f"weight version {version} does not exist yet; the newest is {newest}")
    return version
