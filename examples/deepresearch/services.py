"""The retrieval and refine servers as child processes that cannot outlive the run."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from deepresearch.folders import DataFolder
from megasync.concurrency.tasks import gather_or_cancel
from megasync.serving.process import Service

START_SECONDS = 180.0
_EXAMPLES = Path(__file__).parents[1]


class PythonService(Service):
    """`python -m module`, on loopback and a free port; ready once its /health answers."""

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


@dataclass(frozen=True, slots=True)
class Urls:
    retrievers: list[str]
    refiners: list[str]


@asynccontextmanager
async def running_services(data: DataFolder, logs: Path, refiners: int) -> AsyncIterator[Urls]:
    """A retriever and some refiners while the block runs. Raises ServerError when one does not come up."""
    retriever = PythonService("deepresearch.retriever", ["--data", str(data.root)], logs / "retriever.log")
    helpers = [PythonService("deepresearch.refiner", [], logs / f"refiner-{n}.log") for n in range(refiners)]
    services = [retriever, *helpers]
    async with AsyncExitStack() as stack:
        for service in services:
            stack.push_async_callback(service.stop)
        await gather_or_cancel(*(service.start(START_SECONDS) for service in services))
        yield Urls([retriever.url], [helper.url for helper in helpers])
