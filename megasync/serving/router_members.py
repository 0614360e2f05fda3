"""Which servers a router sends requests to, changed while it runs, over its own HTTP interface.

What sglang-router 0.3.2 does, as seen: adding (`POST /workers`) and removing (`DELETE /workers/{id}`) are queued, so both
are repeated and looked after until the list says so. A removal cuts nothing: requests that are running there, streamed
or not, go on to their end. A server added twice is there once. A router may run with none, and answers 503 then.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from megasync.errors import Refused
from megasync.serving.answers import converted
from megasync.serving.control import ServerControl

ANSWER_SECONDS = 5.0


class Worker(msgspec.Struct):
    """A server as the router lists it."""

    url: str
    id: str = ""
    is_healthy: bool = False


class _Workers(msgspec.Struct):
    workers: list[Worker]


async def list_workers(router: ServerControl) -> list[Worker]:
    """Raises ServerError."""
    answer = await router.get("/workers", timeout=ANSWER_SECONDS)
    return converted(answer, _Workers, f"{router.url}/workers").workers


class RouterMembers:
    """The list of one router; `close` when it is not looked at any more."""

    def __init__(self, router: ServerControl, generation_key: str | None = None) -> None:
        """`generation_key` is that of the servers."""
        self._control = router
        self._server = {} if generation_key is None else {"api_key": generation_key}

    async def adjust(self, wanted: Collection[str]) -> bool:
        """Asks for what is missing or too much; True when exactly the wanted servers were listed already.

        Raises ServerError when the router does not answer.
        """
        ids = {worker.url.rstrip("/"): worker.id for worker in await list_workers(self._control)}
        for url in ids.keys() - set(wanted):
            await self._remove(ids[url])
        for url in set(wanted) - ids.keys():
            await self._control.post("/workers", {"url": url} | self._server, timeout=ANSWER_SECONDS)
        return ids.keys() == set(wanted)

    async def _remove(self, worker: str) -> None:
        try:
            await self._control.delete(f"/workers/{worker}", timeout=ANSWER_SECONDS)
        except Refused as error:
            # Another removal, asked for before, has come through in the meantime.
            if error.status != 404:
                raise

    async def close(self) -> None:
        await self._control.close()
