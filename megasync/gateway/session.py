"""One sample's way through the gateway: an id in the path, a key, and the client whose conversation keeps what is sampled.

Invariant: requests of different samples never meet, as each session has a client of its own; after `end` none of its
requests runs, and none is begun. Several requests at once are lines of one conversation, which fork where they differ.

    waits     for                               who wakes it
    --------  --------------------------------  ------------------------------------------------------------
    answer    the client's gate, the servers    the end of a weight sync; `timeouts.request`; the end of the session
    end       its requests                      their cancellation
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from megasync.config.schema import SamplingConfig
from megasync.errors import ServerError
from megasync.gateway.chat_request import ChatBody, sampling_options, tool_schemas
from megasync.gateway.completion import LiveText
from megasync.gateway.errors import RequestError
from megasync.gateway.transcript import Transcript
from megasync.rollout.generation import Reply

# An answer, and the message that the agent gets for it.
Answered = tuple[Reply, dict[str, Any]]


class Session:
    """`client` is a SampleClient, `sampling` what the configuration says; `chooses` as in `sampling_options`."""

    def __init__(self, client: Any, sampling: SamplingConfig, chooses: bool) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        # Why the sample must be played again, once a server has failed it: no answer of the agent can make up for that.
        self.failure: ServerError | None = None
        self._client = client
        self._sampling = sampling
        self._chooses = chooses
        self._transcript = Transcript()
        self._requests: set[asyncio.Task] = set()
        self._ended = False

    def admits(self, authorization: str) -> bool:
        """Whether this is the session's key, as `Bearer ...`; takes as long for any other."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode())

    def began(self, request: asyncio.Task) -> None:
        """A request whose task ends with the session at the latest. Raises RequestError when that has ended."""
        if self._ended:
            raise RequestError(404, "the session has ended: its agent has returned", code="session_ended")
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def end(self) -> None:
        """Cancels what still runs and waits until it has ended."""
        self._ended = True
        running = list(self._requests)
        for request in running:
            request.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def answer(self, body: ChatBody, watch: Callable[[Sequence[int]], None] | None = None) -> Answered:
        """Raises RequestError, DataError and ServerError."""
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
        return reply, self._transcript.answered(reply)

    async def stream(self, body: ChatBody) -> AsyncIterator[str | Answered]:
        """Text as it is sampled, and the answer last. Text that has to be parsed or cut comes with the answer only.

        Raises as `answer`.
        """
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        live = LiveText(self.decode)

        def watch(ids: Sequence[int]) -> None:
            if text := live.grown(ids):
                pieces.put_nowait(text)

        answer = asyncio.create_task(self.answer(body, watch if self._streams(body) else None))
        answer.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as the agent sees them."""
        return self._client.tokenizer.decode(ids, skip_special_tokens=True)

    def _streams(self, body: ChatBody) -> bool:
        """Calls and reasoning are taken out of whole answers, and a stop text may reach over two pieces."""
        return not (tool_schemas(body) or body.stop or self._sampling.stop or self._client.sets_reasoning_apart)
