"""Workflows: plain `async def` functions that turn one sample into trajectories, and the check of what they return.

A workflow is called as `rollout(client, sample)`. `sample` holds the row's columns, "prompt_ids" and, with a chat
template, "messages"; it is the workflow's own copy. It returns a Trajectory, or a list of them.

Invariant: a trajectory that passes `TrajectoryCheck` has a finite log-prob for every trained token, arrays of numbers
that are all finite, valid Unicode, and metrics that are finite floats under text names. (The constructor guarantees
integers, and as many entries as tokens.) Nothing else reaches the buffer, the
ledger, metrics or a file. Rewards are checked where they are scored (`RewardRunner`). An invalid token or text is a
DataError of the sample. An invalid metric is dropped and reported once per name, because a measurement must not cost a
response.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from megasync.base.importing import name_of
from megasync.concurrency.foreign import shown
from megasync.errors import DataError
from megasync.observe import trace
from megasync.rollout.chat import ToolLike
from megasync.rollout.client import RolloutClient
from megasync.rollout.conversation import Conversation, Generation, Reply
from megasync.rollout.inflight import RequestGate
from megasync.rollout.partials import SampleResponses
from megasync.trajectory import ROUTES, SUPPORT_SIZES, TOKEN_REWARDS, Prompt, Trajectory, finite_float

log = logging.getLogger(__name__)

T = TypeVar("T")

# Metrics by which a workflow says that a sample ended early by the agent's own failure. It is trained as it was scored.
AGENT_FAILURES = ("turn_limit", "context_full", "template_refused", "deadline")


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
        client: RolloutClient,
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

    def again(self) -> SampleClient:
        """A client for the sample from its beginning. While it sends the same requests, it gets the same responses."""
        fresh = copy.copy(self)
        fresh._requests = 0
        fresh.conversation = Conversation()
        return fresh

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

    def count(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolLike] = ()) -> int:
        """The number of tokens of the prompt that `chat` would send. Raises DataError as `chat`."""
        return self._client.count(messages, tools, self.conversation)

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
    def context_length(self) -> int:
        """The tokens that a prompt and its response may have together."""
        return self._client.context_length

    @property
    def sets_reasoning_apart(self) -> bool:
        """Whether `chat` separates reasoning from answers."""
        return self._client.sets_reasoning_apart

    async def _send(self, method: Callable[..., Awaitable[T]], prompt: Sequence[Any], overrides: dict[str, Any]) -> T:
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
                answer = await method(prompt, **options | overrides)
                args |= _described(answer)
                return answer


def _described(answer: Any) -> dict[str, Any]:
    """Returns the attributes of a span for an answer: its tokens, and the version of the last one."""
    generation = answer.generation if isinstance(answer, Reply) else answer
    tokens = len(generation.tokens) - len(generation.prompt)
    return {"tokens": tokens, "version": generation.newest_version, "prompt_tokens": len(generation.prompt)}


def label_of(workflow: Callable[..., Any]) -> str:
    """The name under which failures of a workflow's samples are counted: of its environment, or its own."""
    return str(getattr(workflow, "label", "") or name_of(workflow).rpartition(".")[2]).replace("/", "-")


def request_seed(*parts: object) -> int:
    """A seed of 31 bits derived from all parts, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


class OpenedWorkflow(ABC):
    """A workflow of megasync's own that opens something first: a gateway's port, servers of tools or environments."""

    @abstractmethod
    async def open(self) -> None:
        """Opens it, before any other process starts. Raises ConfigError when something refuses."""

    @abstractmethod
    async def close(self) -> None:
        """Closes it."""


class SessionWorkflow(OpenedWorkflow):
    """A workflow whose samples are played by programs outside of the run, which open sessions with a key."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where programs outside open sessions."""

    @abstractmethod
    def admit(self, key: str) -> None:
        """Lets the holders of this key open sessions."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """The counts by metric name. Those of sessions that are alive end with /inflight."""


Workflow = Callable[[SampleClient, dict[str, Any]], Awaitable[Trajectory | list[Trajectory]]]


async def single_turn(client: SampleClient, sample: dict[str, Any]) -> Trajectory:
    """The default workflow: one response to the prompt, which the reward function scores."""
    reply = await client.generate(sample["prompt_ids"])
    return reply.trajectory()


async def call_workflow(
    workflow: Workflow, client: SampleClient, prompt: Prompt, check: TrajectoryCheck
) -> list[Trajectory]:
    """Calls a workflow with its own copy of a row, and checks what it returns: all that touches its objects."""
    sample = copy.deepcopy(dict(prompt.columns)) | {"prompt_ids": list(prompt.prompt_ids)}
    return check.check(await workflow(client, sample))


class TrajectoryCheck:
    """Checks what one workflow returns. `routed` trajectories need the routes of all positions, `truncated` ones the
    support of each trained token.
    """

    def __init__(self, workflow: Workflow, routed: bool = False, truncated: bool = False) -> None:
        self._name = name_of(workflow)
        self._routed = routed
        self._truncated = truncated
        self._reported: set[str] = set()

    def check(self, result: object) -> list[Trajectory]:
        """The trajectories of a result. Raises DataError, naming the workflow, for an invalid one."""
        trajectories = [result] if isinstance(result, Trajectory) else result
        if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
            raise DataError(
                f"the workflow {self._name} must return a Trajectory or a list of them, not {shown(result)}"
            )
        return [self._checked(trajectory) for trajectory in trajectories]

    def _checked(self, trajectory: Trajectory) -> Trajectory:
        changed: dict[str, Any] = {"metrics": self._metrics(trajectory.metrics)}
        for name in ("text", "finish_reason"):
            text = getattr(trajectory, name)
            if not isinstance(text, str):
                raise self._error(f"{name}={shown(text, 80)}, which must be text")
            if not _encodable(text):
                # Half of a surrogate pair, which neither the ledger nor a file can store.
                changed[name] = text.encode("utf-8", "replace").decode()
        self._check_numbers(trajectory)
        if self._routed and ROUTES not in trajectory.arrays and trajectory.oldest_version is not None:
            raise self._error(
                "no routes, which rollout.routing_replay=true needs; build it with generation.trajectory(), or "
                "reply.trajectories()"
            )
        if self._truncated and (missing := _without_support(trajectory)):
            raise self._error(
                f"{missing} trained tokens without a support, which rollout.sampling.top_k needs; build it with "
                f"generation.trajectory(), or reply.trajectories()"
            )
        return replace(trajectory, **changed)

    def _check_numbers(self, trajectory: Trajectory) -> None:
        """A non-finite number would spoil the whole batch that it is trained in, and again after each resume."""
        trained = trajectory.logprobs[trajectory.loss_mask.expand() != 0]
        if not np.isfinite(trained).all():
            at = int(np.flatnonzero(~np.isfinite(trained))[0])
            raise self._error(f"a non-finite log-prob, {trained[at]}, of trained token {at}")
        for name, array in trajectory.arrays.items():
            if array.dtype.kind not in "iubf":
                raise self._error(f"the array {name!r} of type {array.dtype}, which does not hold numbers")
            # A token without a reward has NaN.
            if not (np.isfinite(array) | (np.isnan(array) & (name == TOKEN_REWARDS))).all():
                raise self._error(f"the array {name!r}, which holds numbers that are not finite")

    def _metrics(self, metrics: object) -> dict[str, float]:
        if not isinstance(metrics, Mapping):
            self._report("metrics", f"is {shown(metrics, 80)}, not a dictionary")
            return {}
        kept: dict[str, float] = {}
        for name, value in metrics.items():
            if not isinstance(name, str) or not _encodable(name):
                self._report(shown(name, 80), "has a name that is not valid text")
            elif (number := finite_float(value)) is None:
                self._report(name, f"is {shown(value, 80)}, not a finite number")
            else:
                kept[name] = number
        return kept

    def _report(self, name: str, problem: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.warning("The metric %s of the workflow %s %s. Such values are dropped", name, self._name, problem)

    def _error(self, problem: str) -> DataError:
        return DataError(f"the workflow {self._name} returned a trajectory with {problem}")


def _without_support(trajectory: Trajectory) -> int:
    """The number of trained tokens of which nobody knows what else could have been sampled."""
    trained = trajectory.loss_mask.expand() > 0
    sizes = trajectory.arrays.get(SUPPORT_SIZES)
    return int(trained.sum()) if sizes is None else int((trained & (sizes < 1)).sum())


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
