"""A rollout worker's process (`rollout.workers`): opens its own client, workflow and rewards from the configuration.

    driver: worker_processes ──▶ WorkerSetup ──(Ray)──▶ worker: build_worker ──▶ GroupWorker, Answerer, WorkerEnd

Whatever was passed from Python travels with the setup; everything else is loaded as the driver loaded it, so a mistake
in the configuration was refused before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megasync.app.workload import PythonArguments, Task, WorkerTask, Workload, prepare_worker
from megasync.cluster.rollout_workers import RolloutWorkers, WorkerBuffer, check_travels
from megasync.concurrency.foreign import invoke
from megasync.concurrency.garbage import short_collections
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import Config
from megasync.config.access import Keys, router_trust
from megasync.errors import PoisonPrompt
from megasync.evaluation.evaluate import Answerer, HeldOutAnswer, failed_answer, key_of
from megasync.evaluation.held_out import HeldOutSet
from megasync.observe import trace
from megasync.observe.logfile import log_to_file
from megasync.rewards import reward_functions
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.destination import ANYWHERE, Destination
from megasync.rollout.group_worker import DropRecord, FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.remote_quarantine import RemoteQuarantine
from megasync.rollout.remote_worker import Outbox, WorkerEnd
from megasync.serving.control import ServerControl
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker's process gets from the driver. `router_url` stays the same for the life of the run."""

    config: Config
    run_dir: Path
    number: int
    router_url: str
    keys: Keys
    custom: PythonArguments
    verifier: Callable | None
    # The verifiers of the evaluation sets, by the sets' names.
    verifiers: Mapping[str, Callable | None]


def worker_setup(
    config: Config, run_dir: Path, number: int, router_url: str, keys: Keys, task: Task, custom: PythonArguments
) -> WorkerSetup:
    """The setup of worker `number`, whose functions are those of the driver's `task`."""
    return WorkerSetup(
        config=config_of_worker(config, number),
        run_dir=run_dir.absolute(),
        number=number,
        router_url=router_url,
        keys=keys,
        custom=replace(custom, train_dataset=None, eval_dataset=None),
        verifier=task.verifier if isinstance(task, Workload) else None,
        verifiers={held_out.name: held_out.verifier for held_out in task.eval_sets},
    )


class ServersOfWorkers:
    """Tells the workers which servers there are: those of the rollout pool, or of a frozen model under its `key`."""

    def __init__(self, workers: RolloutWorkers, key: str = "") -> None:
        self._workers = workers
        self._key = key
        self._urls: list[str] = []

    def add_server(self, server: ServerControl) -> None:
        self._urls.append(server.url)
        self._tell()

    def remove_server(self, url: str) -> None:
        self._urls.remove(url)
        self._tell()

    def metrics(self) -> dict[str, float]:
        """None: the workers report them."""
        return {}

    def _tell(self) -> None:
        self._workers.tell("set_servers", self._key, self._key, list(self._urls))


class AnswersOfWorkers:
    """Has the workers answer prompts of held-out sets (`evaluation.Answer`)."""

    def __init__(self, workers: RolloutWorkers) -> None:
        self._workers = workers

    async def __call__(
        self,
        held_out: HeldOutSet,
        temperature: float,
        number: int,
        prompt: Prompt,
        repeat: int,
        destination: Destination = ANYWHERE,
        /,
    ) -> HeldOutAnswer:
        job = held_out.name, temperature, number, prompt, repeat, destination
        try:
            return await self._workers.ask(key_of(held_out, prompt), prompt, "answer", *job)
        except PoisonPrompt as error:
            return failed_answer(held_out, temperature, number, prompt, repeat, error)


def config_of_worker(config: Config, number: int) -> Config:
    """The configuration of one worker: a gateway port of its own, and its share of the requests to frozen models."""
    rollout = config.rollout

    def shared(models: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: replace(model, max_inflight=max(1, model.max_inflight // rollout.workers))
            for name, model in models.items()
        }

    port = rollout.gateway.port and rollout.gateway.port + number
    return replace(
        config,
        rollout=replace(rollout, gateway=replace(rollout.gateway, port=port)),
        reward_models=shared(config.reward_models),
        auxiliary_models=shared(config.auxiliary_models),
        teachers=shared(config.teachers),
    )


def check_workload_travels(task: Task, custom: PythonArguments) -> None:
    """Raises ConfigError, before anything starts, for functions and rows that cannot be sent to a worker."""
    for name in ("reward", "rollout", "agent"):
        given = getattr(custom, name)
        # Of several rewards, name the one that cannot be sent.
        for value in [each.call for each in reward_functions(given)] if name == "reward" else [given]:
            if value is not None:
                check_travels(f"{name}=", value)
    for held_out in task.eval_sets:
        check_travels("a verifier", held_out.verifier)
        if custom.eval_dataset is not None:
            for prompt in held_out.prompts:
                check_travels("the rows of eval_dataset", dict(prompt.columns))
    for row in custom.train_dataset or ():
        check_travels("the rows of train_dataset", dict(row))


async def build_worker(setup: WorkerSetup, clock_offset: float = 0.0) -> WorkerEnd:
    """Opens everything that the worker needs, in its process.

    ``clock_offset`` is what to add to this host's clock to get the driver's, in seconds.
    """
    config = setup.config
    outbox = Outbox()
    log_to_file(setup.run_dir / "logs" / f"rollout-worker-{setup.number}.log")
    limit = trace.share_bytes(config.observe, 1 + config.rollout.workers)
    trace.start(setup.run_dir / trace.TRACE_FOLDER, f"worker-{setup.number}", limit, clock_offset)
    logging.getLogger("megasync").addHandler(outbox)
    task = await asyncio.to_thread(invoke, prepare_worker, config, setup.custom, setup.verifier, setup.verifiers)
    await task.open()
    # Both end with the process.
    stack = AsyncExitStack()
    await stack.enter_async_context(short_collections())
    abandoned = asyncio.create_task(outbox.end_when_abandoned(config.timeouts.rollout_worker), name="abandoned")
    stack.push_async_callback(cancel_and_wait, abandoned)
    return _WorkerParts(setup, task, outbox, stack).end


class _WorkerParts:
    """The parts of a worker, and what the driver tells them."""

    def __init__(self, setup: WorkerSetup, task: WorkerTask, outbox: Outbox, stack: AsyncExitStack) -> None:
        config, rollout = setup.config, setup.config.rollout
        self._keys = setup.keys
        self._task = task
        self._stack = stack
        self._closing: set[asyncio.Task[None]] = set()
        # Servers by the list that they belong to: of the rollout pool under "", of frozen models under their keys.
        self._servers: dict[str, dict[str, ServerControl]] = {}
        self._published: int | None = None
        self._newest: int | None = None
        self._buffer = WorkerBuffer()
        quarantine: Any = RemoteQuarantine(partial(outbox.tell, "quarantine"))
        self._client = client = RolloutClient(
            setup.router_url,
            [],
            ServedModel(task.vocab_size, task.context_length, task.tokenizer, task.stop_ids, task.routes),
            RequestSettings.of(config),
            api_key=setup.keys.generation,
            trust=router_trust(config.cluster),
            quarantine=quarantine,
            on_invalid_answer=partial(outbox.tell, "invalid_answer"),
            auxiliary=task.auxiliary,
        )
        client.newest_version = lambda: self._newest
        client.published_version = lambda: self._published
        seed = config.seed if rollout.deterministic else None
        worker = GroupWorker(
            client,
            self._buffer,
            GroupSpec.of(config, task.workflow, task.rewards, task.teachers, seed),
            FailurePolicy(rollout.max_attempts, save_seconds=rollout.save_partials_seconds),
            quarantine=quarantine,
            more_metrics=self._frozen_metrics,
            record=DropRecord.of(config, setup.run_dir, f"worker-{setup.number}"),
        )
        self._answer = Answerer(client, task.workflow, seed)
        self._sets = {held_out.name: held_out for held_out in task.eval_sets}
        self.end = WorkerEnd(
            worker,
            outbox,
            quarantine,
            {
                "use_buffer": self._buffer.use,
                "set_servers": self._set_servers,
                "set_versions": self._set_versions,
            },
            {"answer": self._answered, "versions": self._versions_known, "close": self._close},
        )

    async def _answered(
        self, name: str, temperature: float, number: int, prompt: Prompt, repeat: int, destination: Destination
    ) -> HeldOutAnswer:
        return await self._answer(self._sets[name], temperature, number, prompt, repeat, destination)

    def _set_versions(self, published: int, newest: int) -> None:
        self._published, self._newest = published, newest

    async def _versions_known(self, published: int, newest: int) -> None:
        self._set_versions(published, newest)

    def _set_servers(self, key: str, urls: Sequence[str]) -> None:
        """Replaces the servers of a list."""
        known = self._servers.setdefault(key, {})
        client = self._task.frozen_clients[key] if key else self._client
        for url in [url for url in known if url not in urls]:
            client.remove_server(url)
            closing = asyncio.create_task(known.pop(url).close(), name=f"close {url}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for url in urls:
            if url not in known:
                known[url] = ServerControl(url, self._keys.admin)
                client.add_server(known[url])

    def _frozen_metrics(self) -> dict[str, float]:
        """Counts, which add up over workers."""
        return {
            f"{key.replace('.', '/')}/{name}": value
            for key, client in self._task.frozen_clients.items()
            for name, value in client.metrics().items()
            if name != "inflight"
        }

    async def _close(self) -> None:
        await self._client.close()
        await self._task.close()
        await cancel_and_wait(*self._closing)
        await self._stack.aclose()
        trace.stop()
