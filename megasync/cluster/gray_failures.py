"""The comparison of servers with their peers, by their answers to a check and by their own reports."""

from __future__ import annotations

from collections import Counter

import orjson

from megasync.observe.context import RunContext
from megasync.rollout.inflight import ServerLoad
from megasync.rollout.partials import PartialResponse
from megasync.serving.answers import AnswerLimits, read_generated, read_scored
from megasync.serving.outliers import OutlierDetector

# Every vocabulary has these ids. Two tokens, because a stream without an end shows only after the first one.
CHECK = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
}
STREAMED_CHECK = CHECK | {"stream": True}


class GrayFailures:
    """Finds servers that alone misbehave: `reported` and `checked` return why one must be restarted, or None."""

    def __init__(self, vocab_size: int, streams: bool, context: RunContext) -> None:
        """`streams` is whether rollouts stream responses, so that the check does too."""
        self.limits = AnswerLimits(
            vocab_size, CHECK["sampling_params"]["max_new_tokens"], newest=context.newest_version
        )
        self.streams = streams
        self.outliers = OutlierDetector(context.clock)
        # Restarts by the kind of fault.
        self.restarts = Counter[str]()

    def reported(self, slot: int, load: ServerLoad) -> str | None:
        return self._counted("slow", self.outliers.reported(slot, load))

    def checked(self, slot: int, problem: str | None) -> str | None:
        return self._counted("answers", self.outliers.checked(slot, problem))

    def _counted(self, fault: str, reason: str | None) -> str | None:
        self.restarts[fault] += reason is not None
        return reason


class CheckAborted(Exception):
    """The check was aborted together with all requests of the server."""


class CheckAnswer:
    """An answer to `CHECK`, parsed as it arrives: tokens like the client does, scores like the parity check does."""

    def __init__(self, limits: AnswerLimits) -> None:
        self._limits = limits
        self._parts = PartialResponse()
        self._parts.begin_request(limits.tokens)
        self._last = b""
        self._finished = False

    @property
    def tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self._parts)

    def add(self, piece: bytes) -> None:
        """Adds a piece, or the whole answer. Raises InvalidAnswer, StreamedError, CheckAborted."""
        generated = read_generated(piece, self._limits)
        self._finished = self._parts.add(generated)
        self._last = piece
        if generated.finish is not None and generated.finish.type == "abort":
            raise CheckAborted

    def problem(self) -> str | None:
        """The problem of the complete answer; None if there is none. Raises InvalidAnswer."""
        if not self._finished:
            return "it has no finish_reason"
        read_scored(orjson.loads(self._last), CHECK["input_ids"])
        return None
