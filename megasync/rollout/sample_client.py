"""The client of one sample's workflow: every request carries the sample's routing key, seed and conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from megasync.observe import trace
from megasync.rollout.conversation import Conversation
from megasync.rollout.generation import Generation, Reply
from megasync.rollout.inflight import RequestGate
from megasync.rollout.partials import SampleResponses

T = TypeVar("T")


class Client(Protocol):
    """What samples and the rollouter need of a `RolloutClient`."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def sets_reasoning_apart(self) -> bool: ...
    def metrics(self) -> dict[str, float]: ...
    async def generate(self, prompt_ids: Sequence[int], **options: Any) -> Generation: ...
    async def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Reply: ...
    async def ask(self, model: str, messages: Sequence[dict[str, Any]], **sampling: Any) -> str: ...


class SampleClient:
    """The requests of one sample. Options that the workflow passes override the defaults.

    All requests of a prompt carry the same routing key, so that the router can send them to the server that has the
    prompt cached. With `seed`, request number t of the sample is sent with a seed derived from (seed, t), which makes a
    run repeatable. With `responses`, a request continues the partial response that is there, and grows it. Requests of
    a sample that will be trained, in a `batch`, may only be sampled as the trainer scores them, and those of earlier
    batches go first. `conversation` has all generations.
    """

    def __init__(
        self,
        client: Client,
        gate: RequestGate,
        *,
        routing_key: str,
        seed: int | None = None,
        responses: SampleResponses | None = None,
        batch: int | None = None,
        **sampling: Any,
    ) -> None:
        self._client = client
        self._gate = gate
        self._routing_key = routing_key
        self._seed = seed
        self._responses = responses
        self._batch = batch
        self._sampling = sampling
        self._requests = 0
        self.conversation = Conversation()

    async def generate(self, prompt_ids: Sequence[int], **options: Any) -> Generation:
        """Generates from token ids; see `RolloutClient.generate`.

        A prompt that begins with all tokens of an earlier turn continues that turn's trajectory. Given as
        `generation.tokens + [...]`, it costs only what is new.
        """
        prompt = self.conversation.tokens(prompt_ids)
        return self.conversation.record(await self._send(self._client.generate, prompt, options))

    async def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Reply:
        """Answers chat messages; see `RolloutClient.chat`.

        Messages that continue those of an earlier reply continue its trajectory.
        """
        return await self._send(self._client.chat, messages, {"conversation": self.conversation} | options)

    async def ask(self, model: str, messages: Sequence[dict[str, Any]], **sampling: Any) -> str:
        """The answer of one of `auxiliary_models`, which is not part of the sample's trajectory.

        See `AuxiliaryModel.chat`.
        """
        return await self._client.ask(model, messages, **sampling)

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._client.tokenizer

    @property
    def sets_reasoning_apart(self) -> bool:
        """Whether `chat` separates reasoning from answers."""
        return self._client.sets_reasoning_apart

    async def _send(self, method: Callable[..., Awaitable[T]], prompt: Sequence[Any], given: dict[str, Any]) -> T:
        turn = self._requests
        self._requests += 1
        options: dict[str, Any] = {"routing_key": self._routing_key, **self._sampling}
        if self._seed is not None:
            options["seed"] = request_seed(self._seed, turn)
        if self._responses is not None:
            options["keep"] = partial(self._responses.begin, turn)
        priority = 0
        if self._batch is not None:
            # The prompt of a further turn is in a server's cache. Requests without a batch go before all others.
            priority = 1 + 2 * self._batch + (turn == 0)
            options |= {"trained": True, "priority": priority}
        async with self._gate.request(priority):
            with trace.span("generate", "generate", turn=turn) as args:
                answer = await method(prompt, **options | given)
                args |= _described(answer)
                return answer


def _described(answer: Any) -> dict[str, Any]:
    """What a span says about an answer: its tokens, and the version of the last one."""
    generation = answer.generation if isinstance(answer, Reply) else answer
    tokens = len(generation.tokens) - len(generation.prompt)
    return {"tokens": tokens, "version": generation.newest_version, "prompt_tokens": len(generation.prompt)}


def request_seed(*parts: object) -> int:
    """A seed of 31 bits derived from all parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
