"""A generation while it grows: part by part, as requests for it end, and piece by piece where they are streamed.

Invariant: `token_ids`, `logprobs` and `versions` have one entry per sampled token, in order, over all parts; `add` refuses
an answer that has not. So whenever a part breaks off, what is here can be sent again as part of the prompt. What is
`finished` never is: sampling behind the last token of an answer would be another answer.

A server says which token has which version only with the end of a request (`weight_versions`). Until then each piece
carries the version at its sending, so the tokens of a piece that straddles an update are given the version before it:
if a server dies mid-request, its last tokens may be labelled one version too old, never too new.

A stream that goes on without tokens is refused: a server sends a piece when it has sampled something or when the request
ends, and nothing at all while it is paused, has retracted the request or is busy with a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megasync.errors import InvalidAnswer
from megasync.serving.answers import Generated
from megasync.trajectory import Partial

# Pieces in a row that bring neither a token nor the end, with which a stream is refused. SGLang sends none, except with
# `stream_interval: 1`, where a request may be reported for a batch that brought it nothing; the next one brings a token.
EMPTY_PIECES = 4


@dataclass(slots=True)
class Parts:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # "stop" or "length" of a response that is complete.
    finish_reason: str = "abort"
    # What of it was saved: tokens, and `finish_reason`.
    saved: tuple[int, str] = (0, "abort")
    # Told all token ids whenever there are more of them.
    watch: Callable[[Sequence[int]], None] | None = None
    # Where the part that is growing began, the most tokens that it may have, and the version of its last piece.
    _start: int = 0
    _room: int = 0
    _version: int | None = None
    # Pieces in a row that brought nothing.
    _empty: int = 0

    @classmethod
    def of(cls, partial: Partial) -> Parts:
        """A generation that goes on from what was saved of it, or is complete as it was saved."""
        parts = cls(
            list(partial.token_ids),
            list(partial.logprobs),
            list(partial.versions),
            [partial.text] if partial.token_ids else [],
            partial.finish_reason,
        )
        parts.saved = parts.state
        return parts

    def partial(self, request_digest: str) -> Partial:
        """A copy of what is there now."""
        return Partial(
            request_digest,
            list(self.token_ids),
            list(self.logprobs),
            list(self.versions),
            self.finish_reason,
            "".join(self.texts),
        )

    @property
    def state(self) -> tuple[int, str]:
        return len(self.token_ids), self.finish_reason

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def begin(self, room: int, published: int | None = None) -> None:
        """The next piece belongs to another request, for at most `room` tokens; one that brought nothing is no part.

        `published` is the version that every serving server has at least: until the server's own account is there, it is
        that of the first piece, whose tokens may be older than its sending.
        """
        if not self.texts or len(self.token_ids) > self._start:
            self.texts.append("")
        self._start, self._room, self._version, self._empty = len(self.token_ids), room, published, 0

    def add(self, piece: Generated) -> bool:
        """Takes a piece, or the whole answer, of the request that is growing; True when it is the request's last one.

        Raises InvalidAnswer, and then takes nothing, for one that does not fit those before it.
        """
        count = len(self.token_ids) - self._start + len(piece.token_ids)
        if count > self._room:
            raise InvalidAnswer(f"{count} tokens, and {self._room} at most were asked for")
        if piece.finish is None:
            self._empty = 0 if piece.token_ids else self._empty + 1
            if self._empty >= EMPTY_PIECES:
                raise InvalidAnswer(
                    f"its stream does not end: {self._empty} pieces without a token after {count} tokens"
                )
            before, self._version = self._version, piece.version
            self.versions += [piece.version if before is None else before] * len(piece.token_ids)
        else:
            if count == 0 and piece.finish.type != "abort":
                raise InvalidAnswer(f"it ended ({piece.finish.type}) without a token")
            if sum(tokens for _, tokens in piece.spans) != count:
                raise InvalidAnswer(f"weight_versions {piece.spans} do not cover {count} tokens")
            # The server's own account of the whole request.
            self.versions[self._start :] = [version for version, tokens in piece.spans for _ in range(tokens)]
            self.finish_reason = piece.finish.type
        self.logprobs += piece.logprobs
        self.token_ids += piece.token_ids
        self.texts[-1] += piece.text
        if self.watch is not None:
            self.watch(self.token_ids)
        return piece.finish is not None

    def discard(self) -> None:
        """Forgets the request that is growing: its server said something that makes no sense."""
        for values in (self.token_ids, self.logprobs, self.versions):
            del values[self._start :]
        self.texts[-1] = ""
        self.finish_reason = "abort"

    def ends_at(self, stop_ids: frozenset[int], stop_texts: Sequence[str], *, trim: bool) -> bool:
        """Whether the last token ended the answer although its request was aborted; then it is finished.

        An abort that reaches a server during the very step that samples the end hides it: SGLang reports the abort.
        """
        if len(self.token_ids) == self._start:
            return False
        # The server looks after each token, so a stop text that is in this part was completed by its last one.
        at = min((found for stop in stop_texts if (found := self.texts[-1].find(stop)) >= 0), default=-1)
        if at >= 0 and trim:
            self.texts[-1] = self.texts[-1][:at]
        if at >= 0 or self.token_ids[-1] in stop_ids:
            self.finish_reason = "stop"
        return self.finished
