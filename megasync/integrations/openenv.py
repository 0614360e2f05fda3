"""Joins OpenEnv: its servers as environments, over their WebSocket: `reset`, `step`, and the tools of MCP environments.

Each environment of the pool has a connection, which is a session of the server: an environment of its own there. All
are at one server, which runs elsewhere (`url`) or is started here (`command`).

    what fails                                        is
    ------------------------------------------------  ---------------------------------------------------------
    connecting, the connection, the session: the      ServerError: the episode is repeated, after a backoff
    server is down, restarts, or has no free session
    an action that the server's schema refuses        the next observation, without a step
    code of the environment; an answer of another     DataError: the sample fails
    form; no answer within `timeouts.environment`
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from megasync.environments.protocol import Step, episode_seed
from megasync.errors import ConfigError, DataError, ServerError, raised_as
from megasync.integrations.owned_server import EnvironmentService, OwnedServer
from megasync.trajectory import finite_float

# Seconds to connect, and between two pings: a server that answers none is taken for dead.
_CONNECT_SECONDS = 10.0
_PING_SECONDS = 20.0
_MIB = 1024**2
# The largest message of a server. More text than that fits no model's context.
_MESSAGE_BYTES = 16 * _MIB
# Errors that say that the server cannot have a session; others are of the environment.
_OF_SESSIONS = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
# Titles of the action schemas of environments whose actions are calls of MCP tools.
_MCP_SCHEMAS = ("Action", "CallToolAction", "ListToolsAction")
_FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)


class OpenEnvServer:
    """The server of all environments of a pool, and how its actions and observations are written as text.

    Options:
        url: a server that runs, such as http://127.0.0.1:8000.
        command: starts a server instead, such as "uvicorn server.app:app --host {host} --port {port}". Programs of
            `megasync install openenv` are found.
        folder: where the command runs.
        action: the field of the action that gets the model's text. By default the only required one, if it is a text;
            otherwise the model writes the action as a JSON object, or as a call of a tool.
        observation: the field of the observation that the model reads; by default all that are not empty.
        headers: HTTP headers for the server, such as an Authorization.
    """

    def __init__(
        self,
        seconds: float,
        url: str = "",
        command: str | Sequence[str] = (),
        folder: str = ".",
        action: str = "",
        observation: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if bool(url) == bool(command):
            raise ConfigError(
                f"the environment openenv takes a url or a command, not url={url!r} and command={command!r}"
            )
        if url and not re.match(r"(http|ws)s?://[^/]", url):
            raise ConfigError(f"url={url!r} of the environment openenv is no address, such as http://127.0.0.1:8000")
        self._url = re.sub("^ws", "http", url.rstrip("/"))
        self._owned = self._owned_server(command, folder, seconds) if command else None
        self.action = action
        self.observation = observation
        self.headers = dict(headers or {})

    @property
    def url(self) -> str:
        return self._owned.url if self._owned else self._url

    async def ready(self) -> None:
        """Starts the server if it is started here. One that runs elsewhere is asked by the first episode."""
        if self._owned is not None:
            await self._owned.ready()

    async def close(self) -> None:
        if self._owned is not None:
            await self._owned.close()

    @staticmethod
    def _owned_server(command: str | Sequence[str], folder: str, seconds: float) -> OwnedServer:
        if not Path(folder).is_dir():
            raise ConfigError(f"folder={folder!r} of the environment openenv does not exist")
        words = shlex.split(command) if isinstance(command, str) else list(command)
        programs = (str(Path(sys.prefix) / "openenv" / "bin"), os.environ.get("PATH", os.defpath))
        env = {"PATH": os.pathsep.join(programs)}
        # `env --chdir` also finds the program on the new path.
        service = EnvironmentService("openenv", ["env", f"--chdir={folder}", *words], env, _is_healthy)
        return OwnedServer(service, seconds)


class OpenEnv:
    """One session of an OpenEnv server. An episode is seeded as one of Gymnasium is.

    A row's column `reset` has further arguments of the environment's `reset`.
    """

    make_shared = OpenEnvServer

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._connection: _Connection | None = None
        self._actions: _Actions | None = None

    async def reset(self, sample: dict[str, Any]) -> str:
        try:
            return await self._reset(sample)
        except BaseException:
            # The pool discards an environment after an error, and nobody else closes the connection.
            await self.close()
            raise

    async def step(self, action: str) -> Step:
        try:
            return await self._step(action)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _reset(self, sample: dict[str, Any]) -> str:
        given = {"seed": episode_seed(sample)} | _mapping(sample.get("reset") or {}, "the column reset of the row")
        answer = None
        if self._connection is not None:
            try:
                answer = await self._connection.ask("reset", given)
            except ServerError:
                # The server was restarted, or closed a session that was idle.
                await self.close()
        if answer is None:
            self._connection = await _Connection.to(self._server.url, self._server.headers)
            self._actions = await self._learn_actions(self._connection)
            answer = await self._connection.ask("reset", given)
        assert self._actions is not None
        return "\n\n".join(filter(None, (self._text(answer["observation"]), self._actions.instruction)))

    async def _step(self, action: str) -> Step:
        assert self._connection is not None and self._actions is not None
        try:
            answer = await self._connection.ask("step", self._actions.parse(action))
        except _RefusedAction as error:
            return Step(f"That is no action: {error}. {self._actions.instruction}".strip(), 0.0, False)
        given = answer.get("reward")
        reward = 0.0 if given is None else finite_float(given)
        if reward is None:
            raise DataError(f"the OpenEnv server gave the reward {given!r:.80}, which is no finite number")
        return Step(self._text(answer["observation"]), reward, bool(answer.get("done")))

    async def _learn_actions(self, connection: _Connection) -> _Actions:
        schema = _mapping(_mapping(await connection.schema(), "the server's schema").get("action"), "its action schema")
        if self._server.action or schema.get("title") not in _MCP_SCHEMAS:
            return _Actions.of(schema, self._server.action)
        listed = _mapping((await connection.ask("step", {"type": "list_tools"}))["observation"], "the list of tools")
        return _Actions.of_tools(listed.get("tools"))

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        fields = _mapping(observation, "an observation")
        if name := self._server.observation:
            if name not in fields:
                raise DataError(f"the observation has no field {name!r}; it has {', '.join(fields) or 'none'}")
            shown: Any = fields[name]
        else:
            shown = {
                key: value for key, value in fields.items() if key != "metadata" and value not in ("", None, [], {})
            }
            if len(shown) == 1 and isinstance(alone := next(iter(shown.values())), str):
                return alone
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


class _RefusedAction(Exception):
    """The model wrote something that is no action of the environment."""


class _Actions:
    """Makes actions of the model's text: of one `field`, of a JSON object, or of a call of one of the `tools`."""

    def __init__(self, field: str = "", tools: Sequence[str] = (), instruction: str = "") -> None:
        self.instruction = instruction
        self._field = field
        self._tools = tools

    @classmethod
    def of(cls, schema: dict[str, Any], field: str) -> _Actions:
        """The actions of a JSON schema. Raises DataError if it has no such field."""
        properties = _mapping(schema.get("properties") or {}, "the properties of its action schema")
        required = schema.get("required") or []
        if field and field not in properties:
            raise DataError(f"the action has no field {field!r}; it has {', '.join(properties) or 'none'}")
        if not field and len(required) == 1 and _mapping(properties.get(required[0]), "it").get("type") == "string":
            field = required[0]
        if field:
            return cls(field)
        shown = {name: value for name, value in properties.items() if name != "metadata"}
        form = json.dumps({"properties": shown, "required": required}, ensure_ascii=False)
        return cls(instruction=f"Answer with a JSON object of this schema: {form}")

    @classmethod
    def of_tools(cls, tools: Any) -> _Actions:
        try:
            names = [str(tool["name"]) for tool in tools]
        except (TypeError, KeyError):
            raise DataError(f"the server's list of tools has another form: {tools!r:.200}") from None
        form = '{"name": ..., "arguments": {...}}'
        return cls(
            tools=names,
            instruction=f"Call a tool with a JSON object {form}. Tools: {json.dumps(tools, ensure_ascii=False)}",
        )

    def parse(self, text: str) -> dict[str, Any]:
        """The action. Raises _RefusedAction."""
        if self._field:
            return {self._field: text}
        found = _json_object(text)
        if not self._tools:
            return found
        name, arguments = found.get("name", found.get("tool_name")), found.get("arguments", {})
        if name not in self._tools or not isinstance(arguments, dict):
            raise _RefusedAction(
                f"name={json.dumps(name)} and arguments={json.dumps(arguments)} call none of the tools"
            )
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}


class _Connection:
    """A WebSocket to a server. After an error it must be closed: a late answer would be taken for the next one."""

    def __init__(self, url: str, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.url = url
        self._session = session
        self._socket = socket

    @classmethod
    async def to(cls, url: str, headers: Mapping[str, str]) -> _Connection:
        """Connects. Raises ServerError, or DataError if something else answers at this address."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        session = aiohttp.ClientSession(headers=dict(headers), timeout=timeout)
        try:
            socket = await session.ws_connect(f"{url}/ws", heartbeat=_PING_SECONDS, max_msg_size=_MESSAGE_BYTES)
        except BaseException as error:
            await session.close()
            if isinstance(error, aiohttp.WSServerHandshakeError) and error.status < 500:
                raise DataError(f"{url}/ws answers with status {error.status}: it is no OpenEnv server") from error
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise ServerError(f"no connection to the OpenEnv server at {url}: {error}") from error
            raise
        return cls(url, session, socket)

    async def schema(self) -> Any:
        """The JSON schemas of actions and observations."""
        try:
            async with self._session.get(f"{self.url}/schema") as answer:
                answer.raise_for_status()
                return json.loads(await answer.read())
        except ValueError as error:
            raise DataError(f"{self.url}/schema is not JSON: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(f"{self.url}/schema cannot be read: {error}") from error

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the data of its answer, which has an observation.

        Raises _RefusedAction for an action against the schema, ServerError, and DataError.
        """
        with raised_as(ServerError, f"the connection to {self.url} was lost", of=(aiohttp.ClientError, OSError)):
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._lost(message)
        return self._checked(kind, message.data)

    async def close(self) -> None:
        """Closes the connection, and with it the session of the server."""
        # Not `socket.close()`, which waits for the server's answer.
        await self._session.close()

    def _lost(self, message: aiohttp.WSMessage) -> Exception:
        code = self._socket.close_code
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            return DataError(f"the OpenEnv server sent an observation of more than {_MESSAGE_BYTES // _MIB} MiB")
        if message.type is aiohttp.WSMsgType.BINARY:
            return DataError(f"the OpenEnv server at {self.url} sent bytes instead of JSON")
        return ServerError(f"the OpenEnv server at {self.url} closed the connection (code {code})")

    def _checked(self, kind: str, text: str) -> dict[str, Any]:
        try:
            answer = json.loads(text)
            form, data = answer["type"], _mapping(answer["data"], "its data")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._other_form(text) from None
        if form == "observation" and "observation" in data:
            return data
        if form != "error":
            raise self._other_form(text)
        code, said = data.get("code"), str(data.get("message"))
        if code == "CAPACITY_REACHED":
            said += "; set rollout.environment.pool to the sessions that the server has"
        if code in _OF_SESSIONS:
            raise ServerError(f"the OpenEnv server at {self.url} has no session: {said} ({code})")
        if kind == "step" and code == "VALIDATION_ERROR":
            raise _RefusedAction(_problems(data.get("errors")) or said)
        raise DataError(f"the OpenEnv server answered {kind} with {code}: {said:.2000}")

    def _other_form(self, text: str) -> DataError:
        return DataError(f"the OpenEnv server at {self.url} answered in another form: {text:.200}")


async def _is_healthy(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=_CONNECT_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object in a text: in a fence, or from its first to its last brace."""
    fenced = _FENCED.findall(text)
    begin, end = text.find("{"), text.rfind("}") + 1
    for candidate in [*fenced[-1:], text[begin:end] if 0 <= begin < end else ""]:
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    raise _RefusedAction("it has no JSON object")


def _problems(errors: Any) -> str:
    """Pydantic's list of what is wrong, as one line."""
    try:
        return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in errors)
    except (TypeError, KeyError):
        return ""


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} must be an object, not {value!r:.200}")
    return value
