"""The gateway's HTTP server. It runs on the event loop that starts it.

    GET  /s/<session>/v1/models, /s/<session>/v1/models/<name>
    POST /s/<session>/v1/chat/completions, /s/<session>/v1/responses
    POST /s/<session>/v1/messages, /s/<session>/v1/messages/count_tokens
    POST /s/<session>/inference/v1/generate
    POST /s/by-model/...                         the same for one client of many sessions, whose requests name theirs
                                                 as the model

Invariant: a request is not processed before its session is found and its key is verified. Every response is JSON in its
dialect's form, except a stream that breaks off in the middle. `_answer` guarantees both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import msgspec
import orjson
from aiohttp import web

from megasync.base.http_server import listen, low_level
from megasync.concurrency.first_use import prepared
from megasync.config.host import reach_directly, resolve_host
from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.gateway import messages
from megasync.gateway.chat_completions import ChatExchange
from megasync.gateway.errors import RequestError, as_request_error
from megasync.gateway.generate import generated, parse_generate
from megasync.gateway.request import Exchange, Kept, decode_body
from megasync.gateway.responses import ResponsesExchange
from megasync.gateway.session import Session, has_key, new_key
from megasync.rollout.workflow import SampleClient

log = logging.getLogger(__name__)

# Seconds to wait for the body of a request.
_BODY_SECONDS = 60.0
_MIB = 1024**2
# In the place of a session in paths: the request's model is the session.
_BY_MODEL = "by-model"

_JSON = {"Content-Type": "application/json; charset=utf-8"}
# The rollout client has already retried what can be retried, so a retry by the agent would only take time.
_NO_RETRY = _JSON | {"x-should-retry": "false"}


@prepared
class _Named(msgspec.Struct):
    """The part of a body that every route has."""

    model: str


class Gateway:
    """Serves one session per sample. `model` is the model name that it reports.

    `outside` answers what is not below /s/, such as claims of samples (`external`).
    """

    def __init__(
        self,
        config: GatewayConfig,
        sampling: SamplingConfig,
        model: str,
        outside: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._model = model
        self._outside = outside
        # Of the sessions that requests name as their model.
        self.key = new_key()
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
            config = self._config
            # When an agent disconnects, its generation is cancelled with the answer.
            runner = low_level(self._answer, lambda _: config.body_mb * _MIB)
            host = resolve_host(config.host)
            # Agents' HTTP clients heed proxies.
            reach_directly(host)
            refused = f"the gateway cannot listen at rollout.gateway.host={config.host}, port={config.port}"
            self.url = await listen(runner, host, config.port, refused)
            self._runner = runner

    async def close(self) -> None:
        """Ends all sessions and the server."""
        await asyncio.gather(*(session.end() for session in self._sessions.values()))
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @asynccontextmanager
    async def session(self, client: SampleClient, *, by_model: bool = False) -> AsyncIterator[Session]:
        """A session of one SampleClient, which ends with the block.

        One `by_model` has the gateway's key, and its requests may go to `url_by_model` with its id as the model.
        """
        await self.start()
        session = Session(client, self._sampling, self._config.sampling == "request")
        if by_model:
            session.key = self.key
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            await session.end()

    def base_url(self, session: Session) -> str:
        return f"{self.url}/s/{session.id}/v1"

    @property
    def url_by_model(self) -> str:
        return f"{self.url}/s/{_BY_MODEL}/v1"

    # Requests

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # The path is /s/<session>/<rest>.
        name, _, path = request.path.removeprefix("/s/").partition("/")
        # A client appends its version to a base URL, which may have one.
        while path.startswith("v1/"):
            path = path[3:]
        try:
            if self._outside is not None and not request.path.startswith("/s/"):
                return await self._outside(request)
            if name == _BY_MODEL and has_key(request.headers, self.key):
                name = decode_body(await read_body(request, again=True), _Named).model
            session = self._sessions.get(name)
            if session is None:
                raise RequestError(
                    404,
                    f"there is no session at {request.path}: it has ended or never existed",
                    code="session_not_found",
                )
            if not session.admits(request.headers):
                raise RequestError(401, "invalid API key for this session; pass the api_key that the agent receives")
            session.begin_request()
            return await self._route(request, session, path)
        except Exception as error:  # every error is reported to the agent
            refused = as_request_error(error)
            if refused.status == 500:
                log.error("Gateway failed at %s", request.path, exc_info=error)
            body = messages.refusal(refused) if path.startswith("messages") else refused.body()
            return _json(body, refused.status, _NO_RETRY)

    async def _route(self, request: web.BaseRequest, session: Session, path: str) -> web.StreamResponse:
        match request.method, path:
            case "POST", "chat/completions" | "responses" | "messages":
                return await self._chat(request, session, _DIALECTS[path])
            case "POST", "messages/count_tokens":
                asked = messages.count_request(await read_body(request), session.kept)
                return _json({"input_tokens": session.count(asked)})
            case "POST", "inference/v1/generate":
                prompt_ids, sampling = parse_generate(await read_body(request))
                self._warn_of_ignored(sampling.chosen if self._config.sampling == "configured" else ())
                return _json(generated(await session.generate(prompt_ids, sampling)))
            case "GET", "models":
                entry = _model_entry(self._model, session)
                return _json({"object": "list", "data": [entry], "has_more": False})
            case "GET", _ if path.startswith("models/"):
                return _json(_model_entry(path.removeprefix("models/"), session))
        raise RequestError(
            404,
            f"{request.method} /v1/{path} is not supported: the gateway serves POST /v1/chat/completions, "
            f"/v1/responses, /v1/messages and /v1/messages/count_tokens, GET /v1/models, and POST "
            f"/inference/v1/generate",
            code="not_supported",
        )

    async def _chat(
        self, request: web.BaseRequest, session: Session, dialect: Callable[[bytes, str, Kept], Exchange]
    ) -> web.StreamResponse:
        exchange = dialect(await read_body(request), self._model, session.kept)
        asked = exchange.request
        ignored = asked.sampling.chosen if self._config.sampling == "configured" else ()
        self._warn_of_ignored([*ignored, *asked.without_effect])
        if asked.stream:
            return await self._stream(request, session, exchange)
        return _json(exchange.whole(await session.answer(asked)))

    async def _stream(self, request: web.BaseRequest, session: Session, exchange: Exchange) -> web.StreamResponse:
        async with aclosing(session.stream(exchange.request)) as parts:
            # Nothing is sent before the first part, so that a refusal can still set the status.
            part = await anext(parts)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await response.write(exchange.begin())
            try:
                while isinstance(part, str):
                    await response.write(exchange.text(part))
                    part = await anext(parts)
            except Exception as error:  # the status has been sent; the client's package raises an error event
                log.debug("Stream of %s failed", request.path, exc_info=error)
                await response.write(exchange.failed(as_request_error(error)))
                return response
            await response.write(exchange.end(part))
            return response

    def _warn_of_ignored(self, names: Collection[str]) -> None:
        if names and not self._warned:
            self._warned = True
            log.warning(
                "The agent's requests set %s, which have no effect; temperature, top_p and seed have one if "
                "rollout.gateway.sampling=request",
                ", ".join(names),
            )


# The dialects of chat, by path.
_DIALECTS: dict[str, Callable[[bytes, str, Kept], Exchange]] = {
    "chat/completions": ChatExchange,
    "responses": ResponsesExchange,
    "messages": messages.MessagesExchange,
}


def _model_entry(name: str, session: Session) -> dict[str, Any]:
    """A model, with the fields of OpenAI, of vLLM and of Anthropic."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "megasync"}
    return openai | {
        "max_model_len": session.context_length,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def read_body(request: web.BaseRequest, *, again: bool = False) -> bytes:
    """The body of a request, which is read once, unless `again`. Raises RequestError if it does not arrive in time."""
    try:
        # Without a timer if it arrived together with the headers.
        async with nullcontext() if request.content.is_eof() else asyncio.timeout(_BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise RequestError(408, f"the request's body did not arrive within {_BODY_SECONDS:g} s") from None
    if not again:
        # The connection would keep it until its next request: all messages of a long conversation.
        request._read_bytes = None
    return body


def _json(value: Any, status: int = 200, headers: Mapping[str, str] = _JSON) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=headers)
