"""Latency of a tenant's steps beside a tenant that attacks, over endpoint, service and record.

    python benchmarks/serve_victim.py [--seconds 10] [--attacks flood large ...]

Trainer ranks and servers answer at once (`serve_endpoint.py`), so what is measured is what the two tenants share. The
service is this process; the victim is another one, and the attacker a third at the lowest priority, so that it takes no
core from the service. A step of the victim is four samples, a pass, an optimizer step and a sampler; its latency beside
an attack is divided by that alone, measured just before. With two tenants a fair share is a ratio of about 2.
"""

# Its environment has a client of Tinker.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import zstandard
from serve_endpoint import Ranks, Servers
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from megasync.base.files import new_folder
from megasync.service.endpoint import Endpoint
from megasync.service.interfaces import AdapterSpec, ServedModel, WriteState
from megasync.service.scheduler import share_with_threads
from megasync.service.service import Service

KEYS = {"victim": "tml-victim-0123456789", "attacker": "tml-attacker-01234567"}
CONTEXT, RANK, LARGE_RANK, STATE_BYTES = 4096, 8, 32, 1 << 25
# Connections of an attacker that wait for answers, and those that it merely holds.
BUSY, HELD = 64, 400
# A step that takes so much longer than the measurement counts as this.
STARVED_SECONDS = 60
ZIPPED = {"Content-Encoding": "zstd"}
SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0"}


class SizedRanks(Ranks):
    """Ranks whose models of a large rank have large states."""

    def __init__(self) -> None:
        self._large: set[str] = set()

    async def create(self, model: str, spec: AdapterSpec) -> None:
        self._large |= {model} if spec.rank == LARGE_RANK else set()

    async def copy_state(self, model: str, optimizer: bool) -> WriteState:
        def write(folder: Path) -> None:
            with new_folder(folder) as draft:
                (draft / "adapter_model.safetensors").write_bytes(bytes(STATE_BYTES if model in self._large else 4096))

        return partial(asyncio.to_thread, write)


class Client:
    """A tenant over plain HTTP, with a session, a model and a sampler."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self.url = http, url
        self._numbers, self._samples, self._made = itertools.count(1), itertools.count(), itertools.count()
        self.session = self.model = self.sampler = ""

    async def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        given: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        method = "GET" if body is None else "POST"
        async with self._http.request(method, f"{self.url}/api/v1/{path}", headers=headers, **given) as answer:
            data = await answer.read()
            return json.loads(data) if data and "json" in answer.content_type else {}

    async def outcome(self, path: str, body: Any) -> Any:
        promise = await self.ask(path, body)
        if (name := promise.get("request_id")) is None:
            return promise
        return await self.ask("retrieve_future", {"request_id": name}, Accept="application/x-protobuf")

    async def begin(self, rank: int) -> None:
        self.session = (await self.ask("create_session", SESSION))["session_id"]
        self.model = (await self.make(rank))["model_id"]
        asked = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "model"}
        self.sampler = (await self.ask("create_sampling_session", asked))["sampling_session_id"]

    async def make(self, rank: int) -> Any:
        asked = {"session_id": self.session, "model_seq_id": next(self._made), "base_model": "model"}
        return await self.outcome("create_model", asked | {"lora_config": {"rank": rank, "seed": 1}})

    def numbered(self, ahead: int = 0, **fields: Any) -> dict[str, Any]:
        return {"model_id": self.model, "seq_id": next(self._numbers) + ahead} | fields

    def compute(self, data: int, tokens: int, forward_only: bool = False) -> bytes:
        ids = np.ones(tokens, np.int64)
        # Any: the client turns arrays into its own type.
        inputs: dict[str, Any] = {"target_tokens": ids}
        one = types.Datum(model_input=types.ModelInput.from_ints(ids.tolist()), loss_fn_inputs=inputs)
        given = types.ForwardBackwardInput(data=[one], loss_fn="cross_entropy")
        request = types.ForwardBackwardRequest(forward_backward_input=given, **self.numbered())
        message = forward_backward_request_to_proto(request)
        message.data.extend([message.data[0]] * (data - 1))
        message.forward_only = forward_only
        return message.SerializeToString()

    async def sample(self) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 32}]}
        asked = {"sampling_session_id": self.sampler, "seq_id": next(self._samples), "prompt": prompt}
        return await self.outcome("asample", asked | {"sampling_params": {"max_tokens": 64}, "num_samples": 4})

    async def step(self) -> None:
        done = [*await asyncio.gather(*(self.sample() for _ in range(4)))]
        passed, updated = self.compute(16, 96), self.numbered(adam_params={"learning_rate": 1e-3})
        done += await asyncio.gather(self.outcome("forward_backward", passed), self.outcome("optim_step", updated))
        saved = self.numbered(sampling_session_seq_id=1 + next(self._samples))
        done.append(await self.outcome("save_weights_for_sampler", saved))
        assert not any("error" in each or "detail" in each for each in done), str(done)[:500]


# Attacks: what each of some connections repeats.


async def flood(client: Client) -> None:
    await client.ask("session_heartbeat", {"session_id": client.session})


async def large(client: Client) -> None:
    await client.outcome("forward_backward", await asyncio.to_thread(client.compute, 1200, CONTEXT, True))


async def malformed(client: Client) -> None:
    bomb = zstandard.compress(bytes(1 << 26))
    bodies = ((b"(\xb5/\xfd broken", ZIPPED), (bomb, ZIPPED), (b"[" * 10**6, {}), (b"\n\x7f" * 10**6, {}))
    for path, (body, headers) in itertools.product(("forward_backward", "asample", "optim_step"), bodies):
        await client.ask(path, body, **headers)


async def slow(client: Client) -> None:
    """Holds connections whose requests never end."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['attacker']}\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    for part in (head, "Content-Length: 60000000\r\n\r\n", *["x"] * 600):
        writer.write(part.encode())
        await asyncio.sleep(0.1)


async def polls(client: Client) -> None:
    """Asks for an outcome that waits for a number that never comes, and for completions that there are not."""
    waiting = await client.ask("optim_step", client.numbered(ahead=1000, adam_params={"learning_rate": 1e-3}))
    asked = {"target": {"sampling_session_id": client.sampler, "cloned_sampler_id": 0}, "prev_cursor": 0, "timeout": 0}
    held = asyncio.ensure_future(client.ask("retrieve_future", waiting))
    while not held.done():
        await client.ask("retrieve_futures", asked)


async def downloads(client: Client) -> None:
    await client.ask(f"training_runs/{client.model}/checkpoints/weights/w/archive")


async def models(client: Client) -> None:
    made = await client.make(RANK)
    await client.outcome("unload_model", {"model_id": made.get("model_id", client.model + "0")})


ATTACKS: dict[str, tuple[Callable[[Client], Awaitable[None]], int]] = {
    "flood": (flood, BUSY),
    "large": (large, 8),
    "malformed": (malformed, 16),
    "slow": (slow, HELD),
    "polls": (polls, HELD),
    "downloads": (downloads, 16),
    "models": (models, BUSY),
}


async def attack(client: Client, name: str, link: Any) -> None:
    os.nice(19)
    await client.begin(LARGE_RANK)
    await client.outcome("save_weights", client.numbered(path="w"))
    link.send(0.0)

    async def repeat(once: Callable[[Client], Awaitable[None]]) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError):
                await once(client)

    once, connections = ATTACKS[name]
    await asyncio.gather(*(repeat(once) for _ in range(connections)))


async def recipe(client: Client, link: Any) -> None:
    await client.begin(RANK)
    while True:
        began = time.perf_counter()
        await client.step()
        link.send(time.perf_counter() - began)


async def play(name: str, url: str, link: Any) -> None:
    key = KEYS["attacker" if name in ATTACKS else "victim"]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers={"X-API-Key": key}) as http:
        client = Client(http, url)
        await (attack(client, name, link) if name in ATTACKS else recipe(client, link))


class Player:
    """A client in a process of its own, which begins once it knows the address."""

    def __init__(self, name: str) -> None:
        fork = multiprocessing.get_context("fork")
        self._link, theirs = fork.Pipe()
        self._process = fork.Process(target=lambda: asyncio.run(play(name, theirs.recv(), theirs)), daemon=True)
        self._process.start()

    async def begin(self, url: str) -> None:
        self._link.send(url)
        assert await self.seconds(600) is not None, "a client did not begin"

    async def seconds(self, most: float) -> float | None:
        """Returns the next number that the client sends, or None if that takes too long."""
        return self._link.recv() if await asyncio.to_thread(self._link.poll, most) else None

    def end(self) -> None:
        self._process.kill()
        self._process.join()


async def latencies(victim: Player, seconds: float) -> list[float]:
    """The milliseconds of the victim's steps that end in this time, but for the first, which began before it."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(found) < 3:
        found.append(1000 * (await victim.seconds(STARVED_SECONDS) or STARVED_SECONDS))
    return found[1:]


async def measure(victim: Player, attackers: dict[str, Player], seconds: float) -> None:
    served = ServedModel("model", CONTEXT, 1000, LARGE_RANK)
    with tempfile.TemporaryDirectory() as folder:
        async with Service(Path(folder), SizedRanks(), Servers(), served) as service:
            endpoint = Endpoint(service, KEYS)
            await endpoint.start()
            await victim.begin(endpoint.url)
            for name, attacker in attackers.items():
                alone = await latencies(victim, seconds)
                await attacker.begin(endpoint.url)
                beside = await latencies(victim, seconds)
                attacker.end()
                shown = [
                    f"{np.quantile(beside, part):.0f} ({np.quantile(beside, part) / np.quantile(alone, part):.1f})"
                    for part in (0.5, 0.99)
                ]
                print(f"| {name} | {' | '.join(shown)} |", flush=True)
            victim.end()
            await endpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10, help="alone, and beside each attack")
    given = parser.parse_args()
    # Before the service has threads.
    victim, attackers = Player("victim"), {name: Player(name) for name in given.attacks}
    share_with_threads()
    print("| attack | median step, ms (ratio) | 99th percentile |\n|---|---|---|", flush=True)
    asyncio.run(measure(victim, attackers, given.seconds))


if __name__ == "__main__":
    main()
