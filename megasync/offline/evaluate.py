"""Evaluates a checkpoint on the held-out sets of a configuration. Starts servers, no trainer.

The parts are those of a run (`servers`, `workload`). The weights come from a folder, so a restarted server serves at
once.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console

from megasync.app.rollout_worker import answers_of
from megasync.app.run_directory import run_stoppable
from megasync.app.servers import InferenceServers, open_task, reserve_pools
from megasync.app.workload import Task, prepare_task
from megasync.concurrency.event_loop import run_to_end
from megasync.concurrency.tasks import wait_for_first
from megasync.config import CONFIG_FILE, CUSTOM_FILE, Config, custom_of, load_config, save_config
from megasync.config.access import describe_sessions
from megasync.config.builtin import EXTERNAL
from megasync.config.pools import pool_specs
from megasync.config.schema import SyncConfig, TrainerConfig
from megasync.device import check_machine, resolve_device
from megasync.errors import CheckpointError, ConfigError, raised_as
from megasync.evaluation.evaluate import HeldOutScores, evaluate
from megasync.models.hub import local_folder, resolve_names
from megasync.observe.context import RunContext
from megasync.observe.logfile import log_to_file
from megasync.observe.names import UNNAMED_SET
from megasync.offline.report import EvaluationProgress, write_scores
from megasync.preflight.check import check_config

# Seconds between two checks of the servers.
WATCH_SECONDS = 1.0
# Below the output folder: a training checkpoint as a Hugging Face folder, while the servers run.
EXPORT_FOLDER = "model"


def load_target(target: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a YAML file or of a run directory, without its trainer.

    Raises ConfigError, also for a run whose reward, rollout function or held-out rows came from Python.
    """
    if not target.is_dir():
        config = load_config(target, overrides)
    elif not (target / CONFIG_FILE).is_file():
        raise ConfigError(f"{target} is neither a configuration file nor a run directory: it has no {CONFIG_FILE}")
    else:
        config = load_config(target / CONFIG_FILE, overrides)
        passed = custom_of(target) if (target / CUSTOM_FILE).is_file() else []
        if missing := [name for name in passed if name != "train_dataset"]:
            raise ConfigError(
                f"{target} was started from Python with its own {', '.join(missing)}, which `megasync eval` lacks; "
                f"name them in a configuration (rollout.reward, rollout.workflow, eval.sets) and evaluate it with "
                f"--model"
            )
    # There is no trainer to sync with. Servers have the merged model, beside which no other adapter makes sense.
    config.trainer, config.sync = TrainerConfig(), SyncConfig()
    config.eval.sets = {name: held_out for name, held_out in config.eval.sets.items() if held_out.adapter is None}
    return config


@contextmanager
def output_folder(target: Path, config: Config, out: Path | None) -> Iterator[Path]:
    """Creates the output folder: `out`, or a new one in the run directory or below run_root. Removes it if still empty.

    Raises ConfigError when the folder is not empty, or cannot be created.
    """
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = out or (
        target / f"eval-{stamp}" if target.is_dir() else Path(config.run_root) / f"{config.name}-eval-{stamp}"
    )
    with raised_as(ConfigError, f"the output folder {folder} cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name another folder with --out")
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def model_folder(
    target: Path, config: Config, out: Path, model: Path | None, checkpoint: Path | None
) -> Iterator[tuple[Path, str]]:
    """The Hugging Face folder to serve, and a name for it.

    That is `model`, else the training checkpoint (by default a run's newest), exported below `out` and removed at the
    end, else the configuration's model. Raises CheckpointError for an unreadable checkpoint.
    """
    if model is None and checkpoint is None and not target.is_dir():
        model = Path(config.model.path)
    if model is not None:
        yield model, str(model)
        return
    from megasync.offline.merge import export_model
    from megasync.trainer.checkpoint import latest

    checkpoint = checkpoint or latest(target)
    if checkpoint is None:
        raise CheckpointError(f"{target} has no complete checkpoint yet; name a Hugging Face folder with --model")
    folder = out / EXPORT_FOLDER
    try:
        export_model(checkpoint, local_folder(config.model.path, "model.path"), folder)
        yield folder, str(checkpoint)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_evaluation(
    config: Config, out: Path, served: Path, name: str, only: Collection[str], console: Console
) -> list[HeldOutScores]:
    """Starts servers of the folder `served`, evaluates, and shuts them down. `only` names the sets; empty means all.

    Raises ConfigError or DataError before any process starts, KeyboardInterrupt after Ctrl-C once all have ended.
    """
    config.model.path = str(served)
    _drop_unused_rewards(config, only)
    config.teachers = {}
    check_config(resolve_names(config), training=False)
    if config.cluster.address is None:
        check_machine(config.cluster.device, trains=False)
    # They hold the weights of a run.
    config.rollout.external = []
    task = prepare_task(config, only)
    save_config(config, out / CONFIG_FILE)
    with closing(log_to_file(out / "logs" / "evaluation.log")):
        return run_to_end(run_stoppable(_evaluate(config, out, name, task, console), out, config))


def _drop_unused_rewards(config: Config, only: Collection[str]) -> None:
    """Starts no reward model when every set has a reward of its own."""
    named = [held_out.reward for name, held_out in config.eval.sets.items() if not only or name in only]
    unnamed = config.data.eval is not None and (not only or UNNAMED_SET in only)
    if named and all(named) and not unnamed:
        config.rollout.rewards, config.reward_models = {}, {}


async def _evaluate(config: Config, out: Path, name: str, task: Task, console: Console) -> list[HeldOutScores]:
    parts = [
        (each.name, temperature, len(each.prompts) * each.repeats_at(temperature))
        for each in task.eval_sets
        for temperature in each.temperatures
    ]
    progress = EvaluationProgress(out, parts, console)
    device = resolve_device(config.cluster.device)
    async with AsyncExitStack() as stack:
        await open_task(stack, config, task)
        progress.message(f"starting {config.rollout.servers} server(s) of {name}")
        pools = await reserve_pools(stack, config, pool_specs(config, training=False), device)
        servers = InferenceServers.build(stack, config, out, device, pools, task, RunContext())
        await servers.start()
        await servers.fleet.joined([control.url for control in servers.fleet.joiners()])
        start = time.monotonic()
        if config.rollout.agent == EXTERNAL:
            progress.message(describe_sessions(out))
        with progress:
            answer = answers_of(servers.workers)
            evaluating = evaluate(answer, task.eval_sets, config.eval.max_inflight, progress.answer)
            evaluation = asyncio.create_task(evaluating, name="evaluation")
            await wait_for_first(evaluation, asyncio.create_task(_watch_servers(servers), name="servers"))
        scores = evaluation.result()
        write_scores(out, name, scores, time.monotonic() - start)
        return scores


async def _watch_servers(servers: InferenceServers) -> None:
    """Lets restarted servers serve: they hold the weights already. Raises when too few servers are left."""
    while True:
        await servers.fleet.watch()
        await servers.frozen_models.watch()
        await servers.workers.watch()
        if joiners := servers.fleet.joiners():
            await servers.fleet.joined([control.url for control in joiners])
        await asyncio.sleep(WATCH_SECONDS)
