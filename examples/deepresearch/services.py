"""The retriever and its shards as child processes that cannot outlive the run, and are restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from deepresearch.folders import DataFolder
from deepresearch.index_folder import shard_files
from megasync.concurrency.tasks import Backoff, cancel_and_wait, gather_or_cancel
from megasync.errors import ServerError
from megasync.serving.process import Service

log = logging.getLogger(__name__)

START_SECONDS = 180.0
# Seconds between two looks at a process, and before a restart, doubled for each failed one up to the second number.
POLL_SECONDS = 0.5
RESTART_WAIT = (1.0, 30.0)
_EXAMPLES = Path(__file__).parents[1]


class PythonService(Service):
    """`python -m module`, on loopback; ready once its /health answers. It keeps the port of its first start."""

    def __init__(self, module: str, arguments: Sequence[str], log_path: Path) -> None:
        super().__init__("127.0.0.1", 0, log_path)
        self.name = module
        self._arguments = arguments

    def command(self) -> list[str]:
        return [
            sys.executable, "-m", self.name, "--host", self.host, "--port", str(self.port), *self._arguments,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        paths = [str(_EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
        # One thread: they share the cores with the model's servers and trainers.
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    async def ready(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)) as session,
                session.get(f"{self.url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def keep_alive(self) -> None:
        """Restarts the process whenever it has ended, at the same URL, which its clients know."""
        # A fixed port from here on.
        self._fixed_port = True
        backoff = Backoff(RESTART_WAIT)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self.alive():
                continue
            log.warning("%s has ended, restarting it. Last lines of its log:\n%s", self.name, self.tail(5))
            await asyncio.sleep(backoff.next())
            try:
                await self.start(START_SECONDS)
                backoff.reset()
            except ServerError as error:
                log.warning("%s", error)


@asynccontextmanager
async def running_retriever(data: DataFolder, logs: Path) -> AsyncIterator[str]:
    """The URL of a retriever whose shards are processes of their own. Raises ServerError if one does not start."""
    numbers = range(len(shard_files(data.index)))
    shards = [
        PythonService(
            "deepresearch.remote_shard", ["--data", str(data.root), "--shard", str(n)], logs / f"shard-{n}.log"
        )
        for n in numbers
    ]
    async with AsyncExitStack() as stack:
        for shard in shards:
            stack.push_async_callback(shard.stop)
        urls = await gather_or_cancel(*(shard.start(START_SECONDS) for shard in shards))
        retriever = PythonService(
            "deepresearch.retriever", ["--data", str(data.root), "--shards", *urls], logs / "retriever.log"
        )
        stack.push_async_callback(retriever.stop)
        url = await retriever.start(START_SECONDS)
        keepers = [asyncio.create_task(each.keep_alive(), name=each.name) for each in (*shards, retriever)]
        stack.push_async_callback(cancel_and_wait, *keepers)
        yield url
