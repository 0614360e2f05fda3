"""Partial responses: what the requests of running samples have generated so far, by prompt, sample and turn.

A response grows request by request, and piece by piece where a request is streamed. It outlives the request: a retry,
or a resumed run, continues from it.

Invariants:

- Ids, `logprobs` and `versions` of a `PartialResponse` have one entry per sampled token, in order, over all of
  its requests; `add` rejects an answer that would break this. So when a request is cut, the tokens that are here can be
  sent again as part of the prompt.
- A finished response is kept as finished and returned as it is. Nothing is ever sampled after its last token, because
  that would be a different answer.
- A response is reused only for the identical request (`request_digest`).

A server reports the version of each token only at the end of a request (`weight_versions`). Until then each piece
carries the version at the time it was sent, so the tokens of a piece that straddles a weight update get the older
version. If a server dies mid-request, its last tokens may be labelled one version too old, never too new.

A stream that continues without tokens is rejected. A server sends a piece when it has sampled something or when the
request ends, and nothing while it is paused, has retracted the request or is busy with a prefill.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from megasync.errors import InvalidAnswer
from megasync.rollout.tokens import Tokens
from megasync.serving.answers import GeneratedPiece, PromptScores, TopTokens
from megasync.trajectory import Partial, Support
from megasync.trajectory.runs import FloatArray, IntArray, Runs

# Tokens per batch of saved responses: a message of a few megabytes, which the buffer records in a fraction of a second.
# A longer response is a batch of its own.
BATCH_TOKENS = 2**18

# Consecutive pieces with neither a token nor the end that make a stream invalid. SGLang sends none, except with
# `stream_interval: 1`, where a request may be reported for a batch that gave it nothing; the next one brings a token.
EMPTY_PIECES = 4


class PartialResponse:
    """One response while it is generated. Its tokens follow those of its prompt, in the array of the conversation.

    `texts` has the text of each request that returned tokens. `finish_reason` is "stop" or "length" once the response
    is finished. `watch` is called with all token ids whenever some were added.
    """

    __slots__ = (
        "_budget",
        "_empty",
        "_logprobs",
        "_prompt",
        "_routed",
        "_spans",
        "_start",
        "_start_kept",
        "_start_span",
        "_start_top",
        "_support",
        "_top",
        "_version",
        "cached",
        "finish_reason",
        "saved",
        "scores",
        "texts",
        "tokens",
        "watch",
    )

    def __init__(
        self,
        token_ids: Sequence[int] | IntArray = (),
        logprobs: Sequence[float] | FloatArray = (),
        versions: Runs | Sequence[int] = (),
        texts: Sequence[str] = (),
        finish_reason: str = "abort",
        support: Support | None = None,
    ) -> None:
        # The ids of prompt and response, and the length of the prompt.
        self.tokens = Tokens.of(token_ids)
        self._prompt = 0
        self._logprobs = array("f", logprobs)
        # (version, number of tokens), in the order of the tokens.
        self._spans = Runs.of(versions).spans() if len(versions) else []
        # The support of each token, as sizes and ids; None if sampling is not truncated.
        self._support = None if support is None else (array("i", support.sizes), array("i", support.ids))
        # The likeliest tokens at each token, piece by piece, if they are requested.
        self._top: list[TopTokens] = []
        # What a server said of the prompt, if it was asked; and how many of its tokens the first one had computed.
        self.scores: PromptScores | None = None
        self.cached: int | None = None
        self.texts = list(texts)
        self.finish_reason = finish_reason
        # The `state` that was last saved.
        self.saved: tuple[int, str] = (0, "abort")
        self.watch: Callable[[IntArray], None] | None = None
        # Of the current request: the indices of its first token, of its first span, of its first support's first id and
        # of its first likeliest tokens, its token budget, the version of its latest piece, and how many consecutive
        # pieces had no token.
        self._start = self._start_span = self._start_kept = self._start_top = self._budget = self._empty = 0
        # The positions whose routes were known before the current request.
        self._routed = 0
        self._version: int | None = None

    @classmethod
    def from_saved(cls, partial: Partial) -> PartialResponse:
        """Restores a saved response, to be continued or, if it is finished, returned."""
        texts = [partial.text] if len(partial.token_ids) else []
        response = cls(
            partial.token_ids, partial.logprobs, partial.versions, texts, partial.finish_reason, partial.support
        )
        response.saved = response.state
        return response

    def follow(self, prompt: Tokens) -> None:
        """Puts the response behind its prompt, the same one in every attempt."""
        self.tokens, self._prompt = prompt + self.token_ids if len(self) else prompt, len(prompt)

    def snapshot(self, request_digest: str) -> Partial:
        """The response as it is now."""
        text = "".join(self.texts)
        return Partial(
            request_digest,
            self.token_ids,
            np.array(self._logprobs),
            self.versions,
            self.finish_reason,
            text,
            self.support,
        )

    def __len__(self) -> int:
        """The number of sampled tokens."""
        return len(self.tokens) - self._prompt

    @property
    def token_ids(self) -> IntArray:
        """The ids of the sampled tokens, a read-only view."""
        return self.tokens.array[self._prompt :]

    @property
    def logprobs(self) -> FloatArray:
        """One log-prob per sampled token: a read-only view, while which exists nothing can be added."""
        if not self._logprobs:
            return np.empty(0, np.float32)
        view = np.frombuffer(self._logprobs, np.float32)
        view.flags.writeable = False
        return view

    @property
    def packed_logprobs(self) -> array[float]:
        """One float32 per sampled token. The response's own, which takes less memory than a view of it."""
        return self._logprobs

    @property
    def support(self) -> Support | None:
        """A copy of the support of each token; None if sampling is not truncated."""
        return Support(*map(np.array, self._support)) if self._support and self._support[0] else None

    @property
    def top(self) -> TopTokens | None:
        """The likeliest tokens at each token; None unless they were requested."""
        if not self._top:
            return None
        ids, logprobs = (
            np.concatenate(parts) for parts in zip(*((each.ids, each.logprobs) for each in self._top), strict=True)
        )
        return TopTokens(ids, logprobs)

    @property
    def versions(self) -> Runs:
        """The version of each token."""
        return Runs.of_spans(self._spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version, number of tokens), in the order of the tokens. Neighbours differ, and none is empty."""
        return self._spans if len(self._spans) == 1 else self.versions.spans()

    @property
    def state(self) -> tuple[int, str]:
        """Number of tokens and finish reason, which change with every change of the response."""
        return len(self), self.finish_reason

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def first_requested(self) -> int:
        """The first position whose routes the current request asks for: the first that are unknown."""
        return min(self._routed, self._prompt + self._start)

    def begin_request(self, budget: int, published: int | None = None) -> None:
        """Starts another request, for at most `budget` tokens. The text of one that returned no token is replaced.

        `published` is the version that every serving server holds at least. The tokens of the first piece get it until
        the server reports their versions, because they may be older than the piece's own version.
        """
        if not self.texts or len(self) > self._start:
            self.texts.append("")
        self._start, self._start_span, self._routed = len(self), len(self._spans), self.tokens.routed
        self._start_kept, self._start_top = len(self._support[1]) if self._support else 0, len(self._top)
        self._budget, self._version, self._empty = budget, published, 0

    def add(self, piece: GeneratedPiece) -> bool:
        """Appends a piece, or the whole answer, of the current request; True when it is the request's last piece.

        Raises InvalidAnswer, and appends nothing, for a piece that does not fit the request.
        """
        added = len(piece.token_ids)
        count = len(self) - self._start + added
        if count > self._budget:
            raise InvalidAnswer(f"{count} tokens, but at most {self._budget} were requested")
        if piece.finish is None:
            self._empty = 0 if added else self._empty + 1
            if self._empty >= EMPTY_PIECES:
                raise InvalidAnswer(
                    f"the stream does not end: {self._empty} pieces without a token after {count} tokens"
                )
            before, self._version = self._version, piece.version
            if added:
                self._spans.append((piece.version if before is None else before, added))
        else:
            if count == 0 and piece.finish.type != "abort":
                raise InvalidAnswer(f"the answer finished ({piece.finish.type}) without a token")
            if sum(tokens for _, tokens in piece.spans) != count:
                raise InvalidAnswer(f"weight_versions {piece.spans} do not cover {count} tokens")
            routed = max(0, self._prompt + self._start + count - 1 - self.first_requested)
            if piece.routes is not None and len(piece.routes) != routed:
                raise InvalidAnswer(f"it has routes of {len(piece.routes)} positions, and {routed} were requested")
            # The server's own report for the whole request.
            self._spans[self._start_span :] = piece.spans
            self.finish_reason = piece.finish.type
        self._logprobs.extend(piece.logprobs)
        if piece.support is not None:
            self._support = self._support or (array("i"), array("i"))
            self._support[0].extend(piece.support.sizes)
            self._support[1].extend(piece.support.ids)
        if piece.top is not None:
            self._top.append(piece.top)
        if self.cached is None:
            self.cached = piece.cached
        self.tokens = self.tokens + piece.token_ids
        if piece.routes is not None:
            self.tokens.add_routes(self.first_requested, piece.routes)
        self.texts[-1] += piece.text
        if self.watch is not None:
            self.watch(self.token_ids)
        return piece.finish is not None

    def discard_request(self) -> None:
        """Removes what the current request returned, after an invalid answer."""
        self.tokens.forget_routes(self._routed)
        self.tokens = self.tokens.first(self._prompt + self._start)
        del self._logprobs[self._start :], self._spans[self._start_span :]
        del self._top[self._start_top :]
        if self._support:
            del self._support[0][self._start :], self._support[1][self._start_kept :]
        self.texts[-1] = ""
        self.finish_reason = "abort"

    def finish_if_stopped(self, stop_ids: frozenset[int], stop_texts: Sequence[str], *, trim: bool) -> bool:
        """Marks an aborted response as finished when its last token is a stop; returns whether it is finished.

        SGLang reports an abort that arrives in the very step that samples the stop, which hides the stop.
        """
        if len(self) == self._start:
            return False
        # The server checks after each token, so a stop text within this request was completed by its last token.
        at = min((position for stop in stop_texts if (position := self.texts[-1].find(stop)) >= 0), default=-1)
        if at >= 0 and trim:
            self.texts[-1] = self.texts[-1][:at]
        if at >= 0 or self.tokens[-1] in stop_ids:
            self.finish_reason = "stop"
        return self.finished


# Request digest and response, by (sample, turn).
_Turns = dict[tuple[int, int], tuple[str, PartialResponse]]


class PartialResponses:
    """The partial responses of all groups that are being generated."""

    def __init__(self) -> None:
        self._groups: dict[str, _Turns] = {}

    def restore(self, uid: str, saved: Mapping[tuple[int, int], Partial]) -> None:
        """Restores the saved responses of a group, by (sample, turn)."""
        for key, partial in saved.items():
            self._groups.setdefault(uid, {})[key] = (partial.request_digest, PartialResponse.from_saved(partial))

    def sample(self, uid: str, index: int) -> SampleResponses:
        return SampleResponses(self._groups.setdefault(uid, {}), index)

    def forget(self, uid: str) -> None:
        """Removes a group that is complete or dropped."""
        self._groups.pop(uid, None)

    def unsaved(self) -> Iterator[dict[tuple[str, int, int], Partial]]:
        """Copies of the responses that changed since they were saved, by (uid, sample, turn), in batches.

        Requesting the next batch confirms that the previous one is saved; the next call returns an unconfirmed batch
        again. Groups may come and go between two batches.
        """
        batch: dict[tuple[str, int, int], Partial] = {}
        copied: list[tuple[PartialResponse, tuple[int, str]]] = []
        tokens = 0
        for uid, key in [(uid, key) for uid, turns in self._groups.items() for key in turns]:
            if (previous := self._groups.get(uid, {}).get(key)) is None or previous[1].saved == previous[1].state:
                continue
            digest, response = previous
            batch[uid, *key] = response.snapshot(digest)
            copied.append((response, response.state))
            tokens += len(response)
            if tokens >= BATCH_TOKENS:
                yield batch
                _mark_saved(copied)
                batch, copied, tokens = {}, [], 0
        if batch:
            yield batch
            _mark_saved(copied)


def _mark_saved(copied: Sequence[tuple[PartialResponse, tuple[int, str]]]) -> None:
    for response, state in copied:
        response.saved = state


class SampleResponses:
    """The partial responses of one sample, by turn."""

    def __init__(self, turns: _Turns, sample: int) -> None:
        self._turns = turns
        self._sample = sample

    def begin(self, turn: int, digest: str) -> PartialResponse:
        """The response to the request of this digest so far; an empty one if there is none or the request differs."""
        entry = self._turns.get((self._sample, turn))
        if entry is None or entry[0] != digest:
            entry = self._turns[self._sample, turn] = (digest, PartialResponse())
        return entry[1]

    def forget_finished(self) -> None:
        """Removes finished responses, after the sample itself failed: the same answers would make it fail again."""
        for key, (_, response) in list(self._turns.items()):
            if key[0] == self._sample and response.finished:
                del self._turns[key]


def request_digest(prompt: Tokens, params: Mapping[str, Any]) -> str:
    """Digest of everything that a response depends on except its seed, including token budget and stop texts."""
    return prompt.digest(orjson.dumps(dict(params), option=orjson.OPT_SORT_KEYS))[:32]
