"""A gateway session: the requests of one sample, with a session id in the path, a key, and a SampleClient.

Invariant: samples share nothing, because each session has its own client. After `end`, none of its requests runs and
none can start. Concurrent requests are branches of one conversation, which forks where they differ.

    waits     for                               woken by
    --------  --------------------------------  ------------------------------------------------------------
    answer    the client's gate, the servers    the end of a weight sync; `timeouts.request`; the end of the session
    end       its requests                      their cancellation
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.schema import SamplingConfig
from megasync.data.text_codec import TextCodec
from megasync.errors import ServerError, TemplateRefused
from megasync.gateway.chat_request import ChatBody, sampling_options, tool_schemas
from megasync.gateway.completion import LiveText, token_logprobs
from megasync.gateway.errors import RequestError
from megasync.gateway.transcript import Transcript
from megasync.rollout.conversation import Reply
from megasync.rollout.workflow import SampleClient
from megasync.trajectory.runs import IntArray

# A reply, and the message that the agent receives for it.
Answered = tuple[Reply, dict[str, Any]]


class Session:
    """`sampling` is the configured sampling, `chooses` as in `sampling_options`."""

    def __init__(self, client: SampleClient, sampling: SamplingConfig, chooses: bool) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        # The first server failure. The sample must then be repeated, whatever the agent returns.
        self.failure: ServerError | None = None
        # What the chat template rejected after the model had answered; the agent cannot go on then.
        self.refusal: TemplateRefused | None = None
        self._client = client
        self._sampling = sampling
        self._chooses = chooses
        self._transcript = Transcript()
        self._requests: set[asyncio.Task[Any]] = set()
        self._ended = False

    def admits(self, authorization: str) -> bool:
        """Whether the header `Bearer ...` has the session's key, compared in constant time."""
        # A header may hold any bytes, which arrive as surrogates.
        header = authorization.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(header, f"Bearer {self.key}".encode())

    def begin_request(self) -> None:
        """Registers the current task, so that `end` cancels it. Raises RequestError after the session has ended."""
        if self._ended:
            raise RequestError(404, "the session has ended because its agent returned", code="session_ended")
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def end(self) -> None:
        """Cancels the running requests and waits for them."""
        self._ended = True
        await cancel_and_wait(*self._requests)

    async def answer(self, body: ChatBody, watch: Callable[[IntArray], None] | None = None) -> Answered:
        """The reply to a request, and the message for the agent.

        `watch` is called with all token ids so far as the response grows. Raises RequestError, DataError and
        ServerError.
        """
        if self.failure is not None:
            raise self.failure
        options = sampling_options(body, self._sampling.max_new_tokens, self._chooses)
        if watch is not None:
            options["watch"] = watch
        messages = self._transcript.restore(body.messages)
        try:
            reply = await self._client.chat(messages, tools=tool_schemas(body), **options)
        except ServerError as error:
            self.failure = error
            raise
        except TemplateRefused as error:
            if self._client.conversation.generations:
                self.refusal = error
            raise
        self.refusal = None
        return reply, self._transcript.answered(messages, reply)

    async def stream(self, body: ChatBody) -> AsyncGenerator[str | Answered]:
        """Yields text as it is sampled, then the answer. Text that must be parsed or cut comes only with the answer.

        Raises the same errors as `answer`.
        """
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        live = LiveText(self.decode)

        def watch(ids: IntArray) -> None:
            if text := live.grown(ids):
                pieces.put_nowait(text)

        answer = asyncio.create_task(self.answer(body, watch if self._streams(body) else None))
        answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield answer.result()
        finally:
            await cancel_and_wait(answer)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of token ids as the agent sees it, without special tokens."""
        return self._client.tokenizer.decode(ids, skip_special_tokens=True)

    def logprobs(self, reply: Reply) -> dict[str, Any]:
        """The log-prob of every token of a reply, as the agent sees it."""
        return token_logprobs(reply.generation, self.decode, TextCodec(self._client.tokenizer))

    def _streams(self, body: ChatBody) -> bool:
        """Whether text can be streamed before the answer is complete.

        Tool calls and reasoning are parsed from the complete answer, and a stop text may span two pieces.
        """
        return not (tool_schemas(body) or body.stop or self._sampling.stop or self._client.sets_reasoning_apart)
