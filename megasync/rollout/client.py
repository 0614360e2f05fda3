"""Asks the servers for tokens, through the router.

A generation survives interruptions: an aborted request is sent again with the tokens it has so far as part of the
prompt, within what is left of its budget, and keeps the log-probs and versions of every part. What the caller passed is
never changed, all sampling parameters are always sent, and no token id outside the vocabulary leaves this module (one
would kill the server): `_checked` guarantees that.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError, ServerError
from megasync.rollout.control import ServerControl
from megasync.rollout.generation import Generation, Parts, Reply
from megasync.rollout.router import ROUTING_KEY_HEADER
from megasync.rollout.sampling import base_params, merge_params

log = logging.getLogger(__name__)

# Statuses that may pass: no server is free or healthy, or one went away under the request (the router says 500 then).
_RETRIED = frozenset({429, 500, 502, 503, 504})
_ATTEMPTS = 6
# Seconds before the second attempt, doubled for each further one: 6 s in all.
_BACKOFF = 0.2
# Seconds before asking again after an abort that brought no token, doubled up to the second number: a server that
# aborts everything is not asked in a tight loop.
_EMPTY_ABORT_WAIT = (0.01, 1.0)
_ABORT_TIMEOUT = 5.0
_BODY_SHOWN = 500


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
    ) -> None:
        """`context_length` is in tokens, prompt and response together; `request_timeout` in seconds, per generation.

        `tokenizer` is a Hugging Face tokenizer, needed for `chat` only. `api_key` is the router's, if it has one.
        """
        self.url = router_url.rstrip("/")
        self.servers = list(servers)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.tokenizer = tokenizer
        self._base = base_params(sampling)
        self._timeout = request_timeout
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task] = set()
        # Of fixed length: SGLang aborts every request whose id starts with the one it is given.
        self._rid_prefix = uuid.uuid4().hex[:12]
        self._requests = 0
        self._random = random.Random()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        routing_key: str | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Generation:
        """Samples one response. `sampling` replaces configured parameters (temperature, max_new_tokens, stop, ...).

        With `seed`, a server started as deterministic gives the same tokens whatever else it is doing; other servers
        ignore it. `max_new_tokens` is cut to what the context still holds. With stop strings, one that straddles an
        interruption is not seen.

        Raises DataError for ids outside the vocabulary, unknown parameters, or a prompt that fills the context;
        ServerError when the servers refuse, keep failing, or take longer than `request_timeout`.
        """
        prompt = self._checked(prompt_ids)
        params = merge_params(self._base, sampling)
        budget = min(params["max_new_tokens"], self.context_length - len(prompt))
        if budget < 1:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room for a response in a context of {self.context_length}"
            )
        # Deterministic servers would give every request without a seed the same one.
        params["sampling_seed"] = self._random.getrandbits(63) if seed is None else seed
        headers = {ROUTING_KEY_HEADER: routing_key} if routing_key is not None else None
        try:
            async with asyncio.timeout(self._timeout):
                parts = await self._generate_parts(prompt, params, budget, headers)
        except TimeoutError:
            raise ServerError(
                f"no complete answer from {self.url} within {self._timeout:g} s (timeouts.request) for a prompt of "
                f"{len(prompt)} tokens and a budget of {budget}"
            ) from None
        return Generation(
            prompt_ids=prompt,
            token_ids=parts.token_ids,
            logprobs=parts.logprobs,
            versions=parts.versions,
            finish_reason=parts.finish_reason,
            text=self._text(parts, params),
            parts=len(parts.texts),
        )

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        routing_key: str | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> Reply:
        """Renders `messages` with the tokenizer's chat template and generates the assistant's turn.

        Raises DataError without a tokenizer or a chat template, or when the template refuses the messages.
        """
        if self.tokenizer is None:
            raise DataError("chat() needs a tokenizer, and this client has none; use generate() with token ids")
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer of {getattr(self.tokenizer, 'name_or_path', 'the model')!r} has no chat template; "
                f"use generate() with token ids, or data.prompt.format=raw"
            )
        conversation = [dict(message) for message in messages]
        try:
            prompt = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs that raise what they like
            raise DataError(f"the chat template refused {len(conversation)} messages: {error}") from error
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        generation = await self.generate(prompt_ids, routing_key=routing_key, seed=seed, **sampling)
        return Reply([*conversation, {"role": "assistant", "content": generation.text}], generation)

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

    async def _generate_parts(
        self, prompt: list[int], params: dict[str, Any], budget: int, headers: dict[str, str] | None
    ) -> Parts:
        parts = Parts()
        wait, longest = _EMPTY_ABORT_WAIT
        minimum = params["min_new_tokens"]
        while True:
            done = len(parts.token_ids)
            body = {
                "input_ids": prompt + parts.token_ids,
                "sampling_params": params
                | {"max_new_tokens": budget - done, "min_new_tokens": max(0, min(minimum, budget) - done)},
                "return_logprob": True,
            }
            gained = parts.add(await self._post_generate(body, headers))
            if parts.finish_reason != "abort":
                return parts
            if len(parts.token_ids) >= budget:
                parts.finish_reason = "length"
                return parts
            if not gained:
                await asyncio.sleep(wait)
                wait = min(2 * wait, longest)

    async def _post_generate(self, body: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
        """One answer; each attempt has a request id of its own, aborted on the servers when nobody waits any more."""
        failure = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_BACKOFF * 2 ** (attempt - 1) * self._random.uniform(0.75, 1.25))
            rid = self._next_rid()
            body["rid"] = rid
            try:
                async with self._open().post(
                    self.url + "/generate", data=orjson.dumps(body), headers=headers
                ) as response:
                    raw = await response.read()
                    status = response.status
            except asyncio.CancelledError:
                self._abort_later(rid)
                raise
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
                self._abort_later(rid)
                continue
            if status == 200:
                return _parse(raw, self.url)
            failure = f"status {status}: {raw[:_BODY_SHOWN].decode('utf-8', 'replace')}"
            if status not in _RETRIED:
                raise ServerError(f"{self.url}/generate refused a prompt of {len(body['input_ids'])} tokens: {failure}")
            self._abort_later(rid)
        raise ServerError(f"{self.url}/generate failed {_ATTEMPTS} times in a row; the last time with {failure}")

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

    def _text(self, parts: Parts, params: dict[str, Any]) -> str:
        if len(parts.texts) == 1 or self.tokenizer is None or params["stop"]:
            return "".join(parts.texts)
        # A character may lie across two parts, which the server decoded one by one.
        return self.tokenizer.decode(parts.token_ids, skip_special_tokens=params["skip_special_tokens"])

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
