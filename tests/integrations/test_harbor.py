"""Harbor tasks: their folders as rows, and their tests as the reward of what an agent leaves in a sandbox."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from containers import image, output
from mutations import SEEDS, try_mutations
from waits import PATIENCE, deadlines

from megasync.config.schema import DatasetConfig
from megasync.data.datasets import load_dataset
from megasync.environments import Play
from megasync.environments.pool import EnvironmentPool
from megasync.environments.protocol import environment_factory
from megasync.errors import ConfigError, DataError
from megasync.integrations.harbor import episode as harbor
from megasync.integrations.harbor.episode import HarborEpisode, HarborTask, TaskStarter
from megasync.sandboxes import local
from megasync.sandboxes.local import Isolation

TEST = """#!/bin/bash
[ "$(cat answer)" = "$EXPECTED" ] && [ ! -e /solution ] && reward=1 || reward=0.25
echo $reward > /logs/verifier/reward.txt
"""
INSTRUCTION = "<!-- canary 123 -->\n\nWrite 42 into answer.\n"
TOML = """[agent]
timeout_sec = 120
[verifier]
timeout_sec = 60.0
env = {EXPECTED = "42"}
"""


@pytest.fixture
def make(tmp_path):
    def task(name="answer", toml=TOML, test=TEST, instruction=INSTRUCTION, **files):
        files = {"instruction.md": instruction, "task.toml": toml, "tests/test.sh": test, **files}
        files |= {"environment/start.txt": "given", "solution/solve.sh": "echo 42 > answer"}
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        return tmp_path / name

    return task


def row_of(folder):
    rows, reward = load_dataset(DatasetConfig("harbor", str(folder)))
    assert reward is None
    return rows[0]


def test_a_folder_of_tasks_is_a_dataset(make, tmp_path):
    make("b")
    make("a", toml="", instruction="Do it.")
    rows, _ = load_dataset(DatasetConfig("harbor", str(tmp_path)))
    assert [row["prompt"] for row in rows] == ["Do it.", "Write 42 into answer."]
    assert [row["task"] for row in rows] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [(row["agent_seconds"], row["test_seconds"]) for row in rows] == [(900.0, 600.0), (120.0, 60.0)]
    assert rows[1]["test_env"] == {"EXPECTED": "42"}
    assert "solve" not in str(rows)


def test_a_split_is_a_subfolder_with_its_name(make, tmp_path):
    make("train/a")
    make("test/b")
    rows, _ = load_dataset(DatasetConfig("harbor", str(tmp_path), split="test"))
    assert [row["task"] for row in rows] == [str(tmp_path / "test" / "b")]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"toml": "agent ="}, "cannot be read"),
        ({"toml": "agent = 5"}, r"must be a table, \[agent\]"),
        ({"toml": "[agent]\ntimeout_sec = 0"}, "agent.timeout_sec=0 must be"),
        ({"toml": "[agent]\ntimeout_sec = nan"}, "timeout_sec=nan must be"),
        ({"toml": "[[steps]]\nname = 'a'"}, "several steps, which is not supported"),
        ({"toml": "[environment]\nos = 'windows'"}, "os=windows"),
        ({"toml": "[verifier]\nenvironment_mode = 'separate'"}, "environment of its own for the tests"),
        ({"toml": "[verifier]\nenv = {KEY = '${OPENAI_API_KEY}'}"}, "variable of this machine, which no sandbox"),
        ({"toml": "[environment]\nworkdir = 5"}, "environment.workdir=5 must be text"),
        ({"toml": "[environment]\ndocker_image = ['a']"}, "docker_image=.* must be text"),
        ({"toml": "a = " + "[" * 3000}, "cannot be read"),
        ({"environment/docker-compose.yaml": ""}, "several containers"),
    ],
)
def test_a_task_that_is_not_supported_is_refused_before_the_run(make, changed, problem):
    folder = make(**changed)
    with pytest.raises(DataError, match=problem):
        row_of(folder)


SETTINGS = {
    "version": "1.0",
    "metadata": {"author": "a", "tags": ["a"]},
    "agent": {"timeout_sec": 120.0},
    "verifier": {"timeout_sec": 60, "env": {"EXPECTED": "42"}, "environment_mode": "shared"},
    "environment": {"docker_image": "i", "workdir": "/w", "cpus": 1, "env": {"A": "b"}, "os": "linux"},
}


def toml(value) -> str:
    """A value as TOML, which has no null."""
    match value:
        case dict():
            return f"{{{', '.join(f'{json.dumps(str(key))} = {toml(entry)}' for key, entry in value.items())}}}"
        case list():
            return f"[{', '.join(map(toml, value))}]"
        case bool() | int() | str() | None:
            return json.dumps("" if value is None else value)
    return str(value)


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_changed_task_is_refused_or_a_row_of_the_types_that_a_run_takes(make, seeds):
    folder = make()

    def read(content):
        (folder / "task.toml").write_bytes(content)
        row = row_of(folder)
        assert isinstance(row["workdir"], str) and isinstance(row["image"], str | None)
        assert all(isinstance(text, str) for text in (*row["environment_env"].values(), *row["test_env"].values()))
        json.dumps(dict(row.items()), allow_nan=False).encode()

    def read_settings(settings):
        read("\n".join(f"{json.dumps(str(key))} = {toml(value)}" for key, value in settings.items()).encode())

    for read_any, sound in ((read_settings, SETTINGS), (read, TOML.encode())):
        read_any(sound)
        assert 0 < try_mutations(read_any, sound, seeds, DataError) < len(seeds)


def test_a_task_without_tests_is_refused(make):
    folder = make()
    os.unlink(folder / "tests" / "test.sh")
    with pytest.raises(DataError, match=r"has no tests/test.sh"):
        row_of(folder)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sandbox": {"kind": "vm"}}, "unknown sandbox kind 'vm'"),
        ({"sandbox": {"memory": 1}}, "the option sandbox: a sandbox has no option 'memory'"),
        ({"sandbox": {"folder": "/data"}}, "folder='/data' has no effect"),
        ({"turns": 1}, "rejects its options"),
    ],
)
def test_a_wrong_option_is_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        environment_factory("harbor", options)()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("reward.txt", "1\n", {"reward": 1.0}),
        ("reward.txt", "nan", None),
        ("reward.txt", "", None),
        ("reward.txt", "good", None),
        ("reward.json", "0.5", {"reward": 0.5}),
        ("reward.json", '{"reward": 1, "style": 0.5}', {"reward": 1.0, "style": 0.5}),
        ("reward.json", '{"style": 0.5}', {"style": 0.5, "reward": 0.5}),
        ("reward.json", '{"style": 0.5, "speed": 1}', None),
        ("reward.json", '{"reward": NaN}', None),
        ("reward.json", '{"reward": "1e999"}', None),
        ("reward.json", "[1]", None),
        ("reward.json", "[" * 10**5, None),
    ],
)
def test_only_finite_rewards_are_read(name, content, expected):
    read = {"reward.txt": harbor._from_text, "reward.json": harbor._from_json}[name]
    if expected is None:
        with pytest.raises(DataError, match="the file"):
            read(content.encode(), "the file")
    else:
        assert read(content.encode(), "the file") == expected


def fenced(command):
    return f"I try this.\n```bash\n{command}\n```"


@pytest.fixture
async def task(request):
    task = HarborTask(**getattr(request, "param", {}))
    yield task
    await task.close()


@pytest.mark.processes
async def test_an_episode_is_scored_by_tests_that_it_never_sees(make, task):
    observation = await task.reset(dict(row_of(make())))
    assert observation.startswith("Write 42 into answer.") and "canary" not in observation
    said = await task.step(fenced("cat start.txt; ls / /tests /solution"))
    assert "given" in said.observation and "solve.sh" not in said.observation and "test.sh" not in said.observation
    assert said[1:] == (0.0, False)
    assert "no command was found" in (await task.step("I am done.")).observation
    # Whoever waits for the tests is dead when they come.
    await task.step(fenced("(until [ -e /tests/test.sh ]; do :; done; rm -f /tests/* /logs/verifier/*) &"))
    await task.step(fenced("echo 42 > answer"))
    assert await task.step(fenced("submit")) == ("", 1.0, True)
    # The next episode has a sandbox of its own.
    await task.reset(dict(row_of(make())))
    assert "No such file" in (await task.step(fenced("cat answer"))).observation
    assert await task.grade() == 0.25


@pytest.mark.processes
@pytest.mark.parametrize(
    "trick",
    [
        "cd /logs; mkdir verifier; echo 1 > verifier/reward.txt; echo '{\"reward\": 1}' > verifier/reward.json",
        "mkdir /tests; printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod 500 /tests",
        "rm -rf /logs; ln -s /work /logs; mkdir verifier; echo 1 > verifier/reward.txt; chmod 500 verifier",
        "head -c 900000000 /dev/zero > big; head -c 900000000 /dev/zero > big2; head -c 900000000 /dev/zero > big3",
        "echo 'echo 1 > /logs/verifier/reward.txt' > .bashrc; cp .bashrc .profile; cp .bashrc .bash_profile",
    ],
)
async def test_an_agent_cannot_write_its_own_reward(make, task, trick):
    await task.reset(dict(row_of(make())))
    await task.step(fenced(trick))
    assert await task.grade() < 1.0


class Graded:
    """An environment that can grade an unfinished episode."""

    async def reset(self, sample):
        return "begin"

    async def step(self, action):
        return "go on", 0.25, action == "done"

    async def grade(self):
        return 0.5

    async def close(self): ...


@pytest.mark.parametrize(("last", "reward"), [("more", 1.0), ("done", 0.5)])
async def test_an_episode_that_the_turns_end_is_graded_as_it_is(last, reward):
    answers, rewards = ["more", last], []

    async def chat(messages):
        return SimpleNamespace(text=answers.pop(0), messages=messages)

    conversation = SimpleNamespace(trajectories=lambda reward, *_: rewards.append(reward))
    workflow = Play(EnvironmentPool(Graded, 1, 20.0), max_turns=2)
    await workflow(SimpleNamespace(chat=chat, conversation=conversation), {})
    assert rewards == [reward]
    await workflow.close()


@pytest.mark.processes
async def test_time_limits_end_commands_the_agent_and_the_tests(make):
    task = HarborTask(command_seconds=0.2)
    await task.reset(dict(row_of(make())))
    assert "longer than 0.2 s and was killed" in (await task.step(fenced("sleep 600"))).observation
    # What was done within the time counts.
    task._seconds = 2 * PATIENCE
    for seconds in deadlines():
        await task.reset(dict(row_of(make(toml=TOML.replace("120", str(seconds))))))
        step = await task.step(fenced("echo 42 > answer; sleep 600"))
        if step == ("", 1.0, True):
            break
        assert step == ("", 0.0, True)
    assert step == ("", 1.0, True)
    await task.reset(dict(row_of(make(toml=TOML.replace("60.0", "0.2"), test="#!/bin/sh\nsleep 600"))))
    assert await task.step(fenced("submit")) == ("", 0.0, True)
    await task.reset(dict(row_of(make(test="#!/bin/sh\necho nothing"))))
    with pytest.raises(DataError, match=r"wrote no /logs/verifier/reward.txt: nothing"):
        await task.step(fenced("submit"))
    await task.close()


@pytest.mark.processes
@pytest.mark.parametrize("task", [{"max_output": 40}], indirect=True)
async def test_long_output_is_cut_in_its_middle(make, task):
    await task.reset(dict(row_of(make())))
    observation = (await task.step(fenced("seq 1000; exit 3"))).observation
    assert observation.startswith("exit status 3\n1\n2\n") and observation.endswith("\n1000\n")
    assert "characters left out" in observation


@pytest.mark.processes
async def test_what_needs_an_image_or_a_root_folder_is_refused_where_there_is_none(make, monkeypatch):
    for changed, problem in (
        (
            {"environment/Dockerfile": "FROM ubuntu"},
            r"an image that .*Dockerfile builds, which .* kind process",
        ),
        ({"toml": "[environment]\ndocker_image = 'ubuntu'"}, "needs the image ubuntu, which"),
    ):
        with pytest.raises(DataError, match=problem):
            await HarborEpisode(row_of(make(problem[:5], **changed)), TaskStarter()).__aenter__()
    monkeypatch.setattr(local, "isolation", lambda: Isolation("", True))
    with pytest.raises(ConfigError, match="need sandboxes with a root folder of their own"):
        await HarborEpisode(row_of(make("plain")), TaskStarter()).__aenter__()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["docker", "podman"])
@pytest.mark.parametrize("of", ["Dockerfile", "task", "options", "user"])
async def test_an_episode_is_played_in_a_container(of, kind, make, monkeypatch):
    base = await asyncio.to_thread(image, kind, "1000:1000" if of == "user" else "")
    changed, toml = {}, TOML
    if of in ("Dockerfile", "user"):
        run = "RUN echo of the image > /srv/made\n" if of == "Dockerfile" else ""
        changed["environment/Dockerfile"] = f"FROM {base}\n{run}COPY start.txt /srv/\n"
        toml = f'{TOML}[environment]\nworkdir = "/work"\n'
    if of == "task":
        toml = f'{TOML}[environment]\ndocker_image = "{base}"\n'
    test = TEST.replace("bash", "sh")
    task = HarborTask({"kind": kind, "image": base if of == "options" else None, "limits": {"memory_mb": 128}})
    await task.reset(dict(row_of(make(toml=toml, test=test, **changed))))
    said = await task.step(fenced("cat start.txt /srv/start.txt /srv/made; pwd"))
    there = {
        "Dockerfile": "givenof the image\n/work\n",
        "task": "/work\n",
        "options": "given/work\n",
        "user": "given/work\n",
    }
    assert said.observation.startswith(f"exit status 0\n{there[of]}")
    await task.step(fenced("(until [ -e /tests/test.sh ]; do :; done; rm -f /tests/* /logs/verifier/*) &"))
    # Fails the tests unless it is there, in the folder where they run.
    await task.step(fenced("echo 42 > answer"))
    assert await task.step(fenced("submit")) == ("", 1.0, True)
    await task.close()
    # What was built stays for the next run.
    if built := [name for name in task._starter._starters if name and name.startswith("megasync-harbor:")]:
        assert "Untagged" in await output(kind, "rmi", "--force", *built)


@pytest.mark.processes
async def test_a_dockerfile_is_built_once(make, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker"
    container = f"run) echo {2**32} 256; while read -r _; do echo; done ;; exec) echo ;;"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase $1 in {container} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    starter = TaskStarter({"kind": "docker"})
    row = row_of(make(**{"environment/Dockerfile": "FROM ubuntu"}))
    for _ in range(2):
        async with HarborEpisode(row, starter):
            pass
    calls = (tmp_path / "calls").read_text().splitlines()
    builds = [call for call in calls if call.startswith("build --tag megasync-harbor:")]
    assert len(builds) == 1 and builds[0].endswith(f"{row['task']}/environment")
    assert sum(call.startswith("run ") and " megasync-harbor:" in call for call in calls) == 2
