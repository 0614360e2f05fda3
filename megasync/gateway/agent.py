"""Workflow for an agent that uses OpenAI's or Anthropic's API. Each sample gets a gateway session of its own.

async def agent(base_url, api_key, sample, model) -> float | None | dict

An agent may block its event loop, for example by using a sync client inside an `async def`. On the gateway's loop, its
own requests could then never be answered. Async agents therefore share a loop on its own thread, and each sync agent
gets a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from megasync.base.importing import check_call, name_of
from megasync.concurrency.foreign import DeadlineExceeded, invoke, is_async, run, shown
from megasync.concurrency.tasks import cancel_and_wait
from megasync.concurrency.threads import AllThreadsStuck, DaemonThreads
from megasync.config.schema import GatewayConfig, SamplingConfig
from megasync.errors import SANDBOXES, DataError, ServerError
from megasync.gateway.server import Gateway
from megasync.rollout.breaker import Breaker
from megasync.rollout.workflow import OpenedWorkflow, SampleClient
from megasync.trajectory import Trajectory, finite_float

log = logging.getLogger(__name__)

# Seconds that cancelled agents have to finish at shutdown.
_CLOSE_SECONDS = 5.0


class AgentLate(DataError):
    """An agent did not return within its deadline."""


class AgentWorkflow(OpenedWorkflow):
    """`rollout(client, sample)` for an agent, called as `agent(base_url=, api_key=, sample=, model=)`, sync or async.

    The agent returns the sample's reward, None (the reward function scores the last answer), or a dictionary with
    "reward" and metrics. `deadline` is in seconds from the start of the agent to its return; a sync agent's wait for a
    free thread does not count. With `score_late`, the sample of an agent that reaches it ends with its responses, which
    the reward function scores; otherwise it fails. Raises ConfigError for an agent that does not accept these keywords.
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        config: GatewayConfig,
        sampling: SamplingConfig,
        model: str,
        deadline: float,
        *,
        score_late: bool = False,
    ) -> None:
        form = "must be written as `def agent(base_url, api_key, sample, model)`, sync or async"
        check_call(agent, f"the agent {name_of(agent)} {form}", base_url="", api_key="", sample={}, model="")
        # Error messages about the workflow then use the agent's name.
        functools.update_wrapper(self, agent, updated=())
        self._gateway = Gateway(config, sampling, model)
        self._agent = agent
        # Of those that agents start themselves.
        self._sandboxes = Breaker(SANDBOXES)
        # Of sync agents; and the loop of async ones, once the first has begun.
        self._threads = DaemonThreads(config.threads)
        self._loop: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._name = name_of(agent)
        self._model = model
        self._deadline = deadline
        self._score_late = score_late

    async def open(self) -> None:
        """Starts the gateway. Raises ConfigError when its address cannot be bound."""
        await self._gateway.start()

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        """Runs the agent for one sample and returns the trajectories.

        Raises ServerError when a server failed any of the agent's requests, even if the agent caught that error;
        ServiceDown when sandboxes have failed for everybody for long;
        DataError for an agent that exceeds its deadline, sends no request or returns an invalid result; and otherwise
        whatever the agent raises. If it raises after the chat template rejected messages that follow a response, the
        sample ends with its responses, which the reward function scores.
        """
        result, ended = None, ""
        async with self._sandboxes.episode(), self._gateway.session(client) as session:
            try:
                base_url = self._gateway.base_url(session)
                result = await self._called(base_url=base_url, api_key=session.key, sample=sample, model=self._model)
            except Exception as error:  # whatever the agent raises
                late = self._score_late and isinstance(error, AgentLate) and client.conversation.generations
                if session.failure is None and session.refusal is None and not late:
                    raise
                log.debug("Agent %s failed after a failed request", self._name, exc_info=error)
                ended = "deadline" if late else "template_refused" if session.refusal is not None else ""
        if session.failure is not None:
            raise ServerError(f"a request of the agent {self._name} failed: {session.failure}") from session.failure
        if ended:
            # The responses are trained as they are: what led here should be unlearned.
            return client.conversation.trajectories(metrics={ended: 1.0})
        reward, metrics = invoke(self._outcome, result)
        if not client.conversation.generations:
            raise DataError(
                f"the agent {self._name} returned before any of its requests was answered; it must send them to its "
                f"base_url, with its api_key"
            )
        return client.conversation.trajectories(reward, metrics)

    async def close(self) -> None:
        """Ends the agents, the sessions and the server. A loop that an agent blocks is abandoned."""
        if self._loop is not None:
            (loop, thread), self._loop = self._loop, None
            ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_cancel_all(), loop))
            await asyncio.wait({ended}, timeout=_CLOSE_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)
        await self._gateway.close()

    async def _called(self, **arguments: Any) -> Any:
        """Calls the agent, and returns or raises what it does. Cancellation reaches async agents only."""
        name = f"agent {self._name}"
        try:
            if is_async(self._agent):
                return await self._on_loop(run(self._agent, name, None, **arguments))
            return await self._threads.call(self._agent, name, self._deadline, **arguments)
        except DeadlineExceeded:
            raise AgentLate(
                f"the agent {self._name} did not return within {self._deadline:g} s; raise timeouts.agent, or give it "
                f"less to do"
            ) from None
        except AllThreadsStuck as error:
            raise DataError(
                f"the agent {self._name} cannot start: {error}; raise rollout.gateway.threads, or give the agent a "
                f"deadline of its own"
            ) from None

    async def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs an async agent on the loop of all of them. Raises DeadlineExceeded."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._loop = loop, threading.Thread(target=_run, args=(loop,), name="agents", daemon=True)
            self._loop[1].start()
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop[0]))
        # Cancelled but not awaited: an agent that ignores its cancellation must not block the run.
        try:
            await asyncio.wait({call}, timeout=self._deadline)
            if not call.done():
                raise DeadlineExceeded
            return call.result()
        finally:
            call.cancel()

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


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_all() -> None:
    await cancel_and_wait(*(asyncio.all_tasks() - {asyncio.current_task()}))
