"""Lets one of several requests with the same prompt go ahead, so that its server computes the prompt once.

The samples of a group begin with the same prompt at the same time. A server that takes several of them into one
prefill computes the prompt for each, because none of them is in its cache yet. So the first one goes ahead, and the
others are sent when it has its first token. That helps where a group's requests go to one server.

Every wait ends with the first token or with the end of the request that goes ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from megasync.rollout.tokens import Tokens


class _Shared:
    """The requests under way with one routing key and prompt."""

    def __init__(self, prompt: Tokens) -> None:
        self.prompt = prompt
        self.requests = 0
        # Whether a server has computed the prompt, and whether a request that may show it is under way.
        self.computed = False
        self.led = False
        self.changed = asyncio.Event()

    def tell(self, *, computed: bool) -> None:
        self.computed, self.led = self.computed or computed, False
        self.changed.set()


class SharedPrompts:
    """Orders the requests of each routing key that have the same prompt. For one event loop."""

    def __init__(self) -> None:
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def request(self, key: str, prompt: Tokens) -> AsyncIterator[Callable[[], None]]:
        """Entered when the request may be sent. Yields a function to be called when its first token has arrived."""
        shared = self._shared.setdefault(key, _Shared(prompt))
        if shared.prompt != prompt:
            # Another turn, or an agent with several prompts.
            yield lambda: None
            return
        shared.requests += 1
        leads = False
        try:
            while shared.led and not shared.computed:
                await shared.changed.wait()
            if not shared.computed:
                leads = shared.led = True
                shared.changed.clear()
            yield lambda: shared.tell(computed=True)
        finally:
            if leads and not shared.computed:
                shared.tell(computed=False)
            shared.requests -= 1
            if not shared.requests:
                del self._shared[key]
