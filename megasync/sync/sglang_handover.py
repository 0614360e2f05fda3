"""What the engines of one server need inside SGLang, where some compute prompts and the others responses.

A prefill engine computes a prompt's keys and values and the first token, and hands them over to a decode engine, which
goes on from there. Each gets the request. `PromptCalls` sends it from the decode engine to a prefill engine: SGLang's
router, which would send it to both at once, leaves one of the two waiting for the other until SGLang's deadline of five
minutes when a pause, an abort or a death meets one of them alone. Here the decode engine asks when it has the request
in its own queue. When it drops the request, it drops the call; when the call fails, it aborts the request.

In SGLang 0.5.23 engines arrange a handover over an HTTP server at each prefill engine and ZeroMQ sockets at all ranks,
and move the cache with NIXL. `Handover` changes three things:

- Those servers and sockets talk to anyone. Here both ends prove that they know the server's handover key: in a header,
  and by ZeroMQ's CURVE, whose one key pair follows from that key and which encrypts too.
- A decode engine goes on from the cache of any version. Here a handover carries the version of the weights that
  computed it, and the decode engine aborts a request with that of another one. The client sends it again.
- On a CPU, SGLang registers the cache as that of a GPU, which NIXL refuses, and a thread of NIXL spins on a core.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megasync.errors import ServerError
from megasync.serving.engine_protocol import PREFILL_ROUTE, ROUTING_KEY_HEADER

if TYPE_CHECKING:
    import aiohttp

_CONN = "sglang.srt.disaggregation.common.conn."
_BUFFERS = "sglang.srt.disaggregation.utils.MetadataBuffers."
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager."
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
# An unused word of the row of `cached_tokens` that travels with each handover.
_VERSION = 15
# Such words are signed and have 32 bits.
_VERSIONS = 2**31 - 1
# The route that tells whether the HTTP server runs; it tells nothing else.
_OPEN_ROUTE = "/health"
_TURN_MICROSECONDS = 1000
# In SGLang's reason when a request ends on the way because it was told to, at either engine.
_STOPPED = "Aborted by"

log = logging.getLogger(__name__)

# A hooked method of SGLang. It is passed on and called, never inspected.
Stock = Callable[..., Any]


class Handover:
    """Hooks around SGLang's methods, in each process of an engine.

    Args:
        key: the server's handover key.
        on_cpu: whether the cache is in host memory.
        version: the version of the weights that this process computes with.
    """

    def __init__(self, key: str, on_cpu: bool, version: Callable[[], str] | None = None) -> None:
        self._key = key
        self._on_cpu = on_cpu
        self._version = version or served_version

    def register(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_CONN + "CommonKVBootstrapServer._setup_routes", self.around_routes, HookType.AROUND)
        HookRegistry.register(_CONN + "CommonKVManager.__init__", self.before_manager, HookType.BEFORE)
        HookRegistry.register(_BUFFERS + "set_buf", self.around_write, HookType.AROUND)
        HookRegistry.register(_BUFFERS + "get_buf", self.around_read, HookType.AROUND)
        if self._on_cpu:
            HookRegistry.register(_NIXL + "__init__", self.before_transfers, HookType.BEFORE)

    # Keys

    def around_routes(self, stock: Stock, server: Any) -> None:
        """Closes the routes of the HTTP server at which the engines meet."""
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            given = request.headers.get("Authorization", "")
            if request.path != _OPEN_ROUTE and not hmac.compare_digest(given.encode(), self._header.encode()):
                return web.Response(status=401)
            return await handler(request)

        server.app.middlewares.append(guard)
        stock(server)

    def before_manager(self, *_: Any, **__: Any) -> None:
        """Has the module that arranges handovers use keys, before it opens its first socket."""
        import zmq
        from sglang.srt.disaggregation.common import conn

        if isinstance(conn.zmq, SimpleNamespace):
            return
        context = keyed_context(self._key)
        conn.zmq = SimpleNamespace(**vars(zmq) | {"Context": context})
        conn.requests = keyed_requests(self._header)
        conn.CommonKVReceiver._ctx = context()

    @property
    def _header(self) -> str:
        return f"Bearer {self._key}"

    # Versions

    def around_write(self, stock: Stock, buffers: Any, request: Any) -> None:
        """Notes the version that computed a prompt, with what travels beside its cache."""
        stock(buffers, request)
        buffers.cached_tokens[request.metadata_buffer_index][_VERSION] = word_of(self._version())

    def around_read(self, stock: Stock, buffers: Any, index: int) -> Any:
        """Makes SGLang abort a request whose prompt another version computed.

        It does so for metadata of another request, which it tells by their last part.
        """
        received = stock(buffers, index)
        _, cached, *_, room = received
        if (given := int(cached[_VERSION])) != (own := word_of(self._version())):
            log.error("A prompt was handed over that version %d computed, to version %d", given - 1, own - 1)
            room[0] = 1 if int(room[0]) != 1 else 2
        return received

    def before_transfers(self, manager: Any, arguments: Any, *_: Any, **__: Any) -> None:
        """Names the kind of memory that the cache is in, and has NIXL's thread sleep between its turns."""
        bindings: Any = import_module("nixl._api").nixlBind
        bindings.nixlAgentConfig = patient(bindings.nixlAgentConfig)
        arguments.kv_data_mem_kinds = ["DRAM"] * len(arguments.kv_data_ptrs)


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
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_MANAGER + "generate_request", self.around_generate, HookType.AROUND)
        HookRegistry.register(_MANAGER + "_send_one_request", self.around_send, HookType.AROUND)
        HookRegistry.register(_MANAGER + "_handle_abort_finish_reason", self.before_abort, HookType.BEFORE)

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


def served_version() -> str:
    """The version of the weights of this scheduler process."""
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version


def word_of(version: str) -> int:
    """A version as the word that travels; never 0, which is what was not written."""
    return int(version) % _VERSIONS + 1


def patient(stock: type[Any]) -> type[Any]:
    """NIXL's class of settings, with a least delay between two turns of the thread that moves caches on."""

    class PatientConfig(stock):
        @property
        def pthrDelay(self) -> int:
            return stock.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            stock.pthrDelay.__set__(self, max(microseconds, _TURN_MICROSECONDS))

    return PatientConfig


def key_pair(key: str) -> tuple[bytes, bytes]:
    """The public and the secret key of CURVE that follow from a handover key."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(hashlib.sha256(b"megasync handover " + key.encode()).digest())
    return zmq.curve_public(secret), secret


def keyed_context(key: str) -> type[Any]:
    """A ZeroMQ context whose PULL sockets take messages only from PUSH sockets of one with the same key."""
    import zmq

    public, secret = key_pair(key)

    class KeyedContext(zmq.Context[Any]):
        def socket(self, socket_type: int, *arguments: Any, **options: Any) -> Any:
            socket = super().socket(socket_type, *arguments, **options)
            if socket_type in (zmq.PULL, zmq.PUSH):
                socket.curve_publickey, socket.curve_secretkey = public, secret
            if socket_type == zmq.PULL:
                socket.curve_server = True
            elif socket_type == zmq.PUSH:
                socket.curve_serverkey = public
            return socket

    return KeyedContext


def keyed_requests(header: str) -> SimpleNamespace:
    """The module `requests`, with a header in every request."""
    import requests

    class KeyedSession(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            # Neither proxies nor a user's .netrc, which would replace the header.
            self.trust_env = False
            self.headers["Authorization"] = header

    def call(method: str) -> Callable[..., Any]:
        def send(url: str, **options: Any) -> Any:
            with KeyedSession() as session:
                return session.request(method, url, **options)

        return send

    calls = {method: call(method) for method in ("get", "put", "post")}
    return SimpleNamespace(**vars(requests) | calls | {"Session": KeyedSession})
