"""Sessions from outside (`rollout.agent: external`): their CPU time, the latency that they add, and their memory.

    python benchmarks/external.py [--sessions 1000] [--turns 20] [--repeats 3]
    python benchmarks/external.py --live 300
    python benchmarks/external.py --steps

A separate process is all programs outside: it claims the samples over HTTP, chats by plain aiohttp, and closes each
session with a reward. The null server answers immediately. First all sessions run as fast as they can: that is full
load. Then the programs, once each has its session, pause between turns, so that requests come at half that rate, and
measure how long each one takes; so they do with requests that go straight to the null server. Rounds of both alternate;
the difference is what the gateway adds.

`--live` has conversations of 50 turns and 32k tokens, and measures the driver's memory when all have reached their full
length, connections included.

`--steps` counts the driver's bytecode instructions in a round of 4 sessions, also by file. Unlike CPU time, they are
the same beside other load. They say nothing about C code, such as the tokenizer's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import aiohttp
import orjson
import psutil
from rollout import (
    ANSWER,
    LONG_TURNS,
    PROMPT,
    QUESTION,
    TOOL,
    Bench,
    long_client,
    long_sample,
    null_server,
    trained,
)

from megasync.concurrency.garbage import short_collections
from megasync.config.schema import GatewayConfig, SamplingConfig, TimeoutConfig
from megasync.gateway import ExternalAgents
from megasync.rollout.inflight import FIRST_REQUESTS, RequestGate
from megasync.rollout.partials import PartialResponses
from megasync.rollout.workflow import SampleClient

KEY = "the key of this benchmark"
STEP_SESSIONS = 4


@dataclass(frozen=True)
class Played:
    """A round: seconds, the driver's CPU seconds, and the sorted latencies of its requests in milliseconds."""

    seconds: float
    cpu: float
    latencies: Sequence[float]

    def latency(self, share: float) -> float:
        return self.latencies[int(share * (len(self.latencies) - 1))]


# The driver


class Programs:
    """The process that plays all programs outside, and the commands for it."""

    def __init__(self, agents: ExternalAgents, process: asyncio.subprocess.Process, tokens: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._agents, self._asks, self._answers, self._tokens = agents, process.stdin, process.stdout, tokens

    async def tell(self, **command: Any) -> Any:
        self._asks.write(orjson.dumps(command) + b"\n")
        return orjson.loads(await self._answers.readline())

    async def play(
        self, clients: Sequence[SampleClient], turns: int, pause: float, steps: Counter[str] | None = None
    ) -> Played:
        """Has a session of each client played, with `pause` seconds between two turns on average.

        The bytecode instructions are added to `steps`, by file.
        """

        def trace(frame: FrameType, event: str, _: object) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode" and steps is not None:
                steps[frame.f_code.co_filename] += 1
            return trace

        gc.collect()
        sys.settrace(None if steps is None else trace)
        cpu, start = time.process_time(), time.perf_counter()
        samples = [asyncio.create_task(self._agents(client, {"n": n})) for n, client in enumerate(clients)]
        latencies = await self.tell(url=self._agents.url, count=len(clients), turns=turns, pause=pause)
        await asyncio.gather(*samples)
        seconds, used = time.perf_counter() - start, time.process_time() - cpu
        sys.settrace(None)
        assert {trained(client) for client in clients} == {turns * self._tokens}
        return Played(seconds, used, latencies)


@asynccontextmanager
async def programs(sampling: SamplingConfig) -> AsyncIterator[tuple[ExternalAgents, Programs]]:
    agents = ExternalAgents(GatewayConfig(), sampling, "null", TimeoutConfig(agent=1e6, heartbeat=1e6))
    await agents.open()
    agents.admit(KEY)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--programs"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    assert process.stdin is not None
    try:
        yield agents, Programs(agents, process, sampling.max_new_tokens)
    finally:
        process.stdin.close()
        await process.wait()
        await agents.close()


async def measure(url: str, sessions: int, turns: int, tokens: int, repeats: int) -> None:
    bench = Bench(url, sessions, turns, tokens)
    async with programs(bench.sampling) as (_, outside):
        full, half, raw = [], [], []
        for repeat in range(repeats + 1):
            clients = [bench.sample(number) for number in range(sessions)]
            full.append(await outside.play(clients, turns, 0.0))
            if not repeat:
                # The first round opens connections and fills caches.
                full.clear()
        requests = sessions * turns
        rate = statistics.median(requests / played.seconds for played in full)
        cpu = statistics.median(1e3 * played.cpu / requests for played in full)
        print(f"{sessions} sessions of {turns} turns at once, {tokens} tokens an answer; medians of {repeats} rounds\n")
        print(f"full load: {rate:.0f} requests/s, {cpu:.2f} ms of the driver's CPU per request\n", flush=True)
        pause = sessions / (0.5 * rate)
        for _ in range(repeats):
            clients = [bench.sample(number) for number in range(sessions)]
            half.append(await outside.play(clients, turns, pause))
            start = time.perf_counter()
            found = await outside.tell(url=url, count=sessions, turns=turns, pause=pause, tokens=tokens)
            raw.append(Played(time.perf_counter() - start, 0.0, found))
    await bench.close()
    print("| at half load | requests/s | latency ms: median | 90 % | 99 % |\n|---|---|---|---|---|")
    for name, rounds in (("straight to the null server", raw), ("session from outside", half)):
        shown = [statistics.median(played.latency(share) for played in rounds) for share in (0.5, 0.9, 0.99)]
        arrived = statistics.median(requests / played.seconds for played in rounds)
        print(f"| {name} | {arrived:.0f} | {' | '.join(f'{value:.1f}' for value in shown)} |")
    added = statistics.median(one.latency(0.99) - other.latency(0.99) for one, other in zip(half, raw, strict=True))
    print(f"\nadded at 99 %: {added:.1f} ms")


async def measure_steps(url: str, turns: int, tokens: int) -> None:
    bench, steps = Bench(url, STEP_SESSIONS, turns, tokens), Counter[str]()
    async with programs(bench.sampling) as (_, outside):
        # The first round fills caches.
        for counted in (None, steps):
            await outside.play([bench.sample(number) for number in range(STEP_SESSIONS)], turns, 0.0, counted)
    await bench.close()
    requests = STEP_SESSIONS * turns
    print(f"{steps.total() / requests:.0f} bytecode instructions per request; the files with the most:\n")
    for file, count in steps.most_common(20):
        print(f"{count / requests:8.0f}  {file}")


async def measure_live(url: str, count: int) -> None:
    client, responses, gate = long_client(url), PartialResponses(), RequestGate()
    gate.set_limit(32 * FIRST_REQUESTS)
    async with programs(SamplingConfig(max_new_tokens=ANSWER)) as (agents, outside):
        warm = long_sample(client, gate, count, responses)
        await outside.play([warm], LONG_TURNS, 0.0)
        gc.collect()
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        clients = [long_sample(client, gate, number, responses) for number in range(count)]
        samples = [asyncio.create_task(agents(each, {"n": n})) for n, each in enumerate(clients)]
        await outside.tell(url=agents.url, count=count, turns=LONG_TURNS, pause=0.0, long=True, hold=True)
        held, seconds = psutil.Process().memory_info().rss - before, time.perf_counter() - start
        lengths = {len(each.conversation.generations[-1].tokens) for each in clients}
        await outside.tell(release=True)
        await asyncio.gather(*samples)
    await client.close()
    print(
        f"{count} live sessions of {lengths} tokens hold {held / 1e9:.2f} GB, {held / count / 1e6:.3f} MB each; "
        f"{count * LONG_TURNS / seconds:.0f} requests/s"
    )


# The process of the programs


async def run_programs() -> None:
    """Plays a round for each line of input, and prints the sorted latencies of its requests in milliseconds."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    released, playing = asyncio.Event(), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        while line := await reader.readline():
            command = orjson.loads(line)
            if "release" in command:
                released.set()
                await asyncio.gather(*playing)
                print("[]", flush=True)
                continue
            latencies: list[float] = []
            one = play_raw if "tokens" in command else partial(play_session, claimed=asyncio.Barrier(command["count"]))
            if "hold" not in command:
                await asyncio.gather(*(one(http, command, latencies) for _ in range(command["count"])))
                print(orjson.dumps(sorted(latencies)).decode(), flush=True)
                continue
            everyone = asyncio.Semaphore(0)
            playing = [
                asyncio.create_task(play_session(http, command, latencies, everyone, released))
                for _ in range(command["count"])
            ]
            for _ in playing:
                await everyone.acquire()
            print("[]", flush=True)


async def play_session(
    http: aiohttp.ClientSession,
    command: dict[str, Any],
    latencies: list[float],
    arrived: asyncio.Semaphore | None = None,
    released: asyncio.Event | None = None,
    *,
    claimed: asyncio.Barrier | None = None,
) -> None:
    authorized = {"Authorization": f"Bearer {KEY}"}
    async with http.post(command["url"] + "/sessions", json={"wait": 60}, headers=authorized) as claim:
        assert claim.status == 200, await claim.text()
        session = await claim.json()
    if claimed is not None and command["pause"]:
        # A thousand claims at once are more than half load.
        await claimed.wait()
    messages: list[dict[str, str]] = []
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    for turn in range(command["turns"]):
        messages.append(question(turn) if "long" in command else QUESTION)
        data = orjson.dumps({"model": "null", "messages": messages})
        await pause(command)
        answer = await timed(http, f"{session['base_url']}/chat/completions", data, headers, latencies)
        messages.append(orjson.loads(answer)["choices"][0]["message"])
    if arrived is not None and released is not None:
        arrived.release()
        await released.wait()
    address = f"{command['url']}/sessions/{session['id']}/reward"
    async with http.post(address, json={"reward": 1.0}, headers=authorized) as close:
        assert close.status == 200, await close.text()


async def play_raw(http: aiohttp.ClientSession, command: dict[str, Any], latencies: list[float]) -> None:
    """The same requests, as the gateway sends them to the null server."""
    asked = [5] * len(QUESTION["content"])
    ids: list[int] = []
    for turn in range(command["turns"]):
        ids = ids + asked
        params = {"temperature": 1.0, "max_new_tokens": command["tokens"]}
        body = {"rid": f"{turn}", "input_ids": ids, "sampling_params": params, "return_logprob": True}
        data = orjson.dumps(body)
        await pause(command)
        await timed(http, command["url"] + "/generate", data, {}, latencies)
        ids = ids + asked[:1] * command["tokens"]


def question(turn: int) -> dict[str, str]:
    """A message as long as in `rollout.py`: one token for each character, and some of the template."""
    return {"role": "user", "content": ("What do you see? " * 64)[: PROMPT if turn == 0 else TOOL - 20]}


async def pause(command: dict[str, Any]) -> None:
    if command["pause"]:
        await asyncio.sleep(random.expovariate(1 / command["pause"]))


async def timed(
    http: aiohttp.ClientSession, url: str, data: bytes, headers: dict[str, str], latencies: list[float]
) -> bytes:
    start = time.perf_counter()
    async with http.post(url, data=data, headers=headers) as response:
        answer = await response.read()
        assert response.status == 200, answer
    latencies.append(1e3 * (time.perf_counter() - start))
    return answer


async def as_in_a_run(measurement: Awaitable[None]) -> None:
    """Measures with the garbage collections of a run's driver."""
    async with short_collections():
        await measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--programs", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.programs:
        asyncio.run(run_programs())
    elif given.live:
        with null_server("null_fixed.py", str(ANSWER)) as url:
            asyncio.run(as_in_a_run(measure_live(url, given.live)))
    elif given.steps:
        with null_server("null_fixed.py", str(given.tokens)) as url:
            asyncio.run(as_in_a_run(measure_steps(url, given.turns, given.tokens)))
    else:
        with null_server("null_fixed.py", str(given.tokens)) as url:
            asyncio.run(as_in_a_run(measure(url, given.sessions, given.turns, given.tokens, given.repeats)))


if __name__ == "__main__":
    main()
