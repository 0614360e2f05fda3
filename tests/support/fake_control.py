"""A server's control that pauses, has a version, and fails on demand."""

from __future__ import annotations

import asyncio

from megasync.errors import ServerError


class FakeControl:
    """Keeps the state of a real server. ``faults`` maps a path to the outcomes of the next calls of that path."""

    def __init__(self, url):
        self.url = url
        self.calls, self.faults = [], {}
        self.paused = False
        self.version = "0"

    async def get(self, path, timeout):
        await self._fault(path, timeout)
        return {"weight_version": self.version}

    async def weight_version(self, timeout):
        return int((await self.get("/model_info", timeout))["weight_version"])

    async def post(self, path, body, timeout):
        self.calls.append((path, body))
        await self._fault(path, timeout)
        match path:
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
        return await self.answer(path, body) or {"success": True}

    async def answer(self, path, body):
        """The answer to a successful call, for subclasses to override."""

    async def _fault(self, path, timeout):
        script = self.faults.get(path)
        if script:
            fault = script.pop(0)
            if fault == "hang":
                try:
                    await asyncio.wait_for(asyncio.Event().wait(), timeout)
                except TimeoutError as error:
                    raise ServerError(f"POST {self.url}{path}: no answer within {timeout:g} s") from error
            if fault:
                raise ServerError(f"POST {self.url}{path}: status 400: {fault}")
