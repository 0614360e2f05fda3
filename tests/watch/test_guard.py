"""Who may read the page: the token, the host, the origin and the method, for requests and for the websocket."""

from __future__ import annotations

import pytest

from megasync.watch.guard import Guard

TOKEN = "secret-token"


class Exchange:
    """Sends one request through a guard and keeps its outcome."""

    def __init__(self) -> None:
        self.reached = False
        self.sent: list[dict] = []

    async def app(self, scope, receive, send) -> None:
        self.reached = True
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the run"})

    async def ask(self, guard: Guard, path="/", query="", kind="http", method="GET", **headers: str) -> int | None:
        """The status of the answer; None for a websocket."""
        scope = {
            "type": kind,
            "path": path,
            "query_string": query.encode(),
            "method": method,
            "headers": [(name.encode(), value.encode()) for name, value in ({"host": "localhost:1"} | headers).items()],
        }

        async def receive() -> dict:
            return {"type": "websocket.connect" if kind == "websocket" else "http.request", "body": b""}

        async def send(message) -> None:
            self.sent.append(message)

        await guard(scope, receive, send)
        return self.sent[0].get("status")

    def header(self, name: str) -> str:
        return dict(self.sent[0]["headers"]).get(name.encode(), b"").decode()


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


async def cookie(exchange: Exchange, guard: Guard) -> str:
    other = Exchange()
    assert await other.ask(guard, "/overview", f"run=a&token={TOKEN}") == 303
    assert other.header("location") == "/overview?run=a"
    given = other.header("set-cookie")
    assert "HttpOnly" in given and "SameSite=lax" in given
    return given.partition(";")[0]


async def test_the_token_of_the_address_becomes_a_cookie_that_opens_the_page(exchange):
    guard = Guard(exchange.app, TOKEN, loopback=True)
    assert await exchange.ask(guard, cookie=await cookie(exchange, guard)) == 200
    assert exchange.reached


@pytest.mark.parametrize("query", ["", "token=", "token=secret-toke", "token=secret-token2"])
async def test_without_the_token_nothing_answers(exchange, query):
    assert await exchange.ask(Guard(exchange.app, TOKEN, loopback=True), query=query) == 401
    assert not exchange.reached


async def test_the_websocket_needs_the_cookie_too(exchange):
    guard = Guard(exchange.app, TOKEN, loopback=True)
    await exchange.ask(guard, "/_nicegui_ws/socket.io/", kind="websocket")
    assert not exchange.reached
    assert exchange.sent[0]["type"] == "websocket.close"
    await exchange.ask(guard, "/_nicegui_ws/socket.io/", kind="websocket", cookie=await cookie(exchange, guard))
    assert exchange.reached


async def test_the_cookie_of_another_page_opens_nothing(exchange):
    other = Guard(exchange.app, "other", loopback=True)
    guard = Guard(exchange.app, TOKEN, loopback=True)
    assert await exchange.ask(other, cookie=await cookie(exchange, guard)) == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "", "[::1", "10.0.0.5"]
)
async def test_a_foreign_host_is_refused_on_loopback_even_without_a_token(exchange, host):
    assert await exchange.ask(Guard(exchange.app, None, loopback=True), host=host) == 421
    assert not exchange.reached


@pytest.mark.parametrize("host", ["localhost", "localhost:8420", "127.0.0.1:9", "[::1]:8420"])
async def test_any_port_of_loopback_is_accepted_since_tunnels_change_it(exchange, host):
    assert await exchange.ask(Guard(exchange.app, None, loopback=True), host=host) == 200


async def test_a_page_of_another_origin_may_not_open_the_websocket(exchange):
    guard = Guard(exchange.app, None, loopback=True)
    await exchange.ask(guard, "/_nicegui_ws/socket.io/", kind="websocket", origin="http://[::1")
    await exchange.ask(guard, "/_nicegui_ws/socket.io/", kind="websocket", origin="http://localhost:3000")
    assert not exchange.reached
    await exchange.ask(guard, "/_nicegui_ws/socket.io/", kind="websocket", origin="http://localhost:1")
    assert exchange.reached


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_the_page_is_read_only(exchange, method):
    assert await exchange.ask(Guard(exchange.app, None, loopback=True), method=method) == 405


async def test_the_address_after_the_token_stays_on_this_host(exchange):
    guard = Guard(exchange.app, TOKEN, loopback=True)
    await exchange.ask(guard, "//evil.example/", f"token={TOKEN}")
    assert exchange.header("location") == "/evil.example/"


async def test_answers_carry_the_security_headers(exchange):
    await exchange.ask(Guard(exchange.app, None, loopback=True))
    policy = exchange.header("content-security-policy")
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "ws://localhost:1" in policy
    assert exchange.header("x-content-type-options") == "nosniff"
    assert exchange.header("referrer-policy") == "no-referrer"
