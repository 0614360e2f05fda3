"""The guard of a server: which routes answer without the admin key, and the middleware that refuses the others.

Every route is closed that `PROBES` and `GENERATION` do not name, including routes that SGLang does not have: its next
version may add them. SGLang's own access levels leave open every route without a level, such as `/server_info`, and
every WebSocket. `ServerGuard._admits` guarantees this; it sees each request before any other part of the server does.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

# Set in the environment of a server that reads its keys, as JSON, from its standard input.
KEYS_VARIABLE = "MEGASYNC_SERVER_KEYS"
# Not a route: without the key, a guarded server answers 401 and any other server 404.
CLOSED_ROUTE = "/closed"

# Open without a key. They expose the model's names and version, and counts; they change nothing.
PROBES = frozenset(
    {
        *(("GET", "/health"), ("GET", "/ready")),
        *(("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/v1/models")),
        # Exist with --enable-metrics only.
        *(("GET", "/metrics"), ("GET", "/metrics/")),
    }
)
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
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, admin: str, generation: str | None
    ) -> None:
        self._app = app
        self._admin = admin
        self._generation = generation

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
        if route in PROBES or (self._generation is None and route in GENERATION):
            return True
        if _has_key(scope, self._admin):
            return True
        return self._generation is not None and route in GENERATION and _has_key(scope, self._generation)


def _has_key(scope: Mapping[str, Any], key: str) -> bool:
    # The router adds its own header to the client's.
    given = [value.partition(b" ") for name, value in scope["headers"] if name == b"authorization"]
    return any(
        scheme.lower() == b"bearer" and secrets.compare_digest(token.strip(), key.encode())
        for scheme, _, token in given
    )
