"""Parses and validates servers' answers: typed, bounded in size, and within what was requested.

Invariant: no part of an answer is used before all of it is validated. An invalid answer leaves this module only as
InvalidAnswer, which callers treat as a failure of that server: the request is repeated, and the answer never reaches
training. `read_generated`, `read_scored` and `parse_as` guarantee this. msgspec checks each token while it parses;
`min`, `max` and `==` check all of them. Tokens leave this module as arrays.

What is made for each request is a named tuple: a frozen dataclass of as many fields takes seven times as long.
"""

from __future__ import annotations

import binascii
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from megasync.concurrency.first_use import prepared
from megasync.errors import InvalidAnswer, raised_as
from megasync.layout.routes import RouteArray, RouteFormat
from megasync.trajectory import Support
from megasync.trajectory.runs import FloatArray, IntArray

T = TypeVar("T")

# No rounding error explains a log-prob outside: above is a probability over 1, below a token that cannot be sampled.
_LOGPROBS = (-1000.0, 1e-3)
# A version has at most this many digits.
_VERSION_DIGITS = 15
# Bytes of an answer: its frame; and per token its log-prob, its text, and its share of a streamed piece's frame.
_FRAME_BYTES = 1 << 20
_TOKEN_BYTES = 4096
# Bytes of an id and its comma in JSON, and as much again.
_ID_BYTES = 24
# Bytes of an id with its log-prob, and as much again.
_CELL_BYTES = 96
_SHOWN = 300
# The content type of a streamed answer, the prefix of each event, and the event that ends the stream.
EVENT_STREAM = "text/event-stream"
_EVENT_PREFIX, _LAST_EVENT = b"data:", b"[DONE]"

_Entry = tuple[float, int, Any]
# Of the positions of a prompt, the first has nothing.
_Row = list[_Entry] | None


@prepared
class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


@prepared
class Finish(msgspec.Struct):
    """Why a response ended."""

    type: Literal["stop", "length", "abort"]
    # The token id or the text that caused a "stop".
    matched: Any = None
    status_code: int | None = None
    message: Any = None


@prepared
class _Meta(msgspec.Struct):
    finish_reason: Finish | None
    weight_version: str | int | None = None
    output_token_logprobs: list[_Entry] | None = None
    # The ids that truncated sampling left at each token, and the log-prob of the token among them.
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None
    # The likeliest tokens at each token.
    output_top_logprobs: list[list[_Entry]] | None = None
    # The name of the adapter that sampled the tokens.
    adapter: str | None = None
    # Of the prompt, those whose keys and values were there already.
    cached_tokens: int | None = None


@prepared
class _Error(msgspec.Struct):
    code: Any = None
    message: Any = None


@prepared
class _Generated(msgspec.Struct):
    meta_info: _Meta | None = None
    text: str | None = None
    output_ids: tuple[int, ...] | None = None
    error: _Error | None = None
    # Which of several responses this is a piece of.
    index: int = 0


@prepared
class _ScoredMeta(msgspec.Struct):
    # The first token has no log-prob.
    input_token_logprobs: list[tuple[float | None, int, Any]]


@prepared
class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


@prepared
class _PromptMeta(_ScoredMeta):
    input_token_ids_logprobs: list[_Row] | None = None
    # Base64 of float32 and of int32, [positions, top].
    input_top_logprobs_val_flat_b64: str = ""
    input_top_logprobs_idx_flat_b64: str = ""


@prepared
class _Prompt(msgspec.Struct):
    meta_info: _PromptMeta


_generated = msgspec.json.Decoder(_Generated)
_prompt = msgspec.json.Decoder(_Prompt)
_several = msgspec.json.Decoder(list[msgspec.Raw])
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens at some positions and their log-probs, both [positions, count], likeliest first."""

    ids: IntArray
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """The log-probs that a request asks for of a prompt, at its positions from ``first`` on, at temperature 1.

    They are those of the prompt's own tokens, of the ``top`` likeliest ones, and of the ``named`` ids. ``first`` is at
    least 1: what follows nothing has no log-prob. ``top`` is at most the size of the vocabulary.
    """

    first: int
    top: int = 0
    named: tuple[int, ...] = ()

    def most_bytes(self, prompt: int) -> int:
        """The size of the answer about a prompt of so many tokens, at most."""
        return (prompt - self.first + 1) * (_CELL_BYTES * (1 + len(self.named)) + 12 * self.top)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The answer to a `PromptQuestion`: the log-probs [positions], the ``top`` ones, and the ``named`` ones.

    ``named`` is [positions, named ids].
    """

    logprobs: FloatArray
    top: TopTokens | None = None
    named: FloatArray | None = None


class AnswerLimits(NamedTuple):
    """Bounds of the answer to one request.

    `tokens` is the maximum number of tokens. `newest` is called for each piece and returns the newest weight version
    that any server can hold, or None where it is unknown. `oldest` is the version that every server held when the
    request was sent: an older one is that of a process that no weight sync has reached. `routes` is the format of
    routes, if they were requested, of at most `positions` positions. `support` is about how many tokens a token's
    support has at most; 0 if none was requested. `adapter` is the one that the request names, and `top` the number of
    likeliest tokens that are requested at each token. `responses` counts those that were requested, each of them within
    these bounds.
    """

    vocab_size: int
    tokens: int
    stop: Collection[str] = ()
    newest: Callable[[], int | None] = lambda: None
    routes: RouteFormat | None = None
    positions: int = 0
    support: int = 0
    oldest: int = 0
    adapter: str | None = None
    top: int = 0
    responses: int = 1

    @property
    def most_bytes(self) -> int:
        routes = 0 if self.routes is None else self.routes.text_bytes * self.positions
        token = _TOKEN_BYTES + _ID_BYTES * self.support + _CELL_BYTES * self.top
        return self.responses * (_FRAME_BYTES + token * self.tokens + routes)


class GeneratedPiece(NamedTuple):
    """A whole answer, or one piece of a streamed answer: per token its id (int32) and its log-prob (float32).

    Only the last piece has a `finish`, and only it tells which token has which version: `spans` are (version, tokens).
    The other pieces carry the version at the time of sending. `routes` are those of the requested positions, if the
    last piece has them. `support` is that of each token, over which its log-prob is, if it was requested. `top` are the
    likeliest tokens at each token, likewise. `cached` counts the prompt's tokens that the server had computed before.
    `number` is that of the response that it belongs to, among several.
    """

    token_ids: array[int]
    logprobs: array[float]
    text: str
    finish: Finish | None
    version: int
    spans: list[tuple[int, int]]
    routes: RouteArray | None = None
    support: Support | None = None
    top: TopTokens | None = None
    cached: int = 0
    number: int = 0


class StreamedError(Exception):
    """An error that a server sent as an event of a stream, with its HTTP status if it named one."""

    def __init__(self, code: Any, message: Any) -> None:
        super().__init__(str(message)[:_SHOWN])
        self.status = code if isinstance(code, int) else None


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except _BROKEN as error:
        raise InvalidAnswer(f"{error}: {raw[:_SHOWN]!r}") from error


def split_answers(raw: bytes, limits: AnswerLimits) -> list[bytes]:
    """The answers to a request for several responses, or the only one. Raises InvalidAnswer, StreamedError."""
    if limits.responses == 1:
        return [raw]
    if not raw.lstrip().startswith(b"["):
        # An error of the whole request.
        read_generated(raw, limits)
        raise InvalidAnswer(f"one answer, and {limits.responses} were requested")
    answers = [bytes(answer) for answer in _decoded(_several, raw)]
    if len(answers) != limits.responses:
        raise InvalidAnswer(f"{len(answers)} answers, and {limits.responses} were requested")
    return answers


def read_generated(raw: bytes, limits: AnswerLimits) -> GeneratedPiece:
    """Parses an answer to /generate, or one piece of it. Raises InvalidAnswer, StreamedError."""
    answer = _decoded(_generated, raw)
    if answer.error is not None:
        raise StreamedError(answer.error.code, answer.error.message)
    meta = answer.meta_info
    if meta is None:
        raise InvalidAnswer(f"no meta_info: {raw[:_SHOWN]!r}")
    finish = meta.finish_reason
    if finish is not None and finish.status_code:
        # Without streaming, the HTTP status would report this error. It comes with a token that nothing sampled.
        raise StreamedError(finish.status_code, finish.message)
    if limits.adapter is not None and meta.adapter != limits.adapter:
        raise InvalidAnswer(f"the adapter {meta.adapter!r:.{_SHOWN}} sampled it, and {limits.adapter!r} was requested")
    logprobs, token_ids, _ = (
        zip(*meta.output_token_logprobs, strict=True) if meta.output_token_logprobs else ((), (), ())
    )
    if answer.output_ids is not None and answer.output_ids != token_ids:
        raise InvalidAnswer(f"{len(answer.output_ids)} output_ids and other log-probs, of {len(token_ids)} tokens")
    support = None
    if limits.support and token_ids:
        logprobs = meta.output_token_sampling_logprobs or ()
        support = _support(meta.output_token_sampling_mask or (), logprobs, token_ids, limits)
    if token_ids:
        _check_tokens(token_ids, limits)
        _check_logprobs(logprobs)
    if finish is not None and isinstance(finish.matched, str) and finish.matched not in limits.stop:
        # SGLang ends a response in this way when its logits are NaN.
        raise InvalidAnswer(
            f"it stopped at the text {finish.matched[:_SHOWN]!r}, which is not a stop text of the request"
        )
    return GeneratedPiece(
        array("i", token_ids),
        array("f", logprobs),
        answer.text or "",
        finish,
        _recent(meta.weight_version, limits) if finish is None else -1,
        _spans(meta.weight_versions or [], limits),
        None if meta.routed_experts is None else _routes(meta.routed_experts, limits),
        support,
        _top(meta.output_top_logprobs or (), len(token_ids), limits) if limits.top and token_ids else None,
        meta.cached_tokens or 0,
        answer.index,
    )


def read_scored(answer: Any, ids: list[int]) -> list[float]:
    """Log-probs of `ids` but the first, from an answer to /generate without new tokens. Raises InvalidAnswer."""
    entries = parse_as(answer, _Scored, "the scores").meta_info.input_token_logprobs
    # SGLang names the last token of the vocabulary 0, which then is the largest of these. Its log-prob is right.
    last = max(ids)
    reported = [
        last if entry[1] == 0 and at < len(ids) and ids[at] == last else entry[1] for at, entry in enumerate(entries)
    ]
    if reported != ids:
        raise InvalidAnswer(f"it scored {len(entries)} tokens, not the {len(ids)} that it was given")
    logprobs = [logprob for logprob, _, _ in entries[1:] if logprob is not None]
    if len(logprobs) < len(entries) - 1:
        missing = next(i for i, entry in enumerate(entries[1:], 1) if entry[0] is None)
        raise InvalidAnswer(f"token {missing} has no log-prob")
    _check_logprobs(logprobs)
    return logprobs


def read_prompt(raw: bytes, question: PromptQuestion, ids: IntArray, limits: AnswerLimits) -> PromptScores:
    """Parses what an answer to /generate says of its prompt, ``ids``. Raises InvalidAnswer."""
    meta = _decoded(_prompt, raw).meta_info
    asked = ids[question.first :]
    # The first entry is that of the position before, without a log-prob.
    entries = meta.input_token_logprobs[1:]
    values, reported, _ = zip(*entries, strict=True) if entries else ((), (), ())
    # SGLang names the last token of the vocabulary 0. Its log-prob is right.
    expected = np.where((np.array(reported) == 0) & (asked == limits.vocab_size - 1), 0, asked) if reported else asked
    if not np.array_equal(reported, expected):
        raise InvalidAnswer(f"it scored {len(entries)} tokens, not the {asked.size} that were asked for")
    logprobs = _checked_array(values, asked.size)
    top = None
    if question.top:
        shape = asked.size, question.top
        top_ids = _flat(meta.input_top_logprobs_idx_flat_b64, np.int32, shape)
        _check_ids(top_ids, limits)
        top = TopTokens(top_ids, _checked_array(_flat(meta.input_top_logprobs_val_flat_b64, np.float32, shape), shape))
    named = None
    if question.named:
        rows = (meta.input_token_ids_logprobs or ())[1:]
        found, values = _cells(rows, (asked.size, len(question.named)))
        if (found != question.named).any():
            raise InvalidAnswer("it has log-probs of other ids than were asked for")
        named = _checked_array(values, values.shape)
    return PromptScores(logprobs, top, named)


def parse_as(answer: Any, form: type[T], what: str) -> T:
    """Converts a JSON answer to `form`, a msgspec type; `what` names the answer in errors. Raises InvalidAnswer."""
    try:
        return msgspec.convert(answer, form)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidAnswer(f"{what}: {error}: {answer!r:.{_SHOWN}}") from error


async def read_bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises InvalidAnswer for more than `most` bytes, aiohttp.ClientError when the connection breaks."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > most:
            raise InvalidAnswer(f"it has more than {most} bytes, which is too long")
    return b"".join(chunks)


async def events(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """Yields the JSON of each server-sent event. Only its last object tells whether the stream is complete.

    Raises aiohttp.ClientError if the connection breaks, and InvalidAnswer for another content type or a stream of more
    than `most` bytes.
    """
    if response.content_type != EVENT_STREAM:
        raise InvalidAnswer(f"its content type is {response.content_type!r:.100}, not {EVENT_STREAM}")
    rest, size = b"", 0
    async for data in response.content.iter_any():
        size += len(data)
        if size > most:
            raise InvalidAnswer(f"its event stream is longer than {most} bytes")
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            content = event.removeprefix(_EVENT_PREFIX).strip()
            if content != _LAST_EVENT:
                yield content


def _check_tokens(token_ids: Sequence[int], limits: AnswerLimits) -> None:
    if len(token_ids) > limits.tokens:
        raise InvalidAnswer(f"{len(token_ids)} tokens, and at most {limits.tokens} were requested")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        bad = next(i for i in token_ids if not 0 <= i < limits.vocab_size)
        raise InvalidAnswer(f"token id {bad} is outside the vocabulary [0, {limits.vocab_size})")


def _check_logprobs(logprobs: Sequence[float]) -> None:
    low, high = _LOGPROBS
    # JSON has neither NaN nor infinity.
    if min(logprobs) < low or max(logprobs) > high:
        bad = next(value for value in logprobs if not low <= value <= high)
        raise InvalidAnswer(f"the log-prob {bad:g} of a sampled token is outside [{low:g}, 0]")


def _checked_array(values: Any, shape: int | tuple[int, ...]) -> FloatArray:
    """Log-probs of any tokens, which may be smaller than those of sampled ones."""
    with raised_as(InvalidAnswer, f"not log-probs of {shape} tokens", of=(TypeError, ValueError)):
        array = np.asarray(values, np.float32).reshape(shape)
    if not (np.isfinite(array) & (array <= _LOGPROBS[1])).all():
        raise InvalidAnswer(f"a log-prob is not a finite number of at most 0: {array.ravel()[:8]}")
    return array


def _check_ids(ids: IntArray, limits: AnswerLimits) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < limits.vocab_size:
        raise InvalidAnswer(
            f"token ids between {ids.min()} and {ids.max()} leave the vocabulary [0, {limits.vocab_size})"
        )


def _flat(text: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    with raised_as(InvalidAnswer, f"not the {shape} likeliest tokens that were requested", of=ValueError):
        return np.frombuffer(binascii.a2b_base64(text, strict_mode=True), dtype).reshape(shape)


def _cells(rows: Sequence[_Row], shape: tuple[int, int]) -> tuple[IntArray, FloatArray]:
    """Ids and log-probs of rows of entries, both of this shape."""
    if len(rows) != shape[0] or any(len(row or ()) != shape[1] for row in rows):
        raise InvalidAnswer(f"it has log-probs of several tokens at {len(rows)} positions, not {shape}")
    cells = list(chain.from_iterable(row for row in rows if row is not None))
    values, ids, _ = zip(*cells, strict=True) if cells else ((), (), ())
    return np.array(ids, np.int32).reshape(shape), np.array(values, np.float32).reshape(shape)


def _top(rows: Sequence[list[_Entry]], tokens: int, limits: AnswerLimits) -> TopTokens:
    ids, logprobs = _cells(rows, (tokens, limits.top))
    _check_ids(ids, limits)
    return TopTokens(ids, _checked_array(logprobs, logprobs.shape))


def _routes(text: str, limits: AnswerLimits) -> RouteArray:
    if limits.routes is None:
        raise InvalidAnswer("it has routes, which were not requested")
    with raised_as(InvalidAnswer, "its routes are invalid", of=ValueError):
        routes = limits.routes.parse(binascii.a2b_base64(text, strict_mode=True))
    if len(routes) > limits.positions:
        raise InvalidAnswer(f"it has routes of {len(routes)} positions, and at most {limits.positions} were requested")
    return routes


def _support(
    masks: Sequence[list[int]], logprobs: Sequence[float], token_ids: Sequence[int], limits: AnswerLimits
) -> Support:
    if not len(masks) == len(logprobs) == len(token_ids):
        raise InvalidAnswer(
            f"it has sampling masks of {len(masks)} tokens and log-probs within them of {len(logprobs)}, not of "
            f"{len(token_ids)}; start the server with megasync's plugin, or sample from the full distribution "
            f"(rollout.sampling.top_k=-1, top_p=1 and min_p=0)"
        )
    for token, mask in zip(token_ids, masks, strict=True):
        if token not in mask or len(set(mask)) < len(mask):
            raise InvalidAnswer(f"the sampling mask {mask!r:.{_SHOWN}} of token {token} lacks it, or names one twice")
        if min(mask) < 0 or max(mask) >= limits.vocab_size:
            raise InvalidAnswer(
                f"the sampling mask {mask!r:.{_SHOWN}} is outside the vocabulary [0, {limits.vocab_size})"
            )
    return Support.of(masks)


def _spans(spans: list[_Span], limits: AnswerLimits) -> list[tuple[int, int]]:
    lengths: list[tuple[int, int]] = []
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start:
            raise InvalidAnswer(f"weight_versions overlap or have a gap at token {at}: {span.start} to {span.end}")
        lengths.append((_recent(span.version, limits), span.end - span.start))
        at = span.end
    return lengths


def _recent(value: str | int | None, limits: AnswerLimits) -> int:
    """A weight version that the server can hold now."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= _VERSION_DIGITS):
        raise InvalidAnswer(
            f"weight version {text[:_SHOWN]!r} is not an integer of 0 or more; start the server with --weight-version 0"
        )
    version = int(text)
    newest = limits.newest()
    if newest is not None and version > newest:
        raise InvalidAnswer(f"weight version {version} does not exist yet; the newest is {newest}")
    if version < limits.oldest:
        raise InvalidAnswer(
            f"weight version {version} is older than {limits.oldest}, which every server holds: it has started again, "
            f"and waits for a weight sync"
        )
    return version
