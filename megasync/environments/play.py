"""The workflow that plays an environment: the model answers each observation with an action until the episode ends."""

from __future__ import annotations

from typing import Any

from megasync.config.schema import EnvironmentConfig
from megasync.environments.pool import EnvironmentPool
from megasync.environments.protocol import environment_factory
from megasync.observe import trace
from megasync.rollout.workflow import SampleClient
from megasync.trajectory import Trajectory


class Play:
    """`rollout(client, sample)` for an environment. The reward is the sum of those of all turns.

    An episode ends when the environment reports `done`, or after `max_turns` steps. `system` is the system message.
    """

    def __init__(self, pool: EnvironmentPool, max_turns: int, system: str = "") -> None:
        self._pool = pool
        self._max_turns = max_turns
        self._opening = [{"role": "system", "content": system}] if system else []

    @classmethod
    def of(cls, config: EnvironmentConfig, deadline: float, start: float = 600.0) -> Play:
        """The workflow of a configuration. Raises ConfigError.

        `deadline` is in seconds, per call; `start` is that of the start of a server.
        """
        factory = environment_factory(config.kind, config.options, start)
        return cls(EnvironmentPool(factory, config.pool, deadline, config.isolation), config.max_turns, config.system)

    async def open(self) -> None:
        """Starts what the environments share. Raises ConfigError if it cannot start."""
        await self._pool.ready()

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        rewards: list[float] = []
        done = False
        async with self._pool.lease() as episode:
            observation = await episode.reset(sample)
            messages = self._opening
            while not done and len(rewards) < self._max_turns:
                reply = await client.chat([*messages, {"role": "user", "content": observation}])
                messages = reply.messages
                with trace.span("tool", "environment"):
                    observation, reward, done = await episode.step(reply.text)
                rewards.append(reward)
        metrics = {"environment/turns": float(len(rewards)), "environment/finished": float(done)}
        return client.conversation.trajectories(sum(rewards), metrics, rewards)

    async def close(self) -> None:
        await self._pool.close()
