"""Who comes past the guard of a server: every route but a few is closed, whatever stands behind it."""

from __future__ import annotations

import pytest

from megasync.serving.plugin_protocol import CLOSED_ROUTE
from megasync.sglang.guard import GENERATION, PROBES, ServerGuard

ADMIN, MAKER = "the-admin-key", "the-generation-key"
CLOSED = [
    *(("GET", "/server_info"), ("GET", "/get_server_info"), ("GET", CLOSED_ROUTE), ("POST", "/pause_generation")),
    # Not what the lists name: another method, another spelling, a route that begins alike.
    *(("PUT", "/generate"), ("GET", "/generate"), ("POST", "/health"), ("GET", "//health"), ("GET", "/health/")),
    *(
        ("GET", "/health_generate"),
        ("GET", "/metrics_of"),
        ("POST", "/Generate"),
        ("OPTIONS", "/server_info"),
        ("GET", "/"),
    ),
]


async def status(
    route: tuple[str, str], *keys: bytes, generation: str | None = MAKER, kind: str = "http", named: bool = False
) -> int:
    """200 is what stands behind the guard, 403 a WebSocket that was not accepted."""
    sent = []

    async def behind(scope, receive, send):
        sent.append({"status": 200})

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"here"), *((b"authorization", key) for key in keys)]
    scope = {"type": kind, "method": route[0], "path": route[1], "headers": headers}
    await ServerGuard(behind, admin=ADMIN, generation=generation, named_adapters=named)(scope, None, send)
    first = sent[0]
    if first.get("type") == "websocket.close":
        return 403
    assert first["status"] != 401 or sent[1]["type"] == "http.response.body"
    return first["status"]


@pytest.mark.parametrize("route", CLOSED)
async def test_other_routes_require_the_admin_key(route):
    for generation in (None, MAKER):
        assert await status(route, generation=generation) == 401
        assert await status(route, b"Bearer " + MAKER.encode(), generation=generation) == 401
        assert await status(route, b"Bearer " + ADMIN.encode(), generation=generation) == 200


@pytest.mark.parametrize("route", sorted(PROBES))
async def test_probes_are_open_and_only_look(route):
    assert route[0] == "GET"
    assert await status(route) == 200


async def test_a_list_of_tenants_adapters_is_no_probe():
    assert [await status(("GET", path), named=True) for path in ("/v1/models", "/model_info")] == [401, 200]
    assert await status(("GET", "/v1/models"), b"Bearer " + ADMIN.encode(), named=True) == 200


@pytest.mark.parametrize("route", sorted(GENERATION))
async def test_generation_is_open_until_there_is_a_key_for_it(route):
    assert await status(route, generation=None) == 200
    assert await status(route) == 401
    assert await status(route, b"Bearer " + MAKER.encode()) == 200
    assert await status(route, b"Bearer " + ADMIN.encode()) == 200


@pytest.mark.parametrize(
    "keys",
    [
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Basic " + ADMIN.encode()],
        [ADMIN.encode()],
        [b"Bearer " + ADMIN[:-1].encode()],
        [b"Bearer \xff\xfe"],
        [b"Bearer wrong", b"Bearer " + MAKER.encode()],
    ],
)
async def test_what_is_no_key_opens_nothing(keys):
    assert await status(("GET", "/server_info"), *keys) == 401


async def test_a_websocket_needs_the_admin_key():
    # As of a WebSocket: without a method.
    for path in ("/v1/realtime", "/health", "/generate"):
        assert await status((None, path), kind="websocket") == 403
        assert await status((None, path), b"Bearer " + ADMIN.encode(), kind="websocket") == 200


async def test_start_and_end_pass():
    started = []

    async def behind(scope, receive, send):
        started.append(scope["type"])

    await ServerGuard(behind, admin=ADMIN, generation=None)({"type": "lifespan"}, None, None)
    assert started == ["lifespan"]
