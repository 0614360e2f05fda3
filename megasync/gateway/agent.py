"""Workflow for an agent that uses the OpenAI API. Each sample gets a gateway session of its own.

async def agent(base_url, api_key, sample, model) -> float | None | dict
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from megasync.base.importing import check_call, name_of
from megasync.concurrency.foreign import DeadlineExceeded, invoke, shown
from megasync.concurrency.threads import AllThreadsStuck
from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.errors import DataError, ServerError
from megasync.gateway.agent_loop import AgentLoop
from megasync.gateway.server import Gateway
from megasync.rollout.workflow import SampleClient
from megasync.trajectory import Trajectory, finite_float

log = logging.getLogger(__name__)


class AgentWorkflow:
    """`rollout(client, sample)` for an agent, called as `agent(base_url=, api_key=, sample=, model=)`, sync or async.

    The agent returns the sample's reward, None (the reward function scores the last answer), or a dictionary with
    "reward" and metrics. `deadline` is in seconds from the start of the agent to its return; a sync agent's wait for a
    free thread does not count. Raises ConfigError for an agent that does not accept these keywords.
    """

    def __init__(
        self, agent: Callable[..., Any], config: GatewayConfig, sampling: SamplingConfig, model: str, deadline: float
    ) -> None:
        form = "must be written as `def agent(base_url, api_key, sample, model)`, sync or async"
        check_call(agent, f"the agent {name_of(agent)} {form}", base_url="", api_key="", sample={}, model="")
        # Error messages about the workflow then use the agent's name.
        functools.update_wrapper(self, agent, updated=())
        self._gateway = Gateway(config, sampling, model)
        self._loop = AgentLoop(agent, config.threads)
        self._name = name_of(agent)
        self._model = model
        self._deadline = deadline

    async def open(self) -> None:
        """Starts the gateway. Raises ConfigError when its address cannot be bound."""
        await self._gateway.start()

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        """Runs the agent for one sample and returns the trajectories.

        Raises ServerError when a server failed any of the agent's requests, even if the agent caught that error;
        DataError for an agent that exceeds its deadline, sends no request or returns an invalid result; and otherwise
        whatever the agent raises. If it raises after the chat template rejected messages that follow a response, the
        sample ends with its responses, which the reward function scores.
        """
        result, refused = None, False
        async with self._gateway.session(client) as session:
            try:
                result = await self._returned(
                    base_url=self._gateway.base_url(session), api_key=session.key, sample=sample, model=self._model
                )
            except Exception as error:  # whatever the agent raises
                if session.failure is None and session.refusal is None:
                    raise
                log.debug("Agent %s failed after a failed request", self._name, exc_info=error)
                refused = session.refusal is not None
        if session.failure is not None:
            raise ServerError(f"a request of the agent {self._name} failed: {session.failure}") from session.failure
        if refused:
            # The responses are trained as they are: what led here should be unlearned.
            return client.conversation.trajectories(metrics={"template_refused": 1.0})
        reward, metrics = invoke(self._outcome, result)
        if not client.conversation.generations:
            raise DataError(
                f"the agent {self._name} returned before any of its requests was answered; it must send them to its "
                f"base_url, with its api_key"
            )
        return client.conversation.trajectories(reward, metrics)

    async def close(self) -> None:
        """Ends the agents, the sessions and the server."""
        await self._loop.close()
        await self._gateway.close()

    async def _returned(self, **arguments: Any) -> Any:
        try:
            return await self._loop.call(self._deadline, **arguments)
        except DeadlineExceeded:
            raise DataError(
                f"the agent {self._name} did not return within {self._deadline:g} s; raise timeouts.agent, or give it "
                f"less to do"
            ) from None
        except AllThreadsStuck as error:
            raise DataError(
                f"the agent {self._name} cannot start: {error}; raise rollout.gateway.threads, or give the agent a "
                f"deadline of its own"
            ) from None

    def _outcome(self, result: Any) -> tuple[float | None, dict[str, Any]]:
        """The reward and metrics that the agent returned. Metrics are validated later, as for every workflow."""
        metrics = dict(result) if isinstance(result, Mapping) else {"reward": result}
        value = metrics.pop("reward", None)
        reward = finite_float(value)
        if reward is None and value is not None:
            raise DataError(
                f"the agent {self._name} must return a finite reward, None, or a dictionary of a reward and metrics, "
                f"not {shown(result)}"
            )
        return reward, metrics
