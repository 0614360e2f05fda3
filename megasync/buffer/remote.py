"""The driver's buffer as a rollout worker in another process uses it.

Bodies go to segments of this process; what travels to the driver is a header with the place of its body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from megasync.buffer.payload import EncodedGroup, EncodedPartial
from megasync.buffer.segments import BodyWriter


class RemoteBuffer:
    """Calls what `AsyncBuffer` has for workers (`of_worker`), and raises the same.

    ``ask(call, *arguments)`` returns the driver's answer; ``bodies`` is the writer of this process.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], bodies: BodyWriter) -> None:
        self._ask = ask
        self._bodies = bodies

    async def commit(self, group: EncodedGroup) -> bool:
        return await self._ask("commit", await self._bodies.store(group))

    async def drop(self, uid: str, reason: str) -> bool:
        return await self._ask("drop", uid, reason)

    async def partials(self, uid: str) -> dict[tuple[int, int], bytes]:
        return await self._ask("partials", uid)

    async def save_partials(self, partials: dict[tuple[str, int, int], EncodedPartial]) -> None:
        await self._ask("save_partials", partials)
