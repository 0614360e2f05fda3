"""The CPU time of one request to the training service: its endpoint alone, and with the service behind it.

    python benchmarks/serve_requests.py [--requests 2000] [--at-once 64] [--repeats 3]

Clients post plain HTTP from a process of their own, so the CPU time of this process is the server's. A request is a
post and the poll of its outcome. Trainer and servers are the fakes of the tests, which compute next to nothing. Of
`endpoint` the service is one that keeps nothing and answers at once; `service` is the real one, which records
everything on disk.

    sample    a prompt of 500 tokens, 64 sampled tokens
    pass      a forward_backward of 4 data of 500 tokens with three inputs
    step      an optim_step

The first round is a warm-up; the table shows the median, least and most of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from service_fakes import SERVED, FakeServers, FakeTrainer
from tinker import types  # pyright: ignore[reportMissingImports]
from tinker.proto.request_conv import forward_backward_request_to_proto  # pyright: ignore[reportMissingImports]

from megasync.service.endpoint import Endpoint
from megasync.service.interfaces import AdapterSpec, PassResult, SampledTokens, Samples, ServedModel
from megasync.service.requests import Compute, CreateModel, ModelReady, Outcome, Request, Sample, Updated
from megasync.service.service import Service

KEY = "tml-benchmark-0123456789"
TENANT = "bench"
WAYS = ("sample", "pass", "step")
MODEL = ServedModel(SERVED.name, context=4096, vocab=1000, rank=8)


class ForgetfulService:
    """Answers at once, and keeps only the outcomes that were not asked for yet."""

    def __init__(self) -> None:
        self.served = MODEL
        self._outcomes: dict[str, Outcome] = {}
        self._count = 0

    async def submit(self, tenant: str, request: Request, key: str | None = None) -> str:
        self._count += 1
        promise = f"p{self._count}"
        match request:
            case Sample():
                ids = np.arange(64)
                outcome: Outcome = Samples([SampledTokens(ids, np.zeros(64, np.float32), True, [("a", 0, 64)])])
            case Compute():
                outcome = PassResult([{"logprobs": datum.tokens.astype(np.float32)} for datum in request.work.data], {})
            case _:
                outcome = Updated({"norm:mean": 1.0})
        self._outcomes[promise] = outcome
        return promise

    async def outcome(self, tenant: str, promise: str, seconds: float) -> Outcome | None:
        return self._outcomes.pop(promise)


def bodies(way: str, model: str, sampler: str, first: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(route, body) of each request, numbered from ``first``."""
    tokens = np.random.default_rng(0).integers(0, 1000, 500)
    prompt = types.ModelInput.from_ints(tokens.tolist())
    inputs = {"target_tokens": tokens, "logprobs": np.zeros(500, np.float32), "advantages": np.ones(500, np.float32)}
    data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs) for _ in range(4)]
    params = types.SamplingParams(max_tokens=64)
    for seq in range(first, first + count):
        match way:
            case "sample":
                request = types.SampleRequest(
                    sampling_session_id=sampler, seq_id=seq, prompt=prompt, sampling_params=params
                )
                yield "asample", request.model_dump_json(exclude_none=True).encode()
            case "pass":
                given = types.ForwardBackwardInput(data=data, loss_fn="importance_sampling")
                request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
                yield "forward_backward", forward_backward_request_to_proto(request).SerializeToString()
            case _:
                request = types.OptimStepRequest(model_id=model, seq_id=seq, optim_params=types.AdamParams())
                yield "optim_step", request.model_dump_json().encode()


async def ask_all(url: str, at_once: int, sent: list[tuple[str, bytes]]) -> None:
    """Posts requests, and polls each for its outcome."""
    headers = {"X-API-Key": KEY, "Accept": "application/x-protobuf"}
    left = iter(sent)
    async with aiohttp.ClientSession(url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def work() -> None:
            for route, body in left:
                async with http.post(f"/api/v1/{route}", data=body) as answer:
                    promise = (await answer.json())["request_id"]
                async with http.post("/api/v1/retrieve_future", json={"request_id": promise}) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

        await asyncio.gather(*(work() for _ in range(at_once)))


async def client(url: str, at_once: int, requests: int) -> None:
    """Asks for what each line of the standard input names, and answers with a line."""
    for line in sys.stdin:
        way, model, sampler, first = line.split()
        sent = list(bodies(way, model, sampler, int(first), requests))
        print(flush=True)
        sys.stdin.readline()
        await ask_all(url, at_once, sent)
        print(flush=True)


@asynccontextmanager
async def served(kind: str) -> AsyncIterator[tuple[Any, str, str]]:
    """A service, and the ids of a model and a sampler of it."""
    if kind == "endpoint":
        yield ForgetfulService(), "model", "sampler"
        return
    with tempfile.TemporaryDirectory() as folder:
        async with Service(Path(folder), FakeTrainer(), FakeServers(), MODEL) as service:
            session = await service.create_session(TENANT)
            promise = await service.submit(TENANT, CreateModel(session, 0, MODEL.name, AdapterSpec(4, 0)))
            ready = await service.outcome(TENANT, promise, 60.0)
            assert isinstance(ready, ModelReady)
            yield service, ready.model, await service.create_sampler(TENANT, session, 0)


async def measure(kind: str, given: argparse.Namespace) -> dict[str, list[float]]:
    """CPU milliseconds of each request, by way, without those of the warm-up."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    async with served(kind) as (service, model, sampler):
        endpoint = Endpoint(service, {TENANT: KEY})
        await endpoint.start()
        command = [sys.executable, __file__, "--client", endpoint.url]
        command += ["--requests", str(given.requests), "--at-once", str(given.at_once)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None and process.stdout is not None
        seq = 1
        for turn in range(given.repeats + 1):
            for way in WAYS:
                process.stdin.write(f"{way} {model} {sampler} {seq}\n".encode())
                await process.stdout.readline()
                begun = time.process_time()
                process.stdin.write(b"\n")
                await process.stdout.readline()
                if turn:
                    times[way].append((time.process_time() - begun) / given.requests * 1000)
                # A sampler numbers its own requests.
                seq += given.requests if way != "sample" else 0
        process.stdin.close()
        await process.wait()
        await endpoint.close()
    return times


def main() -> None:
    """Runs the benchmark, or is its client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client(given.client, given.at_once, given.requests))
        return
    print("| service | request | CPU ms | least | most |\n|---|---|---|---|---|")
    for kind in ("endpoint", "service"):
        for way, found in asyncio.run(measure(kind, given)).items():
            print(
                f"| {kind} | {way} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
