"""Calls of an object's methods from other processes of this machine, over a socket. A call costs about a fifth of one
through Ray, and arrays travel without a copy in pickle.

    frame       8 bytes: length of the rest │ number of parts n │ n lengths │ pickle │ buffers outside of the pickle
    question    (id, method, arguments, keyword arguments)
    answer      (id, whether it returned, what it returned or raised)

Invariant: each call ends with its answer, or with ConnectionError once the connection is lost, which it is when either
process dies. Only processes of the same user may call: `_Answers.connection_made` asks the kernel who connects.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import uuid
from itertools import count
from typing import Any

from megasync.errors import MegasyncError

# Bytes that are read at once; a longer frame is read into memory of its own.
READ_BYTES = 2**16
# Parts of up to this many bytes are sent together.
JOINED_BYTES = 2**16
_LENGTH = struct.Struct("<Q")
# Of `struct ucred`: process, user, group.
_CREDENTIALS = struct.Struct("3i")


async def listen(target: Any) -> str:
    """Answers calls of ``target``'s methods, which are coroutines, while this process lives. Returns the address."""
    address = f"\0megasync-{uuid.uuid4().hex}"
    await asyncio.get_running_loop().create_unix_server(lambda: _Answers(target), address)
    return address


class Link:
    """A connection to the object that listens at an address."""

    def __init__(self, questions: _Questions) -> None:
        self._questions = questions

    @classmethod
    async def connect(cls, address: str) -> Link:
        """Raises OSError."""
        _, questions = await asyncio.get_running_loop().create_unix_connection(_Questions, address)
        return cls(questions)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Raises what the method raises, and ConnectionError. A cancelled call goes on at the other end."""
        return await self._questions.ask(method, args, kwargs)

    def close(self) -> None:
        """Calls in flight fail."""
        self._questions.close()


class _Frames(asyncio.BufferedProtocol):
    """Sends and receives messages as frames."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        # What arrived of the next frames, or of one that is longer than this.
        self._start, self._filled = bytearray(READ_BYTES), 0
        self._long: memoryview | None = None

    def received(self, message: Any) -> None:
        raise NotImplementedError

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._start if self._long is None else self._long)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._long is None:
            self._read_frames()
        elif self._filled == len(self._long):
            body, self._long, self._filled = self._long, None, 0
            self.received(_unpack(body))

    def _read_frames(self) -> None:
        at, start, view = 0, self._start, memoryview(self._start)
        while self._filled - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(start, at)
            end = at + _LENGTH.size + size
            if end > self._filled:
                break
            body, at = bytes(view[at + _LENGTH.size : end]), end
            self.received(_unpack(memoryview(body)))
        rest = start[at : self._filled]
        self._filled = len(rest)
        if len(rest) >= _LENGTH.size and (size := _LENGTH.unpack_from(rest)[0]) > READ_BYTES - _LENGTH.size:
            self._filled -= _LENGTH.size
            self._long = memoryview(bytearray(size))
            self._long[: self._filled] = rest[_LENGTH.size :]
        elif at:
            start[: len(rest)] = rest

    def send(self, message: Any) -> None:
        """Raises what pickle raises, and sends nothing then."""
        outside: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=outside.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in outside)]
        sizes = [len(part) for part in parts]
        start = struct.pack(f"<{len(parts) + 2}Q", 8 * (len(parts) + 1) + sum(sizes), len(parts), *sizes)
        if sum(sizes) <= JOINED_BYTES:
            self._transport.write(b"".join([start, *parts]))
            return
        for part in (start, *parts):
            self._transport.write(part)


def _unpack(body: memoryview) -> Any:
    (parts,) = _LENGTH.unpack_from(body)
    at = 8 * (parts + 1)
    views: list[memoryview] = []
    for size in struct.unpack_from(f"<{parts}Q", body, 8):
        views.append(body[at : at + size])
        at += size
    return pickle.loads(views[0], buffers=views[1:])


class _Answers(_Frames):
    """The end that makes the calls."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
            # Before anything is unpickled.
            transport.abort()

    def received(self, message: Any) -> None:
        call = self._loop.create_task(self._answer(*message))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            answer = number, True, await getattr(self._target, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer = number, False, error
        if self._transport.is_closing():
            return
        try:
            self.send(answer)
        except Exception as error:  # noqa: BLE001 - pickle raises whatever the object's own hooks raise
            self.send(
                (number, False, MegasyncError(f"the answer to {method} cannot be sent: {error!r}: {answer[2]!r:.200}"))
            )


class _Questions(_Frames):
    """The end that calls."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._lost: str | None = None

    async def ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._lost is not None:
            raise ConnectionError(self._lost)
        number, answer = next(self._numbers), self._loop.create_future()
        self.send((number, method, args, kwargs))
        self._asked[number] = answer
        try:
            return await answer
        finally:
            del self._asked[number]

    def received(self, message: Any) -> None:
        number, returned, value = message
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value) if returned else answer.set_exception(value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"its connection was lost ({exc})" if exc is not None else "its connection was closed")

    def close(self) -> None:
        self._end("the connection was closed here")
        if not self._loop.is_closed():
            self._transport.abort()

    def _end(self, why: str) -> None:
        self._lost = self._lost or why
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError(self._lost))
