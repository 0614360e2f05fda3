"""Asks the servers for tokens, through the router.

A generation survives interruptions: a request that was aborted, or whose server or router died, is sent again with the
tokens it has so far as part of the prompt, within what is left of its budget, and keeps the log-probs and versions of
every part. With `stream_interval` tokens arrive while they are sampled, so a dead server costs at most so many of each
request. Whatever may pass is tried again, with growing waits, until the generation's own deadline. What the caller passed
is never changed, all sampling parameters are always sent, and no token id outside the vocabulary leaves this module (one
would kill the server): `_checked` guarantees that.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import aiohttp
import orjson

from megasync.config.schema import ChatConfig, SamplingConfig
from megasync.errors import ContextFull, DataError, ServerError
from megasync.rollout.chat import Chat, ToolLike
from megasync.rollout.control import ServerControl
from megasync.rollout.conversation import Conversation
from megasync.rollout.event_stream import events
from megasync.rollout.generation import Generation, Reply
from megasync.rollout.parts import Parts
from megasync.rollout.quarantine import Quarantine, Ticket
from megasync.rollout.reply_parser import ReplyParser
from megasync.rollout.router import ROUTING_KEY_HEADER
from megasync.rollout.sampling import base_params, merge_params
from megasync.rollout.waits import Waits

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
_BODY_SHOWN = 500

# Given a prompt's token ids, what there is already of the response; it grows in place.
Keep = Callable[[list[int]], Parts]


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
        quarantine: Quarantine | None = None,
        on_nonsense: Callable[[], None] = lambda: None,
    ) -> None:
        """`context_length` is in tokens, prompt and response together; `request_timeout` in seconds, per generation.

        `servers` are those that are told to abort requests; `add_server` and `remove_server` change them.
        `stream_interval` is the servers' own, in tokens; 0 when they were started without. `tokenizer` is a Hugging Face tokenizer, needed for `chat` only. `api_key` is the router's, if it has one.
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
        self._stream = stream_interval > 0
        self._chat_config = chat or ChatConfig()
        self._quarantine = quarantine
        self._on_nonsense = on_nonsense
        self._chat: Chat | None = None
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task] = set()
        # Of fixed length: SGLang aborts every request whose id starts with the one it is given.
        self._rid_prefix = uuid.uuid4().hex[:12]
        self._requests = 0
        self._random = random.Random()

    def add_server(self, server: ServerControl) -> None:
        self.servers.append(server)

    def remove_server(self, url: str) -> None:
        self.servers = [server for server in self.servers if server.url != url]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        routing_key: str | None = None,
        seed: int | None = None,
        keep: Keep | None = None,
        watch: Callable[[Sequence[int]], None] | None = None,
        **sampling: Any,
    ) -> Generation:
        """Samples one response. `sampling` replaces configured parameters (temperature, max_new_tokens, stop, ...).

        With `seed`, a server started as deterministic gives the same tokens whatever else it is doing; other servers
        ignore it. `max_new_tokens` is cut to what the context still holds. With stop strings, one that straddles an
        interruption is not seen. `keep` brings what the response begins with, from an earlier attempt, and lets its
        caller see the response grow. `watch` is told all token ids so far whenever a server has sent more of them.

        Raises DataError for ids outside the vocabulary, unknown parameters, or a prompt that a server calls wrong,
        ContextFull for one that leaves no room, KillsServers for one that did; ServerError when the servers refuse otherwise, or there is no answer in `request_timeout`.
        """
        prompt = self._checked(prompt_ids)
        params = merge_params(self._base, sampling)
        budget = min(params["max_new_tokens"], self.context_length - len(prompt))
        if budget < 1:
            raise ContextFull(
                f"a prompt of {len(prompt)} tokens leaves no room for a response in a context of {self.context_length}"
            )
        # Deterministic servers would give every request without a seed the same one.
        params["sampling_seed"] = self._random.getrandbits(63) if seed is None else seed
        headers = {ROUTING_KEY_HEADER: routing_key} if routing_key is not None else None
        parts = Parts() if keep is None else keep(prompt)
        parts.watch = watch
        self._give_text(parts)
        failures: list[str] = []
        try:
            async with self._ticket(routing_key, prompt) as ticket, asyncio.timeout(self._timeout) as deadline:
                await self._finish(parts, prompt, params, budget, headers, failures, ticket, deadline)
        except TimeoutError:
            last = f"; the last of {len(failures)} failed attempts: {failures[-1]}" if failures else ""
            raise ServerError(
                f"no complete answer from {self.url} within {self._timeout:g} s (timeouts.request) for a prompt of "
                f"{len(prompt)} tokens and a budget of {budget}, after {len(parts.token_ids)} tokens{last}"
            ) from None
        return Generation(
            prompt_ids=prompt,
            token_ids=list(parts.token_ids),
            logprobs=list(parts.logprobs),
            versions=list(parts.versions),
            finish_reason=parts.finish_reason,
            text=self._text(parts, params),
            parts=len(parts.texts),
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

        Raises DataError for fewer than two ids or ids outside the vocabulary, ServerError as `generate`.
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
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != ids:
            raise ServerError(f"{server.url} scored {len(entries)} tokens, not the {len(ids)} it was given")
        return [entry[0] for entry in entries[1:]]

    async def abort_all(self) -> None:
        """Ends every request on every server. A `generate` still awaited goes on from its partial tokens."""
        await asyncio.gather(
            *(server.post("/abort_request", {"abort_all": True}, timeout=_ABORT_TIMEOUT) for server in self.servers)
        )

    async def close(self) -> None:
        """Waits for pending aborts and closes the connections; the servers' controls belong to their owner."""
        if self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _finish(
        self,
        parts: Parts,
        prompt: list[int],
        params: dict[str, Any],
        budget: int,
        headers: dict[str, str] | None,
        failures: list[str],
        ticket: Ticket | None,
        deadline: asyncio.Timeout,
    ) -> None:
        """Sends requests until the response is complete. `failures` takes what went wrong on the way."""
        empty, failed = Waits(_EMPTY_ABORT_WAIT, self._random), Waits(_FAILURE_WAIT, self._random)
        minimum = min(params["min_new_tokens"], budget)
        while (done := len(parts.token_ids)) < budget:
            body = {
                "input_ids": prompt + parts.token_ids,
                "sampling_params": params | {"max_new_tokens": budget - done, "min_new_tokens": max(0, minimum - done)},
                "return_logprob": True,
                "stream": self._stream,
            }
            wait = empty
            url = self.url if ticket is None else await self._enter(ticket, body, deadline)
            try:
                await self._request(url, body, headers, parts)
            except _Passing as failure:
                failures.append(str(failure))
                wait = failed
                if ticket is not None and failure.cut:
                    self._quarantine.cut(ticket)
            if parts.finish_reason != "abort":
                return
            if len(parts.token_ids) > done:
                empty.reset()
                failed.reset()
            else:
                await asyncio.sleep(wait.next())
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
        """One request, with an id of its own that is aborted on the servers when nobody waits for the rest any more.

        Raises _Passing when another attempt may succeed; what it brought until then is in `parts`.
        """
        body["rid"] = self._next_rid()
        parts.begin()
        try:
            async with self._open().post(url + "/generate", data=orjson.dumps(body), headers=headers) as response:
                if response.status != 200:
                    text = (await response.read())[:_BODY_SHOWN].decode("utf-8", "replace")
                    self._refused(response.status, text, len(body["input_ids"]))
                await self._take(response, parts, len(body["input_ids"]))
        except (aiohttp.ClientError, OSError) as error:
            self._abort_later(body["rid"])
            # What could not connect reached no server.
            cut = not isinstance(error, aiohttp.ClientConnectorError)
            raise _Passing(f"{type(error).__name__}: {error}", cut) from error
        except ServerError:
            self._abort_later(body["rid"])
            self._on_nonsense()
            raise
        except BaseException:
            self._abort_later(body["rid"])
            raise

    async def _take(self, response: aiohttp.ClientResponse, parts: Parts, sent: int) -> None:
        if not self._stream:
            parts.add(_parse(await response.read(), self.url))
            return
        finished = False
        try:
            # To the end of the stream: a connection with something left in it is not used again.
            async for piece in events(response):
                if "error" in piece:
                    self._refused(piece["error"].get("code"), str(piece["error"].get("message")), sent)
                finished = parts.add(piece)
                if finished and (status := piece["meta_info"]["finish_reason"].get("status_code")):
                    # Unstreamed it would have been the status of the answer.
                    self._refused(status, str(piece["meta_info"]["finish_reason"].get("message")), sent)
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

    def _next_rid(self) -> str:
        self._requests += 1
        return f"{self._rid_prefix}{self._requests:012d}"

    def _abort_later(self, rid: str) -> None:
        """Tells the servers, without waiting, that nobody wants this request; which of them has it is not known."""
        task = asyncio.get_running_loop().create_task(self._abort(rid))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, rid: str) -> None:
        for server in self.servers:
            try:
                await server.post("/abort_request", {"rid": rid}, timeout=_ABORT_TIMEOUT)
            except ServerError as error:
                log.debug("could not abort %s: %s", rid, error)

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

    def _give_text(self, parts: Parts) -> None:
        """What was saved of a response came without its text."""
        if parts.token_ids and not parts.texts and self.tokenizer is not None:
            parts.texts.append(self.tokenizer.decode(parts.token_ids))

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
                headers=headers,
                # How much runs at once is the rollouter's business; the deadline is `generate`'s.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _parse(raw: bytes, url: str) -> dict[str, Any]:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{url}/generate answered no JSON: {raw[:_BODY_SHOWN]!r}") from error
