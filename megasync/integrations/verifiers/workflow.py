"""Joins environments of verifiers, which play whole episodes themselves against the gateway.

    workflow ──run──▶ environment's server ──starts──▶ its agent ──chat──▶ its client
       ▲  ◀──rewards, metrics, token ids──┘                                   │ token ids
       └──────── trajectories ◀──────── gateway session ◀─────────────────────┘

The server is a process in verifiers' own environment (`side.py`), and is asked over ZMQ in msgpack, in
the protocol of verifiers.v1.serve. An episode's requests reach the gateway at one address with one key, and name their
session as the model: the server keeps a client for each address, so one for each episode would fill its memory.

Invariant: what is trained is what the session sampled, and every turn of a trained agent is among it, to the token
(`_trained` compares them).

    waits    for                    woken by
    -------  ---------------------  ---------------------------------------------------------------------------------
    episode  the server's answer    its answer; the server's death; no sign of life for `timeouts.environment`, after
                                    which the server is killed; `timeouts.agent`
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any
from uuid import uuid4

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import cancel_and_wait, within
from megasync.config.schema import DatasetConfig, EnvironmentConfig, GatewayConfig, SamplingConfig, TimeoutConfig
from megasync.errors import ConfigError, DataError, ServerError, ServiceFailed
from megasync.gateway.server import Gateway
from megasync.gateway.session import Session
from megasync.integrations.owned_server import EnvironmentService, OwnedServer
from megasync.integrations.verifiers.rows import taskset_settings, verifiers_command, verifiers_variables
from megasync.rollout.breaker import Breaker
from megasync.rollout.conversation import Conversation, Generation
from megasync.rollout.workflow import OpenedWorkflow, SampleClient
from megasync.trajectory import Trajectory, finite_float

# The variable in which the server finds the gateway's key. Programs that it starts do not inherit names with API_KEY.
_KEY_VARIABLE = "MEGASYNC_API_KEY"
# Seconds between two looks at the server, and to wait for its first answers while it starts.
_LOOK_SECONDS = 1.0
# Types of verifiers' errors that are not of the agent, the task or the environment's code.
_INFRASTRUCTURE = frozenset({"SandboxError", "ToolsetError", "InterceptionError", "TunnelError"})
_OPTIONS = ("name", "args", "client", "workers", "python")


@prepared
class _Node(msgspec.Struct):
    """A message of a trace, with the tokens that it adds to those of its parent."""

    parent: int | None = None
    sampled: bool = False
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]] = []


@prepared
class _Error(msgspec.Struct):
    type: str
    message: str


@prepared
class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


@prepared
class _Agent(msgspec.Struct):
    name: str = "agent"
    trainable: bool = True


@prepared
class _Values(msgspec.Struct):
    """The values of a trace that a delta replaces; UNSET are those that it leaves as they are."""

    agent: _Agent | msgspec.UnsetType = msgspec.UNSET
    rewards: dict[str, _Reward | None] | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, float | None] | msgspec.UnsetType = msgspec.UNSET
    ok: bool | msgspec.UnsetType = msgspec.UNSET
    stop_condition: str | msgspec.UnsetType | None = msgspec.UNSET


@prepared
class _Delta(msgspec.Struct):
    """A change of a trace: values that it replaces, and nodes that it adds."""

    trace: str
    discard: bool = False
    nodes: list[_Node] = []
    errors: list[_Error] = []
    set: _Values = msgspec.field(default_factory=_Values)


@prepared
class _Head(msgspec.Struct):
    ok: bool = False
    errors: list[_Error] = []


@prepared
class _Summary(msgspec.Struct):
    id: str
    nodes: int = 0


@prepared
class _Reply(msgspec.Struct):
    success: bool = True
    error: str | None = None
    head: _Head | None = None
    traces: list[_Summary] = []


_decode_delta = msgspec.msgpack.Decoder(_Delta).decode
_decode_reply = msgspec.msgpack.Decoder(_Reply).decode


class Trace:
    """The episode of one agent, as far as its deltas have arrived."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.errors: list[_Error] = []
        self.agent = _Agent()
        self.rewards: dict[str, _Reward | None] = {}
        self.metrics: dict[str, float | None] = {}
        self.ok = False
        self.stop_condition: str | None = None

    def add(self, delta: _Delta) -> None:
        """Adds what is new."""
        self.nodes += delta.nodes
        self.errors += delta.errors
        for name, value in msgspec.structs.asdict(delta.set).items():
            if value is not msgspec.UNSET:
                setattr(self, name, value)

    def turns(self) -> Iterable[bytes]:
        """For each sampled message whose tokens are known: all tokens up to its end, as bytes of int64."""
        paths: list[bytes] = []
        for node in self.nodes:
            if node.parent is not None and not 0 <= node.parent < len(paths):
                raise DataError(f"the environment's server sent a message that continues message {node.parent}")
            before = b"" if node.parent is None else paths[node.parent]
            paths.append(before + np.asarray(node.token_ids, np.int64).tobytes())
            if node.sampled and node.token_ids:
                yield paths[-1]

    def reward(self) -> float | None:
        """The sum of the weighted rewards; None if nothing was scored. Raises DataError for one that is not finite."""
        scored = {name: reward for name, reward in self.rewards.items() if reward is not None}
        for name, reward in scored.items():
            if finite_float(reward.score) is None or finite_float(reward.weight) is None:
                raise DataError(
                    f"the environment's reward {name!r} is {reward.score} times {reward.weight}, which is not finite"
                )
        return sum(reward.score * reward.weight for reward in scored.values()) if scored else None


class _Run:
    """An episode that the server plays."""

    def __init__(self) -> None:
        self.traces: dict[str, Trace] = {}
        self.ended: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()

    def take(self, kind: bytes, data: bytes) -> None:
        """Takes a message of the server. One of another form ends the episode."""
        try:
            if kind != b"delta":
                self._end(_decode_reply(data))
                return
            delta = _decode_delta(data)
            if delta.discard:
                self.traces.pop(delta.trace, None)
            else:
                self.traces.setdefault(delta.trace, Trace()).add(delta)
        except msgspec.DecodeError as error:
            self.fail(DataError(f"the environment's server answered in another form: {error}"))

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            # Nobody may be waiting any more.
            self.ended.exception()

    def _end(self, reply: _Reply) -> None:
        if not self.ended.done():
            self.ended.set_result(reply)


class _Channel:
    """A connection to the server, from its start to its death. Its loop hands messages to their episodes."""

    def __init__(self, server: OwnedServer, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._context = zmq.asyncio.Context()
        self._socket = _dealer(self._context, server.url)
        self._runs: dict[bytes, _Run] = {}
        # Looks at the server since its last message. Time alone would not do: this loop may have been blocked.
        self._silent = 0
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self.open = True

    async def play(self, request: bytes) -> list[Trace]:
        """The traces of an episode that the server plays. Raises ServerError, and DataError."""
        identity, run = uuid4().hex.encode(), _Run()
        self._runs[identity] = run
        await self._socket.send_multipart([identity, b"run", request])
        try:
            reply = await asyncio.shield(run.ended)
        except asyncio.CancelledError:
            await self._cancel(identity)
            raise
        finally:
            del self._runs[identity]
        if not reply.success or reply.head is None:
            raise DataError(f"the environment's server refused an episode: {reply.error}")
        if any(each.id not in run.traces or len(run.traces[each.id].nodes) != each.nodes for each in reply.traces):
            raise ServerError("messages of an episode were lost between the environment's server and its client")
        traces = [run.traces[each.id] for each in reply.traces]
        _check(reply.head, traces)
        return traces

    async def close(self) -> None:
        self.open = False
        await cancel_and_wait(*self._tasks)
        self._fail("was shut down")
        self._socket.close()
        self._context.term()

    async def _cancel(self, identity: bytes) -> None:
        """Has the server stop an episode that nobody waits for."""
        order = msgspec.msgpack.encode({"request_id": identity.decode()})
        with suppress(zmq.ZMQError):
            await self._socket.send_multipart([uuid4().hex.encode(), b"cancel", order])

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._silent = 0
            run = self._runs.get(frames[0])
            if run is not None and len(frames) == 3:
                run.take(frames[1], frames[2])

    async def _watch(self) -> None:
        """Ends the channel when the server dies, or answers nothing for too long."""
        patience = max(2, math.ceil(self._patience / _LOOK_SECONDS))
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._silent += 1
            if not self._server.alive():
                return self._fail("died; its log says why")
            if self._silent > patience:
                self._server.kill()
                return self._fail(f"did not answer for {self._patience:g} s (timeouts.environment) and was killed")
            if self._silent == patience // 2:
                await self._socket.send_multipart([b"health", b"health", msgspec.msgpack.encode({})])

    def _fail(self, problem: str) -> None:
        self.open = False
        for run in self._runs.values():
            run.fail(ServerError(f"the environment's server {problem}"))


class VerifiersWorkflow(OpenedWorkflow):
    """`rollout(client, sample)` for an environment of verifiers. A row's column `task` is the task's data.

    Raises ConfigError for options that cannot be meant.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        gateway: GatewayConfig,
        sampling: SamplingConfig,
        model: str,
        timeouts: TimeoutConfig,
        rows: DatasetConfig | None = None,
    ) -> None:
        """`rows` are the training data: the settings of its taskset, which `args` may change."""
        options = environment.options
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise ConfigError(f"the environment verifiers has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}")
        name, args, own = options.get("name"), options.get("args") or {}, options.get("client") or {}
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the environment verifiers needs the name of a taskset, not name={name!r}")
        for option, value in (("args", args), ("client", own)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{option}={value!r} of the environment verifiers must be a mapping")
        for key, default in (("system", ""), ("isolation", "thread")):
            if (given := getattr(environment, key)) != default:
                raise ConfigError(
                    f"rollout.environment.{key}={given!r} has no effect with kind=verifiers, whose tasks have their "
                    f"own messages and whose server is a process; remove it"
                )
        self._gateway = Gateway(gateway, sampling, model)
        taskset = taskset_settings(rows) if rows is not None and rows.source == name else {}
        order = {
            "name": name,
            "args": {**args, "taskset": taskset | dict(args.get("taskset") or {})},
            "workers": options.get("workers", 1),
            "max_turns": environment.max_turns,
        }
        command = [*verifiers_command("serve", str(options.get("python", ""))), "tcp://{host}:{port}"]
        env = verifiers_variables(command) | {_KEY_VARIABLE: self._gateway.key}
        service = EnvironmentService(name, command, env, _answers, "tcp", json.dumps(order).encode())
        self._server = OwnedServer(service, timeouts.server_start)
        self._client = {"type": "train", "renderer_model_name": model} | dict(own) | {"api_key_var": _KEY_VARIABLE}
        if self._client["type"] != "train":
            del self._client["renderer_model_name"]
        self._name = name
        self.label = environment.kind
        self._breaker = Breaker(environment.kind)
        self._timeouts = timeouts
        self._free = asyncio.Semaphore(environment.pool)
        self._channel: _Channel | None = None

    async def open(self) -> None:
        """Starts the gateway and the server. Raises ConfigError when one of them cannot start."""
        await self._gateway.start()
        await self._server.ready()

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        """Has the server play an episode, and returns the trajectories of its trained agents.

        The reward is the mean of these agents' rewards. Raises ServerError for a failure of a server of the run, of the
        environment's server or of its sandboxes, and DataError for any other failure.
        """
        task = sample.get("task")
        if not isinstance(task, Mapping):
            raise DataError("a row has no column `task`; verifiers plays rows of data.train.kind=verifiers")
        async with self._breaker.episode(), self._free, self._gateway.session(client, by_model=True) as session:
            try:
                traces = await within(self._play(session, task), self._timeouts.agent)
            except TimeoutError:
                raise DataError(
                    f"an episode of {self._name} took more than {self._timeouts.agent:g} s; raise timeouts.agent, or "
                    f"set a limit of the agent in args"
                ) from None
            except DataError:
                if session.failure is None:
                    raise
                traces = []
            except ServerError as error:
                if session.failure is None:
                    raise ServiceFailed(str(error), self._breaker.name) from error
                traces = []
            if session.failure is not None:
                raise ServerError(f"a request of {self._name} failed: {session.failure}") from session.failure
        return trajectories_of(client.conversation, traces)

    async def close(self) -> None:
        """Ends the episodes, the server and the gateway."""
        if self._channel is not None:
            await self._channel.close()
        await self._server.close()
        await self._gateway.close()

    async def _play(self, session: Session, task: Mapping[str, Any]) -> list[Trace]:
        await self._server.ready()
        if self._channel is None or not self._channel.open:
            ended, self._channel = self._channel, _Channel(self._server, self._timeouts.environment)
            if ended is not None:
                await ended.close()
        request = {
            "task_data": task,
            "client": self._client | {"base_url": self._gateway.url_by_model},
            "model": session.id,
            "sampling": {},
        }
        return await self._channel.play(msgspec.msgpack.encode(request))


def trajectories_of(conversation: Conversation, traces: Collection[Trace]) -> list[Trajectory]:
    """The trajectories of an episode's trained agents, with the mean of their rewards.

    The parts of a reward are the metrics `reward/<name>`, the environment's metrics are `environment/<name>`.
    """
    trained = [trace for trace in traces if trace.agent.trainable]
    rewards = [reward for trace in trained if (reward := trace.reward()) is not None]
    if not rewards:
        raise DataError("the environment scored none of its trained agents")
    named: dict[str, list[float]] = {}
    for trace in trained:
        for name, reward in trace.rewards.items():
            if reward is not None:
                named.setdefault(f"reward/{name}", []).append(reward.score)
        for name, value in trace.metrics.items():
            if value is not None:
                named.setdefault(f"environment/{name}", []).append(value)
    metrics = {name: statistics.fmean(values) for name, values in named.items()}
    kept = copy.copy(conversation)
    kept.generations = _trained(conversation.generations, traces)
    return kept.trajectories(statistics.fmean(rewards), metrics)


def _trained(generations: list[Generation], traces: Collection[Trace]) -> list[Generation]:
    """The generations of the trained agents. Raises DataError if a trained turn is not what was sampled.

    A relayed request (`client: {type: eval}`) leaves no tokens in its trace, so then all agents must be trained.
    """
    sampled = {np.asarray(each.tokens.array, np.int64).tobytes(): each for each in generations}
    others = [trace for trace in traces if not trace.agent.trainable]
    known = {id(trace): list(trace.turns()) for trace in traces}
    for trace in traces:
        if trace.agent.trainable and (lost := sum(turn not in sampled for turn in known[id(trace)])):
            raise DataError(f"{lost} turns of the agent {trace.agent.name} have other tokens than were sampled for it")
    if not others:
        return generations
    if any(trace.nodes and not known[id(trace)] for trace in traces):
        raise DataError(
            "the tokens of untrained agents are unknown, so they cannot be left out; use client: {type: train}, or "
            "give these agents a model and a client of their own in args"
        )
    mine = {turn for trace in traces if trace.agent.trainable for turn in known[id(trace)]}
    return [generation for tokens, generation in sampled.items() if tokens in mine]


def _check(head: _Head, traces: Collection[Trace]) -> None:
    """Raises the error of an episode that was not scored."""
    if head.ok or (traces and all(trace.reward() is not None for trace in traces if trace.agent.trainable)):
        return
    failed = [trace for trace in traces if not trace.ok]
    errors = [*head.errors, *(error for trace in failed for error in trace.errors)]
    if errors:
        said = f"{errors[-1].type}: {errors[-1].message:.2000}"
    else:
        said = ", ".join(f"{trace.agent.name} stopped by {trace.stop_condition}" for trace in failed) or "no agent ran"
    kind = ServerError if any(error.type in _INFRASTRUCTURE for error in errors) else DataError
    raise kind(f"an episode failed in the environment: {said}")


async def _answers(url: str) -> bool:
    """Whether an environment's server answers at this address."""
    with zmq.asyncio.Context() as context, _dealer(context, url) as socket:
        await socket.send_multipart([b"health", b"health", msgspec.msgpack.encode({})])
        return bool(await socket.poll(int(_LOOK_SECONDS * 1000)))


def _dealer(context: zmq.asyncio.Context, url: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    # No limit to what is on the way: a run's episodes are bounded.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(url)
    return socket
