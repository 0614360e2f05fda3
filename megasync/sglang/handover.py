"""How a prompt's cache gets from a prefill to a decode engine of one server, inside SGLang.

A prefill engine computes a prompt's keys and values and the first token, and hands them over to a decode engine, which
goes on from there (`prompts` says who asks whom). In SGLang 0.5.23 engines arrange that over an HTTP server at
each prefill engine and ZeroMQ sockets at all ranks, and move the cache with NIXL. `Handover` changes three things:

- Those servers and sockets talk to anyone. Here both ends prove that they know the server's handover key: in a header,
  and by ZeroMQ's CURVE, whose one key pair follows from that key and which encrypts too.
- A decode engine goes on from the cache of any version. Here a handover carries the version of the weights that
  computed it, and the decode engine aborts a request with that of another one. The client sends it again.
- On a CPU, SGLang registers the cache as that of a GPU, which NIXL refuses, and a thread of NIXL spins on a core.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from megasync.sglang.hooks import Stock, hook

_CONN = "sglang.srt.disaggregation.common.conn."
_BUFFERS = "sglang.srt.disaggregation.utils.MetadataBuffers."
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager."
# An unused word of the row of `cached_tokens` that travels with each handover.
_VERSION = 15
# Such words are signed and have 32 bits.
_VERSIONS = 2**31 - 1
# The route that tells whether the HTTP server runs; it tells nothing else.
_OPEN_ROUTE = "/health"
_TURN_MICROSECONDS = 1000

log = logging.getLogger(__name__)


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
        hook("AROUND", _CONN + "CommonKVBootstrapServer._setup_routes", self.around_routes)
        hook("BEFORE", _CONN + "CommonKVManager.__init__", self.before_manager)
        hook("AROUND", _BUFFERS + "set_buf", self.around_write)
        hook("AROUND", _BUFFERS + "get_buf", self.around_read)
        if self._on_cpu:
            hook("BEFORE", _NIXL + "__init__", self.before_transfers)

    # Keys

    def around_routes(self, stock: Stock, server: Any) -> None:
        """Closes the routes of the HTTP server at which the engines meet."""
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            header = request.headers.get("Authorization", "")
            if request.path != _OPEN_ROUTE and not hmac.compare_digest(header.encode(), self._header.encode()):
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
        computed, served = int(cached[_VERSION]), word_of(self._version())
        if computed != served:
            log.error("A prompt was handed over that version %d computed, to version %d", computed - 1, served - 1)
            room[0] = 1 if int(room[0]) != 1 else 2
        return received

    def before_transfers(self, manager: Any, arguments: Any, *_: Any, **__: Any) -> None:
        """Names the kind of memory that the cache is in, and has NIXL's thread sleep between its turns."""
        bindings: Any = import_module("nixl._api").nixlBind
        bindings.nixlAgentConfig = patient(bindings.nixlAgentConfig)
        arguments.kv_data_mem_kinds = ["DRAM"] * len(arguments.kv_data_ptrs)


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
