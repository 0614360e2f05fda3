"""Which servers a router sends requests to, changed while it runs, over its own HTTP interface.

What sglang-router 0.3.2 does, as seen: adding (`POST /workers`) and removing (`DELETE /workers/{id}`) are queued, so both
are repeated and looked after until the list says so. A removal cuts nothing: requests that are running there, streamed
or not, go on to their end. A server added twice is there once. A router may run with none, and answers 503 then.
"""

from __future__ import annotations

from collections.abc import Collection

from megasync.errors import ServerError
from megasync.rollout.control import ServerControl

ANSWER_SECONDS = 5.0


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
        workers = (await self._control.get("/workers", timeout=ANSWER_SECONDS))["workers"]
        ids = {worker["url"].rstrip("/"): worker["id"] for worker in workers}
        for url in ids.keys() - set(wanted):
            await self._remove(ids[url])
        for url in set(wanted) - ids.keys():
            await self._control.post("/workers", {"url": url} | self._server, timeout=ANSWER_SECONDS)
        return ids.keys() == set(wanted)

    async def _remove(self, worker: str) -> None:
        try:
            await self._control.delete(f"/workers/{worker}", timeout=ANSWER_SECONDS)
        except ServerError as error:
            # Another removal, asked for before, has come through in the meantime.
            if "status 404" not in str(error):
                raise

    async def close(self) -> None:
        await self._control.close()
