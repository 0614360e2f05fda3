"""Sandboxes of another machine, over HTTP: a server that starts them for whoever has its key, and its client.

    POST   /sandboxes                  body: a snapshot, or nothing -> {"id", "key"} of the new sandbox
    POST   /sandboxes/ID/run           {"command", "stdin", "cwd", "env", "seconds", "output_bytes"} -> a result
    PUT    /sandboxes/ID/files?path=   body: an archive (tar)
    GET    /sandboxes/ID/files?path=   -> a file, or an archive of a folder
    GET    /sandboxes/ID/snapshot      -> an archive
    POST   /sandboxes/ID/kill, /renew
    DELETE /sandboxes/ID

Every request carries `Authorization: Bearer KEY`: the server's key to start sandboxes, the sandbox's own or the
server's for the rest. Errors are {"error": text}: 400 for what the caller did wrong, 503 for a failed sandbox.

Invariant: a sandbox of which nobody speaks for `lease` seconds is stopped, so no lost client leaves one; `_expire`
guarantees it. The client renews it for as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from megasync.base.http_server import SERVER_LOG, listen
from megasync.concurrency.tasks import cancel_and_wait, to_its_end
from megasync.errors import ConfigError, DataError, SandboxError, raised_as
from megasync.sandboxes.local import filled, folder_content
from megasync.sandboxes.protocol import OUTPUT_BYTES, Result, Sandbox, Snapshot, Spec, Starter, Stopping, archive_of

# Seconds without a request after which a sandbox is stopped, and largest body that is accepted.
LEASE_SECONDS, BODY_BYTES = 120.0, 2**30
# What `run` accepts from a client.
_RUN = {"command", "stdin", "cwd", "env", "seconds", "output_bytes"}
_TYPES = {"command": str | list, "stdin": str, "cwd": str, "env": dict, "seconds": int | float, "output_bytes": int}


@dataclass
class _Leased:
    sandbox: Sandbox
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    # Requests in progress, and the loop's time of the last; infinity for one that is only exposed.
    busy: int = 0
    seen: float = 0.0


class SandboxServer:
    """Exposes the sandboxes of a starter, at most `most` at once; without one only those that are `lent`."""

    def __init__(self, starter: Starter | None, key: str, *, most: int = 256, lease: float = LEASE_SECONDS) -> None:
        if not key:
            raise ConfigError("a server of sandboxes needs a key: whoever has it can run programs here")
        self._starter = starter
        self._key = key
        self._most = most
        self._lease = lease
        self._leased: dict[str, _Leased] = {}
        self._starting = 0
        self._runner: web.AppRunner | None = None
        self._expiring: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens at an address. Raises ConfigError if it is taken."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_answers_errors])
        app.router.add_post("/sandboxes", self._start)
        for method, name, action in (
            ("POST", "run", self._run),
            ("PUT", "files", self._put),
            ("GET", "files", self._get),
            ("GET", "snapshot", self._snapshot),
            ("POST", "kill", self._kill),
            ("POST", "renew", self._renew),
        ):
            app.router.add_route(method, f"/sandboxes/{{id}}/{name}", self._of_sandbox(action))
        app.router.add_delete("/sandboxes/{id}", self._stop)
        self._runner = web.AppRunner(app, access_log=None, logger=SERVER_LOG, handler_cancellation=True)
        self.url = await listen(self._runner, host, port, f"sandboxes cannot be served at {host}:{port}")
        self._expiring = asyncio.create_task(self._expire())

    @contextlib.contextmanager
    def lent(self, sandbox: Sandbox) -> Iterator[tuple[str, str]]:
        """Exposes a sandbox of this process: its URL, and a key for it alone. It stays its owner's to stop."""
        name, leased = secrets.token_urlsafe(16), _Leased(sandbox, seen=math.inf)
        self._leased[name] = leased
        try:
            yield f"{self.url}/sandboxes/{name}", leased.key
        finally:
            self._leased.pop(name, None)

    async def close(self) -> None:
        """Stops the server and all its sandboxes."""
        if self._expiring is not None:
            await cancel_and_wait(self._expiring)
        if self._runner is not None:
            await self._runner.cleanup()
        leased, self._leased = [*self._leased.values()], {}
        await asyncio.gather(*(each.sandbox.stop() for each in leased))
        if self._starter is not None:
            await self._starter.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 4)
            now = asyncio.get_running_loop().time()
            late = [name for name, each in self._leased.items() if not each.busy and now - each.seen > self._lease]
            await asyncio.gather(*(self._leased.pop(name).sandbox.stop() for name in late))

    async def _started(self, snapshot: bytes | None) -> tuple[str, _Leased]:
        if self._starter is None:
            raise DataError("this server starts no sandboxes")
        if len(self._leased) + self._starting >= self._most:
            raise SandboxError(f"all {self._most} sandboxes of this server are in use; stop some, or raise --most")
        self._starting += 1
        try:
            leased = _Leased(await self._starter.start(snapshot))
        finally:
            self._starting -= 1
        leased.seen = asyncio.get_running_loop().time()
        name = secrets.token_urlsafe(16)
        self._leased[name] = leased
        return name, leased

    async def _start(self, request: web.Request) -> web.Response:
        self._authorize(request, self._key)
        name, leased = await self._started(await request.read() or None)
        return web.json_response({"id": name, "key": leased.key})

    async def _stop(self, request: web.Request) -> web.Response:
        leased = self._of(request)
        self._leased.pop(request.match_info["id"], None)
        await to_its_end(leased.sandbox.stop())
        return web.json_response({})

    def _of_sandbox(
        self, action: Callable[[Sandbox, web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            leased = self._of(request)
            leased.busy += 1
            try:
                return await action(leased.sandbox, request)
            finally:
                leased.busy -= 1
                leased.seen = max(leased.seen, asyncio.get_running_loop().time())

        return handle

    def _of(self, request: web.Request) -> _Leased:
        leased = self._leased.get(request.match_info["id"])
        # An unknown sandbox and a wrong key are answered alike, so that nobody learns which exist.
        self._authorize(request, self._key, *([leased.key] if leased else []))
        if leased is None:
            raise web.HTTPNotFound(text="this sandbox does not exist, or was stopped")
        return leased

    def _authorize(self, request: web.Request, *keys: str) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        if not any([hmac.compare_digest(given, key.encode()) for key in keys]):
            raise web.HTTPUnauthorized(
                text="the key is missing or wrong (send 'Authorization: Bearer KEY'), or the sandbox was stopped"
            )

    async def _run(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        order = await _object(request)
        for name, value in order.items():
            if name not in _RUN or not isinstance(value, _TYPES[name]):
                raise DataError(f"run takes no {name}={value!r}; it takes {', '.join(sorted(_RUN))}")
        seconds, most = order.get("seconds", 1.0), order.get("output_bytes", OUTPUT_BYTES)
        if not 0 < seconds <= 86400 or not 0 < most <= 2**26:
            raise DataError(f"run: seconds={seconds} must be above 0, and output_bytes={most} at most {2**26}")
        if "command" not in order:
            raise DataError("run needs a command: a text for a shell, or a list of words")
        return web.json_response(asdict(await sandbox.run(order.pop("command"), **order)))

    async def _put(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        await sandbox.put(await request.read(), request.query.get("path", ""))
        return web.json_response({})

    async def _get(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        return web.Response(body=await sandbox.get(request.query.get("path", "")))

    async def _snapshot(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        return web.Response(body=await sandbox.snapshot())

    async def _kill(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        await sandbox.kill()
        return web.json_response({})

    async def _renew(self, sandbox: Sandbox, request: web.Request) -> web.Response:
        return web.json_response({})


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        order = await request.json()
    except (ValueError, RecursionError):
        order = None
    if not isinstance(order, dict):
        raise DataError("the body must be a JSON object")
    return order


@web.middleware
async def _answers_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": error.text}, status=error.status)
    except (DataError, TypeError, ValueError) as error:
        return web.json_response({"error": str(error)}, status=400)
    except SandboxError as error:
        return web.json_response({"error": str(error)}, status=503)


class RemoteSandbox(Stopping):
    """A sandbox of a server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._stopped = False
        self._renewing = asyncio.create_task(self._renew())

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> Result:
        words = command if isinstance(command, str) else list(command)
        order = {"command": words, "stdin": stdin, "cwd": cwd, "env": dict(env or {}), "output_bytes": output_bytes}
        order |= {} if seconds is None else {"seconds": seconds}
        return Result(**await self._json("POST", "run", json=order))

    async def put(self, files: Mapping[str, bytes] | Snapshot, path: str = "") -> None:
        archive = archive_of(files) if isinstance(files, Mapping) else files
        await self._ask("PUT", "files", params={"path": path}, data=archive)

    async def get(self, path: str) -> bytes:
        return await self._ask("GET", "files", params={"path": path})

    async def snapshot(self) -> Snapshot:
        return await self._ask("GET", "snapshot")

    async def kill(self) -> None:
        await self._ask("POST", "kill")

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            await cancel_and_wait(self._renewing)
            # Otherwise its lease ends.
            with contextlib.suppress(SandboxError, DataError):
                await _asked(self._session, "DELETE", self._url, headers=self._headers)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            with contextlib.suppress(SandboxError, DataError):
                await self._ask("POST", "renew")

    async def _json(self, method: str, what: str, **options: Any) -> dict[str, Any]:
        return json.loads(await self._ask(method, what, **options))

    async def _ask(self, method: str, what: str, **options: Any) -> bytes:
        if self._stopped:
            raise SandboxError("the sandbox was stopped")
        return await _asked(self._session, method, f"{self._url}/{what}", headers=self._headers, **options)


class RemoteStarter:
    """Starts sandboxes of the kind `remote`: of the server at `url`, which says what they are."""

    def __init__(self, spec: Spec) -> None:
        if not spec.url or not spec.key:
            raise ConfigError("a sandbox of kind remote needs url and key, those of `python -m megasync.sandboxes`")
        self._spec = spec
        self._url = spec.url.rstrip("/")
        self._key = spec.key
        self._session: aiohttp.ClientSession | None = None
        self._content: bytes | None = None

    async def start(self, snapshot: Snapshot | None = None) -> RemoteSandbox:
        if self._session is None:
            # Commands have their own limits, which the server enforces.
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        if self._spec.folder is not None and self._content is None:
            self._content = await folder_content(self._spec.folder)
        headers = {"Authorization": f"Bearer {self._key}"}
        answer = await _asked(self._session, "POST", f"{self._url}/sandboxes", headers=headers, data=snapshot or b"")
        lent = json.loads(answer)
        sandbox = RemoteSandbox(self._session, f"{self._url}/sandboxes/{lent['id']}", lent["key"])
        return await filled(sandbox, self._content if snapshot is None else None, None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _asked(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> bytes:
    """The body of an answer. Raises DataError for a status of 400, SandboxError for any other failure."""
    what = f"the server of sandboxes at {url} does not answer"
    with raised_as(SandboxError, what, of=(aiohttp.ClientError, OSError)):
        async with session.request(method, url, **options) as answer:
            body = await answer.read()
    if answer.status >= 400:
        said = body.decode(errors="replace")[:2000]
        if answer.status == 400:
            raise DataError(f"the server of sandboxes refused: {said}")
        raise SandboxError(f"the server of sandboxes at {url} answered {answer.status}: {said}")
    return body
