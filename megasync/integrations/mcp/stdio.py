"""Joins MCP: the standard input and output of a server's process, as the streams of the SDK's client.

Beside the SDK's own transport, this one bounds what a server can do to the worker: a line's length, output that is not
JSON-RPC, and the life of its processes.

Invariant: no process of the server's group outlives the block, the worker (even a killed one) or the server itself; the
supervisor that runs the command guarantees it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import mcp.types  # pyright: ignore[reportMissingImports]
from mcp.client.stdio import get_default_environment  # pyright: ignore[reportMissingImports]
from mcp.shared.message import SessionMessage  # pyright: ignore[reportMissingImports]

from megasync.concurrency.tasks import cancel_and_wait, within
from megasync.errors import ServerError, raised_as
from megasync.serving import supervisor

log = logging.getLogger(__name__)

# Bytes of one message of a server. A worker holds it in memory.
LINE_BYTES = 16 * 2**20
# Lines that are no messages, from the start of a server to its end: a few are what a library prints by mistake.
STRAY_LINES = 1000
# Seconds in which a server may end after its standard input was closed.
END_SECONDS = 2.0
# Characters of a stray line, and of the end of standard error, in messages.
SHOWN_CHARACTERS = 300


@asynccontextmanager
async def stdio_streams(
    command: Sequence[str], environment: Mapping[str, str], on_end: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Runs the command and yields the streams of messages from it and to it.

    `on_end` is told why no further message will come. Raises ServerError when no process can be created.
    """
    script = [sys.executable, "-S", "-E", supervisor.__file__, str(os.getpid()), ""]
    pipe = asyncio.subprocess.PIPE
    with raised_as(ServerError, f"cannot start {command[0]!r}"):
        process = await asyncio.create_subprocess_exec(
            *(*script, *command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=LINE_BYTES,
            # Not the worker's own variables, among which there are keys.
            env={**get_default_environment(), **environment},
            start_new_session=True,
        )
    received, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    work: list[asyncio.Task[None]] = []
    errors = bytearray()
    try:
        work += [
            asyncio.create_task(_read(process, received, errors, on_end), name=f"from {command[0]}"),
            asyncio.create_task(_write(process, to_send), name=f"to {command[0]}"),
            asyncio.create_task(_drain(process, errors), name=f"errors of {command[0]}"),
        ]
        yield messages, outgoing
    finally:
        try:
            await _end(process)
        finally:
            await cancel_and_wait(*work)
            # A process that has left the group may still hold the pipes; nothing public closes them.
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]
            for stream in (received, messages, outgoing, to_send):
                stream.close()


async def _read(process: asyncio.subprocess.Process, received: Any, errors: bytearray, on_end: Any) -> None:
    assert process.stdout is not None
    why, stray = "it ended", 0
    try:
        while line := await process.stdout.readline():
            try:
                message = mcp.types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                stray += 1
                log.debug("Line that is no message: %r", line[:SHOWN_CHARACTERS])
                if stray > STRAY_LINES:
                    why = f"it wrote more than {STRAY_LINES} lines that are no messages, such as {_shown(line)}"
                    break
                continue
            await received.send(SessionMessage(message))
    except ValueError:
        why = f"it wrote a line of more than {LINE_BYTES >> 20} MiB"
    except (anyio.ClosedResourceError, anyio.BrokenResourceError):
        return
    finally:
        tail = f"; the end of its standard error: {_shown(errors)}" if errors else ""
        on_end(f"{why}{tail}")
        received.close()


async def _write(process: asyncio.subprocess.Process, to_send: Any) -> None:
    assert process.stdin is not None
    # A broken pipe means that the server has ended, which the reader reports.
    with suppress(OSError, anyio.ClosedResourceError, anyio.EndOfStream):
        async for message in to_send:
            # On uvloop, which Ray's workers run, a write to it would be a RuntimeError.
            if process.stdin.is_closing():
                return
            process.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _drain(process: asyncio.subprocess.Process, errors: bytearray) -> None:
    """Keeps the end of standard error. A server that could not write there would stop."""
    assert process.stderr is not None
    while piece := await process.stderr.read(65536):
        errors += piece
        del errors[: -4 * SHOWN_CHARACTERS]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes standard input, which ends a server, and kills the group of one that has not ended after END_SECONDS."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await within(process.wait(), END_SECONDS)
    except (TimeoutError, asyncio.CancelledError) as error:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        if isinstance(error, asyncio.CancelledError):
            raise
        with suppress(TimeoutError):
            await within(process.wait(), supervisor.GONE_SECONDS)


def _shown(output: bytes | bytearray) -> str:
    return repr(bytes(output[-SHOWN_CHARACTERS:]).decode("utf-8", "replace").strip())
