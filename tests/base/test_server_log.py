"""Requests that are no HTTP are answered and not logged; faults of the server are."""

import asyncio

import pytest
from aiohttp import web

from megasync.base.server_log import SERVER_LOG

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
    runner = web.ServerRunner(web.Server(answer, access_log=None, logger=SERVER_LOG))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0])
    writer.write(sent)
    status = (await reader.readline()).split()[1]
    writer.close()
    await runner.cleanup()
    if sent in MALFORMED.values():
        assert status == b"400" and not caplog.records
    else:
        assert status == b"500" and "a fault of the server" in caplog.text
