"""The guard of a server: which routes answer without the admin key, and the middleware that refuses the others.

Every route is closed that `PROBES` and `GENERATION` do not name, including routes that SGLang does not have: its next
version may add them. SGLang's own access levels leave open every route without a level, such as `/server_info`, and
every WebSocket. `ServerGuard._admits` guarantees this; it sees each request before any other part of the server does.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from megasync.errors import ServerError
from megasync.sglang.hooks import Stock, hook
from megasync.sglang.prompts import PromptCalls

_SERVE = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_ADD_MIDDLEWARE = "sglang.srt.utils.auth.add_api_key_middleware"

# Open without a key. They expose the model's names and version, and counts; they change nothing.
PROBES = frozenset(
    {
        *(("GET", "/health"), ("GET", "/ready")),
        *(("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/v1/models")),
        # Exist with --enable-metrics only.
        *(("GET", "/metrics"), ("GET", "/metrics/")),
    }
)
# Lists adapters, which of a service are its tenants': a server that loads adapters by name closes it.
ADAPTERS = frozenset({("GET", "/v1/models")})
# Open with the generation key, or without a key if there is none.
GENERATION = frozenset(
    ("POST", path) for path in ("/generate", "/encode", "/classify", "/v1/completions", "/v1/chat/completions")
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ServerGuard:
    """ASGI middleware that refuses requests without the key of their route."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        admin: str,
        generation: str | None,
        named_adapters: bool = False,
    ) -> None:
        self._app = app
        self._admin = admin
        self._generation = generation
        self._probes = PROBES - ADAPTERS if named_adapters else PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closed before it is accepted, which the client sees as status 403.
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})

    def _admits(self, scope: Mapping[str, Any]) -> bool:
        route = (scope.get("method"), scope["path"])
        if route in self._probes or (self._generation is None and route in GENERATION):
            return True
        if _has_key(scope, self._admin):
            return True
        return self._generation is not None and route in GENERATION and _has_key(scope, self._generation)


def _has_key(scope: Mapping[str, Any], key: str) -> bool:
    # The router adds its own header to the client's.
    credentials = [value.partition(b" ") for name, value in scope["headers"] if name == b"authorization"]
    return any(
        scheme.lower() == b"bearer" and secrets.compare_digest(token.strip(), key.encode())
        for scheme, _, token in credentials
    )


@dataclass(frozen=True)
class GuardedServer:
    """SGLang's HTTP server with megasync's guard in front of it.

    The keys never become server arguments: SGLang logs those, passes them to its other processes and shows them at
    `/server_info`.
    """

    admin: str
    generation: str | None
    # Of a decode engine.
    prompts: PromptCalls | None = None
    # Whether it loads adapters by name.
    named_adapters: bool = False

    def register(self) -> None:
        if self.prompts is not None:
            self.prompts.register()
        hook("AROUND", _SERVE, self.around_serve)
        hook("REPLACE", _ADD_MIDDLEWARE, self.add_guard)

    def around_serve(self, stock: Stock, *arguments: Any, **options: Any) -> Any:
        from sglang.srt.runtime_context import get_serving

        serving = get_serving()
        # The guard would cover neither: HTTP workers import the application again, and gRPC is another server.
        if serving.tokenizer_worker_num != 1 or serving.grpc_port is not None:
            raise ServerError(
                f"a server with keys cannot be guarded with --tokenizer-worker-num={serving.tokenizer_worker_num} and "
                f"--grpc-port={serving.grpc_port}; leave both out of server_args, and SGLANG_GRPC_PORT unset"
            )
        # With an admin key SGLang installs a guard; its own warm-up and garbage collection authenticate with these.
        with serving.override(admin_api_key=self.admin, api_key=self.generation):
            return stock(*arguments, **options)

    def add_guard(self, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        if self.prompts is not None:
            app.add_middleware(self.prompts.middleware)
        # Added last, it is in front of all others.
        keys = {"admin": self.admin, "generation": self.generation}
        app.add_middleware(ServerGuard, **keys, named_adapters=self.named_adapters)
