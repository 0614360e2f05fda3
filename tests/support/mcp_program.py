"""An MCP server of the real SDK, for tests: `python mcp_program.py stdio|PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import ImageContent, TextContent

server = MCPServer("test")
counted = 0
# Where a call leaves its mark when it begins, before anything can kill it.
MARKS = Path(os.environ.get("MARKS", os.devnull))


def mark(text: str) -> None:
    with MARKS.open("a") as file:
        file.write(f"{text}\n")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Counts the calls of this process."""
    global counted
    counted += 1
    return str(counted)


@server.tool()
def pid() -> str:
    """The process of the server."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "none")


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such file: x.txt")


@server.tool()
async def slow(seconds: float) -> str:
    """Takes its time."""
    mark("slow")
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
async def hang() -> str:
    """Blocks the whole server."""
    time.sleep(1000)  # noqa: ASYNC251
    return ""


@server.tool()
async def die() -> str:
    """Kills the server in the middle of a call."""
    mark("die")
    os._exit(9)


@server.tool(structured_output=False)
def picture() -> list[TextContent | ImageContent]:
    """A picture."""
    image = ImageContent(type="image", data="aGk=", mime_type="image/png")
    return [TextContent(type="text", text="see:"), image]


@server.tool()
async def grow(context: Context) -> str:
    """Adds a tool."""

    def extra() -> str:
        """A new tool."""
        return "new"

    server.add_tool(extra)
    await context.notify_tools_changed()
    await context.session.send_tool_list_changed()
    return "grown"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
