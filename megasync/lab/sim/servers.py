"""Simulated servers and a simulated router, both as processes and as HTTP endpoints in virtual time.

The real fleet starts them, probes them, registers the servers with the router and removes dead ones. The real client
and the real server controls reach them over `network`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import orjson

from megasync.errors import ServerError
from megasync.lab.sim.answer import Answer, failed_answer, json_answer
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.invariants import INITIAL, Invariants, Weights
from megasync.lab.sim.language import END, VOCABULARY, logprob, next_token

ROUTER_URL = "http://router:1"
START_SECONDS, ROUTER_SECONDS, ANSWER_SECONDS, TOKEN_SECONDS, MEMORY_SECONDS = 0.6, 0.2, 0.005, 0.04, 0.03
# The longest time from the end of a process to the report of its node's agent.
REPORT_SECONDS = 0.5
# Number of requests that fill a server's KV cache.
ROOM = 12
# Seconds between two chunks of a stream that never ends.
ENDLESS_SECONDS = 5.0

# The fault of a row whose requests kill the process that runs them.
POISON_ROW = "poison row"

# Ways in which a server can send invalid answers.
LIES = (
    "a non-numeric log-prob",
    "an id outside the vocabulary",
    "a missing token",
    "invalid JSON",
    "an endless stream",
)


class SimServer:
    """A server process (`start`, `ended`, `tail`, `stop`) with an address.

    `weights` is None while the server holds a mixture of versions. `stream` is the number of tokens between two chunks
    of a streamed answer. A prompt that begins with the token `poison` kills the process.
    """

    def __init__(
        self, url: str, chance: Chance, invariants: Invariants, stream: int, poison: int | None = None
    ) -> None:
        self.url = url
        self.version = 0
        self.weights: Weights | None = INITIAL
        self.gone = asyncio.Event()
        self.lie = ""
        # Whether a prompt killed the server.
        self.poisoned = False
        # Factor by which it samples slower than its peers.
        self.slowness = 1.0
        self._poison = poison
        self._chance = chance
        self._invariants = invariants
        self._stream = max(1, stream)
        self._wedged = False
        self._has_memory = True
        self._begun = 0
        self._decoded = 0
        self._requests: dict[str, _Request] = {}
        self._running = asyncio.Event()
        self._running.set()

    # Process interface, used by the fleet

    async def start(self, timeout: float) -> str:
        self._invariants.takes_device(self.url)
        await asyncio.sleep(self._chance.seconds("generate", START_SECONDS, self.url))
        if self._chance.happens("server dies while it starts", self.url):
            self.kill()
            raise ServerError(f"{self.url} died while it started")
        self._invariants.note(f"{self.url} is up")
        return self.url

    async def ended(self) -> None:
        await self.gone.wait()
        await asyncio.sleep(REPORT_SECONDS * self._chance.share(f"end of {self.url}"))

    def processes(self) -> list[tuple[str, int]]:
        return []

    async def tail(self, lines: int) -> str:
        return "killed"

    async def visible_devices(self) -> str:
        return ""

    async def stop(self, timeout: float) -> None:
        self.kill()

    # Faults

    def kill(self) -> None:
        if self.gone.is_set():
            return
        self._invariants.note(f"{self.url} is gone")
        self._invariants.leaves_device(self.url)
        self.gone.set()
        for request in list(self._requests.values()):
            request.cut()

    def wedge(self) -> None:
        """Hang the scheduler while the HTTP process still answers."""
        self._wedged = True

    # Used by the weight sync

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    # HTTP interface, used by clients

    def generate(self, body: dict[str, Any], key: str) -> Answer:
        """Start a request of the group `key`. The returned answer receives chunks while the request is sampled."""
        answer = Answer()
        if self.gone.is_set():
            answer.cut()
            return answer
        self._invariants.asked(self.url, key)
        self._begun += 1
        request = _Request(body.get("rid", f"{self.url} {self._begun}"), body, key, answer)
        self._requests[request.rid] = request
        request.task = asyncio.create_task(self._sample(request), name=f"request {request.rid}")
        # The cleanup is a callback because a task cancelled before its first step never runs its own code.
        request.task.add_done_callback(lambda task: self._ended(request, task))
        return answer

    def _ended(self, request: _Request, task: asyncio.Task[None]) -> None:
        del self._requests[request.rid]
        if task.cancelled():
            if request.aborted:
                self._end_step(request)
                self._send(request, "abort")
            else:
                request.answer.cut()
        elif (error := task.exception()) is not None:
            self._invariants.record(error)

    async def _sample(self, request: _Request) -> None:
        if request.ids[0] == self._poison:
            await asyncio.sleep(ANSWER_SECONDS)
            self._invariants.note(f"{request.rid} of group {request.key} kills {self.url}")
            self.poisoned = not self.gone.is_set()
            self._chance.met[POISON_ROW] += 1
            self.kill()
        while True:
            if self._wedged:
                await asyncio.Event().wait()
            await asyncio.sleep(self.slowness * self._chance.seconds("generate", TOKEN_SECONDS, request.rid))
            await self._running.wait()
            if request.answer.left:
                return
            self._invariants.serves(self.url, self.version, self.weights, request.key)
            request.sample(self.version)
            self._decoded += 1
            if request.token_ids[-1] == END and len(request.token_ids) >= request.least:
                return self._send(request, "stop")
            if len(request.token_ids) == request.budget:
                return self._send(request, "length")
            if request.streams and len(request.token_ids) % self._stream == 0:
                self._send(request, None)
            if self.lie == "an endless stream":
                while not request.answer.left:
                    await asyncio.sleep(ENDLESS_SECONDS)
                    if request.streams:
                        self._send(request, None)

    def _end_step(self, request: _Request) -> None:
        """Finish the decode step in progress. An abort takes effect after it, and its token may end the response."""
        under_way = self._running.is_set() and len(request.token_ids) < request.budget
        if under_way and self.weights is not None and self._chance.share(f"step of {request.rid}") < 0.5:
            request.sample(self.version)
            self._decoded += 1

    def _send(self, request: _Request, reason: str | None) -> None:
        """Send the tokens sampled since the last chunk. With a finish reason, this chunk is the final one."""
        piece = request.piece(self.version, reason)
        if self.lie and not (reason == "abort" and not request.token_ids):
            self._chance.met[f"answer: {self.lie}"] += 1
        data = _corrupted(piece, self.lie)
        request.answer.send(b"data: " + data + b"\n\n" if request.streams else data)
        if reason is not None:
            request.answer.end()

    def _abort(self, body: dict[str, Any]) -> None:
        """Abort all requests, or only the one with the given `rid`."""
        rid = body.get("rid")
        self._invariants.need(
            rid is None or rid in self._requests, f"{self.url} is to abort {rid}, which it does not have"
        )
        for request in self._requests.values():
            if not self._wedged and request.task is not None and rid in (None, request.rid):
                request.aborted = True
                request.task.cancel()

    async def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Answer a control request. Only requests that need the scheduler block while it hangs."""
        await asyncio.sleep(ANSWER_SECONDS)
        if self._wedged and path == "/server_info":
            await asyncio.Event().wait()
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            return await self._change_memory(path)
        if path == "/pause_generation":
            self.pause()
        if path == "/continue_generation":
            self._invariants.need(self._has_memory, f"{self.url} has its memory when it generates again")
            self.resume()
        if path == "/abort_request":
            self._abort(body)
        if path == "/parse_function_call":
            if self._chance.happens("parsing fails", self.url):
                return failed_answer(503, "shutting down")
            return json_answer({"normal_text": body["text"], "calls": []})
        running = len(self._requests)
        load = {"token_usage": min(1.0, running / ROOM), "num_running_reqs": running, "num_waiting_reqs": 0}
        load |= {"timestamp": asyncio.get_running_loop().time(), "decode_moments": [self._decoded]}
        return json_answer({"loads": [load]})

    async def _change_memory(self, path: str) -> Answer:
        if self._wedged:
            await asyncio.Event().wait()
        await asyncio.sleep(self._chance.seconds("sync", MEMORY_SECONDS, self.url))
        if self._chance.happens("server dies as its memory changes", self.url):
            self.kill()
        if self.gone.is_set():
            return failed_answer(503, "gone")
        resumes = path == "/resume_memory_occupation"
        self._invariants.need(resumes != self._has_memory, f"{self.url} releases and resumes its memory in turns")
        self._invariants.need(
            resumes or not self._running.is_set(), f"{self.url} is paused when it releases its memory"
        )
        self._has_memory = resumes
        (self._invariants.takes_device if resumes else self._invariants.leaves_device)(self.url)
        return json_answer({})


class _Request:
    """One in-flight request."""

    def __init__(self, rid: str, body: dict[str, Any], key: str, answer: Answer) -> None:
        params = body["sampling_params"]
        self.rid = rid
        self.key = key
        self.answer = answer
        self.streams: bool = body.get("stream", False)
        self.ids: list[int] = body["input_ids"]
        self.budget: int = params["max_new_tokens"]
        self.least: int = self.budget if params.get("ignore_eos") else params.get("min_new_tokens", 0)
        self.task: asyncio.Task[None] | None = None
        self.aborted = False
        self.token_ids: list[int] = []
        self._versions: list[int] = []
        self._seed: int = params.get("sampling_seed", 0)
        self._sent = 0
        # The prompt, if its log-probs are requested.
        self._scored = list(self.ids) if body.get("logprob_start_len", -1) == 0 else []

    def sample(self, version: int) -> None:
        token = next_token(self._seed, self.ids)
        self.ids.append(token)
        self.token_ids.append(token)
        self._versions.append(version)

    def piece(self, version: int, reason: str | None) -> dict[str, Any]:
        new = range(self._sent, len(self.token_ids))
        self._sent = len(self.token_ids)
        meta: dict[str, Any] = {
            "output_token_logprobs": [[logprob(self._versions[at]), self.token_ids[at], None] for at in new],
            "finish_reason": None if reason is None else {"type": reason},
            "weight_version": str(version),
        }
        if self._scored:
            meta["input_token_logprobs"] = [[None, self._scored[0], None]] + [
                [logprob(version), token, None] for token in self._scored[1:]
            ]
        if reason is not None:
            meta["weight_versions"] = [
                {"start": at, "end": at + 1, "version": str(version)} for at, version in enumerate(self._versions)
            ]
        ids = [self.token_ids[at] for at in new]
        return {"text": "".join(map(chr, ids)), "output_ids": ids, "meta_info": meta}

    def cut(self) -> None:
        """Break the connection because the server died. Tokens not sent yet are lost."""
        self.answer.cut()
        if self.task is not None:
            self.task.cancel()


def _corrupted(piece: dict[str, Any], lie: str) -> bytes:
    sampled = piece["meta_info"]["output_token_logprobs"]
    if lie == "invalid JSON":
        return b"<html>502</html>"
    if sampled and lie == "a non-numeric log-prob":
        sampled[-1][0] = None
    elif sampled and lie == "an id outside the vocabulary":
        sampled[-1][1] = piece["output_ids"][-1] = VOCABULARY + sampled[-1][1]
    elif sampled and lie == "a missing token":
        sampled.pop()
    return orjson.dumps(piece)


class SimRouter:
    """The router process and its list of servers, which a restart clears."""

    def __init__(self, chance: Chance) -> None:
        self.listed: set[str] = set()
        self.gone = asyncio.Event()
        self.gone.set()
        self._starts = 0
        self._chance = chance
        self._passing: list[Answer] = []

    async def start(self, timeout: float) -> str:
        self._starts += 1
        self.listed.clear()
        await asyncio.sleep(self._chance.seconds("generate", ROUTER_SECONDS, f"router {self._starts}"))
        self.gone.clear()
        return ROUTER_URL

    @property
    def up(self) -> bool:
        return not self.gone.is_set()

    async def ended(self) -> None:
        await self.gone.wait()

    def processes(self) -> list[tuple[str, int]]:
        return []

    async def metrics_url(self) -> str:
        return ""

    async def tail(self, lines: int) -> str:
        return "killed"

    async def stop(self, timeout: float) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the router: responses through it break off, while the servers continue to sample them."""
        self.gone.set()
        for answer in self._passing:
            answer.cut()
        self._passing.clear()

    async def adjust(self, wanted: Collection[str]) -> bool:
        """Adjust the list as `RouterMembers` does: returns True once the list already equals `wanted`."""
        await asyncio.sleep(ANSWER_SECONDS)
        if not self.up:
            raise ServerError("the router refuses the connection")
        settled = self.listed == set(wanted)
        self.listed = set(wanted)
        return settled

    async def close(self) -> None: ...

    def choose(self, number: float) -> str:
        """Return the server for a request. `number` is in [0, 1)."""
        return sorted(self.listed)[int(number * len(self.listed))]

    def register(self, answer: Answer) -> Answer:
        """Add an answer that passes through the router, and return it."""
        self._passing = [other for other in self._passing if not other.ended]
        self._passing.append(answer)
        return answer
