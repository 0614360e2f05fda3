"""The part of the buffer that makers of groups use: rollout workers, in the driver or in processes of their own.

A body goes to a segment of the process that made the group. What reaches the state machine, as a call within the driver
or as a message from elsewhere, is a header with the place of its body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from megasync.buffer.payload import EncodedGroup, EncodedPartial
from megasync.buffer.segments import BodyWriter

# The calls that `ask` takes.
CALLS = ("commit", "drop", "partials", "save_partials")


class GroupSink:
    """Takes groups, as `TrajectoryBuffer` does; see there for what each call means and raises.

    ``ask(call, *arguments)`` returns the driver's answer to one of `CALLS`. ``bodies`` is the writer of this process;
    without one, bodies stay in memory.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], bodies: BodyWriter | None) -> None:
        self._ask = ask
        self._bodies = bodies

    async def commit(self, group: EncodedGroup) -> bool:
        """Writes the body first, unless its maker has."""
        return await self._ask("commit", await self._stored(group))

    async def drop(self, uid: str, reason: str) -> bool:
        return await self._ask("drop", uid, reason)

    async def partials(self, uid: str) -> dict[tuple[int, int], bytes]:
        return await self._ask("partials", uid)

    async def save_partials(self, partials: dict[tuple[str, int, int], EncodedPartial]) -> None:
        await self._ask("save_partials", partials)

    async def _stored(self, group: EncodedGroup) -> EncodedGroup:
        return group if self._bodies is None else await self._bodies.store(group)
