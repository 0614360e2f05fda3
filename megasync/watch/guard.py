"""Who may read the page: an ASGI wrapper in front of everything it serves, pages, files and the websocket alike.

Invariant: no byte of the application answers a request without the access token, a request whose Host header names a
foreign site (DNS rebinding), or a websocket that a page of another origin opens. `Guard.__call__` is the only way in.

The token comes in the address once (`?token=...`), becomes a cookie, and leaves the address. The cookie's name depends
on the token, so that pages behind two tunnels on one `localhost` keep apart.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# The websocket's fallback for browsers behind proxies without websockets also posts.
WEBSOCKET_PATH = "/_nicegui_ws/"
TOKEN_PARAMETER = "token"
REFUSAL = (
    "This page needs its access token. Open the address that `megasync watch` has printed, which contains it, or "
    "start it again for a new one.\n"
)


class Guard:
    """`token` None asks for none. With `loopback`, only the names of this machine's loopback are accepted as host."""

    def __init__(self, app: ASGIApp, token: str | None, loopback: bool) -> None:
        self.app = app
        self._token = token
        self._loopback = loopback
        self._cookie = f"megasync_{hashlib.sha256((token or '').encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        refusal = self._refusal(scope, headers, host)
        if refusal is not None:
            await self._refuse(scope, receive, send, *refusal)
            return
        if self._token is not None and scope["type"] == "http":
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            tokens = [value for name, value in query if name == TOKEN_PARAMETER]
            if tokens and _equal(tokens[0], self._token):
                rest = urlencode([pair for pair in query if pair[0] != TOKEN_PARAMETER])
                # A path that begins with two slashes would lead to another host.
                path = "/" + scope["path"].lstrip("/")
                answer = RedirectResponse(path + (f"?{rest}" if rest else ""), status_code=303)
                answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
                await answer(scope, receive, self._secured(send, host))
                return
        if not self._has_cookie(headers):
            await self._refuse(scope, receive, send, 401, REFUSAL)
            return
        await self.app(scope, receive, self._secured(send, host))

    def _refusal(self, scope: Scope, headers: dict[str, str], host: str) -> tuple[int, str] | None:
        """The status and the text for a request that no token makes acceptable."""
        if self._loopback and _name(host) not in LOOPBACK_NAMES:
            return 421, f"host {_name(host)!r} is not this machine; open the page as localhost or 127.0.0.1\n"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].partition("/")[0] != host:
            return 403, f"a page of {origin} may not read this one, whose host is {host}\n"
        posts = scope["path"].startswith(WEBSOCKET_PATH)
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD") and not posts:
            return 405, "this page is read-only\n"
        return None

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        if self._token is None:
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self._token)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
            return
        await PlainTextResponse(text, status)(scope, receive, self._secured(send, ""))

    def _secured(self, send: Send, host: str) -> Send:
        """Adds the security headers to a response. Vue compiles its templates in the browser: hence unsafe-eval."""
        sockets = f" ws://{host} wss://{host}" if host else ""
        headers = {
            "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
            f"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
            f"connect-src 'self'{sockets}; worker-src 'self' blob:; object-src 'none'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
        }

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return secured


def _equal(candidate: str, token: str) -> bool:
    """Compares in time that does not depend on the content."""
    return hmac.compare_digest(candidate.encode(), token.encode())


def _name(host: str) -> str:
    """The host without its port; an IPv6 address without its brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
