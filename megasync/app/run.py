"""One run, whole: builds every part from the configuration, hands them to the controller, and puts them away again.

What is opened is pushed on one exit stack the moment it exists, so any way out (the end, an error, Ctrl-C once or
twice, at any point of the start) closes exactly what was opened, in reverse order. The workload was prepared before, so
whatever can be refused has been refused when the first process starts.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from megasync.app.mailbox import Mailbox
from megasync.app.run_lock import RunLock
from megasync.app.servers import Servers, reserve
from megasync.app.workload import Workload
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.cluster.fleet import Fleet
from megasync.cluster.remote_buffer import RemoteBuffer
from megasync.cluster.roles import check_capabilities
from megasync.cluster.trainer_group import TrainerGroup
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config, remember
from megasync.config.pools import pool_specs
from megasync.control.controller import Controller
from megasync.control.interfaces import ControlledParts
from megasync.control.progress import Progress
from megasync.control.recovery import FAILED_STEPS_FOLDER
from megasync.control.restore import restore
from megasync.device import Device, resolve_device
from megasync.errors import ServerParityError
from megasync.evaluation.evaluate import PeriodicEvaluation
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.shards import export_checkpoint
from megasync.layout.topology import Topology
from megasync.observe.awaits import describe_tasks
from megasync.observe.logfile import log_to_file
from megasync.observe.observer import RunObserver
from megasync.observe.result import RunResult
from megasync.rollout.client import RolloutClient
from megasync.rollout.inflight import InflightCap
from megasync.rollout.rollouter import FailurePolicy, GroupSpec, Rollouter, ServerLimits
from megasync.rollout.selection import Selection
from megasync.serving.control import ServerControl
from megasync.sync.choose import choose_sync
from megasync.sync.publisher import VersionPublisher
from megasync.trainer.checkpoint import latest

log = logging.getLogger(__name__)

# Prompts whose log-probs trainer and servers must agree on after a sync.
PARITY_PROBES = 4
EXPORT_FOLDER = "export"


class Run:
    def __init__(self, config: Config, run_dir: Path, workload: Workload, checkpoint: Path | None = None) -> None:
        self.config = config
        self.run_dir = run_dir
        self._workload = workload
        self._checkpoint = checkpoint
        self._mailbox = Mailbox(run_dir)
        self._controller: Controller | None = None

    def request_stop(self, reason: str) -> bool:
        """Asks for a clean end. False when the run is not far enough for one: then it can only be left."""
        if self._controller is None:
            return False
        self._controller.request_stop(reason)
        return True

    async def execute(self) -> RunResult:
        with RunLock(self.run_dir):
            return await self._execute()

    async def dump(self) -> None:
        """Writes to the log what each part of the run waits for."""
        parts = describe_tasks() if self._controller is None else await self._controller.dump()
        log.warning("asked for by a signal, the run stands so:\n%s", parts)

    async def _execute(self) -> RunResult:
        handler = log_to_file(self.run_dir / "logs" / "controller.log")
        try:
            check_capabilities()
            self._mailbox.open()
            with RunObserver(self.config, self.run_dir) as observer:
                async with AsyncExitStack() as stack:
                    self._controller = await self._build(stack, observer)
                    progress = await self._controller.run()
                    observer.message("putting servers and ranks away")
                export_dir = await asyncio.to_thread(self._export, observer)
            return RunResult(
                run_dir=self.run_dir,
                step=progress.step,
                version=progress.version,
                scores=list(progress.history),
                export_dir=export_dir,
                stopped=self._controller.stop_reason,
            )
        finally:
            handler.close()

    async def _build(self, stack: AsyncExitStack, observer: RunObserver) -> Controller:
        """Starts every process of the run, both pools at the same time, and wires the controller."""
        device = resolve_device(self.config.cluster.device)
        # The ranks are told what was found here, on a machine that may be another kind than theirs.
        config = replace(self.config, cluster=replace(self.config.cluster, device=device.kind))
        schedule, workload = config.schedule, self._workload
        ledger = self.run_dir / LEDGER_FILE
        progress = await asyncio.to_thread(
            restore, self._checkpoint, ledger, schedule, workload.source, observer.message
        )
        stack.push_async_callback(workload.close)
        await workload.open()
        observer.message("starting Ray, trainer ranks and servers")
        pools = await reserve(stack, config, pool_specs(config), device)
        servers = Servers.of(stack, config, self.run_dir, device, pools, workload)
        fleet = servers.fleet
        ranks = TrainerGroup(config, self.run_dir, pools)
        stack.push_async_callback(ranks.stop)
        total_groups = schedule.total_steps * schedule.groups_per_step
        buffer = RemoteBuffer(schedule, total_groups, ledger=ledger)
        stack.callback(buffer.kill)
        await gather_or_cancel(ranks.start(self._checkpoint), servers.start())

        controls = fleet.joiners()
        client = servers.client(stack, config, workload, controls)
        client.newest_version = fleet.newest_version = lambda: progress.claimed
        client.published_version = lambda: progress.version
        seed = config.seed if config.rollout.deterministic else None
        publisher = await self._publisher(stack, device, ranks, controls, client, observer)
        fleet.follow(publisher.add, publisher.remove, known=controls)
        pressure = config.rollout.kv_pressure
        selection = Selection(config.rollout.groups, schedule.samples_per_group, config.rollout.sampling.max_new_tokens)
        rollouter = Rollouter(
            client,
            workload.source,
            buffer,
            GroupSpec(workload.workflow, workload.rewards, selection, seed),
            schedule,
            failures=FailurePolicy(config.rollout.max_attempts, config.rollout.max_drop_share),
            servers=ServerLimits(
                fleet, None if pressure is None else InflightCap(len(controls), pressure), servers.quarantine
            ),
            save_seconds=config.rollout.save_partials_seconds,
        )
        held_out = PeriodicEvaluation(
            client,
            workload.eval_sets,
            workload.workflow,
            config.eval.max_inflight,
            observer.answers,
            config.observe.samples,
            seed,
        )
        try:
            await self._first_weights(publisher, progress, observer)
        except ServerParityError as found:
            observer.message(f"starting servers again that alone disagree with the trainer: {found}")
            await fleet.disagreed(found.reasons)
        await buffer.publish(progress.version)
        await fleet.joined([control.url for control in fleet.joiners() if control in controls])
        await stack.enter_async_context(self._mailbox.answering({"scale": partial(self._scale, fleet)}))
        parts = ControlledParts(
            trainer=ranks,
            publisher=publisher,
            buffer=buffer,
            rollouter=rollouter,
            fleet=fleet,
            reward_models=servers.reward_models,
            evaluate=held_out if workload.eval_sets else None,
            cursor=workload.source.state,
            observer=observer,
        )
        return Controller(config, parts, progress, self.run_dir / FAILED_STEPS_FOLDER)

    async def _scale(self, fleet: Fleet, servers: int) -> str:
        """Also for a run that is resumed later."""
        done = await fleet.resize(servers)
        try:
            remember(self.run_dir, "rollout.servers", servers)
        except OSError as error:
            return f"{done}; it could not be written down for a resumed run: {error}"
        return done

    async def _publisher(
        self,
        stack: AsyncExitStack,
        device: Device,
        ranks: TrainerGroup,
        controls: list[ServerControl],
        client: RolloutClient,
        observer: RunObserver,
    ) -> VersionPublisher:
        config = self.config
        layout = Layout(read_hf_config(config.model.path), Topology.from_config(config.trainer), device.spec)
        sync, why = await choose_sync(config, self.run_dir, layout, ranks, controls, device)
        stack.push_async_callback(sync.close)
        observer.message(why)
        return VersionPublisher(
            sync,
            config=config.sync,
            dtype=config.model.dtype,
            probes=self._workload.probes(PARITY_PROBES),
            servers=controls,
            trainer_logprobs=ranks.logprobs,
            server_logprobs=client.score,
        )

    async def _first_weights(self, publisher: VersionPublisher, progress: Progress, observer: RunObserver) -> None:
        """Trainer and servers agree before the first prompt: same folder (a new run), or a publish (a resumed one)."""
        if self._checkpoint is None and progress.version == 0:
            await publisher.check_parity(progress.version)
            return
        observer.message(f"resuming after step {progress.step} from {self._checkpoint or 'the start'}")
        await publisher.publish(progress.version)

    def _export(self, observer: RunObserver) -> Path | None:
        """Writes the newest checkpoint as a Hugging Face folder."""
        newest = latest(self.run_dir)
        if not self.config.checkpoint.export or newest is None:
            return None
        out = self.run_dir / EXPORT_FOLDER
        if out.exists():
            # Of this run before it was resumed: derived from an older checkpoint, so nothing is lost with it.
            shutil.rmtree(out)
        export_checkpoint(newest, Path(self.config.model.path), out)
        observer.message(f"Hugging Face checkpoint: {out}")
        return out
