"""A generation while it grows: part by part, as requests for it end, and piece by piece where they are streamed.

Invariant: `token_ids`, `logprobs` and `versions` have one entry per sampled token, in order, over all parts; `add` refuses
an answer that has not. So whenever a part breaks off, what is here can be sent again as part of the prompt.

A server says which token has which version only with the end of a request (`weight_versions`). Until then each piece
carries the version at its sending, so the tokens of a piece that straddles an update are given the version before it:
where a server dies in the middle, its last tokens may look one version older than they are, never younger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.buffer.trajectory import Partial
from megasync.errors import ServerError

_SHOWN = 500


@dataclass(slots=True)
class Parts:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str = "abort"
    # Told all token ids whenever there are more of them.
    watch: Callable[[Sequence[int]], None] | None = None
    # Where the part that is growing began, and the version of its last piece.
    _start: int = 0
    _version: int | None = None

    @classmethod
    def of(cls, partial: Partial) -> Parts:
        """A generation that goes on from what was saved of it."""
        return cls(list(partial.token_ids), list(partial.logprobs), list(partial.versions))

    def partial(self, prompt_digest: str) -> Partial:
        """A copy of what is there now."""
        return Partial(prompt_digest, list(self.token_ids), list(self.logprobs), list(self.versions))

    def begin(self) -> None:
        """The next piece belongs to another request; one that brought nothing is no part."""
        if not self.texts or len(self.token_ids) > self._start:
            self.texts.append("")
        self._start, self._version = len(self.token_ids), None
        self.finish_reason = "abort"

    def add(self, piece: dict[str, Any]) -> bool:
        """Takes a piece, or the whole answer, of the request that is growing; True when it is the request's last one.

        Raises ServerError for a malformed one.
        """
        try:
            meta = piece["meta_info"]
            sampled = meta.get("output_token_logprobs") or []
            finish = meta["finish_reason"]
            reason = None if finish is None else finish["type"]
            logprobs = [entry[0] for entry in sampled]
            token_ids = [entry[1] for entry in sampled]
            count = len(self.token_ids) + len(token_ids) - self._start
            versions = self._provisional(meta, len(token_ids)) if reason is None else token_versions(meta, count)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ServerError(f"a /generate answer without {error!r}: {str(piece)[:_SHOWN]}") from error
        self.logprobs += logprobs
        self.token_ids += token_ids
        if reason is None:
            self.versions += versions
        else:
            # The server's own account of the whole request.
            self.versions[self._start :] = versions
            self.finish_reason = reason
        self.texts[-1] += piece.get("text") or ""
        if self.watch is not None:
            self.watch(self.token_ids)
        return reason is not None

    def _provisional(self, meta: dict[str, Any], count: int) -> list[int]:
        now = int(meta["weight_version"])
        before, self._version = self._version, now
        return [now if before is None else before] * count


def token_versions(meta: dict[str, Any], count: int) -> list[int]:
    """The weight version of each of `count` tokens, from the server's own spans. Raises ServerError for a gap."""
    versions: list[int] = []
    for span in meta.get("weight_versions") or []:
        if span["start"] != len(versions):
            break
        try:
            version = int(span["version"])
        except ValueError:
            raise ServerError(
                f"weight version {span['version']!r} is not an integer; start the server with --weight-version 0"
            ) from None
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ServerError(f"weight_versions {meta.get('weight_versions')} do not cover {count} tokens")
    return versions
