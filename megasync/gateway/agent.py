"""The workflow of an agent that talks OpenAI: a session of the gateway for each sample, and what the agent returns.

async def agent(base_url, api_key, sample, model) -> float | None | dict
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from megasync.concurrency.threads import AllThreadsStuck, DeadlineExceeded
from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.errors import ConfigError, DataError, ServerError
from megasync.gateway.agent_loop import AgentLoop
from megasync.gateway.server import Gateway
from megasync.importing import name_of
from megasync.trajectory import Trajectory, finite_float

log = logging.getLogger(__name__)


class AgentWorkflow:
    """`rollout(client, sample)` for an agent, which is called with the keywords `base_url`, `api_key`, `sample`, `model`.

    It returns the sample's reward, None (the reward function scores the last answer), or a dictionary with "reward" and
    metrics. `deadline` is in seconds, from the moment it begins to its return: a sync agent's wait for a thread does
    not count. Raises ConfigError for one that does not take these.
    """

    def __init__(
        self, agent: Callable[..., Any], config: GatewayConfig, sampling: SamplingConfig, model: str, deadline: float
    ) -> None:
        try:
            inspect.signature(agent).bind(base_url="", api_key="", sample={}, model="")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the agent {name_of(agent)} must be written as `def agent(base_url, api_key, sample, model)`, sync or "
                f"async: {error}"
            ) from None
        # It is called in errors by the agent's name.
        functools.update_wrapper(self, agent, updated=())
        self._gateway = Gateway(config, sampling, model)
        self._loop = AgentLoop(agent, config.threads)
        self._name = name_of(agent)
        self._model = model
        self._deadline = deadline

    async def open(self) -> None:
        """Binds the gateway's address. Raises ConfigError when it cannot be had."""
        await self._gateway.start()

    async def __call__(self, client: Any, sample: dict[str, Any]) -> list[Trajectory]:
        """Raises ServerError when a server failed one of the agent's requests, whatever the agent made of it."""
        result = None
        async with self._gateway.session(client) as session:
            try:
                result = await self._returned(
                    base_url=self._gateway.base_url(session), api_key=session.key, sample=sample, model=self._model
                )
            except Exception as error:  # whatever the agent raises
                if session.failure is None:
                    raise
                log.debug("the agent %s could not go on without a server", self._name, exc_info=error)
        if session.failure is not None:
            raise ServerError(f"a request of the agent {self._name} failed: {session.failure}") from session.failure
        reward, metrics = self._outcome(result)
        if not client.conversation.generations:
            raise DataError(
                f"the agent {self._name} returned without an answer to any request; it must send its requests to the "
                f"base_url that it is given, with the api_key"
            )
        return client.conversation.trajectories(reward, metrics)

    async def close(self) -> None:
        """Ends agents, sessions and the server."""
        await self._loop.close()
        await self._gateway.close()

    async def _returned(self, **arguments: Any) -> Any:
        call = asyncio.ensure_future(self._loop.call(self._deadline, **arguments))
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
        if call.cancelled():
            raise DataError(f"the agent {self._name} ended by a cancellation of its own")
        try:
            return call.result()
        except DeadlineExceeded:
            raise DataError(
                f"the agent {self._name} did not return within {self._deadline:g} s; raise timeouts.agent, or give it less "
                f"to do"
            ) from None
        except AllThreadsStuck as error:
            raise DataError(
                f"the agent {self._name} cannot begin: {error}; raise rollout.gateway.threads, or give the agent a deadline "
                f"of its own"
            ) from None

    def _outcome(self, result: Any) -> tuple[float | None, dict[str, Any]]:
        """The metrics are checked where all workflows' are."""
        metrics = dict(result) if isinstance(result, Mapping) else {"reward": result}
        given = metrics.pop("reward", None)
        reward = finite_float(given)
        if reward is None and given is not None:
            raise DataError(
                f"the agent {self._name} must return a finite reward, None, or a dictionary of a reward and metrics, "
                f"not {result!r:.200}"
            )
        return reward, metrics
