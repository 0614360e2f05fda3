"""Episodes that an environment's server plays through the gateway: what is trained, and what comes of each failure.

The server is a fake that speaks the protocol of verifiers.v1.serve on loopback.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from waits import until

from megasync.config.schema import EnvironmentConfig, GatewayConfig, SamplingConfig, TimeoutConfig
from megasync.errors import ConfigError, DataError, ServerError
from megasync.integrations.verifiers import workflow as verifiers
from megasync.integrations.verifiers.workflow import Trace, VerifiersWorkflow, trajectories_of
from megasync.rollout.conversation import Conversation, Generation

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class FakeServer:
    """Plays `episode(fake, order, delta)`, which returns the head of the reply, or None for no reply."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.starts = self.asked = 0
        self.url = ""
        self.key = ""
        self.cancelled: list[str] = []
        self.healthy = True
        self.episode = plays("cba")
        self._loop: asyncio.Task | None = None
        self._tasks: set[asyncio.Task] = set()

    # What `OwnedServer` has.

    async def ready(self) -> None:
        if not self.alive():
            self.starts += 1
            self.healthy = True
            self.socket = self.context.socket(zmq.ROUTER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.bind("tcp://127.0.0.1:*")
            self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._loop = asyncio.create_task(self._serve())

    def alive(self) -> bool:
        return self._loop is not None and not self._loop.done()

    def kill(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        self.socket.close()

    async def close(self) -> None:
        for task in [*self._tasks, *([self._loop] if self._loop else [])]:
            task.cancel()
        if self.url:
            self.socket.close()
        self.context.term()

    async def _serve(self) -> None:
        while True:
            peer, identity, method, payload = await self.socket.recv_multipart()
            task = asyncio.create_task(self._answer(peer, identity, method, unpack(payload)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: bytes, identity: bytes, method: bytes, order: dict) -> None:
        async def send(kind: bytes, value: object) -> None:
            data = value if isinstance(value, bytes) else pack(value)
            await self.socket.send_multipart([peer, identity, kind, data])

        if method == b"health" and self.healthy:
            self.asked += 1
            await send(b"reply", {"success": True, "error": None})
        elif method == b"cancel":
            self.cancelled.append(order["request_id"])
        elif method == b"run":
            reply = await self.episode(self, order, lambda value: send(b"delta", value))
            if reply is not None:
                await send(b"reply", reply)

    async def ask(self, order: dict, ids: list[int]) -> list[int]:
        """What the server's client asks of the gateway: the sampled ids."""
        base = order["client"]["base_url"].removesuffix("/v1")
        body = {"model": order["model"], "token_ids": ids, "sampling_params": {"logprobs": 1}}
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{base}/inference/v1/generate", json=body, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise LookupError(answer.status)
            return (await answer.json())["choices"][0]["token_ids"]


def plays(text, trace="t", changed=None, **values):
    """An episode of one turn, with what its trace says; `changed` makes other sampled ids of it."""

    async def episode(fake, order, delta):
        prompt = list(order["task_data"]["ids"])
        answer = await fake.ask(order, prompt)
        nodes = [
            {"parent": None, "sampled": False, "token_ids": prompt},
            {"parent": 0, "sampled": True, "token_ids": changed(answer) if changed else answer},
        ]
        await delta({"trace": trace, "open": {"id": trace}, "nodes": nodes[:1], "set": {"ok": False}})
        await delta({"trace": trace, "nodes": nodes[1:], "pending": []})
        said = {"ok": True, "rewards": {"same": {"score": 1, "weight": 2.0}}, "metrics": {"length": 3.0}} | values
        await delta({"trace": trace, "set": said})
        return {"success": True, "error": None, "head": {"ok": said["ok"], "errors": []}, "traces": [summary(trace, 2)]}

    return episode


def summary(trace: str, nodes: int) -> dict:
    return {"id": trace, "nodes": nodes, "calls": 1}


@pytest.fixture
async def stage(rig, monkeypatch):
    """The rig's model, a fake server, and a workflow between them."""
    fake = FakeServer()
    monkeypatch.setattr(verifiers, "OwnedServer", lambda service, seconds: fake)
    monkeypatch.setattr(verifiers, "verifiers_command", lambda order, python: ["python"])
    monkeypatch.setattr(verifiers, "_LOOK_SECONDS", 0.02)

    def make(environment=20.0, agent=20.0, **options):
        timeouts = TimeoutConfig(environment=environment, agent=agent)
        config = EnvironmentConfig(kind="verifiers", options={"name": "words"} | options)
        made = VerifiersWorkflow(config, GatewayConfig(), SamplingConfig(max_new_tokens=50), "tiny", timeouts)
        fake.key = made._gateway.key
        workflows.append(made)
        return made

    workflows: list[VerifiersWorkflow] = []
    made = make()
    yield SimpleNamespace(rig=rig, server=fake, workflow=made, make=make, row={"task": {"ids": [5, 6, 7]}})
    for workflow in workflows:
        await workflow.close()


async def test_an_episode_is_trained_as_it_was_sampled_with_its_rewards_parts_as_metrics(stage):
    stage.rig.write("cba")
    client = stage.rig.sample_client()
    (trajectory,) = await stage.workflow(client, stage.row)
    (generation,) = client.conversation.generations
    assert trajectory.response_ids.tolist() == generation.token_ids
    assert (list(trajectory.prompt_ids), trajectory.reward) == ([5, 6, 7], 2.0)
    assert trajectory.metrics["reward/same"] == 1.0 and trajectory.metrics["environment/length"] == 3.0


async def test_concurrent_episodes_are_sessions_of_their_own(stage):
    stage.rig.write(*["cba"] * 12)
    clients = [stage.rig.sample_client() for _ in range(12)]
    rows = [{"task": {"ids": [5, 6, number]}} for number in range(10, 22)]
    played = await asyncio.gather(*(stage.workflow(client, row) for client, row in zip(clients, rows, strict=True)))
    assert [list(trajectory.prompt_ids) for (trajectory,) in played] == [row["task"]["ids"] for row in rows]
    assert stage.server.starts == 1


FAILED = {"ok": False, "rewards": {"same": None}}


def error(kind):
    return FAILED | {"errors": [{"type": kind, "message": "it broke", "traceback": None}]}


async def fails(fake, order, delta, head=None, errors=()):
    await fake.ask(order, [5])
    await delta({"trace": "t", "errors": list(errors), "set": FAILED})
    return {"success": True, "head": head or {"ok": False, "errors": []}, "traces": [summary("t", 0)]}


def failing(*kinds):
    errors = [{"type": kind, "message": "it broke"} for kind in kinds]
    return lambda *given: fails(*given, errors=errors)


async def refuses(fake, order, delta):
    return {"success": False, "error": "ValidationError: no such task"}


async def other_form(fake, order, delta):
    await delta({"trace": "t", "nodes": "none"})


async def no_msgpack(fake, order, delta):
    await delta(b"\xc1")


async def loses(fake, order, delta):
    return {"success": True, "head": {"ok": True}, "traces": [summary("t", 4)]}


async def loops(fake, order, delta):
    await delta({"trace": "t", "nodes": [{"parent": 0, "sampled": True, "token_ids": [1]}]})
    await delta({"trace": "t", "set": {"ok": True, "rewards": {"same": {"score": 1.0}}}})
    return {"success": True, "head": {"ok": True}, "traces": [summary("t", 1)]}


async def nobody(fake, order, delta):
    return {"success": True, "head": {"ok": False, "errors": [{"type": "EnvError", "message": "ran no agent"}]}}


@pytest.mark.parametrize(
    ("episode", "kind", "words"),
    [
        (failing("SandboxError"), ServerError, "SandboxError: it broke"),
        (failing("TaskError"), DataError, "TaskError: it broke"),
        (failing(), DataError, "agent stopped by None"),
        (refuses, DataError, "no such task"),
        (other_form, DataError, "another form.*nodes"),
        (no_msgpack, DataError, "another form"),
        (loses, ServerError, "were lost"),
        (loops, DataError, "continues message 0"),
        (nobody, DataError, "ran no agent"),
        (plays("cba", rewards={"same": {"score": float("nan"), "weight": 1.0}}), DataError, "nan times 1"),
        (plays("cba", rewards={"same": {"score": 1.0, "weight": float("inf")}}), DataError, "which is not finite"),
        (plays("cba", rewards={}), DataError, "scored none"),
        (plays("cba", changed=lambda ids: [*ids[:-1], 9]), DataError, "other tokens than were sampled"),
    ],
)
async def test_a_failed_episode_says_why_and_whose_fault_it_is(stage, episode, kind, words):
    stage.rig.write("cba")
    stage.server.episode = episode
    with pytest.raises(kind, match=words):
        await stage.workflow(stage.rig.sample_client(), stage.row)


async def test_a_failure_of_the_models_server_repeats_the_sample_whatever_the_environment_makes_of_it(stage):
    async def episode(fake, order, delta):
        with pytest.raises(LookupError):
            await fake.ask(order, [5])
        return {"success": False, "error": "ProviderError"}

    async def down(*_, **__):
        raise ServerError("no server")

    client = stage.rig.sample_client()
    client.generate = down
    stage.server.episode = episode
    with pytest.raises(ServerError, match="no server"):
        await stage.workflow(client, stage.row)


async def test_the_death_of_the_server_fails_its_episodes_and_the_next_one_has_a_new_server(stage):
    async def dies(fake, order, delta):
        fake.kill()

    stage.server.episode = dies
    with pytest.raises(ServerError, match="server died"):
        await stage.workflow(stage.rig.sample_client(), stage.row)
    stage.server.episode = plays("cba")
    stage.rig.write("cba")
    (trajectory,) = await stage.workflow(stage.rig.sample_client(), stage.row)
    assert (trajectory.reward, stage.server.starts) == (2.0, 2)


async def test_a_server_that_gives_no_sign_of_life_is_killed_and_a_slow_episode_is_not(stage):
    slow = asyncio.Event()

    async def episode(fake, order, delta):
        await slow.wait()
        return await plays("cba")(fake, order, delta)

    stage.server.episode = episode
    stage.rig.write("cba")
    workflow = stage.make(environment=0.1)
    playing = asyncio.create_task(workflow(stage.rig.sample_client(), stage.row))
    # Several times as long as its patience.
    await until(lambda: stage.server.asked >= 5)
    assert not playing.done()
    stage.server.healthy = False
    with pytest.raises(ServerError, match=r"did not answer for 0\.1 s \(timeouts.environment\)"):
        await playing
    assert not stage.server.alive()


async def test_an_episode_that_takes_too_long_is_stopped_at_the_server(stage):
    begun = asyncio.Event()

    async def endless(fake, order, delta):
        begun.set()
        await asyncio.Event().wait()

    stage.server.episode = endless
    with pytest.raises(DataError, match=r"more than 0\.2 s; raise timeouts.agent"):
        await stage.make(agent=0.2)(stage.rig.sample_client(), stage.row)
    await until(lambda: stage.server.cancelled)


async def test_the_gateways_key_opens_no_session_of_another_key(stage):
    stage.rig.write("cba")
    async with stage.workflow._gateway.session(stage.rig.sample_client()) as session:
        order = {"client": {"base_url": stage.workflow._gateway.url_by_model}, "model": session.id}
        with pytest.raises(LookupError, match="401"):
            await stage.server.ask(order, [5])
    async with stage.workflow._gateway.session(stage.rig.sample_client(), by_model=True) as session:
        order["model"] = session.id
        key, stage.server.key = stage.server.key, "sk-other"
        with pytest.raises(LookupError, match="404"):
            await stage.server.ask(order, [5])
        stage.server.key = key
        assert await stage.server.ask(order, [5])
    with pytest.raises(LookupError, match="404"):
        await stage.server.ask(order, [5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": {}}, "needs the name of a taskset"),
        ({"options": {"name": "x", "taskset": {}}}, "no option 'taskset'; it has name, args"),
        ({"options": {"name": "x", "args": "y"}}, "args='y'.*must be a mapping"),
        ({"options": {"name": "x"}, "system": "Hi"}, "rollout.environment.system='Hi' has no effect"),
        ({"options": {"name": "x"}, "isolation": "process"}, "rollout.environment.isolation='process' has no effect"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        VerifiersWorkflow(
            EnvironmentConfig(kind="verifiers", **changes), GatewayConfig(), SamplingConfig(), "m", TimeoutConfig()
        )


async def test_a_row_of_another_data_set_is_refused(stage):
    with pytest.raises(DataError, match=r"no column `task`.*data.train.kind=verifiers"):
        await stage.workflow(stage.rig.sample_client(), {"prompt": "hi"})


def made_trace(name, trainable, reward, turns):
    """A trace of turns, given as (prompt ids, sampled ids), of which each may continue the one before."""
    trace, nodes, before = Trace(), [], ()
    for prompt, sampled in turns:
        continues = prompt[: len(before)] == before and bool(before)
        parent = len(nodes) - 1 if continues else None
        nodes.append({"parent": parent, "token_ids": list(prompt[len(before) if continues else 0 :])})
        nodes.append({"parent": len(nodes) - 1, "sampled": True, "token_ids": list(sampled)})
        before = prompt + sampled
    values = {"agent": {"name": name, "trainable": trainable}, "ok": True, "rewards": {"r": {"score": reward}}}
    trace.add(msgspec.convert({"trace": name, "nodes": nodes, "set": values}, verifiers._Delta))
    return trace


def test_of_random_conversations_of_several_agents_each_sampled_token_of_the_trained_ones_is_trained_once():
    for seed in range(200):
        rng = random.Random(seed)
        conversation, turns = Conversation(), {"a": [], "b": [], "user": []}
        for _ in range(rng.randint(3, 12)):
            name = rng.choice(list(turns))
            own = turns[name]
            begin = own[-1][0] + own[-1][1] if own and rng.random() < 0.7 else (ord(name[0]), len(own))
            prompt = begin + tuple(rng.randrange(9) for _ in range(rng.randint(0, 3)))
            sampled = tuple(rng.randrange(9) for _ in range(rng.randint(1, 4)))
            generation = Generation.of(prompt, sampled, [-1.0] * len(sampled), [1] * len(sampled), "stop")
            conversation.record(generation)
            own.append((prompt, sampled))
        if not turns["a"] + turns["b"]:
            continue
        traces = [made_trace(name, name != "user", float(name == "a"), own) for name, own in turns.items() if own]
        played = trajectories_of(conversation, traces)
        trained = sorted(
            token
            for trajectory in played
            for token, mask in zip(trajectory.response_ids.tolist(), trajectory.loss_mask, strict=True)
            if mask
        )
        assert trained == sorted(token for name in "ab" for _, sampled in turns[name] for token in sampled), seed
        agents = [trace for trace in traces if trace.agent.trainable]
        assert {trajectory.reward for trajectory in played} == {sum(each.reward() for each in agents) / len(agents)}


def test_untrained_agents_whose_tokens_are_unknown_are_refused():
    conversation = Conversation()
    conversation.record(Generation.of((1,), (2,), [-1.0], [1], "stop"))
    user = made_trace("user", False, 0.0, [((1,), ())])
    with pytest.raises(DataError, match="cannot be left out"):
        trajectories_of(conversation, [made_trace("a", True, 1.0, [((1,), (2,))]), user])
