"""A software-engineering agent: mini-swe-agent, unchanged, fixes bugs in sandboxes, and hidden tests score it.

    model ◀── gateway ◀── mini-swe-agent (a process of its own) ──▶ sandbox ◀── tests, once it has stopped

`rollout.agent: swe_agent.agent:agent` with rows of `data.kind: harbor`. SWE_AGENT_PYTHON names the interpreter of the
environment in which mini-swe-agent is installed, SWE_AGENT_CONFIG another configuration of it than mini.yaml.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from megasync.errors import ConfigError, SandboxError
from megasync.integrations.harbor.episode import HarborEpisode, TaskStarter
from megasync.sandboxes.remote import SandboxServer

HERE = Path(__file__).parent
# In a folder of the run's environment, as README.md makes it.
PYTHON = os.environ.get("SWE_AGENT_PYTHON", f"{sys.prefix}/mini_swe_agent/bin/python")
CONFIG = os.environ.get("SWE_AGENT_CONFIG", str(HERE / "mini.yaml"))


class Harness:
    """One process of mini-swe-agent, which plays many episodes at once, and the server of their sandboxes."""

    def __init__(self, process: asyncio.subprocess.Process, server: SandboxServer, starter: TaskStarter) -> None:
        self.process = process
        self.server = server
        self.starter = starter
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> Harness:
        if shutil.which(PYTHON) is None:
            raise ConfigError(
                f"mini-swe-agent has no environment at {PYTHON}; make it as examples/swe_agent/README.md says, or set "
                f"SWE_AGENT_PYTHON"
            )
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, str(HERE / "harness.py"), CONFIG),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=2**24,
        )
        starter = TaskStarter()
        server = SandboxServer(None, secrets.token_urlsafe())
        await server.start()
        return cls(process, server, starter)

    async def play(self, episode: HarborEpisode, **words: str) -> dict[str, Any]:
        """Plays one episode to its end. Raises TimeoutError when its time is over, SandboxError if the process dies."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        with self.server.lent(episode.sandbox) as (url, key):
            order = {"id": number, "task": episode.sample["prompt"], "sandbox": url, "key": key, **words}
            try:
                self.process.stdin.write(json.dumps(order).encode() + b"\n")
                async with asyncio.timeout(episode.seconds_left):
                    return await self._waiting[number]
            finally:
                del self._waiting[number]

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                ended = json.loads(line)
                if (waiting := self._waiting.get(ended["id"])) is not None and not waiting.done():
                    waiting.set_result(ended)
        finally:
            # Also when the loop of all agents ends.
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(SandboxError("the process of mini-swe-agent has ended"))
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self.process.wait()


# Of each event loop, because a process and its pipes belong to one.
_harnesses: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Harness]] = WeakKeyDictionary()


async def harness() -> Harness:
    """The process of this loop's agents, started when it is first needed or has died."""
    loop = asyncio.get_running_loop()
    starting = _harnesses.get(loop)
    failed = starting is not None and starting.done() and (starting.cancelled() or starting.exception() is not None)
    if starting is None or failed or (starting.done() and starting.result().process.returncode is not None):
        starting = _harnesses[loop] = loop.create_task(Harness.start())
    return await asyncio.shield(starting)


async def agent(base_url: str, api_key: str, sample: dict[str, Any], model: str) -> dict[str, float]:
    """Has mini-swe-agent work on one task. Returns the reward of the hidden tests, and metrics."""
    player = await harness()
    async with HarborEpisode(sample, player.starter) as episode:
        ended: dict[str, Any] = {}
        # What it has done when its time is over counts.
        with contextlib.suppress(TimeoutError):
            ended = await player.play(episode, base_url=base_url, api_key=api_key, model=model)
        rewards = await episode.grade()
    return rewards | {"submitted": float(ended.get("exit_status") == "Submitted"), "steps": ended.get("steps", 0)}
