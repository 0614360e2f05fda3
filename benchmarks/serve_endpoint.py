"""CPU time of the service's process for each HTTP request, beside a trainer and servers that answer at once.

    python benchmarks/serve_endpoint.py [--shape small large] [--steps 30] [--client PYTHON]

Endpoint, service and record run in this process, and the client with its recipe (`serve_recipe.py`) in another. The
time of all threads of this process counts: decoding, the record and its files, but nothing that ranks or servers do.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from aiohttp import web
from serve import RANK, RECIPE, SHAPES, WARM_UP, Shape, spread

from megasync.base.files import new_folder
from megasync.service.endpoint import Endpoint
from megasync.service.interfaces import (
    Adam,
    AdapterSpec,
    Newest,
    Pass,
    PassResult,
    SampledTokens,
    Samples,
    Sampling,
    ServedModel,
    WriteState,
)
from megasync.service.service import Service

KEY = "tml-0123456789abcdef"


class Ranks:
    """Trainer ranks without a model."""

    async def create(self, model: str, spec: AdapterSpec) -> None: ...

    async def compute(self, passes: Sequence[tuple[str, Pass]]) -> Sequence[PassResult | Exception]:
        return [
            PassResult(
                [{"logprobs": np.zeros(len(datum.tokens), np.float32)} for datum in work.data], {"loss:sum": 0.0}
            )
            for _, work in passes
        ]

    async def update(self, model: str, adam: Adam) -> Mapping[str, float]:
        return {}

    async def copy_state(self, model: str, optimizer: bool) -> WriteState:
        async def write(folder: Path) -> None:
            with new_folder(folder) as draft:
                (draft / "adapter_config.json").write_text("{}")

        return write

    async def load(self, model: str, spec: AdapterSpec, folder: Path, optimizer: bool) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def restart(self) -> None: ...


class Servers:
    """Servers without a model."""

    async def offer(self, adapter: str, folder: Path) -> None: ...

    async def withdraw(self, adapter: str) -> None: ...

    async def sample(self, sampling: Sampling, adapter: str, newest: Newest | None = None) -> Samples:
        tokens = sampling.max_tokens or 1
        ids, logprobs = np.ones(tokens, np.int64), np.zeros(tokens, np.float32)
        return Samples([SampledTokens(ids, logprobs, False, [(adapter, 0, tokens)])] * sampling.samples)


class Counting(Endpoint):
    """Counts requests by the last part of their path."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.requests: collections.Counter[str] = collections.Counter()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests[request.path.rpartition("/")[2]] += 1
        return await super()._answer(request)


async def measure(shape: Shape, steps: int, client: Path) -> tuple[list[float], collections.Counter[str]]:
    """Milliseconds of CPU per request in each counted step, and all requests by their route."""
    with tempfile.TemporaryDirectory() as folder:
        served = ServedModel(shape.model, shape.context, shape.vocabulary, RANK)
        async with Service(Path(folder), Ranks(), Servers(), served) as service:
            endpoint = Counting(service, {"local": KEY})
            await endpoint.start()
            given = {"url": endpoint.url, "keys": [KEY], "rank": RANK, "steps": WARM_UP + steps, "lr": 1e-3, "stop": []}
            script = await asyncio.create_subprocess_exec(
                client,
                RECIPE,
                json.dumps(asdict(shape) | given),
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"TINKER_TELEMETRY": "0"},
            )
            assert script.stdout is not None
            found, cpu, requests = [], time.process_time(), 0
            async for _ in script.stdout:
                now, total = time.process_time(), endpoint.requests.total()
                found.append(1000 * (now - cpu) / (total - requests))
                cpu, requests = now, total
            if await script.wait():
                raise SystemExit(f"the recipe ended with {script.returncode}")
            await endpoint.close()
    return found[WARM_UP:], endpoint.requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small", "large"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--client", type=Path, default=Path(sys.executable), help="interpreter with Tinker's client")
    given = parser.parse_args()
    print("| shape | requests a step | CPU, ms a request |\n|---|---|---|")
    for name in given.shape:
        found, requests = asyncio.run(measure(SHAPES[name], given.steps, given.client))
        routes = ", ".join(f"{route} {count}" for route, count in requests.most_common())
        print(f"{name}: {routes}; mean {statistics.mean(found):.2f} ms", file=sys.stderr)
        print(f"| {name} | {requests.total() / (WARM_UP + given.steps):.0f} | {spread(found)} |", flush=True)


if __name__ == "__main__":
    main()
