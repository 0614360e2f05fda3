"""The HTTP endpoint of the training service, which Tinker's client speaks to. It runs on the event loop that starts it.

Invariant: nothing but `healthz` is answered before the key has named the tenant, and every call to the service carries
that tenant, so none learns of another. For a while, a file's address stands for the key that it was asked for with.
Every error is JSON with a `detail`, in a status that makes the client do the right thing. `_answer` guarantees it all.

    status   the client                                        is answered to
    ------   -----------------------------------------------   ---------------------------------------------------------
    400      raises, and the message says what to change       what cannot be decoded or is refused
    401      raises                                            a missing or unknown key
    403      raises                                            an address of a file that is not valid anymore
    404      raises                                            a name that the tenant has not, an unsupported route
    408      asks again at once                                a promise whose outcome is not there yet
    410      repeats the sampling request; else raises         a lost promise, a finished session
    413      raises                                            a body that is too large
    429      asks again, later each time                       a tenant above a limit
    503      asks again, later each time                       a service that is closing

An outcome that failed is answered with 200, `error` and `category`: the client raises `RequestFailedError`.

    waits                      for                          woken by
    -------------------------  ---------------------------  -----------------------------------------------------------
    retrieve_future(s)         an outcome                   the service; `_POLL_SECONDS`; the end of the connection
    any request                others of its tenant         the next round of the event loop
    the body of a request      the client                   its last byte; a deadline
    a large request            others of its tenant         the answer to one of them
    a large body or outcome    one that is coded            the end of that, in turns of tenants by the time it took
    a download                 others of its tenant         the end of one of them
    a piece of a download      the client                   room in its socket; a deadline
    an idle connection         a request                    the request; `_IDLE_SECONDS`

It is aiohttp's low-level server, as the gateway is.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import orjson
from aiohttp import web

from megasync.base.http_server import listen, low_level
from megasync.config.host import resolve_host
from megasync.errors import CheckpointError, ConfigError, DataError
from megasync.gateway.errors import RequestError
from megasync.gateway.server import read_body
from megasync.service import wire
from megasync.service.checkpoints import SCHEME, pieces, tar_bytes, tar_pieces
from megasync.service.interfaces import PassResult, Samples
from megasync.service.methods import REFUSED
from megasync.service.records import Checkpoint, Model
from megasync.service.requests import Busy, Gone, Outcome, Request, ServiceClosed, Unknown
from megasync.service.scheduler import FairThread, Rounds
from megasync.service.service import Service

log = logging.getLogger(__name__)

_PREFIX = "/api/v1/"
# Seconds that a question for an outcome waits. The client gives up after 45 s.
_POLL_SECONDS = 30.0
# Seconds after which a connection without a request ends. Clients keep unused ones for up to 90 s.
_IDLE_SECONDS = 120.0
# Seconds for a client to take a piece of a download, and the bytes of a piece.
_STALL_SECONDS = 60.0
_PIECE_BYTES = 1 << 16
# Downloads of a tenant at the same time, each with a piece in memory and now and then a thread that reads the next one.
_DOWNLOADS = 8
_MIB = 1024**2
# A body that is larger is decoded in a thread, so that others are answered meanwhile.
_THREAD_BYTES = 1 << 16
# An outcome with more numbers is encoded in a thread.
_THREAD_NUMBERS = 1 << 14
# Bytes of a body that has no tokens.
_SMALL_BYTES = 1 << 20
# Requests of a tenant with larger bodies that are read and decoded at the same time; the others' bodies stay unread.
_LARGE_REQUESTS = 4
# Room for the versions in the headers of an answer, of which clients take about 8 KiB. JSON answers always have them.
_VERSIONS_BYTES = 4096
# Seconds for which the address of a file is valid.
_FILE_SECONDS = 900
_JSON = {"Content-Type": "application/json; charset=utf-8"}
_PROTOBUF = {"Content-Type": "application/x-protobuf"}
VERSIONS_HEADER = "X-Weight-Versions"
# What `client/config` tells clients. A chunk of data, whose size they estimate, fits into `body_mb`.
_CHUNK_BYTES = 5_000_000
# Sessions, models or checkpoints in one list, so that long ones hold up nobody else.
_PAGE = 1_000
Decoded = TypeVar("Decoded")
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_LARGE = frozenset(["forward_backward", "asample"])
_FINISHED = ("success", "errored", "interrupted")


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a tenant: its parameters in the path, and its body."""

    tenant: str
    request: web.BaseRequest
    names: tuple[str, ...]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.request.headers.get("X-Idempotency-Key")


_Handler = Callable[[_Call], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves tenants by their keys, which begin with `tml-` because the client demands it."""

    def __init__(
        self,
        service: Service,
        keys: Mapping[str, str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        body_mb: int = 64,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Takes the key of each tenant by the tenant's name. Raises ConfigError for keys that clients cannot use."""
        self._service = service
        self._keys = _encoded(keys)
        self._host, self._port = host, port
        self._limit = body_mb * _MIB
        self._tls = tls
        # Signs addresses of files. A new service has a new one.
        self._secret = secrets.token_bytes(32)
        # Decoded, a body may take 30 times its size, so only one large one is decoded or encoded at a time.
        self._coding = FairThread()
        self._large_requests: dict[str, asyncio.Semaphore] = {}
        self._downloads: dict[str, asyncio.Semaphore] = {}
        self._rounds = Rounds()
        self._runner: web.ServerRunner | None = None
        self._routes: dict[tuple[str, str], _Handler] = {
            ("POST", "client/config"): self._client_config,
            ("POST", "client/dynamic_config"): self._dynamic_config,
            ("POST", "telemetry"): self._telemetry,
            ("GET", "get_server_capabilities"): self._capabilities,
            ("POST", "create_session"): self._create_session,
            ("POST", "session_heartbeat"): self._heartbeat,
            ("GET", "sessions"): self._list_sessions,
            ("POST", "create_model"): self._create_model,
            ("POST", "get_info"): self._get_info,
            ("POST", "unload_model"): self._unload_model,
            ("POST", "forward_backward"): self._forward_backward,
            ("POST", "optim_step"): self._optim_step,
            ("POST", "save_weights"): self._save_weights,
            ("POST", "load_weights"): self._load_weights,
            ("POST", "save_weights_for_sampler"): self._save_for_sampler,
            ("POST", "save_weights_external"): self._save_external,
            ("POST", "create_sampling_session"): self._create_sampler,
            ("POST", "join_sampling_session"): self._join_sampler,
            ("POST", "asample"): self._sample,
            ("POST", "retrieve_future"): self._retrieve,
            ("POST", "retrieve_futures"): self._retrieve_many,
            ("POST", "cancel_future"): self._cancel,
            ("POST", "weights_info"): self._weights_info,
            ("GET", "training_runs"): self._list_runs,
            ("GET", "checkpoints"): self._list_checkpoints,
        }
        checkpoint = r"training_runs/([^/]+)/checkpoints/([^/]+/[^/]+)"
        self._patterns: list[tuple[str, re.Pattern[str], _Handler]] = [
            (method, re.compile(pattern), handler)
            for method, pattern, handler in (
                ("GET", r"sessions/([^/]+)", self._get_session),
                ("POST", r"sessions/([^/]+)/finish", self._finish_session),
                ("GET", r"samplers/([^/]+)", self._get_sampler),
                ("GET", r"training_runs/([^/]+)", self._get_run),
                ("GET", r"training_runs/([^/]+)/checkpoints", self._list_checkpoints),
                ("DELETE", checkpoint, self._delete_checkpoint),
                ("GET", rf"{checkpoint}/archive", self._archive),
                ("GET", rf"{checkpoint}/external_weights_urls", self._file_urls),
                ("PUT", rf"{checkpoint}/ttl", self._set_ttl),
                ("POST", rf"{checkpoint}/publish", self._publish),
                ("DELETE", rf"{checkpoint}/publish", self._unpublish),
            )
        ]
        self.url = ""

    async def start(self) -> None:
        """Starts the server. Raises ConfigError when the address cannot be bound."""
        # aiohttp does not know zstd, and would not bound it.
        options = {"keepalive_timeout": _IDLE_SECONDS, "auto_decompress": False}
        runner = low_level(self._answer, self._most_bytes, **options)
        refused = f"the service cannot listen at host={self._host}, port={self._port}"
        self.url = await listen(runner, resolve_host(self._host), self._port, refused, tls=self._tls)
        self._runner = runner

    async def close(self) -> None:
        """Ends the server; promises stay."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # Requests

    def _most_bytes(self, path: str) -> int:
        return self._limit if path.removeprefix(_PREFIX) in _LARGE else min(_SMALL_BYTES, self._limit)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            path = request.path.removeprefix(_PREFIX)
            if (request.method, path) == ("GET", "healthz"):
                return _json({"status": "ok"})
            if request.method == "GET" and path.startswith("files/"):
                return await self._file(request, path.removeprefix("files/"))
            tenant = self._tenant(request.headers.get("X-API-Key", ""))
            handler, names = self._find(request.method, path)
            await self._rounds.turn(tenant)
            async with self._turn(tenant, request):
                call = _Call(tenant, request, names, await self._body(tenant, request))
                try:
                    return await handler(call)
                except wire.Numbered as refused:
                    # Those behind it do not wait for its number.
                    await self._service.refuse(tenant, refused.model, refused.seq, str(refused))
                    raise
        except Exception as error:  # every error is reported to the client
            refused = _refusal(error)
            if refused.status == 500:
                log.error("Service failed at %s", request.path, exc_info=error)
            # Paths and headers may hold any bytes.
            detail = str(refused).encode("utf-8", "backslashreplace").decode()
            return _json({"detail": detail}, refused.status)

    def _turn(self, tenant: str, request: web.BaseRequest) -> AbstractAsyncContextManager[None]:
        size, encoded = request.content_length, "Content-Encoding" in request.headers
        most = request.client_max_size if size is None or encoded else size
        if most <= _SMALL_BYTES:
            return nullcontext()
        return self._large_requests.setdefault(tenant, asyncio.Semaphore(_LARGE_REQUESTS))

    async def _body(self, tenant: str, request: web.BaseRequest) -> bytes:
        body = await read_body(request)
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding == "zstd":
            # A short body may be a long one.
            return await self._coding.run(tenant, wire.unzip, body, request.client_max_size)
        if encoding != "identity":
            raise DataError(f"Content-Encoding {encoding!r} is not supported; send zstd, or no compression")
        return body

    async def _decoded(self, decode: Callable[[bytes, int], Decoded], call: _Call) -> Decoded:
        if len(call.body) <= _THREAD_BYTES:
            return decode(call.body, self._limit)
        return await self._coding.run(call.tenant, decode, call.body, self._limit)

    def _find(self, method: str, path: str) -> tuple[_Handler, tuple[str, ...]]:
        if (handler := self._routes.get((method, path))) is not None:
            return handler, ()
        for each, pattern, handler in self._patterns:
            if each == method and (found := pattern.fullmatch(path)) is not None:
                return handler, found.groups()
        for pattern, reason in REFUSED.items():
            if re.fullmatch(pattern, f"{method} {path}") is not None:
                raise RequestError(404, f"{method} {_PREFIX}{path} is not supported: {reason}")
        raise RequestError(404, f"{method} {_PREFIX}{path} is not a route of this service")

    def _tenant(self, key: str) -> str:
        # A header may hold any bytes, which arrive as surrogates. All keys are compared, each in constant time.
        sent = key.encode("utf-8", "surrogateescape")
        found = [tenant for tenant, own in self._keys.items() if hmac.compare_digest(sent, own)]
        if not found:
            raise RequestError(401, "the header X-API-Key has no key of this service; set TINKER_API_KEY to yours")
        return found[0]

    # Client and sessions

    async def _client_config(self, call: _Call) -> web.Response:
        return _json(
            {
                "fwdbwd_max_chunk_bytes_count": min(_CHUNK_BYTES, self._limit // 2),
                "sample_join_sampling_session": True,
                # One poll for all samples of a sampler, which also says which outcomes need not be kept.
                "sample_use_retrieve_futures": True,
            }
        )

    async def _dynamic_config(self, call: _Call) -> web.Response:
        return _json({"sample_cancel_enabled": True})

    async def _telemetry(self, call: _Call) -> web.Response:
        return _json({"status": "accepted"})

    async def _capabilities(self, call: _Call) -> web.Response:
        model = self._service.served
        supported = {
            "model_name": model.name,
            "max_context_length": model.context,
            "trainable": True,
            "sampleable": True,
        }
        return _json({"supported_models": [supported]})

    async def _create_session(self, call: _Call) -> web.Response:
        asked = wire.read(call.body, "CreateSessionRequest")
        session = await self._service.create_session(
            call.tenant, asked.tags, asked.user_metadata, asked.display_name, call.key
        )
        return _json({"type": "create_session", "session_id": session})

    async def _heartbeat(self, call: _Call) -> web.Response:
        self._service.heartbeat(call.tenant, wire.read(call.body, "SessionHeartbeatRequest").session_id)
        return _json({"type": "session_heartbeat"})

    async def _list_sessions(self, call: _Call) -> web.Response:
        found, _ = _page(call, self._service.sessions(call.tenant))
        return _json({"sessions": [session.id for session in found]})

    async def _get_session(self, call: _Call) -> web.Response:
        session = self._service.session(call.tenant, *call.names)
        return _json(
            {
                "training_run_ids": session.models,
                "sampler_ids": session.samplers,
                "user_metadata": _texts(session.metadata),
                "display_name": session.name,
            }
        )

    async def _finish_session(self, call: _Call) -> web.Response:
        value = wire.read_json(call.body)
        reason, detail = value.get("reason"), value.get("detail")
        status = reason.get("type") if isinstance(reason, dict) else None
        if status not in _FINISHED or not isinstance(detail, str | None):
            raise DataError(f"reason.type={status!r} is none of {', '.join(_FINISHED)}, or detail is not text")
        (session,) = call.names
        await self._service.finish_session(call.tenant, session, status, detail)
        return _nothing()

    # Training

    async def _create_model(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_create_model(call.body))

    async def _get_info(self, call: _Call) -> web.Response:
        model = self._service.model(call.tenant, wire.read(call.body, "GetInfoRequest").model_id)
        name = self._service.served.name
        return _json(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": name,
                "model_data": {"model_name": name, "tokenizer_id": name},
                "is_lora": True,
                "lora_rank": model.spec.rank,
            }
        )

    async def _unload_model(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_unload_model(call.body))

    async def _forward_backward(self, call: _Call) -> web.Response:
        return await self._submit(call, await self._decoded(wire.read_compute, call))

    async def _optim_step(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_optim_step(call.body))

    async def _save_weights(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_save_weights(call.body))

    async def _load_weights(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_load_weights(call.body, self._service.served.name))

    async def _save_for_sampler(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_save_for_sampler(call.body))

    async def _save_external(self, call: _Call) -> web.Response:
        return await self._submit(call, wire.read_save_external(call.body))

    async def _submit(self, call: _Call, request: Request) -> web.Response:
        return _json({"request_id": await self._service.submit(call.tenant, request, call.key)})

    # Sampling

    async def _create_sampler(self, call: _Call) -> web.Response:
        asked = wire.read(call.body, "CreateSamplingSessionRequest")
        number = wire.number(asked.sampling_session_seq_id, "sampling_session_seq_id")
        sampler = await self._service.create_sampler(
            call.tenant, asked.session_id, number, asked.model_path, asked.base_model
        )
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _join_sampler(self, call: _Call) -> web.Response:
        asked = wire.read(call.body, "JoinSamplingSessionRequest")
        number = await self._service.join_sampler(call.tenant, asked.sampling_session_id)
        return _json({"type": "join_sampling_session", "client_counter": number})

    async def _get_sampler(self, call: _Call) -> web.Response:
        sampler = self._service.sampler(call.tenant, *call.names)
        found = {"sampler_id": sampler.id, "base_model": self._service.served.name}
        return _json(found if sampler.path is None else found | {"model_path": sampler.path})

    async def _sample(self, call: _Call) -> web.Response:
        request = await self._decoded(wire.read_sample, call)
        promise = await self._service.submit(call.tenant, request, call.key)
        sequences = [f"{promise}:{index}" for index in range(request.sampling.samples)]
        return _json({"request_id": promise, "sample_sequence_ids": sequences})

    # Outcomes

    async def _retrieve(self, call: _Call) -> web.Response:
        promise = wire.read(call.body, "FutureRetrieveRequest").request_id
        outcome = await self._service.outcome(call.tenant, promise, _POLL_SECONDS)
        # Outcomes of many requests come at the same moment.
        await self._rounds.turn(call.tenant)
        if outcome is None:
            return _json({"type": "try_again", "request_id": promise, "queue_state": "active"}, 408)
        return await self._outcome(call.tenant, outcome, "protobuf" in call.request.headers.get("Accept", ""))

    async def _outcome(self, tenant: str, outcome: Outcome, protobuf: bool) -> web.Response:
        if not isinstance(outcome, PassResult | Samples):
            return web.Response(body=wire.write_json(outcome), headers=_JSON)
        write, headers = (wire.write_protobuf, dict(_PROTOBUF)) if protobuf else (wire.write_json, _JSON)
        if protobuf and isinstance(outcome, Samples):
            versions = json.dumps(wire.weight_versions(outcome), separators=(",", ":"))
            if len(versions) <= _VERSIONS_BYTES:
                headers[VERSIONS_HEADER] = versions
        if wire.numbers_of(outcome) <= _THREAD_NUMBERS:
            return web.Response(body=write(outcome), headers=headers)
        return web.Response(body=await self._coding.run(tenant, write, outcome), headers=headers)

    async def _retrieve_many(self, call: _Call) -> web.Response:
        asked = wire.read(call.body, "FuturesRetrieveRequest")
        target, wait = asked.target, asked.timeout
        seconds = _POLL_SECONDS if wait is None else min(max(wait, 0.0), _POLL_SECONDS)
        found, cursor = await self._service.completions(
            call.tenant,
            target.sampling_session_id,
            target.cloned_sampler_id,
            wire.number(asked.prev_cursor, "prev_cursor"),
            seconds,
            asked.retrieved_request_ids,
        )
        completions = [{"state": "failed" if failed else "finished", "request_id": name} for name, failed in found]
        return _json({"completions": completions, "cursor": cursor})

    async def _cancel(self, call: _Call) -> web.Response:
        self._service.cancel(call.tenant, wire.read(call.body, "FutureRetrieveRequest").request_id)
        return _nothing()

    # Runs and checkpoints

    async def _list_runs(self, call: _Call) -> web.Response:
        models, cursor = _page(call, self._service.models(call.tenant))
        return _json({"training_runs": [self._run(call.tenant, model) for model in models], "cursor": cursor})

    async def _get_run(self, call: _Call) -> web.Response:
        return _json(self._run(call.tenant, self._service.model(call.tenant, *call.names)))

    def _run(self, tenant: str, model: Model) -> dict[str, Any]:
        newest: dict[str, Checkpoint] = {}
        for checkpoint in self._service.checkpoints(tenant, model.id):
            newest.setdefault(checkpoint.kind, checkpoint)
        return {
            "training_run_id": model.id,
            "base_model": self._service.served.name,
            "model_owner": tenant,
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "last_request_time": _time(model.last_request or model.created),
            "last_checkpoint": _checkpoint(newest.get("weights")),
            "last_sampler_checkpoint": _checkpoint(newest.get("sampler_weights")),
            "user_metadata": _texts(model.metadata),
        }

    async def _list_checkpoints(self, call: _Call) -> web.Response:
        found = self._service.checkpoints(call.tenant, *call.names)
        # Clients ask for those of one model without pages.
        found, cursor = _page(call, found, most=len(found) if call.names else None)
        return _json({"checkpoints": [_checkpoint(each) for each in found], "cursor": cursor})

    async def _weights_info(self, call: _Call) -> web.Response:
        spec = self._service.checkpoint(call.tenant, _text(call, "tinker_path")).spec
        return _json(
            {
                "base_model": self._service.served.name,
                "is_lora": True,
                "lora_rank": spec.rank,
                "train_unembed": spec.unembed,
                "train_mlp": spec.mlp,
                "train_attn": spec.attention,
            }
        )

    async def _delete_checkpoint(self, call: _Call) -> web.Response:
        await self._service.delete_checkpoint(call.tenant, _path(call))
        return _nothing()

    async def _set_ttl(self, call: _Call) -> web.Response:
        seconds = wire.read_json(call.body).get("ttl_seconds")
        if not isinstance(seconds, int | None):
            raise DataError(f"ttl_seconds={seconds!r} is not a whole number of seconds, or null to keep the checkpoint")
        await self._service.set_ttl(call.tenant, _path(call), seconds)
        return _nothing()

    async def _publish(self, call: _Call) -> web.Response:
        await self._service.publish(call.tenant, _path(call), True)
        return _nothing()

    async def _unpublish(self, call: _Call) -> web.Response:
        await self._service.publish(call.tenant, _path(call), False)
        return _nothing()

    async def _archive(self, call: _Call) -> web.StreamResponse:
        async with self._download(call.tenant), self._service.folder(call.tenant, _path(call)) as (folder, files):
            parts = tar_pieces(folder, files.described, _PIECE_BYTES)
            return await self._send(call.tenant, call.request, parts, tar_bytes(files))

    def _download(self, tenant: str) -> asyncio.Semaphore:
        return self._downloads.setdefault(tenant, asyncio.Semaphore(_DOWNLOADS))

    async def _file_urls(self, call: _Call) -> web.Response:
        path = _path(call)
        files = sorted(self._service.checkpoint(call.tenant, path).files.described)
        expires = int(time.time()) + _FILE_SECONDS
        try:
            base = f"{call.request.url.origin()}{_PREFIX}files/"
        except ValueError:
            host = call.request.headers.get("Host")
            raise DataError(f"Host={host!r} is not an address at which files could be asked for") from None
        urls = {file: base + self._signed([call.tenant, path, file, expires]) for file in files}
        return _json({"urls": urls, "expires": _time(expires)})

    def _signed(self, said: Sequence[str | int]) -> str:
        text = base64.urlsafe_b64encode(orjson.dumps(said)).decode()
        return f"{text}.{self._signature(text)}"

    def _signature(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode("utf-8", "surrogateescape"), "sha256").hex()

    async def _file(self, request: web.BaseRequest, address: str) -> web.StreamResponse:
        """Answers with a file at an address that a tenant was given. Clients send no key there."""
        text, _, signature = address.partition(".")
        sent = signature.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent, self._signature(text).encode()):
            raise RequestError(403, "there is no file at this address, or not anymore; ask for its address again")
        tenant, path, file, expires = orjson.loads(base64.urlsafe_b64decode(text))
        if expires < time.time():
            raise RequestError(403, f"the address of {file} was valid for {_FILE_SECONDS} s; ask for it again")
        async with self._download(tenant), self._service.folder(tenant, path, file) as (folder, _):
            parts = pieces(folder / file, _PIECE_BYTES)
            return await self._send(tenant, request, parts, (folder / file).stat().st_size)

    async def _send(
        self, tenant: str, request: web.BaseRequest, parts: Iterator[bytes], size: int
    ) -> web.StreamResponse:
        """Answers with ``size`` bytes. What is not sent yet stays on the disk; a client that takes nothing loses it."""
        response = web.StreamResponse(headers={"Content-Length": str(size)})
        await response.prepare(request)
        try:
            while part := await asyncio.to_thread(next, parts, b""):
                # Otherwise a request of another tenant waits for a piece of each download, again and again.
                await self._rounds.turn(tenant)
                async with asyncio.timeout(_STALL_SECONDS):
                    await response.write(part)
        except (OSError, TimeoutError) as error:
            # An answer that has begun cannot become another one.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(f"a download of {size} bytes broke off: {error!r}") from error
        await response.write_eof()
        return response


def _encoded(keys: Mapping[str, str]) -> dict[str, bytes]:
    if not keys:
        raise ConfigError("the service has no tenant: give at least one key, as tenant: tml-...")
    for tenant, key in keys.items():
        if not re.fullmatch(r"tml-[!-~]{12,}", key):
            raise ConfigError(
                f"the key of tenant {tenant!r} must be `tml-` and at least 12 characters without spaces: the client "
                f"refuses keys that begin otherwise, and short ones can be guessed"
            )
    if len(set(keys.values())) < len(keys):
        raise ConfigError("two tenants have the same key; give each a key of its own")
    return {tenant: key.encode() for tenant, key in keys.items()}


def _refusal(error: Exception) -> RequestError:
    match error:
        case RequestError():
            return error
        case Unknown():
            return RequestError(404, str(error))
        case Gone():
            return RequestError(410, str(error))
        case Busy():
            return RequestError(429, str(error))
        case DataError():
            return RequestError(400, str(error))
        case ServiceClosed():
            return RequestError(503, str(error))
        case web.HTTPRequestEntityTooLarge():
            return RequestError(413, f"{error.text}; send fewer or smaller data in one request")
        case CheckpointError():
            return RequestError(500, str(error))
        case ConnectionError():
            return RequestError(499, f"the client closed the connection: {error}")
    # Only the log has the details, because they may be another tenant's.
    return RequestError(500, f"internal error ({type(error).__name__}); the log of the service has more")


Listed = TypeVar("Listed")


def _page(call: _Call, found: Sequence[Listed], most: int | None = None) -> tuple[Sequence[Listed], dict[str, int]]:
    """The part of a list that `limit` and `offset` ask for, at most ``most`` of it, and where it is in the list."""
    most = _PAGE if most is None else most
    numbers = []
    for name, least in (("limit", 1), ("offset", 0)):
        text = call.request.query.get(name, "")
        if text and not (re.fullmatch("[0-9]{1,9}", text) and int(text) >= least):
            raise DataError(f"{name}={text!r} is not a whole number of at least {least}")
        numbers.append(int(text) if text else least * most)
    limit, offset = min(numbers[0], most), numbers[1]
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _path(call: _Call) -> str:
    return SCHEME + "/".join(call.names)


def _text(call: _Call, name: str) -> str:
    value = wire.read_json(call.body).get(name)
    if not isinstance(value, str):
        raise DataError(f"{name}={value!r} is not text")
    return value


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _checkpoint(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.files.size,
        "public": checkpoint.public,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _nothing() -> web.Response:
    return web.Response(status=204)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=_JSON)
