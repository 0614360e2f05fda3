"""Asks the servers for tokens, through the router.

A generation survives interruptions: a request that was aborted, or whose server or router died, is sent again with the
tokens it has so far as part of the prompt, within what is left of its budget, and keeps the log-probs and versions of
every part. With `stream_interval` tokens arrive while they are sampled, so a dead server costs at most so many of each
request. Whatever may pass is tried again, with growing waits, until the generation's own deadline. What the caller passed
is never changed, all sampling parameters are always sent, and no token id outside the vocabulary leaves this module (one
would kill the server): `_checked` guarantees that. What comes back is checked as strictly (`answers`): an answer that makes
no sense is forgotten, counted, and asked for again.

Nothing is aborted by name. A connection that this side closes (a caller that is cancelled, a deadline) ends the request at
its server, through the router and through a router's death: at the next piece of a stream, else within about a second.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import ssl
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import aiohttp
import orjson

from megasync.concurrency.tasks import Backoff
from megasync.config.schema import ChatConfig, SamplingConfig
from megasync.errors import ContextLengthExceeded, DataError, InvalidAnswer, ServerError
from megasync.rollout.chat import Chat, ToolLike
from megasync.rollout.conversation import Conversation
from megasync.rollout.event_stream import events
from megasync.rollout.generation import Generation, Reply
from megasync.rollout.partials import request_digest
from megasync.rollout.parts import Parts
from megasync.rollout.quarantine import Quarantine, Ticket
from megasync.rollout.reply_parser import ReplyParser
from megasync.rollout.sampling import base_params, check_trained, merge_params
from megasync.serving.answers import AnsweredError, Asked, read_bounded, read_generated, read_scored
from megasync.serving.control import ServerControl
from megasync.serving.router import ROUTING_KEY_HEADER

log = logging.getLogger(__name__)

# Statuses that may pass: no server is free or healthy, or one went away under the request (the router says 500 then).
_RETRIED = frozenset({429, 500, 502, 503, 504})
# Those among them with which the router says that it sent the request nowhere.
_NOT_SENT = frozenset({429, 503})
# Statuses with which a server says that it is the request that is wrong.
_BAD_REQUEST = frozenset({400, 413, 422})
# Seconds before a second attempt after a failure, doubled for each further one in a row up to the second number.
_FAILURE_WAIT = (0.2, 5.0)
# Seconds before asking again after an abort that brought no token, doubled up to the second number: a server that
# aborts everything is not asked in a tight loop.
_EMPTY_ABORT_WAIT = (0.01, 1.0)
_ABORT_TIMEOUT = 5.0
# Seconds for the connections to close.
_CLOSE_SECONDS = 5.0
# Invalid answers that are logged as warnings; later ones would only repeat them.
_LOUD = 10
_BODY_SHOWN = 500
# The most bytes of a refusal.
_REFUSAL_BYTES = 1 << 20

# Given the digest of a request (`request_digest`), what there is already of the response; it grows in place.
Keep = Callable[[str], Parts]


class _Passing(Exception):
    """A failure that another attempt may not meet. `cut` when it may have had the server's death as its cause."""

    def __init__(self, message: str, cut: bool = True) -> None:
        super().__init__(message)
        self.cut = cut


class RolloutClient:
    """One per event loop; the connection pool opens with the first request and ends with `close`."""

    def __init__(
        self,
        router_url: str,
        servers: Sequence[ServerControl],
        vocab_size: int,
        context_length: int,
        sampling: SamplingConfig,
        request_timeout: float,
        tokenizer: Any = None,
        api_key: str | None = None,
        stream_interval: int = 0,
        chat: ChatConfig | None = None,
        trust: ssl.SSLContext | None = None,
        stop_ids: Collection[int] = (),
        quarantine: Quarantine | None = None,
        on_nonsense: Callable[[], None] = lambda: None,
    ) -> None:
        """`context_length` is in tokens, prompt and response together; `request_timeout` in seconds, per generation.

        `servers` are those that parse answers of `chat`; `add_server` and `remove_server` change them. `stream_interval`
        is the servers' own, in tokens; 0 when they were started without. `tokenizer` is a Hugging Face tokenizer, needed
        for `chat` only. `api_key` is that of generation, if there is one; `trust` is for a router that speaks https.
        `stop_ids` are the tokens that end any response.
        `quarantine` tracks prompts, by routing key, that may kill servers. `on_nonsense` is called for each answer that
        makes no sense.
        """
        self.url = router_url.rstrip("/")
        self.servers = list(servers)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.tokenizer = tokenizer
        self._base = base_params(sampling)
        self._timeout = request_timeout
        self._api_key = api_key
        self._trust = trust
        self._stream = stream_interval > 0
        self._chat_config = chat or ChatConfig()
        self._quarantine = quarantine
        self._on_nonsense = on_nonsense
        self._chat: Chat | None = None
        self._session: aiohttp.ClientSession | None = None
        self._stop_ids = frozenset(stop_ids)
        self._invalid_answers = 0
        self._random = random.Random()
        # The newest weight version that a server can hold; None where nobody knows it.
        self.newest_version: Callable[[], int | None] = lambda: None
        # The published one, which every serving server has at least; None as above.
        self.published_version: Callable[[], int | None] = lambda: None

    def add_server(self, server: ServerControl) -> None:
        self.servers.append(server)

    def remove_server(self, url: str) -> None:
        self.servers = [server for server in self.servers if server.url != url]

    def metrics(self) -> dict[str, float]:
        """Answers of servers that made no sense, since the start."""
        return {"rollout/invalid_answers": float(self._invalid_answers)}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        routing_key: str | None = None,
        seed: int | None = None,
        keep: Keep | None = None,
        watch: Callable[[Sequence[int]], None] | None = None,
        trained: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Samples one response. `sampling` replaces configured parameters (temperature, max_new_tokens, stop, ...).

        With `seed`, a server started as deterministic gives the same tokens whatever else it is doing; other servers
        ignore it. `max_new_tokens` is cut to what the context still holds. With stop strings, one that straddles an
        interruption is not seen. `keep` brings what the response begins with, from an earlier attempt, and lets its
        caller see the response grow; one that is complete is the answer, and nothing is asked. `watch` is told all token
        ids so far whenever a server has sent more of them. What is to be `trained` must be sampled from the distribution
        that the trainer scores.

        Raises DataError for ids outside the vocabulary, unknown parameters, those that a trained response may not have,
        or a prompt that a server calls wrong, ContextLengthExceeded for one that leaves no room, PoisonPrompt for one that did;
        ServerError when the servers refuse otherwise, or there is no answer in `request_timeout`.
        """
        prompt = self._checked(prompt_ids)
        params = merge_params(self._base, sampling)
        if trained:
            check_trained(params, self._base["temperature"])
        budget = min(params["max_new_tokens"], self.context_length - len(prompt))
        if budget < 1:
            raise ContextLengthExceeded(
                f"a prompt of {len(prompt)} tokens leaves no room for a response in a context of {self.context_length}"
            )
        params["max_new_tokens"] = budget
        parts = Parts() if keep is None else keep(request_digest(prompt, params))
        parts.watch = watch
        # Deterministic servers would give every request without a seed the same one.
        params["sampling_seed"] = self._random.getrandbits(63) if seed is None else seed
        failures: list[str] = []
        try:
            async with self._ticket(routing_key, prompt) as ticket, asyncio.timeout(self._timeout) as deadline:
                await self._finish(parts, prompt, params, routing_key, failures, ticket, deadline)
        except TimeoutError:
            last = f"; the last of {len(failures)} failed attempts: {failures[-1]}" if failures else ""
            raise ServerError(
                f"no complete answer from {self.url} within {self._timeout:g} s (timeouts.request) for a prompt of "
                f"{len(prompt)} tokens and a budget of {budget}, after {len(parts.token_ids)} tokens{last}"
            ) from None
        count = len(parts.texts)
        # Whoever is given the parts again gets the same text.
        parts.texts = [self._text(parts, params)]
        return Generation(
            prompt_ids=prompt,
            token_ids=list(parts.token_ids),
            logprobs=list(parts.logprobs),
            versions=list(parts.versions),
            finish_reason=parts.finish_reason,
            text=parts.texts[0],
            parts=count,
        )

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[ToolLike] = (),
        conversation: Conversation | None = None,
        **options: Any,
    ) -> Reply:
        """Generates the assistant's turn; `tools` (functions, or JSON schemas) are those that it may call.

        The tokens of earlier turns of the `conversation` are sent as they were sampled; see there. `options` are those
        of `generate`. Raises DataError without a tokenizer or a chat template, when the template refuses the messages,
        and as `generate`.
        """
        return await self._chats().answer(self.generate, conversation or Conversation(), messages, tools, **options)

    @property
    def sets_reasoning_apart(self) -> bool:
        """Whether `chat` takes reasoning out of answers. Raises DataError as `chat`."""
        return self._chats().sets_reasoning_apart

    async def score(self, server: ServerControl, input_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token but the first given those before it, by that one server, at temperature 1.

        Raises DataError for fewer than two ids or ids outside the vocabulary, ServerError when the server refuses, does not
        answer in time, or answers what makes no sense.
        """
        ids = self._checked(input_ids)
        if len(ids) < 2:
            raise DataError("score() needs at least two tokens: the first has no log-prob")
        body = {
            "input_ids": ids,
            # One token is sampled and thrown away; the log-probs of the input come with it.
            "sampling_params": self._base | {"temperature": 1.0, "max_new_tokens": 1, "stop": []},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await server.post("/generate", body, timeout=self._timeout)
        try:
            return read_scored(answer, ids)
        except InvalidAnswer as error:
            self._invalid_answers += 1
            raise InvalidAnswer(f"{server.url}/generate: {error}") from error

    async def abort_all(self) -> None:
        """Ends every request on every server. A `generate` still awaited goes on from its partial tokens."""
        await asyncio.gather(
            *(server.post("/abort_request", {"abort_all": True}, timeout=_ABORT_TIMEOUT) for server in self.servers)
        )

    async def close(self) -> None:
        """Closes the connections; the servers' controls belong to their owner."""
        if self._session is not None:
            session, self._session = self._session, None
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await session.close()
            except TimeoutError:
                log.warning(
                    "connections to %s did not close within %g s and are left to the system", self.url, _CLOSE_SECONDS
                )

    async def _finish(
        self,
        parts: Parts,
        prompt: list[int],
        params: dict[str, Any],
        routing_key: str | None,
        failures: list[str],
        ticket: Ticket | None,
        deadline: asyncio.Timeout,
    ) -> None:
        """Sends requests until the response is complete. `failures` takes what went wrong on the way."""
        empty, failed = Backoff(_EMPTY_ABORT_WAIT, self._random), Backoff(_FAILURE_WAIT, self._random)
        budget = params["max_new_tokens"]
        minimum = min(params["min_new_tokens"], budget)
        stop_ids = frozenset() if params["ignore_eos"] else self._stop_ids.union(params["stop_token_ids"])
        invalid = 0
        while not parts.finished and (done := len(parts.token_ids)) < budget:
            body = {
                "input_ids": prompt + parts.token_ids,
                "sampling_params": params | {"max_new_tokens": budget - done, "min_new_tokens": max(0, minimum - done)},
                "return_logprob": True,
                "stream": self._stream,
            }
            wait = empty
            url = self.url if ticket is None else await self._enter(ticket, body, deadline)
            try:
                await self._request(url, body, _headers(routing_key, invalid), parts)
            except _Passing as failure:
                failures.append(str(failure))
                wait = failed
                if ticket is not None and failure.cut:
                    self._quarantine.cut(ticket)
            except InvalidAnswer as failure:
                parts.discard()
                failures.append(f"invalid answer: {failure}")
                self._invalid_answers += 1
                self._on_nonsense()
                level = logging.WARNING if self._invalid_answers <= _LOUD else logging.DEBUG
                log.log(level, "Invalid answer of %s/generate, asking again: %s", self.url, failure)
                invalid += 1
                wait = failed
            if parts.finished or parts.ends_at(stop_ids, params["stop"], trim=not params["no_stop_trim"]):
                return
            if len(parts.token_ids) > done:
                empty.reset()
                failed.reset()
            else:
                await asyncio.sleep(wait.next())
        if not parts.finished:
            parts.finish_reason = "length"

    def _ticket(self, key: str | None, prompt: list[int]) -> AbstractAsyncContextManager[Ticket | None]:
        if self._quarantine is None or key is None:
            return nullcontext()
        return self._quarantine.request(key, prompt)

    async def _enter(self, ticket: Ticket, body: dict[str, Any], deadline: asyncio.Timeout) -> str:
        """Where to send the next request of a prompt. While it is held back as a suspect its time stands still."""
        clock = asyncio.get_running_loop().time
        left = deadline.when() - clock()
        deadline.reschedule(None)
        url = await self._quarantine.enter(ticket, body)
        deadline.reschedule(clock() + left)
        return url or self.url

    async def _request(self, url: str, body: dict[str, Any], headers: dict[str, str] | None, parts: Parts) -> None:
        """One request. Raises _Passing when another attempt may succeed, with what it brought until then in `parts`, and
        InvalidAnswer."""
        sampling = body["sampling_params"]
        asked = Asked(self.vocab_size, sampling["max_new_tokens"], sampling["stop"], self.newest_version)
        parts.begin(asked.tokens, self.published_version())
        try:
            async with self._open().post(
                # A redirection would be a request of another kind, to somebody else.
                url + "/generate",
                data=orjson.dumps(body),
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    text = (await read_bounded(response, _REFUSAL_BYTES))[:_BODY_SHOWN].decode("utf-8", "replace")
                    self._refused(response.status, text, len(body["input_ids"]))
                elif (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise InvalidAnswer(f"its encoding is {encoding!r:.100}, which was not asked for")
                elif self._stream:
                    await self._take_stream(response, parts, asked)
                elif not parts.add(read_generated(await read_bounded(response, asked.most_bytes), asked)):
                    raise InvalidAnswer("it has no finish_reason")
        except AnsweredError as error:
            self._refused(error.status, str(error), len(body["input_ids"]))
        except (aiohttp.ClientError, OSError) as error:
            # What could not connect reached no server.
            cut = not isinstance(error, aiohttp.ClientConnectorError)
            raise _Passing(f"{type(error).__name__}: {error}", cut) from error

    async def _take_stream(self, response: aiohttp.ClientResponse, parts: Parts, asked: Asked) -> None:
        finished = False
        try:
            # To the end of the stream: a connection with something left in it is not used again.
            async for event in events(response, asked.most_bytes):
                if finished:
                    raise InvalidAnswer(f"its stream goes on behind the last piece: {event[:_BODY_SHOWN]!r}")
                piece = read_generated(event, asked)
                finished = parts.add(piece)
                if finished and piece.finish.status_code:
                    # Unstreamed it would have been the status of the answer.
                    raise AnsweredError(piece.finish.status_code, piece.finish.message)
        except (aiohttp.ClientError, OSError):
            if not finished:
                raise
        if not finished:
            raise _Passing("the stream ended before the request did")

    def _refused(self, status: int | None, text: str, sent: int) -> None:
        """Raises what an error status means."""
        failure = f"status {status}: {text}"
        if status in _RETRIED:
            raise _Passing(failure, cut=status not in _NOT_SENT)
        error = DataError if status in _BAD_REQUEST else ServerError
        raise error(f"{self.url}/generate refused a prompt of {sent} tokens: {failure}")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """A new list of plain integers, each in [0, vocab_size)."""
        try:
            # Also turns numpy and tensor scalars into integers, and refuses floats.
            checked = list(map(operator.index, ids))
        except TypeError as error:
            raise DataError(f"token ids must be integers: {error}") from error
        if not checked:
            raise DataError("the prompt has no tokens")
        if min(checked) < 0 or max(checked) >= self.vocab_size:
            bad = next((at, i) for at, i in enumerate(checked) if not 0 <= i < self.vocab_size)
            raise DataError(f"token id {bad[1]} at position {bad[0]} is outside the vocabulary [0, {self.vocab_size})")
        return checked

    def _text(self, parts: Parts, params: dict[str, Any]) -> str:
        if len(parts.texts) == 1 or self.tokenizer is None or params["stop"]:
            return "".join(parts.texts)
        # A character may lie across two parts, which the server decoded one by one.
        return self.tokenizer.decode(parts.token_ids, skip_special_tokens=params["skip_special_tokens"])

    def _chats(self) -> Chat:
        if self._chat is None:
            parser = ReplyParser(lambda: self.servers, self._timeout)
            self._chat = Chat(self.tokenizer, self._chat_config, parser)
        return self._chat

    def _open(self) -> aiohttp.ClientSession:
        # Created here and not in __init__: a session belongs to the loop that is running when it is made.
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                headers=headers | {"Accept-Encoding": "identity"},
                # How much runs at once is the rollouter's business; the deadline is `generate`'s.
                connector=aiohttp.TCPConnector(limit=0, ssl=self._trust or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Nothing is asked to be compressed, and what is small on the wire may be very large.
                auto_decompress=False,
            )
        return self._session


def _headers(routing_key: str | None, invalid: int) -> dict[str, str] | None:
    """The key sends requests to one server; after `invalid` answers of it that made no sense, to another."""
    if routing_key is None:
        return None
    return {ROUTING_KEY_HEADER: f"{routing_key}#{invalid}" if invalid else routing_key}
