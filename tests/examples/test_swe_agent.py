"""mini-swe-agent, unchanged, plays whole episodes through the gateway, its commands run in sandboxes."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang
from gateway_rig import Rig
from swe_agent.make_tasks import KINDS, make_tasks
from tiny_models import byte_tokenizer

from megasync.config.schema import ChatConfig, DatasetConfig, SamplingConfig
from megasync.data.datasets import load_dataset
from megasync.integrations.harbor.episode import HarborEpisode, TaskStarter
from megasync.serving.control import ServerControl

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
ANSWER = "I do this.\n```mswea_bash_command\n{}\n```"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture
def tasks(tmp_path):
    make_tasks(tmp_path / "tasks", 6, 6)
    return tmp_path / "tasks"


def rows(tasks, split):
    return load_dataset(DatasetConfig("harbor", str(tasks), split=split))[0]


def test_the_same_seed_makes_the_same_tasks_and_splits_share_none(tmp_path):
    for name in ("one", "other"):
        make_tasks(tmp_path / name, 30, 12)
    texts = []
    for folder in (tmp_path / "one", tmp_path / "other"):
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        texts.append([(str(path.relative_to(folder)), path.read_text()) for path in paths])
    assert texts[0] == texts[1]
    prompts = [{row["prompt"] for row in rows(tmp_path / "one", split)} for split in ("train", "test")]
    assert (len(prompts[0]), len(prompts[1]), len(prompts[0] | prompts[1])) == (30, 12, 42)


@pytest.mark.processes
async def test_only_the_solution_of_a_task_passes_its_tests(tasks):
    starter = TaskStarter()
    for row in rows(tasks, "test"):
        async with HarborEpisode(row, starter) as episode:
            assert (await episode.grade())["reward"] == 0.0
        async with HarborEpisode(row, starter) as episode:
            await episode.run((Path(row["task"]) / "solution" / "solve.sh").read_text())
            assert await episode.grade() == {"reward": 1.0, "cases": 1.0}
    assert len({Path(row["task"]).name.split("-")[1] for row in rows(tasks, "test")}) == len(KINDS)


@pytest.mark.processes
async def test_the_conversations_of_the_warm_start_fix_their_tasks(tasks):
    from swe_agent.train import COMMAND, END, solved

    starter = TaskStarter()
    for row in rows(tasks, "test"):
        messages = solved(Path(row["task"]))
        async with HarborEpisode(row, starter) as episode:
            for message in messages:
                if message["role"] == "assistant":
                    await episode.run(message["content"].removeprefix(COMMAND).removesuffix(END))
            assert (await episode.grade())["reward"] == 1.0, messages


@pytest.fixture
async def rig():
    async with FakeSGLang(vocab=300) as fake:
        control = ServerControl(fake.url)
        tokenizer = byte_tokenizer(TEMPLATE)
        fake.words = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        client = make_rollout_client(
            fake.url,
            [control],
            vocab_size=300,
            context_length=8000,
            sampling=SamplingConfig(max_new_tokens=1000),
            timeout=30.0,
            tokenizer=tokenizer,
            chat=ChatConfig(),
        )
        yield Rig(fake, client)
        await client.close()
        await control.close()


@pytest.mark.processes
@pytest.mark.extra
async def test_the_stock_agent_plays_an_episode_token_by_token(tasks, rig):
    module = importlib.import_module("swe_agent.agent")
    if not Path(module.PYTHON).exists():
        pytest.skip(f"no mini-swe-agent at {module.PYTHON}: see examples/swe_agent/README.md, or set SWE_AGENT_PYTHON")
    rig.sampling = SamplingConfig(max_new_tokens=1000)
    row = dict(rows(tasks, "test")[0])
    fix = (Path(row["task"]) / "solution" / "solve.sh").read_text().partition("\n")[2]
    commands = ["ls; cat *.py", "false", fix, SUBMIT]
    rig.write(*(ANSWER.format(command) for command in commands))
    (trajectory,) = await rig.play(module.agent, deadline=300.0, **row)
    assert trajectory.reward == 1.0
    assert (trajectory.metrics["submitted"], trajectory.metrics["steps"], trajectory.metrics["cases"]) == (
        1.0,
        4.0,
        1.0,
    )
    assert (trajectory.metrics["turns"], trajectory.metrics["turns_forked"]) == (4.0, 0.0)
    # Exactly what the server sampled is trained.
    trained = trajectory.response_ids[trajectory.loss_mask.expand() != 0]
    written = [rig.tokenizer.encode(ANSWER.format(command)) + [rig.tokenizer.eos_token_id] for command in commands]
    assert np.array_equal(trained, np.concatenate(written))
    # The agent saw the sandbox and nothing else.
    assert "exit status 1" in rig.sent(2) and "def " in rig.sent(1)
    assert "grade.py" not in rig.sent(-1)
