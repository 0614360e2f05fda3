"""Generation: tokens from whichever server serves, continued elsewhere when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megasync.errors import ServerError
from megasync.rollout.generation import Generation
from megasync.sim.chance import Chance
from megasync.sim.fleet import SimFleet

TOKEN_SECONDS = 0.04
MOST_TOKENS = 4
RETRY_SECONDS = 0.1


class SimClient:
    """What a workflow calls; `timeout` is `timeouts.request`."""

    def __init__(self, fleet: SimFleet, chance: Chance, timeout: float, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._chance = chance
        self._timeout = timeout
        self._clock = clock

    def metrics(self) -> dict[str, float]:
        return {}

    async def generate(self, prompt_ids: list[int], *, routing_key: str, **_: Any) -> Generation:
        """Raises ServerError when no server has answered for too long."""
        length = 1 + self._chance.below(MOST_TOKENS, f"length {routing_key}")
        versions: list[int] = []
        deadline = self._clock() + self._timeout
        while len(versions) < length:
            try:
                url = self._fleet.router.choose(self._chance.share(f"route {routing_key}"))
                seconds = self._chance.seconds("generate", TOKEN_SECONDS, routing_key)
                versions.append(await self._fleet.servers[url].sample(seconds))
            except ServerError:
                if self._clock() > deadline:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        return Generation(prompt_ids, list(range(length)), [-1.0] * length, versions, "stop")
