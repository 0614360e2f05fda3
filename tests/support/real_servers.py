"""Real servers of a tiny model and their answers, and what Hugging Face computes for the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch

from megasync.config.schema import RolloutConfig
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.server import EngineRole, ServerSpec, SGLangServer
from megasync.sync.publisher import compare_logprobs

PROMPTS = [list(range(3, 40)), [7, 7, 90, 4], list(range(60, 20, -3))]
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


def make_server(
    folder: Path, log: Path, tensor_parallel: int, port: int = 0, *, writes: bool = False, **split: int
) -> SGLangServer:
    """A float32 server of a tiny model on the CPU. Port 0 is a free port. `writes` loads the tokenizer.

    ``split`` are further parallel sizes of `RolloutConfig`.
    """
    rollout = RolloutConfig(
        tensor_parallel=tensor_parallel,
        **split,
        context_length=1024,
        max_total_tokens=8192,
        max_running_requests=32,
        # A fraction of the memory that is free at startup; other processes may be starting too.
        mem_fraction=0.6,
        server_args={} if writes else {"--skip-tokenizer-init": True},
    )
    return SGLangServer(ServerSpec(folder, rollout, "float32", "cpu"), "127.0.0.1", port, log)


@contextmanager
def running(servers: Sequence[SGLangServer]) -> Iterator[list[str]]:
    """Their URLs, while they run."""

    async def start():
        return await asyncio.gather(*(server.start(180) for server in servers))

    async def stop():
        await asyncio.gather(*(server.stop(5) for server in servers))

    try:
        yield asyncio.run(start())
    finally:
        asyncio.run(stop())


class SharedServers:
    """Servers of one model for all files that name them by ``pytest.mark.shares(SharedServers.MARK)``.

    They start when the first test asks for them and stop before a test without the mark. Each test publishes, or loads,
    the weights that it expects: none relies on those that another one left.
    """

    MARK = "dense servers"

    def __init__(self, folder: Path, logs: Path) -> None:
        self._servers = [make_server(folder, logs / f"{index}.log", ranks) for index, ranks in enumerate((1, 1, 2))]
        self._running = ExitStack()
        self._urls: list[str] = []

    def urls(self) -> list[str]:
        """Two servers of one rank and one of two ranks."""
        if not self._urls:
            self._urls = self._running.enter_context(running(self._servers))
        return self._urls

    def after(self, nextitem: pytest.Item | None) -> None:
        if nextitem is None or self.MARK not in [mark.args[0] for mark in nextitem.iter_markers("shares")]:
            self._running.close()
            self._urls = []


# Of servers with several engines.
ADMIN_KEY = "administration-of-engines"


@contextmanager
def running_engines(
    folder: Path, logs: Path, tensor_parallel: int = 1, kinds: Sequence[str] = ("prefill", "decode")
) -> Iterator[list[SGLangServer]]:
    """The engines of one server, those for prompts first, while they run; `control_of` controls them."""
    spec = make_server(folder, logs, tensor_parallel).spec
    engines = [
        SGLangServer(
            *(spec, "127.0.0.1", 0, logs / f"{kind}-{number}.log", ADMIN_KEY),
            role=EngineRole(kind, number * tensor_parallel, len(kinds) * tensor_parallel, "handover-of-these"),
        )
        for number, kind in enumerate(kinds)
    ]
    prefill = kinds.count("prefill")

    async def introduce():
        known = [(engine.url, engine.handover_port()) for engine in engines[:prefill]]
        await asyncio.gather(*(engine.know_prefill(known) for engine in engines[prefill:]))

    with running(engines):
        asyncio.run(introduce())
        yield engines


def control_of(engines: Sequence[SGLangServer], kinds: Sequence[str] = ("prefill", "decode")) -> DisaggregatedControl:
    """Requests go to the first decode engine."""
    controls = [ServerControl(engine.url, ADMIN_KEY) for engine in engines]
    prefill = kinds.count("prefill")
    return DisaggregatedControl(controls[prefill].url, controls[:prefill], controls[prefill:], ADMIN_KEY)


async def generate(server, tokens, prompt=(3, 4, 5), **options):
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        **options,
    }
    return (await server.post("/generate", body, timeout=300))["meta_info"]


async def until_generating(servers):
    """Returns once every server computes a request."""

    async def generating(server):
        while not any(load["num_running_reqs"] for load in (await server.get("/v1/loads?include=core"))["loads"]):
            await asyncio.sleep(0.01)

    async with asyncio.timeout(300):
        await asyncio.gather(*map(generating, servers))


def answered(control, route):
    """An event that is set once the control has an answer of the route."""
    event, post = asyncio.Event(), control.post

    async def watched(path, *arguments, **options):
        answer = await post(path, *arguments, **options)
        if path == route:
            event.set()
        return answer

    control.post = watched
    return event


def spans(answer):
    """The weight versions that sampled an answer, in order."""
    return [span["version"] for span in answer["weight_versions"]]


@asynccontextmanager
async def steady_traffic(servers, tokens=240) -> AsyncIterator[list[list[dict]]]:
    """Four clients per server send requests back to back until the block ends, and one more afterwards.

    First answers have a quarter to all of the tokens, and the block begins when each server has given the shortest:
    from then on a server is always in the middle of some answer, however fast or slow it is. Answers are long, because
    a starved test asks for no new ones meanwhile.
    Yields each client's answers, which are complete after the block.
    """
    over = asyncio.Event()

    async def ask(server, answers, first):
        answers.append(await generate(server, first))
        while not over.is_set():
            answers.append(await generate(server, tokens))
        answers.append(await generate(server, 4))

    clients = [(server, [], tokens * quarter // 4) for server in servers for quarter in range(1, 5)]
    asking = [asyncio.create_task(ask(*client)) for client in clients]
    try:
        while not all(answers for _, answers, _ in clients[::4]) and not any(task.done() for task in asking):
            await asyncio.sleep(0.01)
        yield [answers for _, answers, _ in clients]
    finally:
        over.set()
        await asyncio.gather(*asking)


def check_answers(clients, version, aborting=False):
    """Checks that no request failed, that each client's last answer has the version, and that an answer spans versions.

    With `aborting`, requests in flight are aborted instead of spanning two versions.
    """
    answers = [answer for client in clients for answer in client]
    kinds = {answer["finish_reason"]["type"] for answer in answers}
    assert kinds == ({"abort", "length"} if aborting else {"length"})
    assert all(spans(client[-1]) == [str(version)] for client in clients)
    assert aborting or any(len(spans(answer)) == 2 for answer in answers)


async def score(server, prompt, **options):
    return [entry[0] for entry in (await generate(server, 1, prompt, **options))["input_token_logprobs"][1:]]


def reference(model, prompt):
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


async def checksums(server):
    answer = await server.post("/weights_checker", {"action": "checksum"}, timeout=300)
    return [rank["checksums"] for rank in answer["ranks"]]


async def check_bits(servers, folder):
    """Checks that each server holds what a load of the folder gives it."""
    held = [await checksums(server) for server in servers]
    for server in servers:
        await server.post("/update_weights_from_disk", {"model_path": str(folder)}, timeout=300)
    assert [await checksums(server) for server in servers] == held


async def check_serves(servers, model, version):
    """Checks that each server reports the version and computes the same log-probs as the model."""
    ours = [reference(model, prompt) for prompt in PROMPTS]
    for server in servers:
        assert await server.weight_version() == version
        theirs = [await score(server, prompt) for prompt in PROMPTS]
        compare_logprobs(ours, theirs, 1e-4, f"{server.url}, version {version}")
