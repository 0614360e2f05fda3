"""The gateway's HTTP server. It runs on the event loop that starts it.

    GET  /s/<session>/v1/models, /s/<session>/v1/models/<name>
    POST /s/<session>/v1/chat/completions

Invariant: a request is not processed before its session is found and its key is verified. Every response
is JSON in OpenAI's form, except a stream that breaks off in the middle. `_answer` guarantees both.

It is aiohttp's low-level server, without an application: its router and middlewares would take half of the HTTP time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from megasync.config.host import reach_directly, resolve_host
from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.errors import ConfigError
from megasync.gateway.chat_request import ChatBody, parse_chat
from megasync.gateway.completion import Completion, deltas, finish_reason
from megasync.gateway.errors import RequestError, as_request_error
from megasync.gateway.session import Session
from megasync.rollout.workflow import SampleClient

log = logging.getLogger(__name__)

# Seconds to wait for the body of a request, and for open connections when the gateway closes.
_BODY_SECONDS = 60.0
_CLOSE_SECONDS = 1.0
# Connections that may wait to be accepted: all agents of a step may start at the same moment.
_BACKLOG = 4096
_MIB = 1024**2

_JSON = {"Content-Type": "application/json; charset=utf-8"}
# The rollout client has already retried what can be retried, so a retry by the agent would only take time.
_NO_RETRY = _JSON | {"x-should-retry": "false"}


class Gateway:
    """Serves one session per sample. `model` is the model name that it reports."""

    def __init__(self, config: GatewayConfig, sampling: SamplingConfig, model: str) -> None:
        self._config = config
        self._sampling = sampling
        self._model = model
        self._sessions: dict[str, Session] = {}
        self._runner: web.ServerRunner | None = None
        self._starting = asyncio.Lock()
        self._warned = False
        self.url = ""

    async def start(self) -> None:
        """Starts the server if it is not running. Raises ConfigError when the address cannot be bound."""
        async with self._starting:
            if self._runner is not None:
                return
            # When an agent disconnects, the handler is cancelled, and with it the generation.
            server = web.Server(self._answer, request_factory=self._request, access_log=None, handler_cancellation=True)
            runner = web.ServerRunner(server, shutdown_timeout=_CLOSE_SECONDS)
            await runner.setup()
            host = resolve_host(self._config.host)
            # Agents' HTTP clients heed proxies.
            reach_directly(host)
            try:
                await web.TCPSite(runner, host, self._config.port, backlog=_BACKLOG).start()
            except OSError as error:
                await runner.cleanup()
                raise ConfigError(
                    f"the gateway cannot listen at rollout.gateway.host={self._config.host}, port={self._config.port}: "
                    f"{error}; port=0 takes a free one"
                ) from error
            self._runner = runner
            shown = f"[{host}]" if ":" in host else host
            self.url = f"http://{shown}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        """Ends all sessions and the server."""
        await asyncio.gather(*(session.end() for session in self._sessions.values()))
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @asynccontextmanager
    async def session(self, client: SampleClient) -> AsyncIterator[Session]:
        """A session of one SampleClient, which ends with the block."""
        await self.start()
        session = Session(client, self._sampling, self._config.sampling == "request")
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            await session.end()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/s/{session.id}/v1"

    # Requests

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, size = asyncio.get_running_loop(), self._config.body_mb * _MIB
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            # The path is /s/<session>/<rest>.
            name, _, path = request.path.removeprefix("/s/").partition("/")
            session = self._sessions.get(name)
            if session is None:
                raise RequestError(
                    404,
                    f"there is no session at {request.path}: it has ended or never existed",
                    code="session_not_found",
                )
            if not session.admits(request.headers.get("Authorization", "")):
                raise RequestError(401, "invalid API key for this session; pass the api_key that the agent receives")
            session.begin_request()
            if (request.method, path) == ("POST", "v1/chat/completions"):
                return await self._chat(request, session)
            if (request.method, path) == ("GET", "v1/models"):
                return _json({"object": "list", "data": [_model_entry(self._model)]})
            if request.method == "GET" and path.startswith("v1/models/"):
                return _json(_model_entry(path.removeprefix("v1/models/")))
            raise RequestError(
                404,
                f"{request.method} /{path} is not supported: the gateway serves POST /v1/chat/completions and GET "
                f"/v1/models",
                code="not_supported",
            )
        except Exception as error:  # every error is reported to the agent
            refused = as_request_error(error)
            if refused.status == 500:
                log.error("Gateway failed at %s", request.path, exc_info=error)
            return _json(refused.body(), refused.status, _NO_RETRY)

    async def _chat(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = parse_chat(await read_body(request))
        self._warn_of_ignored(body)
        completion = Completion(body.model or self._model)
        if body.stream:
            return await self._stream(request, session, body, completion)
        reply, message = await session.answer(body)
        logprobs = session.logprobs(reply) if body.logprobs else None
        return _json(completion.whole(reply, message, logprobs))

    async def _stream(
        self, request: web.BaseRequest, session: Session, body: ChatBody, completion: Completion
    ) -> web.StreamResponse:
        async with aclosing(session.stream(body)) as parts:
            # Nothing is sent before the first part, so that a refusal can still set the status.
            part = await anext(parts)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            usage_follows = bool(body.stream_options and body.stream_options.include_usage)

            async def send(event: dict[str, Any]) -> None:
                # If a usage chunk follows, all earlier chunks have `"usage": null`.
                if usage_follows and "error" not in event:
                    event = {"usage": None} | event
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")

            await send(completion.chunk({"role": "assistant", "content": ""}))
            sent = ""
            try:
                while isinstance(part, str):
                    sent += part
                    await send(completion.chunk({"content": part}))
                    part = await anext(parts)
            except Exception as error:  # the status has been sent; the `openai` package raises an error event
                log.debug("Stream of %s failed", request.path, exc_info=error)
                await send(as_request_error(error).body())
                return response
            reply, message = part
            for delta in deltas(message, sent):
                await send(completion.chunk(delta))
            logprobs = session.logprobs(reply) if body.logprobs else None
            await send(completion.chunk({}, finish_reason(reply), logprobs))
            if usage_follows:
                await send(completion.usage_chunk(reply))
            await response.write(b"data: [DONE]\n\n")
            return response

    def _warn_of_ignored(self, body: ChatBody) -> None:
        ignored = [name for name in ("temperature", "top_p", "seed") if getattr(body, name) is not None]
        if ignored and self._config.sampling == "configured" and not self._warned:
            self._warned = True
            log.warning(
                "The agent's requests set %s, which have no effect: rollout.gateway.sampling=configured",
                ", ".join(ignored),
            )


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megasync"}


async def read_body(request: web.BaseRequest) -> bytes:
    """The body of a request. Raises RequestError if it does not arrive in time."""
    if request.content.is_eof():
        # It arrived together with the headers.
        return await request.read()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestError(408, f"the request's body did not arrive within {_BODY_SECONDS:g} s") from None


def _json(value: Any, status: int = 200, headers: Mapping[str, str] = _JSON) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=headers)
