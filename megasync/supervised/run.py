"""The run of `megasync sft`: rows, their order, validation, checkpoints, restarts of lost ranks.

Ranks, checkpoints, display and run directory are those of `megasync train`; there are no servers and no buffer. A lost
rank takes the run back to its newest checkpoint. The order of the rows depends on the seed and the epoch alone, so a
resumed run trains the same steps.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megasync.app.mailbox import answer_with_report
from megasync.app.run_directory import AnyRun, OpenedRun, finished_run, new_run_dir, run_stoppable
from megasync.app.run_lock import refuse_running
from megasync.app.servers import reserve_pools
from megasync.app.workload import stop_ids
from megasync.base.files import atomic_write, read_object
from megasync.concurrency.event_loop import run_to_end
from megasync.concurrency.foreign import invoke
from megasync.concurrency.tasks import wait_for_first
from megasync.config import CONFIG_FILE, ROWS_FILE, Config, load_config
from megasync.config.changes import check_changes
from megasync.config.commands import supervised_config
from megasync.config.pools import trainer_pool
from megasync.config.rules import check_rules
from megasync.control.recovery import named_loss
from megasync.control.saving import Checkpoints
from megasync.data.datasets import load_conversations
from megasync.data.tokenizer import load_tokenizer
from megasync.device import check_machine, resolve_device
from megasync.errors import CheckpointError, ConfigError, RankLost, TrainingError, raised_as
from megasync.layout.model_files import read_hf_config
from megasync.models.hub import resolve_names, with_names
from megasync.observe.context import RunContext
from megasync.observe.observer import RunObserver, RunParts
from megasync.observe.result import RunResult
from megasync.preflight.check import check_supervised
from megasync.supervised.ranks import SupervisedGroup
from megasync.supervised.row_file import write_rows
from megasync.supervised.rows import SupervisedRenderer, TokenRow
from megasync.trainer.checkpoint import check_readable, latest, step_of

# The rows that ranks read, in the run directory.
TRAIN_FILE, VALIDATION_FILE = "sft-train.safetensors", "sft-validation.safetensors"


@dataclass(frozen=True)
class SupervisedRows:
    """Training and held-out rows, and the steps of an epoch."""

    train: list[TokenRow]
    validation: list[TokenRow]
    rows_per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.rows_per_step)

    def of_step(self, step: int) -> NDArray[np.int64]:
        """The numbers of the rows of a step; steps count from 0 here."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.train))
        return order[place * self.rows_per_step : (place + 1) * self.rows_per_step]

    def write(self, run_dir: Path) -> None:
        """Writes the files that ranks read. Raises TrainingError."""
        for name, rows in ((TRAIN_FILE, self.train), (VALIDATION_FILE, self.validation)):
            with raised_as(TrainingError, f"{run_dir / name} cannot be written", "make room and resume"):
                if rows:
                    write_rows(run_dir / name, rows)

    def described(self) -> dict[str, object]:
        """The description of the rows that a resumed run compares."""
        digest = hashlib.sha256()
        for row in self.train:
            digest.update(row.ids.tobytes() + row.trained.tobytes())
        return {"rows": len(self.train), "rows_per_step": self.rows_per_step, "digest": digest.hexdigest()}


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def prepare_rows(config: Config) -> tuple[SupervisedRows, list[str]]:
    """Reads and renders the rows; also messages for the user. Raises DataError."""
    tokenizer = load_tokenizer(config.model.path)
    model, sft = read_hf_config(config.model.path), config.sft
    limit = sft.max_tokens or model["max_position_embeddings"]
    stops = stop_ids(config.model.path, tokenizer)
    renderer = SupervisedRenderer(tokenizer, sft, config.data.prompt, model["vocab_size"], stops, limit)
    rows: dict[str, list[TokenRow]] = {"train": [], "validation": []}
    messages = []
    if (end := renderer.added_stop) is not None:
        messages.append(
            f"the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end)!r}, which is not in "
            f"eos_token_id of {config.model.path}: it is trained, and megasync train stops at it; for other servers, "
            f"add {end} to eos_token_id in generation_config.json"
        )
    for name, dataset in (("train", sft.train), ("validation", sft.validation)):
        if dataset is None:
            continue
        rows[name], long = renderer.rows(load_conversations(dataset, config.data), f"sft.{name}")
        trained = sum(int(row.trained.sum()) for row in rows[name])
        left_out = f"; {long} longer than sft.max_tokens={limit} are left out" if long else ""
        messages.append(f"sft.{name}: {len(rows[name])} rows with {trained} trained tokens{left_out}")
    return SupervisedRows(rows["train"], rows["validation"], sft.rows_per_step, config.seed), messages


def train_supervised(config: Config) -> RunResult:
    """Runs to the end, in a new run directory. Ctrl-C once finishes the step, saves and ends; twice ends immediately.

    Raises ConfigError and DataError before anything starts; another MegasyncError for what ended the run.
    """
    return run_to_end(_begin(config, None))


def resume_supervised(run_dir: Path, overrides: Sequence[str] = ()) -> RunResult:
    """Goes on from the newest checkpoint of a supervised run, or from its start.

    Raises as `train_supervised`, and ConfigError if the rows are not those of the run or another process drives it.
    """
    config = resolve_names(load_config(run_dir / CONFIG_FILE, overrides))
    refuse_running(run_dir)
    newest = latest(run_dir)
    before = load_config(run_dir / CONFIG_FILE)
    check_changes(before, with_names(config), 0 if newest is None else step_of(newest))
    return finished_run(run_dir, config) or run_to_end(_begin(config, run_dir))


def prepare_supervised(config: Config) -> tuple[Config, SupervisedRows, list[str]]:
    """The configuration of the ranks, the rows, and messages for the user. ``config`` passed `check_supervised`.

    Raises ConfigError and DataError for what a run cannot begin with.
    """
    rows, messages = prepare_rows(config)
    steps = config.sft.epochs * rows.steps_per_epoch
    config = supervised_config(replace(config, schedule=replace(config.schedule, total_steps=steps)))
    check_rules(config, within=("schedule.total_steps",))
    return config, rows, messages


async def _begin(config: Config, run_dir: Path | None) -> RunResult:
    check_supervised(config)
    if config.cluster.address is None:
        check_machine(config.cluster.device, trains=True)
    config, rows, messages = await asyncio.to_thread(invoke, prepare_supervised, config)
    described = rows.described()
    if run_dir is None:
        run_dir = new_run_dir(config)
        await asyncio.to_thread(atomic_write, run_dir / ROWS_FILE, json.dumps(described))
    else:
        _check_rows(run_dir / ROWS_FILE, described)
        if (newest := latest(run_dir)) is not None:
            await asyncio.to_thread(check_readable, newest)
    run = SupervisedRun(config, run_dir, rows, messages)
    return await run_stoppable(run.execute(), run_dir, config, run)


def _check_rows(file: Path, described: dict[str, object]) -> None:
    with raised_as(CheckpointError, "the run cannot be resumed", "start it again", of=ValueError):
        before = read_object(file)
    if before != described:
        raise ConfigError(
            f"the rows of sft.train are not those that the run was started with ({described['rows']} rows and "
            f"{before.get('rows')} before, sft.rows_per_step={described['rows_per_step']} and "
            f"{before.get('rows_per_step')} before); put them back, or start a new run from this run's export"
        )


class SupervisedRun(AnyRun):
    """A supervised run in `run_dir`, new or resumed. `messages` are shown when it starts."""

    def __init__(self, config: Config, run_dir: Path, rows: SupervisedRows, messages: Sequence[str] = ()) -> None:
        super().__init__(config, run_dir)
        self._rows = rows
        self._notes = messages
        self._checkpoint = latest(run_dir)
        self._step = 0 if self._checkpoint is None else step_of(self._checkpoint)
        self._losses: list[tuple[int, float]] = []
        self._stop = asyncio.Event()
        self._reason = ""
        self._started = False

    def request_stop(self, reason: str) -> bool:
        if self._started and self._opened is not None and not self._stop.is_set():
            self._reason = reason
            self._opened.observer.message(f"stopping: {reason}")
            self._stop.set()
        return self._started

    async def describe(self) -> str:
        return f"step {self._step}"

    async def execute(self) -> RunResult:
        with self._open(traced_processes=1) as opened:
            observer = opened.observer
            answers = opened.mailbox.answering({"stacks": partial(answer_with_report, opened.reports)})
            # A resumed run writes them again: the held-out rows may be others.
            await asyncio.to_thread(self._rows.write, self.run_dir)
            for note in self._notes:
                observer.message(note)
            async with observer.writing_state(), answers, AsyncExitStack() as stack:
                trainer = await self._start(stack, opened)
                export = partial(self._export_step, observer)
                checkpoints = Checkpoints(self.config.checkpoint, trainer, observer, self._step, export)
                self._started = True
                try:
                    with observer.running():
                        await self._train(trainer, checkpoints, observer)
                    # A stop that is requested later, during an export, has nothing left to stop.
                    self._stop.set()
                    observer.stopped, observer.finished = self._reason, not self._reason
                finally:
                    await checkpoints.exported()
                observer.message("shutting down trainer ranks")
            export_dir = await self._export_newest(observer)
        return RunResult(
            run_dir=self.run_dir,
            step=self._step,
            losses=self._losses,
            export_dir=export_dir,
            stopped=observer.stopped,
            finished=observer.finished,
        )

    async def _start(self, stack: AsyncExitStack, opened: OpenedRun) -> SupervisedGroup:
        device = resolve_device(self.config.cluster.device)
        config = replace(self.config, cluster=replace(self.config.cluster, device=device.kind))
        opened.observer.message("starting Ray and trainer ranks")
        pools = await reserve_pools(stack, config, {"trainer": trainer_pool(config)}, device)
        context = RunContext(events=opened.observer, reports=opened.reports)
        trainer = SupervisedGroup(config, self.run_dir, pools, context)
        stack.push_async_callback(trainer.stop)
        opened.reports.cover(pools.stacks, trainer.processes)
        opened.observer.show(RunParts(ranks=trainer.states))
        await trainer.start(self._checkpoint)
        return trainer

    async def _train(self, trainer: SupervisedGroup, checkpoints: Checkpoints, observer: RunObserver) -> None:
        """Trains until the run is over. A lost rank takes it back to the newest checkpoint."""
        limit, furthest, restarts = self.config.trainer.max_restarts, self._step, 0
        lost = ""
        while True:
            try:
                if lost:
                    what, lost = lost, ""
                    await self._restart(trainer, checkpoints, observer)
                    observer.recovery(what, f"the ranks were restarted, training resumes after step {self._step}")
                return await self._steps(trainer, checkpoints, observer)
            except RankLost as error:
                lost = named_loss(error)
                observer.fault(lost, str(error), interrupted=self._step + 1)
                if self._step > furthest:
                    furthest, restarts = self._step, 0
                if restarts >= limit:
                    raise TrainingError(
                        f"{error}; the ranks were restarted {restarts} times in a row without a new step "
                        f"(trainer.max_restarts={limit})"
                    ) from error
                restarts += 1
                observer.message(f"restarting the trainer ranks, attempt {restarts} of {limit}: {error}")

    async def _restart(self, trainer: SupervisedGroup, checkpoints: Checkpoints, observer: RunObserver) -> None:
        observer.activity("trainer", "restarting")
        state = await trainer.restart()
        self._step = 0 if state is None else state["step"]
        checkpoints.returned(self._step)
        self._losses = [(step, loss) for step, loss in self._losses if step <= self._step]
        observer.rewind(self._step)
        observer.message(f"training goes on after step {self._step}")

    async def _steps(self, trainer: SupervisedGroup, checkpoints: Checkpoints, observer: RunObserver) -> None:
        sft, total = self.config.sft, self.config.schedule.total_steps
        if not self._losses:
            await self._validate(trainer, checkpoints, observer)
        while self._step < total and not self._stop.is_set():
            observer.activity("trainer", "training")
            metrics = await trainer.fit(TRAIN_FILE, self._rows.of_step(self._step), self._step + 1)
            self._step += 1
            observer.step(self._step, 0, metrics)
            if self._step in self.config.observe.profile_steps:
                observer.message(f"torch profiles of step {self._step} are in profile/ of the run directory")
            every = sft.validate_every_steps
            if every and self._step % every == 0 and self._step != total:
                await self._validate(trainer, checkpoints, observer)
            await checkpoints.finish(wait=False)
            saves = self.config.checkpoint.every_steps
            if saves and self._step % saves == 0:
                await self._save(checkpoints, observer)
        # First what must not be lost: a stop ends the validation.
        if self._step not in (checkpoints.saved, checkpoints.begun):
            await self._save(checkpoints, observer)
        if self._losses and self._losses[-1][0] != self._step:
            await self._validate(trainer, checkpoints, observer)
        await checkpoints.finish(wait=True)

    async def _validate(self, trainer: SupervisedGroup, checkpoints: Checkpoints, observer: RunObserver) -> None:
        """Computes the loss of the held-out rows. A stop does not wait for it, unless the ranks must save after it."""
        if not self._rows.validation or self._stop.is_set():
            return
        observer.activity("trainer", "computing the validation loss")
        computing = asyncio.create_task(trainer.loss(VALIDATION_FILE), name="validation")
        if checkpoints.saved == self._step and checkpoints.begun is None:
            await wait_for_first(computing, asyncio.create_task(self._stop.wait(), name="stop"))
        else:
            await computing
        if computing.cancelled():
            return
        loss = computing.result()
        self._losses.append((self._step, loss))
        observer.validation(self._step, loss)

    async def _save(self, checkpoints: Checkpoints, observer: RunObserver) -> None:
        await checkpoints.finish(wait=True)
        observer.activity("trainer", "saving a checkpoint")
        await checkpoints.begin(self._step, {"step": self._step})
