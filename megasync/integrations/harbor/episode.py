"""Joins Harbor: a sandbox for a task, in which an agent works, and its score by tests that the agent never sees.

Invariant: tests enter the sandbox after all processes of the agent have been killed, and the solution never does.
`HarborEpisode.grade` guarantees it.

    environment   {kind: harbor}: the model answers with commands, one for each turn
    agent         `async with HarborEpisode(sample, starter) as episode`, for an agent that runs them itself
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megasync.concurrency.tasks import to_its_end
from megasync.environments.protocol import Step
from megasync.errors import ConfigError, DataError, SandboxError, raised_as
from megasync.sandboxes import Result, Sandbox, Spec, Starter
from megasync.sandboxes.kinds import starter_of
from megasync.sandboxes.local import folder_content
from megasync.trajectory import finite_float

log = logging.getLogger(__name__)

# Where Harbor puts tests and finds the reward.
TESTS, LOGS = "/tests", "/logs/verifier"
# Removes what an agent has put there.
_CLEAR = (
    f"[ -d /logs ] && [ ! -L /logs ] || rm -f /logs; chmod -R u+rwx {TESTS} {LOGS} 2> /dev/null; rm -rf {TESTS} {LOGS}"
)
_IMAGES = ("docker", "podman")
# Seconds in which an image must be built.
_BUILD_SECONDS = 1800.0
_FENCE = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL)
_SUBMIT = "submit"
_HOW = (
    "Answer with one shell command, or several lines of them, in a block that begins with ```bash and ends with ```. "
    "You will see its exit status and output, and can then give the next one. Only files stay between commands. "
    f"When the task is done, answer with a block that contains only the word {_SUBMIT}."
)


class TaskStarter:
    """Starts the sandboxes of tasks, which differ by their images, with the same options. Raises ConfigError."""

    def __init__(self, options: Mapping[str, Any] | Spec | None = None) -> None:
        self._spec = options if isinstance(options, Spec) else _spec(options or {})
        # Also finds a kind or an image that cannot be had here.
        self._starters: dict[str | None, Starter] = {}
        if self._spec.kind not in _IMAGES:
            self._starters[None] = starter_of(self._spec)
        self._contents: dict[str, bytes] = {}
        self._building = asyncio.Lock()

    async def start(self, sample: Mapping[str, Any]) -> Sandbox:
        """A sandbox with the environment of a row. Raises DataError for one that this kind cannot have."""
        kind, folder = self._spec.kind, Path(sample["task"]) / "environment"
        image, own = sample.get("image") or None, bool(sample.get("image") or sample.get("dockerfile"))
        if kind in _IMAGES:
            image = await self._built(folder) if sample.get("dockerfile") else image or self._spec.image
        elif own:
            what = f"the image {image}" if image else f"an image that {folder}/Dockerfile builds"
            raise DataError(
                f"the Harbor task {sample['task']} needs {what}, which sandboxes of kind {kind} cannot have; set the "
                f"option sandbox.kind to docker or podman, or leave the task out"
            )
        else:
            image = None
        if image not in self._starters:
            self._starters[image] = starter_of(_with_image(self._spec, image))
        sandbox = await self._starters[image].start()
        try:
            if not own and folder.is_dir():
                if str(folder) not in self._contents:
                    self._contents[str(folder)] = await folder_content(str(folder))
                await sandbox.put(self._contents[str(folder)], sample["workdir"])
            await sandbox.put({".kept": b""}, "/logs/agent")
            if (await sandbox.run("test -e /logs/agent/.kept")).code != 0:
                raise ConfigError(
                    "Harbor tasks need sandboxes with a root folder of their own, and this kernel allows no "
                    "namespaces; enable them (sysctl user.max_user_namespaces), or set sandbox.kind to docker"
                )
        except BaseException:
            await to_its_end(sandbox.stop())
            raise
        return sandbox

    async def close(self) -> None:
        for starter in self._starters.values():
            await starter.close()

    async def _built(self, folder: Path) -> str:
        """The name of the image of a Dockerfile, built once. Raises SandboxError with what the program said."""
        content = await folder_content(str(folder))
        name = f"megasync-harbor:{hashlib.sha256(content).hexdigest()[:24]}"
        async with self._building:
            if name in self._starters:
                return name
            build = await asyncio.create_subprocess_exec(
                *(self._spec.kind, "build", "--tag", name, str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(_BUILD_SECONDS):
                    said, _ = await build.communicate()
            except BaseException as error:
                build.kill()
                await to_its_end(build.wait())
                if isinstance(error, TimeoutError):
                    raise SandboxError(
                        f"{self._spec.kind} built no image of {folder} in {_BUILD_SECONDS:g} s"
                    ) from None
                raise
            if build.returncode != 0:
                raise SandboxError(
                    f"{self._spec.kind} builds no image of {folder}: {said.decode(errors='replace')[-2000:]}"
                )
            self._starters[name] = starter_of(_with_image(self._spec, name))
        return name


class HarborEpisode:
    """One attempt at a task: a sandbox for the agent, and the score of what it left there.

        async with HarborEpisode(sample, starter) as episode:
            await episode.run("ls")
            rewards = await episode.grade()

    `sample` is a row of `data.kind: harbor`. The agent's time starts with the sandbox.
    """

    def __init__(self, sample: Mapping[str, Any], starter: TaskStarter) -> None:
        if "task" not in sample:
            raise DataError(f"a Harbor task needs rows of data.train.kind=harbor; this one has {sorted(sample)}")
        self.sample = sample
        self._starter = starter
        self._sandbox: Sandbox | None = None
        self._deadline = 0.0

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox. Raises SandboxError before the start and after the end."""
        if self._sandbox is None:
            raise SandboxError("the episode of a Harbor task has no sandbox: it has not begun, or has ended")
        return self._sandbox

    @property
    def seconds_left(self) -> float:
        """Seconds until the agent's time is over."""
        return max(0.0, self._deadline - time.monotonic())

    async def __aenter__(self) -> Self:
        self._sandbox = await self._starter.start(self.sample)
        self._deadline = time.monotonic() + self.sample["agent_seconds"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await to_its_end(self.close())

    async def close(self) -> None:
        """Stops the sandbox. May be called again."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.stop()

    async def run(self, command: str, seconds: float = 60.0) -> Result:
        """Runs a command of the agent in the task's working folder, for at most the time that it has left."""
        return await self.sandbox.run(
            command,
            cwd=self.sample["workdir"],
            env=self.sample["environment_env"],
            seconds=max(0.1, min(seconds, self.seconds_left)),
            output_bytes=2**16,
        )

    async def grade(self) -> dict[str, float]:
        """Ends the agent's processes, runs the tests and returns what they wrote, with the key `reward`.

        0.0 if the tests cannot be placed, or do not end in their time: what the agent left may keep them. Raises
        DataError if they write no valid reward.
        """
        sandbox = self.sandbox
        await sandbox.kill()
        tests = await folder_content(f"{self.sample['task']}/tests")
        try:
            if (await sandbox.run(_CLEAR, seconds=60.0)).code != 0:
                raise DataError(f"{TESTS} and {LOGS} cannot be removed")
            await sandbox.put(tests, TESTS)
            await sandbox.put({".kept": b""}, LOGS)
        except DataError as error:
            # The agent has filled the disk, or made what stands in the way.
            log.info("The tests of %s cannot be run in what the agent left: %s", self.sample["task"], error)
            return {"reward": 0.0, "tests_hindered": 1.0}
        result = await sandbox.run(
            f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh > {LOGS}/test-stdout.txt 2>&1",
            cwd=self.sample["workdir"],
            env=self.sample["environment_env"] | self.sample["test_env"],
            seconds=self.sample["test_seconds"],
        )
        if result.code is None:
            return {"reward": 0.0, "tests_late": 1.0}
        for name, read in (("reward.json", _from_json), ("reward.txt", _from_text)):
            quoted = shlex.quote(f"{LOGS}/{name}")
            if (await sandbox.run(f"test -f {quoted}")).code == 0:
                return read(await sandbox.get(f"{LOGS}/{name}"), f"{name} of the Harbor task {self.sample['task']}")
        said = (await sandbox.run(f"tail -c 500 {LOGS}/test-stdout.txt")).stdout
        raise DataError(f"the tests of the Harbor task {self.sample['task']} wrote no {LOGS}/reward.txt: {said}")


def _from_text(content: bytes, where: str) -> dict[str, float]:
    return {"reward": _number(content.decode(errors="replace").strip(), where)}


def _from_json(content: bytes, where: str) -> dict[str, float]:
    with raised_as(DataError, f"{where} is not valid JSON", of=(ValueError, RecursionError)):
        written = json.loads(content)
    if not isinstance(written, dict):
        return {"reward": _number(written, where)}
    rewards = {name: _number(value, f"{where}, {name}") for name, value in written.items()}
    if "reward" not in rewards:
        if len(rewards) != 1:
            raise DataError(f"{where} has {', '.join(rewards) or 'nothing'}, and no key 'reward', which is trained")
        rewards["reward"] = next(iter(rewards.values()))
    return rewards


def _number(value: Any, where: str) -> float:
    try:
        number = finite_float(float(value)) if isinstance(value, str) else finite_float(value)
    except ValueError:
        number = None
    if number is None:
        raise DataError(f"{where}: the reward {value!r:.80} is not a finite number")
    return number


def _spec(options: Mapping[str, Any]) -> Spec:
    with raised_as(ConfigError, "the option sandbox", of=TypeError):
        spec = Spec.of(options)
    if spec.folder is not None:
        raise ConfigError(f"the option sandbox: folder={spec.folder!r} has no effect: each task has its own")
    return spec


def _with_image(spec: Spec, image: str | None) -> Spec:
    return Spec(spec.kind, image, None, spec.visible, spec.network, spec.url, spec.key, spec.limits)


class HarborTask:
    """The environment of rows of `data.kind: harbor`: every action is a shell command, until the model submits.

    `sandbox` has the options of its sandboxes, `command_seconds` limits one command, `max_output` the characters that
    the model sees of its output. The tests run when the model submits, when the agent's time is over, or when the
    episode ends otherwise (`grade`).
    """

    def __init__(
        self, sandbox: Mapping[str, Any] | None = None, command_seconds: float = 30.0, max_output: int = 4096
    ) -> None:
        if not command_seconds > 0 or max_output < 1:
            raise TypeError(f"command_seconds={command_seconds} and max_output={max_output} must be above 0")
        self._starter = TaskStarter(sandbox)
        self._seconds = command_seconds
        self._max_output = max_output
        self._episode: HarborEpisode | None = None

    async def reset(self, sample: dict[str, Any]) -> str:
        await self._end()
        self._episode = await HarborEpisode(sample, self._starter).__aenter__()
        return f"{sample['prompt']}\n\n{_HOW}"

    async def step(self, action: str) -> Step:
        if self._episode is None:
            raise DataError("a Harbor task gets an action before it begins")
        blocks = _FENCE.findall(action)
        if not blocks:
            return Step(f"Error: no command was found. {_HOW}", 0.0, False)
        if (command := blocks[-1].strip()) != _SUBMIT:
            result = await self._episode.run(command, self._seconds)
            if self._episode.seconds_left > 0:
                return Step(self._shown(result), 0.0, False)
        return Step("", await self.grade(), True)

    async def grade(self) -> float:
        """The reward of what is in the sandbox, which is stopped."""
        if self._episode is None:
            return 0.0
        try:
            return (await self._episode.grade())["reward"]
        finally:
            await self._end()

    async def close(self) -> None:
        await self._end()
        await self._starter.close()

    async def _end(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await to_its_end(episode.close())

    def _shown(self, result: Result) -> str:
        output = result.stdout + result.stderr
        if len(output) > self._max_output:
            half = self._max_output // 2
            output = f"{output[:half]}\n[{len(output) - 2 * half} characters left out]\n{output[-half:]}"
        status = f"no exit status: it ran for longer than {self._seconds:g} s and was killed"
        return f"{f'exit status {result.code}' if result.code is not None else status}\n{output}"
