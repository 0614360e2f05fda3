"""A service with a fake trainer and fake servers behind its endpoint, for the real client and for plain HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from service_fakes import SERVED, FakeServers, FakeTrainer

from megasync.service.endpoint import Endpoint
from megasync.service.interfaces import Newest, Samples, Sampling, ServedModel
from megasync.service.limits import Limits
from megasync.service.service import Service

KEYS = {"ann": "tml-ann-0123456789", "bob": "tml-bob-0123456789"}


class ScoringServers(FakeServers):
    """Fake servers that also score the prompt: position i has log-prob -i."""

    async def sample(self, sampling: Sampling, adapter: str, newest: Newest | None = None) -> Samples:
        samples = await super().sample(sampling, adapter, newest)
        scores = -np.arange(len(sampling.prompt), dtype=np.float32)
        scores[: max(1, len(scores) - sampling.prompt_logprobs)] = np.nan
        return dataclasses.replace(samples, prompt_logprobs=scores if sampling.prompt_logprobs else None)


@dataclass
class Served:
    """A service and its address; `ask` is a request over plain HTTP."""

    service: Service
    trainer: FakeTrainer
    servers: FakeServers
    endpoint: Endpoint
    http: aiohttp.ClientSession

    async def ask(
        self, path: str, body: Any = None, *, key: str | None = KEYS["ann"], method: str = "", **headers: str
    ) -> tuple[int, Any]:
        """(status, JSON, or bytes of anything else)."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()} | ({"X-API-Key": key} if key else {})
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        method = method or ("GET" if body is None else "POST")
        async with self.http.request(method, f"{self.endpoint.url}/api/v1/{path}", headers=sent, **given) as answer:
            json = "json" in answer.headers.get("Content-Type", "")
            return answer.status, await (answer.json() if json else answer.read())

    async def outcome(self, path: str, body: Any, **options: Any) -> Any:
        """The outcome of a request that is answered with a promise, as JSON."""
        status, promise = await self.ask(path, body, **options)
        assert status == 200, promise
        status, outcome = await self.ask("retrieve_future", {"request_id": promise["request_id"]})
        assert status == 200, outcome
        return outcome


@asynccontextmanager
async def serving(
    folder: Path, served: ServedModel = SERVED, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Served]:
    """The service in a folder; ``options`` are the endpoint's."""
    trainer, servers = FakeTrainer(), ScoringServers()
    async with Service(folder, trainer, servers, served, limits) as service, aiohttp.ClientSession() as http:
        endpoint = Endpoint(service, KEYS, **options)
        await endpoint.start()
        try:
            yield Served(service, trainer, servers, endpoint, http)
        finally:
            await endpoint.close()
