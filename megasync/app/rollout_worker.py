"""Builds rollout workers: in the driver, or in processes of their own (`rollout.workers`).

    driver: WorkerSetup ──(Ray)──▶ process: start_worker ──▶ build_worker ──▶ WorkerEnd
    driver: WorkerSetup ──▶ local_worker ──────────────────▶ build_worker ──▶ WorkerEnd

Whatever was passed from Python travels with the setup; a process loads everything else as the driver loaded it, so a
mistake in the configuration was refused before. A worker in the driver uses the driver's own objects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megasync.app.workload import PythonArguments, Task, Workload, prepare_worker
from megasync.base.files import atomic_write
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.buffer.segments import BodyWriter, GroupSink, segments_of
from megasync.cluster.rollout_workers import RolloutWorkers, worker_name
from megasync.concurrency.event_loop import ignore_alarms
from megasync.concurrency.foreign import invoke
from megasync.concurrency.garbage import short_collections
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import SESSIONS_FOLDER, Config
from megasync.config.access import Keys, router_trust
from megasync.errors import PoisonPrompt
from megasync.evaluation.evaluate import Answer, Answerer, AnswerJob, HeldOutAnswer
from megasync.observe import trace
from megasync.observe.logfile import log_to_file
from megasync.rollout.client import ANYWHERE, Destination, RequestSettings, RolloutClient, ServedModel
from megasync.rollout.group_worker import DropRecord, FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.inflight import QuarantineClient
from megasync.rollout.worker_link import PolledEnd, WorkerEnd
from megasync.rollout.workflow import SessionWorkflow
from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The parts that a worker is built from, sent to its process. `router_url` stays the same for the life of the run.

    With `shared_files`, processes on other machines read what it writes.
    """

    config: Config
    run_dir: Path
    number: int
    router_url: str
    keys: Keys
    custom: PythonArguments
    verifier: Callable | None
    # The verifiers of the evaluation sets, by the sets' names.
    verifiers: Mapping[str, Callable | None]
    shared_files: bool

    @classmethod
    def of(
        cls,
        config: Config,
        run_dir: Path,
        number: int,
        router_url: str,
        keys: Keys,
        task: Task,
        custom: PythonArguments,
        shared_files: bool,
    ) -> WorkerSetup:
        """The setup of worker `number`, whose functions are those of the driver's `task`."""
        verifiers = {held_out.name: held_out.verifier for held_out in task.eval_sets}
        verifier = task.verifier if isinstance(task, Workload) else None
        custom = replace(custom, train_dataset=None, eval_dataset=None)
        config, run_dir = config_of_worker(config, number), run_dir.absolute()
        return cls(config, run_dir, number, router_url, keys, custom, verifier, verifiers, shared_files)


def answers_of(workers: RolloutWorkers) -> Answer:
    """Has the workers answer prompts of held-out sets."""

    async def answer(job: AnswerJob, destination: Destination = ANYWHERE, /) -> HeldOutAnswer:
        try:
            return await workers.ask(job.key, job.prompt, "answer", job, destination)
        except PoisonPrompt as error:
            return job.failed(error)

    return answer


def config_of_worker(config: Config, number: int) -> Config:
    """The configuration of one worker: a gateway port of its own, and its share of the requests to frozen models."""
    rollout = config.rollout
    if not rollout.workers:
        return config

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


def local_worker(setup: WorkerSetup, task: Task, buffer: GroupSink | None) -> WorkerEnd:
    """A worker in the driver, which closes the task itself."""
    end = WorkerEnd()

    async def close() -> None: ...

    build_worker(end, setup, "driver", task, buffer, close)
    return end


async def start_worker(setup: WorkerSetup, clock_offset: float) -> PolledEnd:
    """Opens a worker in a process of its own.

    ``clock_offset`` is what to add to this host's clock to get the driver's, in seconds.
    """
    config, name = setup.config, worker_name(setup.number)
    ignore_alarms()
    end = WorkerEnd()
    polled = PolledEnd(end)
    log_to_file(setup.run_dir / "logs" / f"rollout-{name}.log")
    limit = trace.share_bytes(config.observe, 1 + config.rollout.workers)
    trace.start(setup.run_dir / trace.TRACE_FOLDER, name, limit, clock_offset)
    logging.getLogger("megasync").addHandler(polled)
    task = await asyncio.to_thread(invoke, prepare_worker, config, setup.custom, setup.verifier, setup.verifiers)
    await task.open()
    # All end with the process.
    stack = AsyncExitStack()
    stack.callback(trace.stop)
    await stack.enter_async_context(short_collections())
    abandoned = asyncio.create_task(polled.end_when_abandoned(config.timeouts.rollout_worker), name="abandoned")
    stack.push_async_callback(cancel_and_wait, abandoned)
    stack.push_async_callback(task.close)
    bodies = BodyWriter(segments_of(setup.run_dir / LEDGER_FILE), name, setup.shared_files)
    stack.push_async_callback(bodies.close)
    buffer = GroupSink(partial(end.ask, "buffer"), bodies)
    build_worker(end, setup, name, task, buffer, stack.aclose)
    return polled


def build_worker(
    end: WorkerEnd,
    setup: WorkerSetup,
    name: str,
    task: Task,
    buffer: Any,
    close: Callable[[], Awaitable[None]],
) -> None:
    """Makes a worker's client and serves a worker at `end`.

    `close` closes what was opened for the worker. Its `name` is that of what it records. `buffer` is a `GroupSink`;
    None if only held-out prompts are answered.
    """
    config, keys = setup.config, setup.keys
    quarantine = QuarantineClient(partial(end.ask, "enter"), partial(end.tell, "end"))
    client = RolloutClient(
        setup.router_url,
        [],
        ServedModel(task.vocab_size, task.context_length, task.tokenizer, task.stop_ids, task.routes),
        RequestSettings.of(config),
        api_key=keys.generation,
        trust=router_trust(config.cluster),
        quarantine=quarantine,
        on_invalid_answer=partial(end.tell, "invalid_answer"),
        auxiliary=task.auxiliary,
    )
    if isinstance(task.workflow, SessionWorkflow) and keys.sessions is not None:
        task.workflow.admit(keys.sessions)
        # A worker that replaces another has another address, unless rollout.gateway.port is set.
        (folder := setup.run_dir / SESSIONS_FOLDER).mkdir(exist_ok=True)
        atomic_write(folder / f"{name}.url", task.workflow.url)
    record = DropRecord.of(config, setup.run_dir, name)
    serve_worker(
        end, config, task, client, quarantine, buffer, lambda url: ServerControl(url, keys.admin), record, close
    )


def serve_worker(
    end: WorkerEnd,
    config: Config,
    task: Task,
    client: RolloutClient,
    quarantine: QuarantineClient,
    buffer: Any,
    control: Callable[[str], ServerControl],
    record: DropRecord | None,
    close: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> GroupWorker:
    """Serves what the driver may ask of a worker: groups, answers to held-out prompts, servers and versions to use."""
    seed = config.seed if config.rollout.deterministic else None
    servers = _WorkerServers(control, {"": client, **task.frozen_clients})

    def more_metrics() -> dict[str, float]:
        sessions = task.workflow.metrics() if isinstance(task.workflow, SessionWorkflow) else {}
        return sessions | {
            f"{key.replace('.', '/')}/{metric}": value
            for key, model in task.frozen_clients.items()
            for metric, value in model.metrics().items()
        }

    worker = GroupWorker(
        client,
        buffer,
        GroupSpec.of(config, task.workflow, task.rewards, task.teachers, seed),
        FailurePolicy(config.rollout.max_attempts, save_seconds=config.rollout.save_partials_seconds),
        on_ended=partial(end.tell, "ended"),
        on_failed=partial(end.tell, "failed"),
        quarantine=quarantine,
        more_metrics=more_metrics,
        record=record,
        clock=clock,
    )

    async def versions(published: int, newest: int) -> None:
        client.set_versions(published, newest)

    async def close_all() -> None:
        await client.close()
        await servers.close()
        await close()

    end.serve(
        worker,
        {"watch": quarantine.watch, "set_servers": servers.set, "set_versions": client.set_versions},
        {"answer": Answerer(client, task.workflow, task.eval_sets, seed), "versions": versions, "close": close_all},
    )
    return worker


class _WorkerServers:
    """The servers that a worker knows: of the rollout pool under "", of frozen models under their keys."""

    def __init__(self, control: Callable[[str], ServerControl], clients: Mapping[str, Any]) -> None:
        self._control = control
        self._clients = clients
        self._controls: dict[str, dict[str, ServerControl]] = {key: {} for key in clients}
        self._closing: set[asyncio.Task[None]] = set()

    def set(self, key: str, urls: Sequence[str]) -> None:
        """Replaces the servers of a list."""
        controls, client = self._controls[key], self._clients[key]
        for url in [url for url in controls if url not in urls]:
            client.remove_server(url)
            closing = asyncio.create_task(controls.pop(url).close(), name=f"close {url}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for url in urls:
            if url not in controls:
                controls[url] = self._control(url)
                client.add_server(controls[url])

    async def close(self) -> None:
        controls = [control for each in self._controls.values() for control in each.values()]
        await asyncio.gather(*self._closing, *(control.close() for control in controls))
