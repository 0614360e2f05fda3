"""HTTP servers listen where they are told. They log their own errors, and not what strangers send that is no HTTP."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from megasync.base.http_server import listen, low_level
from megasync.errors import ConfigError

MALFORMED = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)) + b"\r\n\r\n",
    "no method": b"\r\n\0\0\0 / HTTP/1.1\r\n\r\n",
    "no version": b"GET / HTTP/9.x\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "long": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
}


async def answer(request):
    raise RuntimeError("a fault of the server")


@pytest.mark.parametrize("sent", [*MALFORMED.values(), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=[*MALFORMED, "HTTP"])
async def test_only_faults_of_the_server_are_logged(caplog, sent):
    runner = low_level(answer, lambda path: 100)
    await listen(runner, "127.0.0.1", 0, "it cannot listen")
    reader, writer = await asyncio.open_connection(*runner.addresses[0])
    writer.write(sent)
    status = (await reader.readline()).split()[1]
    writer.close()
    await runner.cleanup()
    if sent in MALFORMED.values():
        assert status == b"400" and not caplog.records
    else:
        assert status == b"500" and "a fault of the server" in caplog.text


async def test_a_body_is_as_large_as_its_path_may_have():
    async def length(request):
        return web.Response(text=str(len(await request.read())))

    runner = low_level(length, lambda path: 1000 if path == "/large" else 10)
    url = await listen(runner, "127.0.0.1", 0, "it cannot listen")
    async with aiohttp.ClientSession() as http:
        statuses = [(await http.post(url + path, data=b"a" * 100)).status for path in ("/large", "/small")]
    await runner.cleanup()
    assert statuses == [200, 413]


async def test_a_port_in_use_is_an_error_that_names_the_fix_and_leaves_nothing_open():
    first, second = (low_level(answer, lambda path: 0) for _ in range(2))
    url = await listen(first, "127.0.0.1", 0, "it cannot listen")
    with pytest.raises(ConfigError, match=r"it cannot listen at that port: .*in use.*; port=0 takes a free one"):
        await listen(second, "127.0.0.1", int(url.rpartition(":")[2]), "it cannot listen at that port")
    assert second.addresses == []
    await first.cleanup()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_url_of_a_server_can_be_opened(host):
    async def greet(request):
        return web.Response(text="hello")

    runner = low_level(greet, lambda path: 0)
    try:
        url = await listen(runner, host, 0, "it cannot listen")
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert await response.text() == "hello"
    await runner.cleanup()
