"""A mock SGLang server that answers every request with the same tokens, and reads nothing of it but its length.

    python benchmarks/null_fixed.py 256     # answers of 256 tokens; prints its URL, serves until standard input closes

It costs a fraction of what `null_server.py` costs for long prompts.
"""

from __future__ import annotations

import asyncio
import sys

import orjson
from null_server import answer

BACKLOG = 4096


class FixedAnswer(asyncio.Protocol):
    """One connection. Requests have a Content-Length, and each is sent after the answer to the one before."""

    def __init__(self, tokens: int) -> None:
        body = orjson.dumps(answer({"sampling_params": {"max_new_tokens": tokens}}))
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._answer = head.encode() + body
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            self._head += data
            head, found, rest = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            self._missing, self._head, data = int(length.partition(b":")[2]), b"", rest
        self._missing -= len(data)
        if not self._missing:
            self._transport.write(self._answer)


async def main() -> None:
    tokens = int(sys.argv[1])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FixedAnswer(tokens), "127.0.0.1", 0, backlog=BACKLOG)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
