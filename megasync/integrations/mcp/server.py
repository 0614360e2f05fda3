"""Joins MCP (Model Context Protocol): tools of its servers, for the tool agent and for any workflow.

    server = McpServer("files", command=["python", "files_server.py"])      # or url="http://host:8000/mcp"

    async def rollout(client, sample):
        async with server.session() as tools:
            toolbox = Toolbox([search, *tools])
            ...

The official SDK speaks the protocol. Each connection is owned by one task, because the SDK's scopes end in the task
that began them; calls come from any task, and any number of them are in progress at a time.

    connection   is of                    a server that died
    -----------  -----------------------  --------------------------------------------------------------------------
    of a sample  one sample (the default) has lost its state: the sample is repeated
    shared       all samples of a worker  is started again for the next call; samples with a call in progress are
                                          repeated

Invariants: a call that may have begun is never sent twice; `McpTool.call` repeats one only on a connection that was
lost before. A failure of the server is a ServiceFailed, and what it says of a call is the model's to read; `_answer`
tells them apart. No process of a server outlives its owner (`stdio`).

    wait                 ends
    -------------------  --------------------------------------------------------------------------
    a start              with the list of tools, or after START_SECONDS
    a call               with its result, at its deadline, or with the connection
    the check of a late  with any answer of the server, or after CHECK_SECONDS
    call's server
    a session's place    with another sample's session (`pool`)
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megasync.base.confidential import masked_text
from megasync.base.missing import require_extra
from megasync.concurrency.foreign import DeadlineExceeded, explain
from megasync.concurrency.tasks import cancel_and_wait, within
from megasync.errors import ConfigError, DataError, ServiceFailed
from megasync.rollout.breaker import Breaker
from megasync.rollout.tools import Tool, ToolFailed, ToolServer

# Where the extra is not installed, a type checker takes this folder for the package of the same name.
if TYPE_CHECKING:
    from mcp import Client  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

log = logging.getLogger(__name__)

# Seconds from the start of a server to the list of its tools. A package runner may have to download it.
START_SECONDS = 60.0
# Seconds in which a server must answer anything at all after a call has run out of its deadline.
CHECK_SECONDS = 5.0
# Seconds for connections to end with the run.
CLOSE_SECONDS = 10.0
# Connections at a time to a server over HTTP: a call holds one.
HTTP_CONNECTIONS = 4096
# Tools that a prompt may hold, and pages and tools that are read to find them.
OFFERED, PAGES, LISTED = 128, 1000, 20_000
# Characters of a tool's description, and of its schema.
DESCRIPTION_CHARACTERS, SCHEMA_CHARACTERS = 4000, 65_536
NAME_CHARACTERS = 128
# Names in messages.
SHOWN = 10
# Codes of JSON-RPC errors: the connection ended, the server failed by its own fault, and what the SDK reports for a
# session that a server over HTTP no longer knows, with its text.
CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST = -32000, -32603, -32600
FORGOTTEN = "Session terminated"


class _NotBegun(Exception):
    """The connection was lost before the call could begin."""


class McpServer(ToolServer):
    """An MCP server by the command that starts it, or by the URL of one that runs already.

    `name` stands in messages and metrics. `environment` adds variables to the few that the process gets (PATH, HOME,
    USER, ...), `headers` are sent with each request. `tools` are the names of those to offer, all by default; `prefix`
    is put before their names. A `shared` server serves all samples of a worker. Otherwise each sample has a connection
    (and process) of its own, at most `pool` at a time. Raises ConfigError for contradictory arguments and without the
    package mcp.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        url: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] = (),
        prefix: str = "",
        shared: bool = False,
        pool: int = 64,
    ) -> None:
        if bool(command) == bool(url):
            given = "both" if url else "neither"
            raise ConfigError(
                f"the MCP server {name!r} needs `command` (a process to start) or `url` (a server that runs), and has "
                f"{given}"
            )
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the MCP server {name!r} has url={masked_text(url)!r}; begin it with http:// or https://"
            )
        if (command and headers) or (url and environment):
            wrong, right = ("headers", "url") if command else ("environment", "command")
            raise ConfigError(f"the MCP server {name!r} has `{wrong}`, which only a server with `{right}` reads")
        require_extra("mcp", "mcp", f"the MCP server {name!r}")
        self.name, self.command, self.url = name, tuple(command), url
        self.environment, self.headers = dict(environment or {}), dict(headers or {})
        self._selected, self._prefix = tuple(tools), prefix
        self.shared, self._pool = shared, pool
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process connects itself.
        options = {
            "environment": self.environment,
            "headers": self.headers,
            "tools": self._selected,
            "prefix": self._prefix,
            "shared": self.shared,
            "pool": self._pool,
        }
        return partial(McpServer, self.name, self.command, self.url, **options), ()

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._breaker = Breaker(self.name)
        self._places = asyncio.Semaphore(self._pool)
        self._connection: _Connection | None = None
        self._starting: asyncio.Task[_Connection] | None = None
        # Schemas by the tools' names at the server; None until they are listed, or after they have changed.
        self._schemas: dict[str, dict[str, Any]] | None = None
        self._listing = asyncio.Lock()
        self._connections: set[_Connection] = set()

    async def open(self) -> None:
        """Starts the server and lists its tools.

        Raises ServiceFailed, or ConfigError for tools that cannot be offered.
        """
        self._check_loop()
        connection = await self._current()
        await self._list(connection)
        if not self.shared:
            # A sample's own state begins with it.
            self._connection = None
            connection.stop()

    @property
    def offered(self) -> list[Tool]:
        """The tools as far as they are known: after `open`. Those of a `session` can be called."""
        return self._tools(self._current)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[list[Tool]]:
        """The tools of one sample, whose names and schemas stay as they are until its end.

        Raises ServiceFailed if the server cannot be reached, and ServiceDown if it has not been for long.
        """
        self._check_loop()
        async with self._breaker.episode():
            if self.shared:
                await self._list(await self._current())
                yield self._tools(self._current)
                return
            async with self._places:
                connection = await self._connect()
                try:
                    await self._list(connection)

                    async def own() -> _Connection:
                        if connection.lost:
                            raise self.failure(f"{connection.lost}, and with it the state of the sample")
                        return connection

                    yield self._tools(own)
                finally:
                    connection.stop()

    async def close(self) -> None:
        """Ends all connections and processes."""
        if self._starting is not None:
            await cancel_and_wait(self._starting)
        connections = list(self._connections)
        for connection in connections:
            connection.stop()
        await asyncio.gather(*(connection.ended(CLOSE_SECONDS) for connection in connections))
        self._reset()

    def failure(self, problem: str) -> ServiceFailed:
        """The error of a failure that is the server's."""
        return ServiceFailed(f"the MCP server {self.name!r}: {problem}", self.name)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            if not self._loop.is_closed():
                raise DataError(
                    f"the MCP server {self.name!r} is used on two event loops; make an McpServer for each of them"
                )
            self._reset()
        self._loop = loop

    # Connections

    async def _current(self) -> _Connection:
        """The shared connection, which is made again if it is lost. All that wait share one attempt."""
        if self._connection is not None and not self._connection.lost:
            return self._connection
        if self._starting is None or self._starting.done():
            if self._connection is not None:
                log.warning("Starting the MCP server %s again: %s", self.name, self._connection.lost)
            # Of no sample: a workflow's context would end what it starts.
            self._starting = asyncio.get_running_loop().create_task(
                self._connect(), name=f"start of the MCP server {self.name}", context=Context()
            )
        connection = await asyncio.shield(self._starting)
        self._connection = connection
        return connection

    async def _connect(self) -> _Connection:
        connection = _Connection(self)
        self._connections.add(connection)
        await connection.start()
        return connection

    def forget(self, connection: _Connection) -> None:
        """The connection has ended."""
        self._connections.discard(connection)

    # Tools

    def changed(self) -> None:
        """The server says that its tools have changed: the next sample lists them again."""
        self._schemas = None

    async def _list(self, connection: _Connection) -> None:
        """Lists the tools if they are not known; samples that begin together list them once."""
        async with self._listing:
            if self._schemas is None:
                listed = await connection.list()
                self._schemas = self._checked(listed)

    def _checked(self, listed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The schemas of the tools to offer. Raises ConfigError."""
        of_server = f"the MCP server {self.name!r}"
        names = list(self._selected or listed)
        if missing := [name for name in names if name not in listed]:
            known = ", ".join(list(listed)[:SHOWN]) or "none"
            raise ConfigError(f"{of_server} has no tool {missing[0]!r}; it has {len(listed)}: {known}")
        if len(names) > OFFERED:
            raise ConfigError(
                f"{of_server} has {len(names):,} tools, more than the {OFFERED} that a prompt may hold; name those "
                f"that the model needs in `tools`, such as {', '.join(names[:3])}"
            )
        return {name: self._schema(listed[name]) for name in names}

    def _schema(self, tool: Any) -> dict[str, Any]:
        name = f"{self._prefix}{tool.name}"
        if not name.isprintable() or not 0 < len(name) <= NAME_CHARACTERS or " " in name:
            raise ConfigError(
                f"the MCP server {self.name!r} has a tool of the name {name[:NAME_CHARACTERS]!r}, which a model cannot "
                f"call: a name has 1 to {NAME_CHARACTERS} characters without blanks; leave it out by `tools`"
            )
        description = tool.description or tool.title or ""
        if len(description) > DESCRIPTION_CHARACTERS:
            description = f"{description[:DESCRIPTION_CHARACTERS]} [...]"
        # Templates may read the properties of any tool.
        parameters = {"type": "object", "properties": {}, **tool.input_schema}
        if (size := len(json.dumps(parameters))) > SCHEMA_CHARACTERS:
            raise ConfigError(
                f"the MCP server {self.name!r}: the schema of {tool.name} has {size:,} characters, more than the "
                f"{SCHEMA_CHARACTERS:,} that a prompt may hold; leave the tool out by `tools`"
            )
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    def _tools(self, connected: Callable[[], Awaitable[_Connection]]) -> list[Tool]:
        return [
            McpTool(connected, schema, {}, self, remote, connected) for remote, schema in (self._schemas or {}).items()
        ]


@dataclass(frozen=True, slots=True)
class McpTool(Tool):
    """A tool of an MCP server in one session. The server checks the arguments."""

    server: McpServer
    remote_name: str
    connected: Callable[[], Awaitable[_Connection]]

    @property
    def source(self) -> str:
        return f"the MCP server {self.server.name!r}"

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    async def call(self, arguments: dict[str, Any], seconds: float) -> str:
        """Calls the tool and returns its result as text.

        Raises DeadlineExceeded if a server that answers otherwise does not answer this within `seconds`, ToolFailed
        with what the server says of a failed call, and ServiceFailed for a failure of the server.
        """
        for _ in range(2):
            connection = await self.connected()
            try:
                return await connection.call(self.remote_name, arguments, seconds)
            except _NotBegun:
                log.info("A call of %s is sent again: %s", self.remote_name, connection.lost)
        raise self.server.failure("it was lost twice before a call could begin")


class _Connection:
    """One connection, with the server's process if it has a command. `lost` says why it can no longer be used."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self.lost = ""
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once the server has answered. Raises ServiceFailed."""
        self._owner = asyncio.get_running_loop().create_task(
            self._own(), name=f"MCP server {self._server.name}", context=Context()
        )
        self._owner.add_done_callback(lambda _: self._server.forget(self))
        try:
            await within(asyncio.shield(self._ready), START_SECONDS)
        except TimeoutError:
            self._lose(f"it did not start within {START_SECONDS:g} s")
            raise self._server.failure(self.lost) from None
        except asyncio.CancelledError:
            self._owner.cancel()
            raise

    def stop(self) -> None:
        """Ends the connection, without waiting for it."""
        self._lose("its session has ended")

    async def ended(self, seconds: float) -> None:
        """Waits for the end, which is forced after `seconds`."""
        if self._owner is not None:
            await asyncio.wait({self._owner}, timeout=seconds)
            await cancel_and_wait(self._owner)

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._stop.set()

    async def _own(self) -> None:
        """Holds the connection until it is lost or stopped."""
        try:
            async with AsyncExitStack() as stack:
                client = await self._enter(stack)
                if not self._ready.done():
                    self._ready.set_result(client)
                listening = asyncio.ensure_future(self._listen(client))
                try:
                    await self._stop.wait()
                finally:
                    await cancel_and_wait(listening)
        except Exception as error:  # of the SDK, its transports and the server
            self._fail_start(self.lost or explain(_first(error)))
            log.debug("Connection to the MCP server %s", self._server.name, exc_info=error)
        finally:
            self._fail_start(self.lost or "its connection ended")
            self._lose("its connection ended")

    def _fail_start(self, problem: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(self._server.failure(problem))
            # Its caller may be gone.
            self._ready.exception()

    async def _enter(self, stack: AsyncExitStack) -> Client:
        import httpx2  # pyright: ignore[reportMissingImports]
        from mcp import Client  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from mcp.client.streamable_http import streamable_http_client  # pyright: ignore[reportMissingImports]

        from megasync.integrations.mcp.stdio import stdio_streams

        server = self._server
        transport: Any
        if server.command:
            transport = stdio_streams(server.command, server.environment, self._lose)
        else:
            limits = httpx2.Limits(max_connections=HTTP_CONNECTIONS, max_keepalive_connections=HTTP_CONNECTIONS)
            # A call has a deadline of its own.
            timeout = httpx2.Timeout(CHECK_SECONDS * 2, read=None)
            http = httpx2.AsyncClient(headers=server.headers, limits=limits, timeout=timeout)
            await stack.enter_async_context(http)
            transport = streamable_http_client(server.url, http_client=http)
        return await stack.enter_async_context(Client(transport, message_handler=self._notified, cache=None))

    async def _notified(self, message: Any) -> None:
        if getattr(message, "method", None) == "notifications/tools/list_changed":
            self._server.changed()

    async def _listen(self, client: Client) -> None:
        """Hears of changed tools from a server of a protocol version in which the client asks for it."""
        from mcp.client.subscriptions import ListenNotSupportedError  # pyright: ignore[reportMissingImports]

        capability = client.server_capabilities.tools
        if capability is None or not capability.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._server.changed()
        except ListenNotSupportedError:
            # An older server sends notifications unasked.
            return
        except Exception as error:  # noqa: BLE001 - of the SDK or the server, which may refuse
            log.debug("The MCP server %s does not tell of changed tools: %s", self._server.name, error)

    async def list(self) -> dict[str, Any]:
        """All tools of the server by name. Raises ServiceFailed, or ConfigError for far too many."""
        client, listed, cursor = await self._ready, dict[str, Any](), None
        try:
            async with asyncio.timeout(START_SECONDS):
                for _ in range(PAGES):
                    page = await client.session.list_tools(params=_page(cursor))
                    listed |= {tool.name: tool for tool in page.tools}
                    cursor = page.next_cursor
                    if cursor is None:
                        return listed
                    if len(listed) > LISTED:
                        break
        except Exception as error:
            raise self._server.failure(f"its tools cannot be listed: {self.lost or explain(_first(error))}") from error
        raise ConfigError(
            f"the MCP server {self._server.name!r} lists more than {LISTED:,} tools or {PAGES:,} pages of them"
        )

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
        """The text of a call's result; see `McpTool.call`. Raises _NotBegun if the connection was lost before."""
        from mcp import MCPError  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        if self.lost:
            raise _NotBegun
        client = await self._ready
        try:
            async with asyncio.timeout(seconds):
                result = await client.call_tool(name, arguments)
        except TimeoutError:
            if await self._answers(client):
                raise DeadlineExceeded(f"{name} did not return within {seconds:g} s") from None
            self._lose(f"it answered neither a call within {seconds:g} s nor a request after it")
            raise self._server.failure(self.lost) from None
        except MCPError as error:
            self._answer(error)
            raise ToolFailed(error.message) from error
        except Exception as error:
            # Such as a result of another form than the tool's own schema says.
            raise self._server.failure(f"a call of {name} failed: {self.lost or explain(_first(error))}") from error
        text = _text(result)
        if result.is_error:
            raise ToolFailed(text or f"{name} failed")
        return text

    def _answer(self, error: Any) -> None:
        """Returns if an error is the server's answer to this call. Otherwise raises ServiceFailed or _NotBegun."""
        if error.code == INVALID_REQUEST and error.message == FORGOTTEN:
            # The server was restarted: it has refused the call, and the state is lost.
            self._lose("it does not know its session any more")
            raise _NotBegun from error
        if error.code == CONNECTION_CLOSED and not self.lost:
            if self._server.command:
                self._lose("its connection ended")
            else:
                # Over HTTP, each request has a connection of its own, and the next may succeed.
                raise self._server.failure(error.message) from error
        if self.lost:
            raise self._server.failure(f"{self.lost} during a call") from error
        if error.code == INTERNAL_ERROR:
            raise self._server.failure(error.message) from error

    async def _answers(self, client: Client) -> bool:
        """Whether the server answers anything at all."""
        from mcp import MCPError  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await client.session.list_tools()
        except MCPError as error:
            return error.code not in (CONNECTION_CLOSED, INTERNAL_ERROR)
        except Exception:  # noqa: BLE001 - no answer in time, or none that can be read
            return False
        return True


def _page(cursor: str | None) -> Any:
    from mcp.types import PaginatedRequestParams  # pyright: ignore[reportMissingImports]

    return None if cursor is None else PaginatedRequestParams(cursor=cursor)


def _text(result: Any) -> str:
    """A result as the model reads it: its texts, or its structured content if it has no other."""
    parts = [_block(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _block(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource_link":
        return str(block.uri)
    resource = getattr(block, "resource", block)
    if (text := getattr(resource, "text", None)) is not None:
        return text
    kind = "file" if block.type == "resource" else block.type
    return f"[{kind} of type {resource.mime_type or 'unknown'} left out: only text can be read]"


def _first(error: BaseException) -> BaseException:
    """The first error of a group, which the SDK's task groups make of each error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
