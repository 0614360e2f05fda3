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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.schema import SamplingConfig
from megasync.data.tokenizer import TextCodec
from megasync.errors import ServerError, TemplateRefused
from megasync.gateway.answer import Answer, LiveText, token_logprobs
from megasync.gateway.errors import RequestError
from megasync.gateway.request import Kept, Request, Sampling
from megasync.gateway.transcript import Transcript
from megasync.rollout.conversation import Generation
from megasync.rollout.workflow import SampleClient
from megasync.trajectory.runs import IntArray


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def has_key(headers: Mapping[str, str], key: str) -> bool:
    """Whether a request has this key, as clients of OpenAI or Anthropic send it. Compared in constant time."""
    given = headers.get("x-api-key")
    if given is None:
        given = headers.get("Authorization", "").removeprefix("Bearer ")
    # A header may hold any bytes, which arrive as surrogates.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


class Session:
    """`sampling` is the configured sampling, `chooses` as in `Sampling.options`."""

    def __init__(self, client: SampleClient, sampling: SamplingConfig, chooses: bool) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key = new_key()
        # The first server failure. The sample must then be repeated, whatever the agent returns.
        self.failure: ServerError | None = None
        # What the chat template rejected after the model had answered; the agent cannot go on then.
        self.refusal: TemplateRefused | None = None
        # When the agent was last heard of, by the clock of the event loop.
        self.seen = 0.0
        self._client = client
        self._sampling = sampling
        self._chooses = chooses
        self._transcript = Transcript()
        self.kept = Kept()
        self._requests: set[asyncio.Task[Any]] = set()
        self._ended = False

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has the session's key."""
        return has_key(headers, self.key)

    def begin_request(self) -> None:
        """Registers the current task, so that `end` cancels it. Raises RequestError after the session has ended."""
        if self._ended:
            raise RequestError(404, "the session has ended because its agent returned", code="session_ended")
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        request.add_done_callback(self._end_request)
        self.show_life()

    def _end_request(self, request: asyncio.Task[Any]) -> None:
        self._requests.discard(request)
        self.show_life()

    def show_life(self) -> None:
        """Notes that the agent lives."""
        self.seen = asyncio.get_running_loop().time()

    @property
    def busy(self) -> bool:
        """Whether the agent waits for an answer."""
        return bool(self._requests)

    async def end(self) -> None:
        """Cancels the running requests and waits for them."""
        self._ended = True
        await cancel_and_wait(*self._requests)

    async def answer(self, request: Request, watch: Callable[[IntArray], None] | None = None) -> Answer:
        """The answer to a request, for the agent.

        `watch` is called with all token ids so far as the response grows. Raises RequestError, DataError and
        ServerError.
        """
        options = request.sampling.options(self._sampling.max_new_tokens, self._chooses)
        if watch is not None:
            options["watch"] = watch
        messages = self._transcript.restore(request)
        with self._failures():
            reply = await self._client.chat(messages, tools=request.tools, must_call=request.must_call, **options)
        calls = self._transcript.answered(messages, reply, request.single_call)
        message, generation = reply.messages[-1], reply.generation
        logprobs = None
        if request.logprobs:
            logprobs = token_logprobs(generation, self.decode, TextCodec(self._client.tokenizer))
        return Answer(
            generation,
            message["content"],
            message.get("reasoning_content", ""),
            calls,
            logprobs,
            self._stopped_by(request, generation),
        )

    def count(self, request: Request) -> int:
        """The number of tokens of a request's prompt. Raises RequestError and DataError."""
        return self._client.count(self._transcript.restore(request), request.tools)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continues token ids. Raises DataError and ServerError."""
        options = sampling.options(self._sampling.max_new_tokens, self._chooses)
        with self._failures():
            return await self._client.generate(prompt_ids, **options)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Keeps what a request that fails says of the sample. Raises the failure of an earlier request."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except ServerError as error:
            self.failure = error
            raise
        except TemplateRefused as error:
            if self._client.conversation.generations:
                self.refusal = error
            raise
        self.refusal = None

    async def stream(self, request: Request) -> AsyncGenerator[str | Answer]:
        """Yields text as it is sampled, then the answer. Text that must be parsed or cut comes only with the answer.

        Raises the same errors as `answer`.
        """
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        live = LiveText(self.decode)

        def watch(ids: IntArray) -> None:
            if text := live.grown(ids):
                pieces.put_nowait(text)

        answer = asyncio.create_task(self.answer(request, watch if self._streams(request) else None))
        answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield answer.result()
        finally:
            await cancel_and_wait(answer)

    @property
    def context_length(self) -> int:
        """The tokens of prompt and response together."""
        return self._client.context_length

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text of token ids as the agent sees it, without special tokens."""
        return self._client.tokenizer.decode(ids, skip_special_tokens=True)

    def _stopped_by(self, request: Request, generation: Generation) -> str | None:
        """The stop text of the request that ended a response. Its tokens have it, and its text does not."""
        stops = request.sampling.stop
        if not stops or generation.finish_reason != "stop":
            return None
        rest = self.decode(generation.token_ids).removeprefix(generation.text)
        return next((stop for stop in stops if rest.startswith(stop)), None)

    def _streams(self, request: Request) -> bool:
        """Whether text can be streamed before the answer is complete.

        Tool calls and reasoning are parsed from the complete answer, and a stop text may span two pieces.
        """
        return not (request.tools or request.sampling.stop or self._sampling.stop or self._client.sets_reasoning_apart)
