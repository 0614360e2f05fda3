"""The agent workflow: return values, failures, the end of the session, and the thread that it runs on."""

import asyncio
import os
import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
import openai as package
import pytest
from fake_sglang import hang
from gateway_rig import HI, openai
from passing_time import pass_time
from waits import until

from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.errors import ConfigError, DataError
from megasync.gateway import AgentWorkflow


def ask(base_url, api_key, **request):
    """Sends one request with the sync client."""
    with package.OpenAI(base_url=base_url, api_key=api_key, timeout=20.0) as client:
        return client.chat.completions.create(**({"model": "m", "messages": HI} | request))


def returning(value):
    def agent(base_url, api_key, sample, model):
        ask(base_url, api_key)
        return value

    return agent


@pytest.mark.parametrize(
    ("value", "reward", "metrics"),
    [
        (None, None, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (0.25, 0.25, {}),
        ({"reward": 0.5, "found": 3}, 0.5, {"found": 3.0}),
        ({"found": 3}, None, {"found": 3.0}),
        ({"reward": None}, None, {}),
        ({"reward": np.float32(0.5), "found": np.int64(3)}, 0.5, {"found": 3}),
    ],
)
async def test_agent_return_values_become_the_reward_and_metrics(rig, value, reward, metrics):
    rig.write("x")
    (trajectory,) = await rig.play(returning(value))
    assert trajectory.reward == reward
    assert {name: trajectory.metrics[name] for name in metrics} == metrics
    assert (trajectory.metrics["turns"], trajectory.metrics["lines"]) == (1.0, 1.0)


@pytest.mark.parametrize("value", ["1", float("nan"), {"reward": "x"}, 10**400, [1.0, 2.0]])
async def test_invalid_agent_return_values_raise_a_data_error(rig, value):
    rig.write("x")
    with pytest.raises(DataError, match=r"returning.*agent must return a finite reward"):
        await rig.play(returning(value))


async def idle(base_url, api_key, sample, model):
    return 1.0


async def broken(base_url, api_key, sample, model):
    raise KeyError("rope")


async def cancelled(base_url, api_key, sample, model):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("agent", "error", "words"),
    [
        (idle, DataError, "idle returned before any of its requests was answered.*base_url"),
        (broken, KeyError, "rope"),
        (cancelled, DataError, "cancelled itself"),
    ],
)
async def test_an_agent_without_an_answer_fails_with_its_cause(rig, agent, error, words):
    with pytest.raises(error, match=words):
        await rig.play(agent)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
async def test_an_exit_exception_in_an_agent_fails_only_its_sample(rig, kind):
    def agent(base_url, api_key, sample, model):
        raise kind("over")

    async def async_agent(base_url, api_key, sample, model):
        raise kind("over")

    for function in (agent, async_agent):
        with pytest.raises(RuntimeError):
            await rig.play(function)


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_agent_that_exceeds_its_deadline_fails_with_a_timeout_error(rig, is_async):
    release = threading.Event()

    async def waits(base_url, api_key, sample, model):
        await asyncio.sleep(60)

    def blocks(base_url, api_key, sample, model):
        release.wait(60)

    with pytest.raises(DataError, match=r"did not return within 0.2 s; raise timeouts\.agent"):
        await rig.play(waits if is_async else blocks, deadline=0.2)
    release.set()


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_agent_that_blocks_gets_responses_its_sample_and_the_model_name(rig, is_async):
    rig.write("x")

    def agent(base_url, api_key, sample, model):
        assert (sample, model) == ({"answer": "x"}, "tiny")
        return float(ask(base_url, api_key).choices[0].message.content == sample["answer"])

    async def blocking(base_url, api_key, sample, model):
        return agent(base_url, api_key, sample, model)

    (trajectory,) = await rig.play(blocking if is_async else agent, answer="x")
    assert trajectory.reward == 1.0


async def test_concurrent_sessions_of_the_same_agent_are_isolated(rig):
    count = 8
    workflow = AgentWorkflow(echo, GatewayConfig(), rig.sampling, "tiny", 20.0)
    clients = [rig.sample_client() for _ in range(count)]

    async def answer(fake, body):
        # The user's message, so that answers can be distinguished.
        words = rig.tokenizer.decode(body["input_ids"]).split("user: ")[1].split("<eos>")[0]
        ids = [*rig.tokenizer.encode(words), rig.tokenizer.eos_token_id]
        fake.continuation = lambda body, count: ids
        return fake.answer(body, len(ids), "stop")

    rig.fake.script += [answer] * count
    results = await asyncio.gather(*(workflow(client, {"n": n}) for n, client in enumerate(clients)))
    await workflow.close()
    for number, (trajectory,) in enumerate(results):
        assert trajectory.reward == float(number)
        assert rig.tokenizer.decode(trajectory.response_ids) == f"{number}<eos>"


async def echo(base_url, api_key, sample, model):
    async with openai(base_url, api_key) as client:
        message = {"role": "user", "content": str(sample["n"])}
        return float((await client.chat.completions.create(model=model, messages=[message])).choices[0].message.content)


async def test_a_session_ends_with_its_agent_and_aborts_in_flight_requests(rig):
    rig.write("x")
    asked = asyncio.Event()
    rig.fake.script.append(hang(asked))
    left = []

    async def agent(base_url, api_key, sample, model):
        ask(base_url, api_key)
        late = asyncio.create_task(asyncio.to_thread(ask, base_url, api_key))
        left.append((base_url, api_key, late))
        await until(lambda: len(rig.fake.requests) >= 2)

    workflow = AgentWorkflow(agent, GatewayConfig(), rig.sampling, "tiny", 20.0)
    client = rig.sample_client()
    (trajectory,) = await workflow(client, {})
    assert rig.tokenizer.decode(trajectory.response_ids) == "x<eos>"
    assert rig.gate.inflight == 0
    base_url, api_key, late = left[0]
    with pytest.raises(package.NotFoundError, match="it has ended"):
        await asyncio.to_thread(ask, base_url, api_key)
    await until(late.done)
    assert late.exception() is not None
    await workflow.close()


async def test_a_client_disconnect_aborts_its_generation(rig):
    asked = asyncio.Event()
    rig.fake.script.append(hang(asked))

    async def agent(base_url, api_key, sample, model):
        async with openai(base_url, api_key) as client:
            request = asyncio.create_task(client.chat.completions.create(model=model, messages=HI))
            await until(lambda: rig.fake.requests)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await until(lambda: not rig.gate.inflight)
            rig.write("y")
            await client.chat.completions.create(model=model, messages=HI)

    (trajectory,) = await rig.play(agent)
    assert rig.tokenizer.decode(trajectory.response_ids) == "y<eos>"


async def test_a_closed_gate_holds_requests_until_it_opens(rig):
    rig.write("x")
    await rig.gate.close(1.0)
    playing = asyncio.create_task(rig.play(returning(1.0)))
    while not rig.gate._waiting:
        await asyncio.sleep(0)
    assert not rig.fake.requests
    rig.gate.open()
    assert len(await playing) == 1


@pytest.mark.parametrize("agent", [lambda base_url: None, lambda: None, lambda base_url, api_key, sample, model, x: 0])
def test_a_function_with_the_wrong_agent_signature_is_rejected_at_startup(agent):
    with pytest.raises(ConfigError, match=r"must be written as `def agent\(base_url, api_key, sample, model\)`"):
        AgentWorkflow(agent, GatewayConfig(), SamplingConfig(), "tiny", 1.0)


async def test_a_port_in_use_raises_an_error_that_states_the_fix(rig):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = GatewayConfig(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"rollout\.gateway\.host=127\.0\.0\.1, port=.*port=0"):
            await AgentWorkflow(echo, config, SamplingConfig(), "tiny", 1.0).open()


async def test_the_agent_workflow_binds_to_loopback_and_is_named_after_its_agent():
    workflow = AgentWorkflow(echo, GatewayConfig(), SamplingConfig(), "tiny", 1.0)
    await asyncio.gather(workflow.open(), workflow.open())
    assert workflow._gateway.url.startswith("http://127.0.0.1:")
    assert workflow.__name__ == "echo"
    await workflow.close()


def make_workflow(agent, threads, deadline=20.0):
    return AgentWorkflow(agent, GatewayConfig(threads=threads), SamplingConfig(), "m", deadline)


def answered_client():
    """The client of a sample that has had an answer."""
    return SimpleNamespace(conversation=SimpleNamespace(generations=[1], trajectories=lambda reward, metrics: reward))


async def test_sync_agent_concurrency_is_limited_by_the_thread_count():
    running, most, pair = [], [], threading.Barrier(2)

    def busy(base_url, api_key, sample, model):
        running.append(1)
        # Each waits for another one, so that two run at once.
        pair.wait(20)
        most.append(len(running))
        pair.wait(20)
        running.pop()

    workflow = make_workflow(busy, threads=2)
    await asyncio.gather(*(workflow(answered_client(), {}) for _ in range(6)))
    assert max(most) == 2
    await workflow.close()


async def test_waiting_for_a_thread_does_not_count_against_the_deadline_of_a_sync_agent():
    loop = asyncio.get_running_loop()

    async def pass_most_of_the_deadline():
        pass_time(50.0)

    def agent(base_url, api_key, sample, model):
        asyncio.run_coroutine_threadsafe(pass_most_of_the_deadline(), loop).result(20)
        return 1.0

    workflow = make_workflow(agent, threads=1, deadline=80.0)
    assert await asyncio.gather(*(workflow(answered_client(), {}) for _ in range(3))) == [1.0] * 3
    await workflow.close()


async def test_closing_the_workflow_cancels_its_running_agents():
    began, ended = threading.Event(), threading.Event()

    async def forever(base_url, api_key, sample, model):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    workflow = make_workflow(forever, threads=1)
    call = asyncio.create_task(workflow(answered_client(), {}))
    await asyncio.to_thread(began.wait)
    _, thread = workflow._loop
    await workflow.close()
    assert ended.is_set()
    assert not thread.is_alive()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.processes
async def test_an_agent_can_run_as_a_separate_process(rig):
    rig.write("x")
    program = (
        "import json, os, urllib.request as u\n"
        "r = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', "
        "headers={'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}, "
        "data=json.dumps({'messages': [{'role': 'user', 'content': 'hi'}]}).encode())\n"
        "assert json.load(u.urlopen(r, timeout=20))['choices'][0]['message']['content'] == 'x'\n"
    )

    async def agent(base_url, api_key, sample, model):
        keys = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=os.environ | keys)
        return float(await process.wait() == 0)

    (trajectory,) = await rig.play(agent)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_sample_of_a_late_agent_ends_with_its_responses_where_it_is_to_be_scored(rig, is_async):
    rig.write("first")
    asked = asyncio.Event()
    rig.fake.script.append(hang(asked))

    def agent(base_url, api_key, sample, model):
        ask(base_url, api_key)
        # The deadline finds this request at the server.
        ask(base_url, api_key)

    async def async_agent(base_url, api_key, sample, model):
        await asyncio.to_thread(agent, base_url, api_key, sample, model)

    function = async_agent if is_async else agent
    workflow = AgentWorkflow(function, GatewayConfig(), rig.sampling, "tiny", 1.0, score_late=True)
    (trajectory,) = await workflow(rig.sample_client(), {})
    assert (trajectory.reward, trajectory.metrics["deadline"]) == (None, 1.0)
    assert rig.tokenizer.decode(trajectory.response_ids) == "first<eos>"
    await workflow.close()


async def test_a_late_agent_without_a_response_fails_even_where_it_is_to_be_scored(rig):
    async def agent(base_url, api_key, sample, model):
        await asyncio.Event().wait()

    workflow = AgentWorkflow(agent, GatewayConfig(), rig.sampling, "tiny", 0.2, score_late=True)
    with pytest.raises(DataError, match="did not return within"):
        await workflow(rig.sample_client(), {})
    await workflow.close()
