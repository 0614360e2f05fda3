"""Rollout workers run on uvloop, as all async actors of Ray, which differs from asyncio where a pipe has closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from megasync.errors import SandboxError
from megasync.sandboxes import containers

uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed, so Ray does not run on it")


async def to_a_command(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    await containers._write(process.stdin, b"input")


async def to_a_container(process: asyncio.subprocess.Process) -> None:
    container: Any = SimpleNamespace(_holder=process, _name="c")
    with pytest.raises(SandboxError, match="has ended"):
        await containers.ContainerSandbox._told(container)


async def to_an_mcp_server(process: asyncio.subprocess.Process) -> None:
    mcp_stdio = pytest.importorskip("megasync.integrations.mcp.stdio", reason="megasync install mcp")
    message: Any = SimpleNamespace(message=SimpleNamespace(model_dump_json=lambda **_: "{}"))

    async def to_send() -> Any:
        yield message
        yield message

    await mcp_stdio._write(process, to_send())


@pytest.mark.parametrize("write", [to_a_command, to_a_container, to_an_mcp_server])
def test_input_of_a_program_that_has_ended_is_dropped(write) -> None:
    async def play() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("true", stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        await process.wait()
        while not process.stdin.is_closing():
            await asyncio.sleep(0)
        await write(process)

    uvloop.run(play())
