"""Partial responses: what the requests of running samples have generated so far, by prompt, sample and turn.

A response grows request by request, and piece by piece where a request is streamed. It outlives the request: a retry,
or a resumed run, continues from it.

Invariants:

- `token_ids`, `logprobs` and `versions` of a `PartialResponse` have one entry per sampled token, in order, over all of
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

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from megasync.errors import InvalidAnswer
from megasync.serving.answers import GeneratedPiece
from megasync.trajectory import Partial

# Tokens per batch of saved responses: a message of a few megabytes, which the buffer records in a fraction of a second.
# A longer response is a batch of its own.
BATCH_TOKENS = 2**18

# Consecutive pieces with neither a token nor the end that make a stream invalid. SGLang sends none, except with
# `stream_interval: 1`, where a request may be reported for a batch that gave it nothing; the next one brings a token.
EMPTY_PIECES = 4


@dataclass(slots=True)
class PartialResponse:
    """One response while it is generated."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    # The text of each request that returned tokens.
    texts: list[str] = field(default_factory=list)
    # "stop" or "length" once the response is finished.
    finish_reason: str = "abort"
    # The `state` that was last saved.
    saved: tuple[int, str] = (0, "abort")
    # Called with all token ids whenever some were added.
    watch: Callable[[Sequence[int]], None] | None = None
    # Of the current request: the index of its first token, its token budget, and the version of its latest piece.
    _start: int = 0
    _budget: int = 0
    _version: int | None = None
    # Consecutive pieces without a token.
    _empty: int = 0

    @classmethod
    def from_saved(cls, partial: Partial) -> PartialResponse:
        """Restores a saved response, to be continued or, if it is finished, returned."""
        response = cls(
            partial.token_ids.tolist(),
            partial.logprobs.tolist(),
            list(partial.versions),
            [partial.text] if len(partial.token_ids) else [],
            partial.finish_reason,
        )
        response.saved = response.state
        return response

    def snapshot(self, request_digest: str) -> Partial:
        return Partial(
            request_digest,
            self.token_ids,
            self.logprobs,
            self.versions,
            self.finish_reason,
            "".join(self.texts),
        )

    @property
    def state(self) -> tuple[int, str]:
        """Number of tokens and finish reason, which change with every change of the response."""
        return len(self.token_ids), self.finish_reason

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def begin_request(self, budget: int, published: int | None = None) -> None:
        """Starts another request, for at most `budget` tokens. The text of one that returned no token is replaced.

        `published` is the version that every serving server holds at least. The tokens of the first piece get it until
        the server reports their versions, because they may be older than the piece's own version.
        """
        if not self.texts or len(self.token_ids) > self._start:
            self.texts.append("")
        self._start, self._budget, self._version, self._empty = len(self.token_ids), budget, published, 0

    def add(self, piece: GeneratedPiece) -> bool:
        """Appends a piece, or the whole answer, of the current request; True when it is the request's last piece.

        Raises InvalidAnswer, and appends nothing, for a piece that does not fit the request.
        """
        count = len(self.token_ids) - self._start + len(piece.token_ids)
        if count > self._budget:
            raise InvalidAnswer(f"{count} tokens, but at most {self._budget} were requested")
        if piece.finish is None:
            self._empty = 0 if piece.token_ids else self._empty + 1
            if self._empty >= EMPTY_PIECES:
                raise InvalidAnswer(
                    f"the stream does not end: {self._empty} pieces without a token after {count} tokens"
                )
            before, self._version = self._version, piece.version
            self.versions += [piece.version if before is None else before] * len(piece.token_ids)
        else:
            if count == 0 and piece.finish.type != "abort":
                raise InvalidAnswer(f"the answer finished ({piece.finish.type}) without a token")
            if sum(tokens for _, tokens in piece.spans) != count:
                raise InvalidAnswer(f"weight_versions {piece.spans} do not cover {count} tokens")
            # The server's own report for the whole request.
            self.versions[self._start :] = [version for version, tokens in piece.spans for _ in range(tokens)]
            self.finish_reason = piece.finish.type
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.texts[-1] += piece.text
        if self.watch is not None:
            self.watch(self.token_ids)
        return piece.finish is not None

    def discard_request(self) -> None:
        """Removes what the current request returned, after an invalid answer."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[self._start :]
        self.texts[-1] = ""
        self.finish_reason = "abort"

    def finish_if_stopped(self, stop_ids: frozenset[int], stop_texts: Sequence[str], *, trim: bool) -> bool:
        """Marks an aborted response as finished when its last token is a stop; returns whether it is finished.

        SGLang reports an abort that arrives in the very step that samples the stop, which hides the stop.
        """
        if len(self.token_ids) == self._start:
            return False
        # The server checks after each token, so a stop text within this request was completed by its last token.
        at = min((found for stop in stop_texts if (found := self.texts[-1].find(stop)) >= 0), default=-1)
        if at >= 0 and trim:
            self.texts[-1] = self.texts[-1][:at]
        if at >= 0 or self.token_ids[-1] in stop_ids:
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
            if (known := self._groups.get(uid, {}).get(key)) is None or known[1].saved == known[1].state:
                continue
            digest, response = known
            batch[uid, *key] = response.snapshot(digest)
            copied.append((response, response.state))
            tokens += len(response.token_ids)
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
        known = self._turns.get((self._sample, turn))
        if known is None or known[0] != digest:
            known = self._turns[self._sample, turn] = (digest, PartialResponse())
        return known[1]

    def forget_finished(self) -> None:
        """Removes finished responses, after the sample itself failed: the same answers would make it fail again."""
        for key, (_, response) in list(self._turns.items()):
            if key[0] == self._sample and response.finished:
                del self._turns[key]


def request_digest(prompt_ids: Sequence[int], params: Mapping[str, Any]) -> str:
    """Digest of everything that a response depends on except its seed, including token budget and stop texts."""
    digest = hashlib.sha256(array("q", prompt_ids).tobytes())
    digest.update(orjson.dumps(dict(params), option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()[:32]
