"""Builds a training service from a configuration, and takes it down again.

                    ┌─ Ranks ──────────▶ TrainerGroup (Megatron ranks)
    Endpoint ──▶ Service
                    └─ FleetSampler ───▶ router ──▶ Fleet (SGLang servers)

    task        does                                                       ends when
    ----------  ---------------------------------------------------------  ---------------------------------------------
    endpoint    answers clients                                            the service stops
    fleet       lets servers that were restarted serve                     too few are left: the service fails
    tenants     writes metrics while a tenant is active                    the service stops
    (service)   what clients asked for; lost ranks are started again       they cannot be started: the service fails

Whatever is opened is pushed on one exit stack immediately, as in a run. What was accepted is in the ledger before its
promise is given, so stopping loses nothing: `megasync resume` continues with it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from megasync.app.mailbox import answer_with_report
from megasync.app.resume_file import read_resume_file, write_resume_file
from megasync.app.run_directory import AnyRun, OpenedRun, new_run_dir, run_stoppable
from megasync.app.servers import POISON_FOLDER, reserve_pools
from megasync.app.workload import stop_ids
from megasync.base.files import PRIVATE, atomic_write
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.trainer_group import TrainerGroup
from megasync.concurrency.event_loop import run_to_end
from megasync.concurrency.tasks import gather_or_cancel, wait_for_first
from megasync.config import CONFIG_FILE, SERVICE_FOLDER, TENANTS_FILE, Config, load_config
from megasync.config.access import Keys, router_trust
from megasync.config.changes import check_changes
from megasync.config.pools import pool_specs
from megasync.config.schema import ServeConfig
from megasync.data.tokenizer import load_tokenizer
from megasync.device import check_machine, resolve_device
from megasync.errors import ConfigError, MegasyncError
from megasync.layout.model_files import read_hf_config
from megasync.models.hub import resolve_names, with_names
from megasync.observe.context import RunContext
from megasync.observe.observer import RunObserver, RunParts
from megasync.observe.result import resume_command
from megasync.observe.state_file import ModelState, TenantState
from megasync.rollout import client as rollout
from megasync.rollout.inflight import QuarantineClient
from megasync.rollout.quarantine import Quarantine
from megasync.service import tenant_logs
from megasync.service.interfaces import ServedModel
from megasync.service.limits import Limits
from megasync.service.ranks import Ranks, trained_config
from megasync.service.sampling import TOGETHER, FleetSampler
from megasync.service.scheduler import share_with_threads
from megasync.service.service import Service
from megasync.service.status import TenantStatus
from megasync.serving.plugin_protocol import ADAPTER_ROOT
from megasync.tenants.checks import check_service, draw_tenants, read_tenants, served_config, served_context
from megasync.tenants.rank import TenantTrainerRank

if TYPE_CHECKING:
    from megasync.service.endpoint import Endpoint

# Seconds between two looks at the servers, and between two lines of metrics.
WATCH_SECONDS, METRICS_SECONDS = 1.0, 5.0
# Seconds between two looks whether all is answered, when the service stops.
FINISH_SECONDS = 0.2
RANKS = "trainer"


def serve_forever(config: Config, resume_file: Path | None = None) -> None:
    """Serves until it is stopped, in the run directory that ``resume_file`` names, or a new one, which it names then.

    ``config`` passed `check_service`, and came from `resume_file.resolve_config`.

    Ctrl-C once stops accepting requests and ends; twice ends immediately. Raises ConfigError and DataError before
    anything starts; another MegasyncError for what ended the service.
    """
    run_dir = None if resume_file is None else read_resume_file(resume_file)
    if run_dir is not None:
        check_changes(load_config(run_dir / CONFIG_FILE), with_names(config), 0)
    run_to_end(_begin(config, run_dir, resume_file))


def resume_serving(run_dir: Path, overrides: Sequence[str] = ()) -> None:
    """Serves again with all that the run directory holds. Raises as `serve_forever`."""
    run_to_end(_begin(_resumed(run_dir, overrides), run_dir))


def _resumed(run_dir: Path, overrides: Sequence[str]) -> Config:
    config = resolve_names(load_config(run_dir / CONFIG_FILE, overrides))
    check_changes(load_config(run_dir / CONFIG_FILE), with_names(config), 0)
    check_service(config)
    return config


async def _begin(config: Config, run_dir: Path | None, resume_file: Path | None = None) -> None:
    await asyncio.to_thread(_check, config)
    # Raises ConfigError without Tinker's messages, which a service without an endpoint does without.
    from megasync.service.endpoint import Endpoint

    run_dir = run_dir or new_run_dir(config)
    if resume_file is not None:
        await asyncio.to_thread(write_resume_file, resume_file, run_dir)
    share_with_threads()
    run = ServedRun(config, run_dir, Endpoint)
    await run_stoppable(run.execute(), run_dir, config, run)


def _check(config: Config) -> None:
    """Raises ConfigError and DataError for what `check_service` does not see."""
    if config.cluster.address is None:
        check_machine(config.cluster.device, trains=True)
    load_tokenizer(config.model.path)


class ServedRun(AnyRun):
    """A service in `run_dir`, new or resumed. Without an ``endpoint`` only its own process can use it."""

    def __init__(self, config: Config, run_dir: Path, endpoint: type[Endpoint] | None = None) -> None:
        super().__init__(config, run_dir)
        assert config.serve is not None, "`check_service` has refused a configuration without the section"
        self._serve: ServeConfig = config.serve
        self._endpoint = endpoint
        self._stop = asyncio.Event()
        self._started = False

    def request_stop(self, reason: str) -> bool:
        if self._started and self._opened is not None and not self._stop.is_set():
            self._opened.observer.stopped = reason
            self._opened.observer.message(f"stopping: {reason}")
            self._stop.set()
        return self._started

    async def describe(self) -> str:
        return "it serves" if self._started else "it is starting"

    async def execute(self, use: Callable[[Service], None] = lambda service: None) -> None:
        """Serves until a stop is requested. Calls ``use`` once the service has started."""
        with self._open(traced_processes=1) as opened:
            observer = opened.observer
            observer.finished = False
            async with observer.writing_state(), AsyncExitStack() as stack:
                service, fleet = await self._start(stack, opened)
                endpoint = await self._listen(stack, service, observer)
                handlers = {
                    "scale": partial(self.scale, fleet),
                    "stacks": partial(answer_with_report, opened.reports),
                    "stop": self._stop_soon,
                }
                await stack.enter_async_context(opened.mailbox.answering(handlers))
                self._started = True
                use(service)
                waits = service.until_failed(), _watch(fleet), self._record(service, observer), self._stop.wait()
                with observer.running():
                    await wait_for_first(*map(asyncio.ensure_future, waits))
                if endpoint is not None:
                    await endpoint.close()
                await _finish(service, self.config.timeouts.shutdown)
                observer.message("shutting down servers and trainer ranks; what was accepted is kept")
            observer.message(f"to go on: {resume_command(self.run_dir)}")

    async def _start(self, stack: AsyncExitStack, opened: OpenedRun) -> tuple[Service, Fleet]:
        observer, device = opened.observer, resolve_device(self.config.cluster.device)
        config = replace(self.config, cluster=replace(self.config.cluster, device=device.kind))
        context = served_context(config)
        config = served_config(config, context)
        trained = trained_config(config)
        model = Path(config.model.path)
        values = read_hf_config(config.model.path)
        name = with_names(self.config).model.path.partition("@")[0]
        served = ServedModel(name, context, values["vocab_size"], config.trainer.lora.rank, model)
        surroundings = RunContext(events=observer, reports=opened.reports)
        observer.message("starting Ray, trainer ranks and servers")
        pools = await reserve_pools(stack, config, pool_specs(config), device)
        keys = Keys.draw(config.cluster)
        fleet = Fleet(config, FleetProcesses(config, self.run_dir, device, pools, keys), served.vocab, surroundings)
        stack.push_async_callback(fleet.stop)
        group = TrainerGroup(trained, self.run_dir, pools, surroundings, TenantTrainerRank)
        stack.push_async_callback(group.stop)
        opened.reports.cover(pools.stacks, group.processes, fleet.processes)
        parts = RunParts(
            servers=fleet.states, router=fleet.router.described, ranks=group.states, metrics_urls=fleet.metrics_urls
        )
        observer.show(parts)
        await gather_or_cancel(group.start(None), fleet.start())
        await fleet.joined([control.url for control in fleet.joiners()])
        client = self._client(stack, config, fleet, keys, served)
        folder = self.run_dir / SERVICE_FOLDER
        # Of several engines each needs a request of its own for each sample.
        together = 1 if config.rollout.prefill_engines or config.rollout.decode_engines else TOGETHER
        sampler = FleetSampler(client, served, folder / ADAPTER_ROOT, together=together)
        stack.enter_context(tenant_logs.writing(self.run_dir / "logs"))
        ranks = _ReportedRanks(group, trained, served, observer)
        service = await stack.enter_async_context(Service(folder, ranks, sampler, served, limits_of(self._serve)))
        observer.show(replace(parts, tenants=partial(tenant_states, service)))
        if service.status().tenants:
            observer.tenants()
        return service, fleet

    def _client(
        self, stack: AsyncExitStack, config: Config, fleet: Fleet, keys: Keys, served: ServedModel
    ) -> rollout.RolloutClient:
        """A client of all servers, which holds prompts back that may have killed one."""
        health = config.rollout.health
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        quarantine = Quarantine(fleet.reservations, self.run_dir / POISON_FOLDER, hang_seconds=hang_seconds)
        stack.push_async_callback(quarantine.close)
        fleet.on_departure(quarantine.left)
        asking = QuarantineClient(partial(quarantine.enter, SERVICE_FOLDER), partial(quarantine.end, SERVICE_FOLDER))
        quarantine.follow(asking.watch)
        ends = stop_ids(config.model.path, load_tokenizer(config.model.path))
        client = rollout.RolloutClient(
            fleet.router.url,
            [],
            rollout.ServedModel(served.vocab, served.context, stop_ids=ends),
            rollout.RequestSettings.of(config),
            api_key=keys.generation,
            trust=router_trust(config.cluster),
            quarantine=asking,
            on_invalid_answer=fleet.check_all,
        )
        stack.push_async_callback(client.close)
        fleet.follow(client.add_server, client.remove_server)
        return client

    async def _listen(self, stack: AsyncExitStack, service: Service, observer: RunObserver) -> Endpoint | None:
        if self._endpoint is None:
            return None
        serve, cluster = self._serve, self.config.cluster
        file = await asyncio.to_thread(self.keys_file)
        tls = None
        if cluster.tls_cert is not None and cluster.tls_key is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(cluster.tls_cert, cluster.tls_key)
        endpoint = self._endpoint(
            service, read_tenants(file), host=serve.host, port=serve.port, body_mb=serve.request_mb, tls=tls
        )
        await endpoint.start()
        stack.push_async_callback(endpoint.close)
        key = "KEY" if serve.keys is not None else f"$(cut -d' ' -f2 {file})"
        observer.message(
            f"serving {service.served.name}. Clients find it by:\n"
            f"export TINKER_BASE_URL={endpoint.url} TINKER_API_KEY={key}"
        )
        return endpoint

    def keys_file(self) -> Path:
        """The file with the tenants' keys; writes it, for this user alone, if the configuration names none."""
        if self._serve.keys is not None:
            return Path(self._serve.keys).expanduser()
        file = self.run_dir / TENANTS_FILE
        if not file.exists():
            try:
                atomic_write(file, draw_tenants(), PRIVATE)
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error}; make room, or set serve.keys") from None
        return file

    async def _record(self, service: Service, observer: RunObserver) -> None:
        """Writes a line of metrics when a tenant has done something, and the messages of the end of each model."""
        before: list[TenantState] = []

        def record() -> None:
            nonlocal before
            if (now := tenant_states(service)) != before:
                before = now
                observer.tenants()

        try:
            while True:
                await asyncio.sleep(METRICS_SECONDS)
                record()
        finally:
            # What was done since.
            record()

    async def _stop_soon(self) -> str:
        """Stops as at the first Ctrl-C, for who cannot send this process a signal. Raises MegasyncError before that."""
        if not self.request_stop("requested from outside"):
            raise MegasyncError("the service is still starting")
        return "stopping"


async def _watch(fleet: Fleet) -> None:
    """Lets servers serve that were started again. Raises ServerError when too few are left."""
    while True:
        await fleet.watch()
        if joiners := fleet.joiners():
            await fleet.joined([control.url for control in joiners])
        await asyncio.sleep(WATCH_SECONDS)


async def _finish(service: Service, seconds: float) -> None:
    """Waits until what was accepted is answered, at most so long: the rest is done when the service is resumed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while any(each.pending for each in service.status().tenants.values()):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(FINISH_SECONDS)


class _ReportedRanks(Ranks):
    """Ranks whose loss is a fault of the run."""

    def __init__(self, group: TrainerGroup, config: Config, served: ServedModel, observer: RunObserver) -> None:
        super().__init__(group, config, served)
        self._observer = observer

    async def restart(self) -> None:
        self._observer.fault(RANKS, "the trainer ranks have lost the models' states and are started again")
        await super().restart()
        self._observer.recovery(RANKS, "the trainer ranks were started again; models come back with their next request")


def limits_of(serve: ServeConfig) -> Limits:
    return Limits(
        models=serve.models,
        adapters=serve.adapters,
        disk=int(serve.disk_gb * 10**9),
        request=serve.request_mb * 2**20,
        tokens=serve.tokens_in_flight,
        pending=serve.promises,
        kept=2 * serve.promises,
        heartbeat_seconds=serve.heartbeat_seconds,
    )


def tenant_states(service: Service) -> list[TenantState]:
    """The tenants as the page and the metrics show them."""
    return [tenant_state(name, tenant) for name, tenant in service.status().tenants.items()]


def tenant_state(name: str, tenant: TenantStatus) -> TenantState:
    return TenantState(
        name=name,
        sessions=tenant.sessions,
        models=[
            ModelState(
                name=model.id,
                rank=model.rank,
                steps=model.steps,
                loss=model.loss,
                waiting=model.queued,
                waited=round(model.waited, 1),
            )
            for model in tenant.models
        ],
        steps=tenant.steps,
        tokens=tenant.tokens,
        rate=round(tenant.tokens_per_second, 1),
        promises=tenant.pending,
        tokens_in_flight=tenant.pending_tokens,
        samplers=tenant.snapshots,
        checkpoints=tenant.checkpoints,
        disk_bytes=tenant.disk,
    )


class LocalService:
    """A training service in this process, without an endpoint; `async with` gives its `Service`.

        async with megasync.Service("configs/serve_quickstart.yaml") as service:
            session = await service.create_session("me")
            promise = await service.submit("me", CreateModel(session, 0, "models/digits", AdapterSpec(8, seed=0)))
            outcome = await service.outcome("me", promise, seconds=60)

    Requests and outcomes are those of `megasync.service.requests`, tenants are any names. With ``run_dir`` it continues
    with what that directory of an earlier service holds. Downloads models that are given by name. Raises ConfigError
    and DataError before anything starts.
    """

    def __init__(
        self, config: Config | str | Path, overrides: Sequence[str] = (), *, run_dir: str | Path | None = None
    ) -> None:
        self.config = resolve_names(config if isinstance(config, Config) else load_config(config, overrides))
        self.run_dir = None if run_dir is None else Path(run_dir)
        if self.run_dir is not None and (self.run_dir / CONFIG_FILE).exists():
            check_changes(load_config(self.run_dir / CONFIG_FILE), with_names(self.config), 0)
        check_service(self.config)
        _check(self.config)

    async def __aenter__(self) -> Service:
        self.run_dir = self.run_dir or new_run_dir(self.config)
        self._run = ServedRun(self.config, self.run_dir)
        started: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run.execute(started.set_result), name="service")
        await asyncio.wait([self._task, started], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self._task
        return started.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.request_stop("the block of `async with` ended")
        await self._task
