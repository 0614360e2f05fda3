"""Throughput of generation through megasync (client and router), compared with raw calls to the same SGLang servers.

    python benchmarks/generation.py MODEL [--servers 2] [--concurrency 1 16 64] [--tokens 5 64] [--repeats 5] \
        [--stream 16]

Raw calls go directly to the servers, round-robin, over one connection pool, and keep only a count of the tokens. They
are the upper bound. `--stream` adds a third variant, in which the client streams tokens. Variants alternate within each
round, so that other load on the machine affects all of them. The table shows medians, and client CPU time in
milliseconds per request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from megasync.config.schema import RolloutConfig, SamplingConfig
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.serving.router import Router
from megasync.serving.server import ServerSpec, SGLangServer

PROMPT_TOKENS = 16
REQUEST_TIMEOUT = 600.0
START_TIMEOUT = 300.0

# Generates for one prompt and returns the number of sampled tokens.
Generate = Callable[[list[int], int], Awaitable[int]]


@dataclass(frozen=True)
class Round:
    """One measured round; `seconds` is wall-clock time and `client_cpu` the CPU time of this process, in seconds."""

    seconds: float
    requests: int
    tokens: int
    client_cpu: float


async def run_round(generate: Generate, prompts: Sequence[list[int]], tokens: int, concurrency: int) -> Round:
    """Sends every prompt once, with at most `concurrency` requests in flight."""
    queue = iter(prompts)

    async def worker() -> int:
        return sum([await generate(prompt, tokens) for prompt in queue])

    cpu, start = time.process_time(), time.perf_counter()
    sampled = sum(await asyncio.gather(*(worker() for _ in range(concurrency))))
    return Round(time.perf_counter() - start, len(prompts), sampled, time.process_time() - cpu)


def raw_generate(session: aiohttp.ClientSession, urls: Sequence[str]) -> Generate:
    turn = itertools.cycle(urls)

    async def generate(prompt: list[int], tokens: int) -> int:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        async with session.post(next(turn) + "/generate", data=orjson.dumps(body)) as response:
            response.raise_for_status()
            return len(orjson.loads(await response.read())["meta_info"]["output_token_logprobs"])

    return generate


def megasync_generate(client: RolloutClient) -> Generate:
    async def generate(prompt: list[int], tokens: int) -> int:
        return len((await client.generate(prompt, max_new_tokens=tokens, ignore_eos=True)).token_ids)

    return generate


async def measure(arguments: argparse.Namespace, urls: Sequence[str], router_url: str) -> list[str]:
    """The lines of the table."""
    model = json.loads((arguments.model / "config.json").read_text())
    vocab, context = model["vocab_size"], model["max_position_embeddings"]
    intervals = {"megasync": 0} | ({"streamed": arguments.stream} if arguments.stream else {})
    clients = {
        way: RolloutClient(
            router_url,
            [],
            ServedModel(vocab, context),
            RequestSettings(SamplingConfig(), REQUEST_TIMEOUT, stream_interval=interval),
        )
        for way, interval in intervals.items()
    }
    rng = random.Random(0)
    lines = [
        "| concurrency | tokens | | requests/s | tokens/s | client CPU ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        ways = {"raw": raw_generate(session, urls)}
        ways |= {way: megasync_generate(client) for way, client in clients.items()}
        for concurrency, tokens in itertools.product(arguments.concurrency, arguments.tokens):
            count = max(concurrency, min(arguments.requests, arguments.requests * concurrency // 16))
            rounds: dict[str, list[Round]] = {way: [] for way in ways}
            for repeat in range(arguments.repeats + 1):
                for way, generate in ways.items():
                    # Use new prompts each time, so that no variant hits the prefix cache.
                    prompts = [[rng.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
                    done = await run_round(generate, prompts, tokens, concurrency)
                    # The first round is a warm-up.
                    if repeat:
                        rounds[way].append(done)
            for way, measured in rounds.items():
                requests = statistics.median(r.requests / r.seconds for r in measured)
                sampled = statistics.median(r.tokens / r.seconds for r in measured)
                cpu = statistics.median(r.client_cpu / r.requests for r in measured) * 1e3
                ratio = statistics.median(
                    raw.seconds / r.seconds for raw, r in zip(rounds["raw"], measured, strict=True)
                )
                lines.append(
                    f"| {concurrency} | {tokens} | {way} | {requests:.0f} | {sampled:.0f} | {cpu:.2f} | {ratio:.2f} |"
                )
    for client in clients.values():
        await client.close()
    return lines


async def main(arguments: argparse.Namespace) -> None:
    rollout = RolloutConfig(
        max_total_tokens=arguments.kv_tokens,
        max_running_requests=64,
        mem_fraction=0.5,
        stream_interval=arguments.stream,
    )
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        servers = [
            SGLangServer(
                ServerSpec(arguments.model, rollout, arguments.dtype, arguments.device, seed=i),
                *("127.0.0.1", 0, logs / f"{i}.log"),
            )
            for i in range(arguments.servers)
        ]
        parts: list = list(servers)
        try:
            urls = await asyncio.gather(*(server.start(START_TIMEOUT) for server in servers))
            router = Router(urls, arguments.policy, "127.0.0.1", 0, logs / "router.log")
            parts.append(router)
            print("\n".join(await measure(arguments, urls, await router.start(START_TIMEOUT))))
        finally:
            await asyncio.gather(*(part.stop() for part in parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[5, 64])
    parser.add_argument("--requests", type=int, default=640, help="per round, at concurrency 16 and above")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument(
        "--stream", type=int, default=0, help="tokens of a piece for a third, streaming way; 0 for none"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="KV cache of each server, in tokens")
    asyncio.run(main(parser.parse_args()))
