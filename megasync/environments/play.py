"""The workflow that plays an environment: the model answers each observation with an action until the episode ends."""

from __future__ import annotations

from typing import Any

from megasync.config.schema import EnvironmentConfig
from megasync.environments.pool import EnvironmentPool, StepTimeout
from megasync.environments.protocol import environment_factory
from megasync.errors import ContextLengthExceeded, TemplateRefused
from megasync.observe import trace
from megasync.rollout.workflow import AGENT_FAILURES, OpenedWorkflow, SampleClient
from megasync.trajectory import Trajectory


class Play(OpenedWorkflow):
    """`rollout(client, sample)` for an environment. The reward is the sum of those of all turns.

    An episode ends when the environment reports `done`, after `max_turns` steps, when the context is full, or when the
    chat template refuses an observation; it is then scored as far as it came, by the environment if that can grade an
    unfinished one. `system` is the system message. With `score_late`, a step without an answer ends the episode too;
    otherwise it fails.
    """

    def __init__(self, pool: EnvironmentPool, max_turns: int, system: str = "", score_late: bool = False) -> None:
        # What its failures are counted under.
        self.label = pool.breaker.name
        self._pool = pool
        self._score_late = score_late
        self._max_turns = max_turns
        self._opening = [{"role": "system", "content": system}] if system else []

    @classmethod
    def of(cls, config: EnvironmentConfig, deadline: float, start: float = 600.0, *, score_late: bool = False) -> Play:
        """The workflow of a configuration. Raises ConfigError.

        `deadline` is in seconds, per call; `start` is that of the start of a server.
        """
        factory = environment_factory(config.kind, config.options, start)
        pool = EnvironmentPool(factory, config.pool, deadline, config.isolation, config.kind)
        return cls(pool, config.max_turns, config.system, score_late)

    async def open(self) -> None:
        """Starts what the environments share. Raises ConfigError if it cannot start."""
        await self._pool.ready()

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        rewards: list[float] = []
        done, ended = False, ""
        async with self._pool.lease() as episode:
            observation = await episode.reset(sample)
            messages = self._opening
            while not done and not ended and len(rewards) < self._max_turns:
                try:
                    reply = await client.chat([*messages, {"role": "user", "content": observation}])
                except (ContextLengthExceeded, TemplateRefused) as error:
                    if not rewards:
                        raise
                    ended = "context_full" if isinstance(error, ContextLengthExceeded) else "template_refused"
                    break
                messages = reply.messages
                with trace.span("tool", "environment"):
                    try:
                        observation, reward, done = await episode.step(reply.text)
                    except StepTimeout:
                        if not self._score_late:
                            raise
                        reward, ended = 0.0, "deadline"
                rewards.append(reward)
            if not done and rewards and ended != "deadline":
                rewards[-1] += await episode.grade()
        metrics = {"environment/turns": float(len(rewards)), "environment/finished": float(done)}
        ended = ended or ("" if done else "turn_limit")
        metrics |= {name: float(name == ended) for name in AGENT_FAILURES}
        return client.conversation.trajectories(sum(rewards), metrics, rewards)

    async def close(self) -> None:
        await self._pool.close()
