"""verifiers' own environment server plays episodes through the gateway: what is trained is what was sampled.

The model's server is a fake whose answers each test defines, so that a conversation goes as the environment needs it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from tiny_models import byte_tokenizer
from waits import until

from megasync.config.schema import (
    ChatConfig,
    DatasetConfig,
    EnvironmentConfig,
    GatewayConfig,
    SamplingConfig,
    TimeoutConfig,
)
from megasync.data.datasets import load_dataset
from megasync.errors import ConfigError, DataError, ServerError
from megasync.integrations.verifiers.workflow import VerifiersWorkflow

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
TASKS = Path(__file__).parents[1] / "support" / "verifiers_tasks"
CALL = '<tool_call>{"name": "look", "arguments": {"item": "nut"}}</tool_call>'

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (Path(sys.prefix) / "verifiers" / "bin" / "python").exists(),
        reason="needs verifiers: megasync install verifiers",
    ),
]


@pytest.fixture(autouse=True)
def tasks(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def rows_of(taskset, size=None, **options):
    return load_dataset(DatasetConfig(kind="verifiers", source=taskset, size=size, options=options))[0]


@pytest.fixture
async def make_workflow(tmp_path):
    made = []
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "tokenizer")

    async def make(name, **options):
        config = EnvironmentConfig(kind="verifiers", options={"name": name} | options)
        timeouts = TimeoutConfig(server_start=300.0, environment=120.0, agent=300.0)
        sampling = SamplingConfig(max_new_tokens=200)
        made.append(VerifiersWorkflow(config, GatewayConfig(), sampling, str(tmp_path / "tokenizer"), timeouts))
        await made[-1].open()
        return made[-1]

    yield make
    for workflow in made:
        await workflow.close()


@pytest.fixture
async def play(make_rig, make_workflow):
    """Plays the first task of a taskset with these answers; returns the client and the trajectories."""
    async with make_rig(chat=ChatConfig(tool_format="hermes")) as rig:

        async def run(name, *answers, taskset=None, **options):
            workflow = await make_workflow(name, **options)
            client = rig.sample_client()
            rig.write(*answers)
            return client, await workflow(client, dict(rows_of(name, 1, **(taskset or {}))[0]))

        yield run


def spoken(client, trajectory):
    """What the model wrote of a trajectory, and what it read in between."""
    tokens, masks = trajectory.response_ids.tolist(), list(trajectory.loss_mask)
    kinds = {1: [], 0: []}
    for token, mask in zip(tokens, masks, strict=True):
        kinds[mask].append(token)
    return tuple(client.tokenizer.decode(kinds[kind]) for kind in (1, 0))


def test_the_tasks_of_a_taskset_are_rows_and_what_it_cannot_load_is_said(tmp_path):
    rows = rows_of("vf-reverse")
    assert [row["prompt"] for row in rows] == ["Reverse: abc", "Reverse: hello", "Reverse: x"]
    assert rows[1]["task"]["answer"] == "olleh" and rows[1]["task"]["idx"] == 1
    chosen = rows_of("vf-count", 2, first=7, select={"skip": 3})
    assert [row["task"]["goal"] for row in chosen] == [10, 11]
    for options, words in (
        ({"source": "vf-count"}, r"tasks without end; set how many in data\.\*\.size"),
        ({"source": "absent"}, "'absent' not found"),
        ({"source": "vf-count", "options": {"last": 3}}, "last"),
        ({"source": "vf-count", "split": "test"}, "have no splits"),
        ({"source": "vf-count", "options": {"select": 3}}, "options.select=3"),
    ):
        with pytest.raises(DataError, match=words):
            load_dataset(DatasetConfig(kind="verifiers", **options))


async def test_a_turn_is_scored_by_its_rubric(play):
    client, (trajectory,) = await play("vf-reverse", "cba")
    assert spoken(client, trajectory) == ("cba<eos>", "")
    assert client.tokenizer.decode(trajectory.prompt_ids) == "<bos>user: Reverse: abc<eos><bos>assistant: "
    assert trajectory.reward == 2.5
    said = trajectory.metrics
    assert (said["reward/same"], said["reward/brief"], said["environment/length"]) == (1.0, 1.0, 3.0)


@pytest.mark.parametrize(("answer", "words"), [("nan", "'brief' is nan"), ("broken", "TaskError.*grader's mistake")])
async def test_a_grader_that_fails_leaves_the_sample_out(play, answer, words):
    with pytest.raises(DataError, match=words):
        await play("vf-reverse", answer)


async def test_turns_with_an_environment_that_has_a_state_are_one_trajectory(play):
    client, (trajectory,) = await play("vf-count", "2", "1", "2", taskset={"first": 5})
    assert spoken(client, trajectory) == (
        "2<eos>1<eos>2<eos>",
        "<bos>user: 2 of 5<eos><bos>assistant: <bos>user: 3 of 5<eos><bos>assistant: ",
    )
    assert (trajectory.reward, trajectory.metrics["environment/total"]) == (1.0, 5.0)


async def test_the_number_of_turns_is_limited(play, make_workflow):
    _, (trajectory,) = await play("vf-count", "1", "1", taskset={"first": 5}, args={"player": {"max_turns": 2}})
    assert (trajectory.reward, trajectory.metrics["turns"]) == (0.0, 2.0)


async def test_tools_are_called_by_a_relayed_chat(play):
    client, (trajectory,) = await play("vf-tools", CALL, "4 nuts", client={"type": "eval"})
    assert spoken(client, trajectory) == (f"{CALL}<eos>4 nuts<eos>", "<bos>tool: 4<eos><bos>assistant: ")
    assert (trajectory.reward, trajectory.metrics["environment/looked"]) == (1.0, 1.0)


async def test_a_simulated_user_is_played_by_the_model_and_not_trained(play):
    client, (trajectory,) = await play("vf-reverse", "Turn it!", "cba", "###DONE###", args={"id": "user-sim"})
    assert [generation.text for generation in client.conversation.generations] == ["Turn it!", "cba", "###DONE###"]
    assert spoken(client, trajectory) == ("cba<eos>", "")
    assert trajectory.reward == 2.5 and trajectory.metrics["environment/user_turns"] == 2.0


async def test_a_server_killed_in_an_episode_takes_its_agents_along_and_the_next_episode_has_a_new_one(
    make_rig, make_workflow
):
    async with make_rig() as rig:
        workflow, row = await make_workflow("vf-reverse"), rows_of("vf-reverse", 1)[0]
        agents: list[psutil.Process] = []

        async def kill(fake, body):
            supervisor = psutil.Process(workflow._server._service.process_id().pid)
            agents.extend(supervisor.children(recursive=True))
            supervisor.children()[0].kill()
            await asyncio.Event().wait()

        rig.fake.script.append(kill)
        with pytest.raises(ServerError, match="server died"):
            await workflow(rig.sample_client(), dict(row))
        # The server itself, and its agent, which has a session of its own.
        assert len({os.getsid(0), *(agent.pid for agent in agents)}) > 2
        await until(lambda: not any(agent.is_running() for agent in agents))
        rig.fake.script.clear()
        rig.write("cba")
        assert (await workflow(rig.sample_client(), dict(row)))[0].reward == 2.5


async def test_a_taskset_that_does_not_exist_is_refused_at_the_start(make_workflow):
    with pytest.raises(ConfigError, match=r"(?s)'absent' not found.*check rollout.environment.options"):
        await make_workflow("absent")
