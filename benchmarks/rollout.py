"""Many concurrent conversations through the client and the gateway, compared with raw requests to the same null server.

    python benchmarks/rollout.py [--sessions 1000] [--turns 4] [--tokens 64] [--repeats 3]
    python benchmarks/rollout.py --long [--live 16000]
    python benchmarks/rollout.py --dialects

The null server is a separate process and answers immediately, so the benchmark measures megasync's own work in the
driver process. Every variant plays `sessions` conversations of `turns` turns, all concurrently:

    raw        aiohttp posts a prompt of the conversation's length, and discards the response
    generate   the workflow's `client.generate` with the tokens so far; the trajectory is built at the end
    chat       `client.chat` with the messages so far, through a chat template
    gateway    an agent's session: the same chat over HTTP, posted by plain aiohttp clients in a separate process

Variants alternate within each round, so that other load on the machine affects all of them. The first round is a
warm-up; the table shows medians of the others. `lag` is how late a 10 ms sleep ends on the driver's event loop, `CPU`
the driver's CPU time per request, and `growth` the growth of its memory from the first counted round to the last.

`--long` measures conversations of 50 turns and 32k tokens: the driver's CPU time by turn, of conversations that run one
after another, and what their trajectories cost. Prompts are given as `generation.tokens + new`, as lists, or as chat
messages. Then agents of 20 turns take turns in one sample, which has a line for each of them. `--live` then runs that
many conversations at once, and measures the driver's memory when all have reached their full length.

`--dialects` measures the gateway's work without HTTP and servers: CPU per request of conversations of 20 turns, from
the bytes of a request to those of its answer, chat template and tokenizer included; and what a live conversation of 32k
tokens holds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil

from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.gateway.chat_completions import ChatExchange
from megasync.gateway.messages import MessagesExchange
from megasync.gateway.request import Exchange, Kept
from megasync.gateway.responses import ResponsesExchange
from megasync.gateway.server import Gateway
from megasync.gateway.session import Session
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.conversation import Generation, Reply
from megasync.rollout.inflight import FIRST_REQUESTS, RequestGate
from megasync.rollout.partials import PartialResponses
from megasync.rollout.tokens import Tokens
from megasync.rollout.workflow import SampleClient
from megasync.serving.control import ServerControl

HERE = Path(__file__).parent
LAG_SLEEP = 0.01
REQUEST_TIMEOUT = 300.0
QUESTION = {"role": "user", "content": "What do you see now, and what will you do about it?"}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# A long conversation: turns, and tokens of the first prompt, of a tool's output, and of an answer. Ids are as large as
# those of Qwen 3.
LONG_TURNS, PROMPT, TOOL, ANSWER = 50, 512, 384, 256
VOCABULARY = 151_936
LONG_REPEATS = 12
SHOWN_TURNS = (1, 2, 10, 25, 50)
# Of samples with many agents: the numbers of agents, and the turns of each.
AGENTS, AGENT_TURNS = (1, 50, 200), 20

NUMBERS = np.random.default_rng(0)
last_reply: dict[SampleClient, Reply] = {}

# Plays one conversation. Returns the number of trained tokens in its trajectory.
Play = Callable[[int], Awaitable[int]]


@dataclass(frozen=True)
class Round:
    """One measured round: wall-clock and CPU seconds, lags in milliseconds, and resident memory in bytes."""

    seconds: float
    cpu: float
    lags: Sequence[float]
    memory: int


class Bench:
    """The sizes that all variants share, and a client of the null server."""

    def __init__(self, url: str, sessions: int, turns: int, tokens: int) -> None:
        self.url = url
        self.sessions = sessions
        self.turns = turns
        self.tokens = tokens
        self.tokenizer = make_tokenizer()
        self.control = ServerControl(url)
        self.sampling = SamplingConfig(max_new_tokens=tokens)
        self.client = RolloutClient(
            url,
            [self.control],
            ServedModel(len(self.tokenizer), 1_000_000, self.tokenizer),
            RequestSettings(self.sampling, REQUEST_TIMEOUT),
        )

    def sample(self, number: int) -> SampleClient:
        return SampleClient(self.client, RequestGate(), routing_key=f"0:{number}")

    async def close(self) -> None:
        await self.client.close()
        await self.control.close()

    # Variants

    async def generate(self, number: int) -> int:
        client = self.sample(number)
        asked = self.tokenizer.encode(QUESTION["content"])
        ids = Tokens.of(())
        for _ in range(self.turns):
            ids = (await client.generate(ids + asked)).tokens
        return trained(client)

    async def chat(self, number: int) -> int:
        client = self.sample(number)
        messages = []
        for _ in range(self.turns):
            messages = (await client.chat([*messages, QUESTION])).messages
        return trained(client)

    def raw(self, session: aiohttp.ClientSession) -> Play:
        asked = self.tokenizer.encode(QUESTION["content"])

        async def play(number: int) -> int:
            ids: list[int] = []
            for turn in range(self.turns):
                ids = ids + asked
                body = {
                    "rid": f"{number}-{turn}",
                    "input_ids": ids,
                    "sampling_params": {"temperature": 1.0, "max_new_tokens": self.tokens},
                    "return_logprob": True,
                }
                async with session.post(self.url + "/generate", data=orjson.dumps(body)) as response:
                    await response.read()
                ids = ids + asked[:1] * self.tokens
            return self.turns * self.tokens

        return play


def trained(client: SampleClient) -> int:
    (trajectory,) = client.conversation.trajectories(0.0)
    return int(trajectory.loss_mask.expand().sum())


def make_tokenizer():
    """A tokenizer with one token per printable character, and with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"</s>": 0} | {chr(code): code - 31 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)


async def run_round(play: Play, sessions: int, expected: int) -> Round:
    """Plays all conversations concurrently. `expected` is the number of trained tokens of each."""
    lags: list[float] = []
    watch = asyncio.create_task(watch_lag(lags))
    cpu, start = time.process_time(), time.perf_counter()
    found = await asyncio.gather(*(play(number) for number in range(sessions)))
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    watch.cancel()
    assert set(found) == {expected}, f"a conversation trains {set(found)} tokens, not {expected}"
    gc.collect()
    return Round(seconds, used, lags, psutil.Process().memory_info().rss)


async def watch_lag(lags: list[float]) -> None:
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(LAG_SLEEP)
        lags.append(1e3 * (time.perf_counter() - asked - LAG_SLEEP))


@contextmanager
def null_server(script: str = "null_server.py", *options: str):
    """Runs a null server within the context. Yields its URL."""
    command = [sys.executable, str(HERE / script), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)


@asynccontextmanager
async def gateway_agents(bench: Bench) -> AsyncIterator[Play]:
    """Starts the gateway and a process of agents. Yields a function that has an agent play one conversation."""
    gateway = Gateway(GatewayConfig(), bench.sampling, "null")
    await gateway.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--agents", str(bench.turns)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    asks, answers = process.stdin, process.stdout
    done: dict[int, asyncio.Future[None]] = {}

    async def listen() -> None:
        while line := await answers.readline():
            number, _, problem = line.decode().strip().partition(" ")
            if problem:
                done.pop(int(number)).set_exception(RuntimeError(problem))
            else:
                done.pop(int(number)).set_result(None)

    async def play(number: int) -> int:
        client = bench.sample(number)
        async with gateway.session(client) as session:
            done[number] = asyncio.get_running_loop().create_future()
            waits = done[number]
            asks.write(f"{number} {gateway.base_url(session)} {session.key}\n".encode())
            async with asyncio.timeout(REQUEST_TIMEOUT):
                await waits
        return trained(client)

    listening = asyncio.create_task(listen())
    try:
        yield play
    finally:
        asks.close()
        await process.wait()
        await listening
        await gateway.close()


async def play_agents(turns: int) -> None:
    """The process of agents: plays a conversation for each line of input, and prints a line when it has ended."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    running = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def play(number: str, url: str, key: str) -> None:
            try:
                await converse(url, key)
            except (aiohttp.ClientError, KeyError) as error:
                print(number, repr(error), flush=True)
            else:
                print(number, flush=True)

        async def converse(url: str, key: str) -> None:
            messages = []
            for _ in range(turns):
                messages = [*messages, QUESTION]
                data = orjson.dumps({"model": "null", "messages": messages})
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(f"{url}/chat/completions", data=data, headers=headers) as response:
                    answer = orjson.loads(await response.read())
                messages = [*messages, answer["choices"][0]["message"]]

        while line := await reader.readline():
            task = asyncio.create_task(play(*line.decode().split()))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)


# Long conversations


def long_client(url: str) -> RolloutClient:
    return RolloutClient(
        url,
        [],
        ServedModel(VOCABULARY, 1_000_000, make_tokenizer()),
        RequestSettings(SamplingConfig(max_new_tokens=ANSWER), REQUEST_TIMEOUT),
    )


def long_sample(client: RolloutClient, gate: RequestGate, number: int, responses: PartialResponses) -> SampleClient:
    return SampleClient(client, gate, routing_key=f"0:{number}", responses=responses.sample(f"0:{number}", 0))


def new_ids(count: int) -> list[int]:
    """Fresh objects, as a tokenizer returns them."""
    return NUMBERS.integers(0, VOCABULARY, count).tolist()


async def by_tokens(client: SampleClient, last: Generation | None) -> tuple[Generation, float]:
    new = new_ids(PROMPT if last is None else TOOL)
    start = time.process_time()
    return await client.generate(new if last is None else last.tokens + new), start


async def by_lists(client: SampleClient, last: Generation | None) -> tuple[Generation, float]:
    new = new_ids(PROMPT if last is None else TOOL)
    start = time.process_time()
    return await client.generate(new if last is None else [*last.prompt_ids, *last.token_ids, *new]), start


async def by_messages(client: SampleClient, last: Generation | None) -> tuple[Generation, float]:
    messages = [] if last is None else last_reply[client].messages
    # One token for each character; the template adds some.
    asked = {"role": "user", "content": ("What do you see? " * 64)[: PROMPT if last is None else TOOL - 20]}
    start = time.process_time()
    reply = last_reply[client] = await client.chat([*messages, asked])
    return reply.generation, start


# Per way of giving the prompt: the medians of the driver's CPU time by turn, and of building the trajectories; in ms.
LongTimes = dict[str, tuple[list[float], float]]


async def measure_long(url: str, repeats: int = LONG_REPEATS) -> LongTimes:
    client = long_client(url)
    found: LongTimes = {}
    for name, play in {"tokens + new": by_tokens, "lists": by_lists, "chat messages": by_messages}.items():
        times: list[list[float]] = [[] for _ in range(LONG_TURNS)]
        ends: list[float] = []
        for repeat in range(repeats + 1):
            sample, generation = long_sample(client, RequestGate(), repeat, PartialResponses()), None
            for turn in times:
                generation, start = await play(sample, generation)
                turn.append(1e3 * (time.process_time() - start))
            start = time.process_time()
            assert trained(sample) == LONG_TURNS * ANSWER
            ends.append(1e3 * (time.process_time() - start))
        last_reply.clear()
        # The first conversation opens connections and fills caches.
        found[name] = [statistics.median(turn[1:]) for turn in times], statistics.median(ends[1:])
    await client.close()
    return found


def show_long(found: LongTimes) -> None:
    print(f"Conversations of {LONG_TURNS} turns; CPU of the driver per turn in ms, medians of {LONG_REPEATS}:\n")
    print(f"| prompts as | {' | '.join(f'turn {turn}' for turn in SHOWN_TURNS)} | last / first | trajectories, ms |")
    print("|---|" + "---|" * (len(SHOWN_TURNS) + 2))
    for name, (medians, end) in found.items():
        shown = " | ".join(f"{medians[turn - 1]:.2f}" for turn in SHOWN_TURNS)
        print(f"| {name} | {shown} | {medians[-1] / medians[0]:.2f} | {end:.2f} |")


async def measure_agents(url: str) -> None:
    """Prints what a request costs in samples with that many agents, which take turns."""
    client = long_client(url)
    print(f"\nAgents of {AGENT_TURNS} turns in one sample; CPU of the driver:\n")
    print("| agents | ms per request | trajectories, ms |")
    print("|---|---|---|")
    for agents in AGENTS:
        # As many requests as the largest sample has.
        times: list[float] = []
        ends: list[float] = []
        for number in range(max(AGENTS) // agents):
            sample = long_sample(client, RequestGate(), number, PartialResponses())
            histories = [[{"role": "system", "content": f"You are agent {agent}."}] for agent in range(agents)]
            start = time.process_time()
            for turn in range(AGENT_TURNS):
                for agent, messages in enumerate(histories):
                    asked = {"role": "user", "content": f"What do you see in part {agent} of step {turn}?"}
                    histories[agent] = (await sample.chat([*messages, asked])).messages
            times.append(1e3 * (time.process_time() - start) / (agents * AGENT_TURNS))
            start = time.process_time()
            assert len(sample.conversation.trajectories(0.0)) == agents
            ends.append(1e3 * (time.process_time() - start))
        print(f"| {agents} | {statistics.median(times):.2f} | {statistics.median(ends):.1f} |")
    await client.close()


async def measure_live(url: str, count: int) -> float:
    """Bytes that each of this many live conversations holds."""
    client, responses = long_client(url), PartialResponses()
    # As in a run, whose limit follows the servers: one null server takes what 32 real ones would.
    gate = RequestGate()
    gate.set_limit(32 * FIRST_REQUESTS)
    arrived, everyone = 0, asyncio.Event()
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()

    async def play(number: int) -> int:
        nonlocal arrived
        sample, generation = long_sample(client, gate, number, responses), None
        for _ in range(LONG_TURNS):
            generation, _ = await by_tokens(sample, generation)
        assert generation is not None
        arrived += 1
        if arrived == count:
            everyone.set()
        await everyone.wait()
        return len(generation.tokens)

    playing = [asyncio.create_task(play(number)) for number in range(count)]
    waiting = asyncio.create_task(everyone.wait())
    await asyncio.wait({waiting, *playing}, return_when=asyncio.FIRST_COMPLETED)
    held, seconds = psutil.Process().memory_info().rss - before, time.perf_counter() - start
    lengths = set(await asyncio.gather(*playing))
    print(
        f"\n{count} live conversations of {lengths} tokens hold {held / 1e9:.2f} GB, {held / count / 1e6:.3f} MB each; "
        f"{count * LONG_TURNS / seconds:.0f} requests/s"
    )
    await client.close()
    return held / count


# Dialects

DIALECTS: dict[str, tuple[Callable[[bytes, str, Kept], Exchange], str]] = {
    "chat completions": (ChatExchange, "messages"),
    "Responses": (ResponsesExchange, "input"),
    "Messages": (MessagesExchange, "messages"),
}


class EchoClient(RolloutClient):
    """Answers at once with as many tokens as may be sampled."""

    async def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int = ANSWER, **options: Any) -> Generation:
        text = "".join(NUMBERS.choice(list("abcdefgh "), max_new_tokens))
        ids = self.tokenizer.encode(text)
        return Generation.of(self._checked(prompt_ids), ids, [-0.5] * len(ids), [0] * len(ids), "length", text)


async def play_dialect(
    client: RolloutClient, dialect: str, turns: int, asked: int, answer: int
) -> tuple[Session, float]:
    """A session after a conversation, and the CPU seconds of its requests."""
    exchange, key = DIALECTS[dialect]
    sample = SampleClient(client, RequestGate(), routing_key="0:0", max_new_tokens=answer)
    session, used, messages = Session(sample, SamplingConfig(max_new_tokens=answer), False), 0.0, list[Any]()
    for _ in range(turns):
        messages.append({"role": "user", "content": "".join(NUMBERS.choice(list("abcdefgh "), asked))})
        raw = orjson.dumps({"model": "null", key: messages})
        start = time.process_time()
        asks = exchange(raw, "null", session.kept)
        written = orjson.loads(orjson.dumps(asks.whole(await session.answer(asks.request))))
        used += time.process_time() - start
        match dialect:
            case "chat completions":
                messages.append(written["choices"][0]["message"])
            case "Responses":
                messages += written["output"]
            case _:
                messages.append({"role": "assistant", "content": written["content"]})
    return session, used


async def measure_dialects() -> None:
    client = EchoClient(
        "http://null",
        [],
        ServedModel(len(make_tokenizer()), 1_000_000, make_tokenizer()),
        RequestSettings(SamplingConfig(), REQUEST_TIMEOUT),
    )
    print("| dialect | CPU ms per request: least | median | MB per live conversation |\n|---|---|---|---|")
    live: list[Session] = []
    for dialect in DIALECTS:
        times = [1e3 * (await play_dialect(client, dialect, 20, 52, 64))[1] / 20 for _ in range(60)]
        gc.collect()
        before = psutil.Process().memory_info().rss
        live += [(await play_dialect(client, dialect, LONG_TURNS, TOOL - 20, ANSWER))[0] for _ in range(60)]
        gc.collect()
        held = (psutil.Process().memory_info().rss - before) / 60 / 1e6
        print(f"| {dialect} | {min(times):.2f} | {statistics.median(times):.2f} | {held:.2f} |")


async def measure(url: str, sessions: int, turns: int, tokens: int, repeats: int) -> dict[str, list[Round]]:
    bench = Bench(url, sessions, turns, tokens)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, gateway_agents(bench) as through_gateway:
        ways = {"raw": bench.raw(session), "generate": bench.generate, "chat": bench.chat, "gateway": through_gateway}
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for repeat in range(repeats + 1):
            for name, play in ways.items():
                found = await run_round(play, sessions, turns * tokens)
                # The first round opens connections and fills caches.
                if repeat:
                    rounds[name].append(found)
    await bench.close()
    return rounds


def show(rounds: dict[str, list[Round]], requests: int) -> None:
    print("| way | requests/s | × raw | CPU ms per request | lag ms: median | 99 % | longest | growth MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, found in rounds.items():
        rate = statistics.median(requests / r.seconds for r in found)
        ratio = statistics.median(raw.seconds / r.seconds for raw, r in zip(rounds["raw"], found, strict=True))
        cpu = statistics.median(1e3 * r.cpu / requests for r in found)
        # A short round ends before the first lag is known.
        lags = sorted(lag for r in found for lag in r.lags) or [float("nan")]
        growth = (found[-1].memory - found[0].memory) / 1e6
        print(
            f"| {name} | {rate:.0f} | {ratio:.2f} | {cpu:.2f} | {statistics.median(lags):.1f} | "
            f"{lags[int(0.99 * len(lags))]:.1f} | {lags[-1]:.1f} | {growth:+.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--dialects", action="store_true")
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        asyncio.run(play_agents(given.agents))
        return
    if given.dialects:
        asyncio.run(measure_dialects())
        return
    if given.long:
        with null_server("null_fixed.py", str(ANSWER)) as url:
            show_long(asyncio.run(measure_long(url)))
            asyncio.run(measure_agents(url))
            if given.live:
                asyncio.run(measure_live(url, given.live))
        return
    with null_server() as url:
        rounds = asyncio.run(measure(url, given.sessions, given.turns, given.tokens, given.repeats))
    print(f"{given.sessions} conversations of {given.turns} turns at once, {given.tokens} tokens an answer\n")
    show(rounds, given.sessions * given.turns)


if __name__ == "__main__":
    main()
