"""Who asks for prompts in a server with prefill and decode engines: the decode engine that has the request.

SGLang's router would send a request to a prefill and a decode engine at once. When a pause, an abort or a death meets
one of them alone, the other one then waits until SGLang's deadline of five minutes. Here the decode engine asks a
prefill engine when it has the request in its own queue. When it drops the request, it drops the call; when the call
fails, it aborts the request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megasync.errors import ServerError
from megasync.serving.plugin_protocol import PREFILL_ROUTE, ROUTING_KEY_HEADER
from megasync.sglang.hooks import Stock, hook

if TYPE_CHECKING:
    import aiohttp

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
# In SGLang's reason when a request ends on the way because it was told to, at either engine.
_STOPPED = "Aborted by"


class PrefillEngine:
    """A prefill engine as a decode engine sees it: where it answers, and how many of its prompts are not computed."""

    def __init__(self, url: str, port: int) -> None:
        self.url = url
        # Of the HTTP server at which engines arrange handovers, on the host of `url`.
        self.port = port
        self.calls = 0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


class PromptCalls:
    """Has the prompt of each request that a decode engine gets computed, in the process of its HTTP server.

    Args:
        key: what prefill engines require for generation.
    """

    def __init__(self, key: str) -> None:
        self.engines: list[PrefillEngine] = []
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        # What to do once the request with this room is in the queue of this engine.
        self._queued: dict[int, Callable[[], None]] = {}
        # Rooms of requests whose prefill engine failed, rather than drop the prompt because it was told to.
        self._lost: set[int] = set()

    def register(self) -> None:
        hook("AROUND", _MANAGER + "generate_request", self.around_generate)
        hook("AROUND", _MANAGER + "_send_one_request", self.around_send)
        hook("BEFORE", _MANAGER + "_handle_abort_finish_reason", self.before_abort)

    def middleware(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """An ASGI application before ``app`` that takes the prefill engines: JSON {"engines": [[URL, port], ...]}."""

        async def route(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != PREFILL_ROUTE:
                await app(scope, receive, send)
                return
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            self.engines = [PrefillEngine(url, port) for url, port in json.loads(body)["engines"]]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        return route

    async def around_generate(
        self, stock: Stock, manager: Any, request: Any, http: Any = None, *rest: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Answers a request once a prefill engine has computed its prompt.

        A request may name that engine, by its URL as `bootstrap_host`.
        """
        if request.bootstrap_room is not None:
            # SGLang's own warm-up, which needs no other engine.
            async with aclosing(stock(manager, request, http, *rest, **options)) as answers:
                async for answer in answers:
                    yield answer
            return
        if http is None or http.url.path != "/generate":
            raise ValueError("a server with prefill and decode engines answers at /generate only")
        engine = self._choose(request.bootstrap_host, http.headers.get(ROUTING_KEY_HEADER))
        room = secrets.randbits(62) + 1
        meeting = {"bootstrap_host": engine.host, "bootstrap_port": engine.port, "bootstrap_room": room}
        for name, value in meeting.items():
            setattr(request, name, value)

        def failed(problem: str) -> None:
            if _STOPPED not in problem:
                self._lost.add(room)
            manager.abort_request(request.rid)

        call = _Call(self._post, engine, {**await http.json(), **meeting, "stream": False}, failed)
        self._queued[room] = call.start
        try:
            async with aclosing(stock(manager, request, http, *rest, **options)) as answers:
                async for answer in answers:
                    meta = answer["meta_info"]
                    if (meta["finish_reason"] or {"type": "abort"})["type"] != "abort" and request.return_logprob:
                        meta["input_token_logprobs"] = await call.scores()
                    yield answer
        finally:
            self._queued.pop(room, None)
            self._lost.discard(room)
            call.drop()

    async def around_send(self, stock: Stock, manager: Any, request: Any) -> None:
        """Asks for the prompt of a request that has passed all gates."""
        room = request.bootstrap_room
        await stock(manager, request)
        if (start := self._queued.pop(room, None)) is not None:
            start()

    def before_abort(self, manager: Any, out: Any, state: Any, *_: Any, **__: Any) -> None:
        """Takes away the error status of a request that was stopped on the way from one engine to the other.

        It may continue, as one that was stopped anywhere else, which has none.
        """
        finish = out["meta_info"]["finish_reason"]
        if _STOPPED in str(finish.get("message")) and state.obj.bootstrap_room not in self._lost:
            finish.pop("status_code", None)

    def _choose(self, url: str | None, routing_key: str | None) -> PrefillEngine:
        if not self.engines:
            raise ValueError("this decode engine has not been told where prefill engines are")
        if url is not None:
            if (named := {engine.url: engine for engine in self.engines}.get(url)) is None:
                raise ValueError(f"bootstrap_host={url!r} is no prefill engine of this server")
            return named
        if routing_key is not None:
            # Prompts with one key share their beginning, which stays in the cache of one engine.
            return self.engines[zlib.crc32(routing_key.encode()) % len(self.engines)]
        return min(self.engines, key=lambda engine: engine.calls)

    async def _post(self, url: str, body: Any) -> Any:
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"}
            # SGLang ends a request whose caller is gone, so the calls need no deadline of their own.
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(
                headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
            )
        async with self._session.post(url + "/generate", json=body) as answer:
            if answer.status != 200:
                raise ServerError(f"status {answer.status}: {await answer.text()}")
            return await answer.json()


class _Call:
    """One prompt that a prefill engine computes. `on_failure` gets the reason if it does not."""

    def __init__(
        self, post: Callable[[str, Any], Any], engine: PrefillEngine, body: Any, on_failure: Callable[[str], None]
    ) -> None:
        self._post, self._engine, self._body = post, engine, body
        self._on_failure: Callable[[str], None] | None = on_failure
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._engine.calls += 1
        self._task = asyncio.create_task(self._post(self._engine.url, self._body))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._engine.calls -= 1
        if task.cancelled():
            return
        error = task.exception()
        problem = aborted(task.result()) if error is None else f"{type(error).__name__}: {error}"
        if problem and self._on_failure is not None:
            self._on_failure(problem)

    async def scores(self) -> Any:
        """Log-probs of the input. Raises ValueError when the engine has not computed them."""
        if self._task is None:
            raise ValueError("no prefill engine was asked for this prompt")
        return (await self._task)["meta_info"].get("input_token_logprobs")

    def drop(self) -> None:
        """The prompt is not needed any more."""
        self._on_failure = None
        if self._task is not None:
            self._task.cancel()


def aborted(answer: Any) -> str:
    """Why a prefill engine has not computed a prompt; empty if it has."""
    finish = answer["meta_info"]["finish_reason"]
    return f"{_STOPPED}: {finish}" if finish and finish["type"] == "abort" else ""
