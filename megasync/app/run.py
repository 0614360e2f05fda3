"""One run: builds every part from the configuration, hands them to the controller, and shuts them down.

Whatever is opened is pushed on one exit stack immediately, so every way out (the end, an error, Ctrl-C once or twice,
at any point of the start) closes exactly what was opened, in reverse order. The workload is prepared before, so
whatever can be refused is refused before the first process starts.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megasync.app.mailbox import answer_with_report
from megasync.app.rollout_worker import answers_of
from megasync.app.run_directory import AnyRun, OpenedRun
from megasync.app.servers import InferenceServers, open_task, reserve_pools
from megasync.app.workload import PythonArguments, Workload
from megasync.buffer import AsyncBuffer
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.cluster.fleet import Fleet
from megasync.cluster.trainer_group import TrainerGroup
from megasync.concurrency.garbage import short_collections
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import describe_sessions
from megasync.config.builtin import EXTERNAL
from megasync.config.pools import pool_specs
from megasync.control.controller import Controller
from megasync.control.interfaces import ControlledParts
from megasync.control.progress import Progress
from megasync.control.recovery import FAILED_STEPS_FOLDER
from megasync.control.restore import restore
from megasync.device import Device, resolve_device
from megasync.errors import MegasyncError, ServerParityError
from megasync.evaluation.periodic import PeriodicEvaluation
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.quantized import VALUES_DTYPE
from megasync.layout.shards import served_in_fp8
from megasync.layout.topology import Topology
from megasync.observe.context import RunContext
from megasync.observe.observer import RunObserver
from megasync.observe.result import RunResult
from megasync.rollout.client import RolloutClient
from megasync.rollout.inflight import InflightCap
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.serving.control import ServerControl
from megasync.sync.choose import choose_sync
from megasync.sync.disk.adapters import AdapterSync
from megasync.sync.publisher import VersionPublisher

# Prompts on whose log-probs trainer and servers must agree after a sync.
PARITY_PROBES = 4


@dataclass(frozen=True, slots=True)
class StartedRun:
    """Every process of a run, and what compares the servers' log-probs.

    `controls` are the servers that the run started with.
    """

    trainer: TrainerGroup
    servers: InferenceServers
    buffer: AsyncBuffer
    controls: list[ServerControl]
    scorer: RolloutClient


class Run(AnyRun):
    """A run in `run_dir`, new or resumed. `checkpoint` is the one that it resumes from, if any.

    `custom` is what the workload got from Python.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        workload: Workload,
        checkpoint: Path | None = None,
        custom: PythonArguments | None = None,
    ) -> None:
        super().__init__(config, run_dir)
        self._workload = workload
        self._custom = custom or PythonArguments()
        self._checkpoint = checkpoint
        self._controller: Controller | None = None

    def request_stop(self, reason: str) -> bool:
        if self._controller is None:
            return False
        self._controller.request_stop(reason)
        return True

    async def describe(self) -> str:
        return "it is starting" if self._controller is None else await self._controller.describe()

    async def execute(self) -> RunResult:
        with self._open(traced_processes=1 + self.config.rollout.workers) as opened:
            observer = opened.observer
            async with short_collections(), observer.writing_state(), AsyncExitStack() as stack:
                controller = self._controller = await self._build(stack, opened)
                with observer.running():
                    progress = await controller.run()
                observer.stopped, observer.finished = controller.stop_reason, controller.finished
                observer.message("shutting down servers and trainer ranks")
            export_dir = await self._export_newest(observer)
        return RunResult(
            run_dir=self.run_dir,
            step=progress.step,
            version=progress.version,
            scores=list(progress.history),
            export_dir=export_dir,
            # As it ended: a stop that is requested during the export has nothing left to stop.
            stopped=observer.stopped,
            finished=observer.finished,
        )

    async def _build(self, stack: AsyncExitStack, opened: OpenedRun) -> Controller:
        """Restores progress, starts every process, publishes the weights, and wires the controller."""
        observer = opened.observer
        device = resolve_device(self.config.cluster.device)
        # The driver resolves the device: the ranks may run on another kind of machine.
        config = replace(self.config, cluster=replace(self.config.cluster, device=device.kind))
        ledger = self.run_dir / LEDGER_FILE
        progress = await asyncio.to_thread(
            restore,
            *(self._checkpoint, ledger, config.schedule, self._workload.source, observer.message),
            self._workload.curriculum,
        )
        context = RunContext(events=observer, reports=opened.reports, newest_version=lambda: progress.claimed)
        started = await self._start_processes(stack, config, device, ledger, opened, context)
        fleet, workers = started.servers.fleet, started.servers.workers
        publisher, held_adapters = await self._build_publisher(stack, device, started, observer)
        evaluation = None
        if self._workload.eval_sets and config.eval.every_steps:
            evaluation = PeriodicEvaluation(
                answers_of(workers),
                self._workload.eval_sets,
                config.eval.max_inflight,
                on_answers=observer.answers,
                shown=config.observe.samples,
            )
        parts = ControlledParts(
            trainer=started.trainer,
            publisher=publisher,
            buffer=started.buffer,
            rollouter=self._build_rollouter(config, started),
            fleet=fleet,
            reservations=fleet.reservations,
            frozen_models=started.servers.frozen_models,
            evaluate=evaluation,
            held_adapters=held_adapters,
            cursor=self._workload.source.state,
            observer=observer,
            rollout_workers=workers,
            export=partial(self._export_step, observer),
        )
        await self._first_weights(publisher, progress, fleet, observer)
        await workers.announce(progress.version, progress.claimed)
        await started.buffer.publish(progress.version)
        await fleet.joined([control.url for control in fleet.joiners() if control in started.controls])
        handlers = {
            "scale": partial(self.scale, fleet),
            "stacks": partial(answer_with_report, opened.reports),
            "stop": self._stop,
        }
        await stack.enter_async_context(opened.mailbox.answering(handlers))
        return Controller(config, context, parts, progress, self.run_dir / FAILED_STEPS_FOLDER)

    async def _start_processes(
        self,
        stack: AsyncExitStack,
        config: Config,
        device: Device,
        ledger: Path,
        opened: OpenedRun,
        context: RunContext,
    ) -> StartedRun:
        """Starts trainer ranks and servers at the same time; where they share devices, first the ranks."""
        workload, schedule = self._workload, config.schedule
        await open_task(stack, config, workload)
        opened.observer.message("starting Ray, trainer ranks and servers")
        pools = await reserve_pools(stack, config, pool_specs(config), device)
        total = schedule.total_steps * schedule.groups_per_step
        open_buffer = partial(AsyncBuffer, schedule, total, ledger=ledger, shared=pools.several_nodes)
        buffer = await asyncio.to_thread(open_buffer)
        stack.push_async_callback(buffer.release)
        places = config, self.run_dir, device, pools
        servers = InferenceServers.build(stack, *places, workload, context, buffer, self._custom)
        trainer = TrainerGroup(config, self.run_dir, pools, context)
        stack.push_async_callback(trainer.stop)
        servers.show(opened, pools, trainer)
        if config.cluster.colocate:
            await trainer.start(self._checkpoint)
            await trainer.offload()
            await servers.start(await trainer.gpus())
        else:
            await gather_or_cancel(trainer.start(self._checkpoint), servers.start())
        if config.rollout.agent == EXTERNAL:
            opened.observer.message(describe_sessions(self.run_dir))
        controls = servers.fleet.joiners()
        return StartedRun(trainer, servers, buffer, controls, servers.scorer(stack, config, workload))

    async def _build_publisher(
        self, stack: AsyncExitStack, device: Device, started: StartedRun, observer: RunObserver
    ) -> tuple[VersionPublisher, AdapterSync | None]:
        config, controls = self.config, started.controls
        layout = Layout(read_hf_config(config.model.path), Topology.from_config(config.trainer), device.spec)
        if config.rollout.fp8:
            layout = served_in_fp8(layout, Path(config.model.path))
        sync, why = await choose_sync(config, self.run_dir, layout, started.trainer, controls, device)
        stack.push_async_callback(sync.close)
        observer.message(why)
        publisher = VersionPublisher(
            sync,
            config=config.sync,
            dtype=VALUES_DTYPE if config.rollout.fp8 else config.model.dtype,
            probes=self._workload.probes(PARITY_PROBES),
            servers=controls,
            trainer_logprobs=started.trainer.logprobs,
            server_logprobs=started.scorer.score,
            engine_logprobs=started.scorer.engine_scores,
        )
        started.servers.fleet.follow(publisher.add, publisher.remove, known=controls)
        return publisher, sync if isinstance(sync, AdapterSync) else None

    def _build_rollouter(self, config: Config, started: StartedRun) -> Rollouter:
        rollout, schedule, servers = config.rollout, config.schedule, started.servers
        pressure = rollout.kv_pressure
        cap = None if pressure is None else InflightCap(len(started.controls), pressure)
        rollouter = Rollouter(
            self._workload.source,
            started.buffer,
            schedule,
            max_drop_share=rollout.max_drop_share,
            servers=ServerLimits(servers.fleet, cap, servers.quarantine),
            curriculum=self._workload.curriculum,
            placement=servers.workers.placement,
        )
        servers.workers.follow(rollouter.add, rollouter.remove)
        return rollouter

    async def _first_weights(
        self, publisher: VersionPublisher, progress: Progress, fleet: Fleet, observer: RunObserver
    ) -> None:
        """Makes trainer and servers agree before the first prompt.

        In a new run both loaded the same folder; in a resumed one, and to external servers, the weights are published.
        """
        try:
            if self._checkpoint is not None or progress.version:
                observer.message(f"resuming after step {progress.step} from {self._checkpoint or 'the start'}")
            elif not self.config.rollout.external:
                await publisher.check_parity(progress.version)
                return
            else:
                # Version 0 is what a server reports that has started again and that no sync has reached.
                progress.published(progress.next_version())
            await publisher.publish(progress.version)
        except ServerParityError as error:
            observer.message(f"restarting servers that alone disagree with the trainer: {error}")
            await fleet.parity_failed(error.reasons)

    async def _stop(self) -> str:
        """Stops as at the first Ctrl-C, for who cannot send this process a signal. Raises MegasyncError before that."""
        if not self.request_stop("requested from outside"):
            raise MegasyncError("the run is still starting and has nothing to save")
        return "stopping after this step"
