"""`AsyncTrainer`: the Python entry point. Takes a configuration and, optionally, the caller's functions and rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megasync.app.resume_file import is_resumable, read_resume_file, write_resume_file
from megasync.app.run import Run
from megasync.app.run_directory import finished_run, new_run_dir, refuse_running_loop, run_stoppable
from megasync.app.run_lock import refuse_running
from megasync.app.workload import PythonArguments, prepare_workload
from megasync.base.terminal import Terminal
from megasync.concurrency.event_loop import run_to_end
from megasync.concurrency.foreign import invoke
from megasync.config import CONFIG_FILE, Config, custom_of, load_config
from megasync.config.changes import check_changes
from megasync.device import check_machine
from megasync.errors import CheckpointError, ConfigError
from megasync.models.hub import resolve_names, with_names
from megasync.observe.result import RunResult, show_result
from megasync.preflight.check import check_config
from megasync.rewards import reward_functions
from megasync.rewards.function import Given
from megasync.serving.external_server import check_external_servers


class AsyncTrainer:
    """Trains asynchronously as the configuration says.

    `reward` has the signature `f(completions, **columns) -> list[float | None]` or another of `rewards.function`, or
    is a list of such functions, with or without weights, or a dictionary from functions to weights; `rollout` is `async
    def rollout(client, sample) -> Trajectory | list[Trajectory]`; `agent`, instead of it, is `def agent(base_url,
    api_key, sample, model)`, sync or async. A function may be given by its name, "package.module:function".
    `train_dataset` and `eval_dataset` are sequences of rows, dicts with at least a "prompt" column. Each argument
    replaces what the configuration names.

    Downloads models that are given by name. Raises ConfigError for a configuration that contradicts itself, its model
    or an argument.
    """

    def __init__(
        self,
        config: Config | str | Path,
        overrides: Sequence[str] = (),
        *,
        reward: Given | None = None,
        rollout: Callable | str | None = None,
        agent: Callable | str | None = None,
        train_dataset: Sequence[dict] | None = None,
        eval_dataset: Sequence[dict] | None = None,
    ) -> None:
        self.config = resolve_names(config if isinstance(config, Config) else load_config(config, overrides))
        if rollout is not None and agent is not None:
            raise ConfigError("rollout= and agent= exclude each other; pass one of them")
        rewards = None if reward is None else reward_functions(reward)
        self._custom = PythonArguments(rewards, rollout, agent, train_dataset, eval_dataset)
        self._run_dir: Path | None = None
        self._checkpoint: Path | None = None
        # The run directory is written to it when the run starts.
        self._resume_file: Path | None = None
        check_config(
            self.config,
            own_rows=train_dataset is not None,
            own_eval_rows=eval_dataset is not None,
            own_agent=agent is not None,
        )
        if self.config.cluster.address is None:
            check_machine(self.config.cluster.device, trains=True)

    @classmethod
    def resume(cls, run_dir: str | Path, overrides: Sequence[str] = (), **custom: Any) -> AsyncTrainer:
        """Resumes a run from its newest complete checkpoint, or from its start, in the same run directory.

        Keyword arguments are those of the constructor; what the first start got from Python must be passed again.
        Raises ConfigError if it is not, for an override that a run cannot change (`config.changes`), for a folder that
        is not a run directory, and for a run that another process drives; CheckpointError if there is nothing to resume
        from.
        """
        run_dir = Path(run_dir)
        if not (run_dir / CONFIG_FILE).is_file():
            raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
        refuse_running(run_dir)
        if not is_resumable(run_dir):
            raise CheckpointError(
                f"{run_dir} ended before the run began: it has no complete checkpoint and no ledger; "
                f"start the run again"
            )
        if missing := [name for name in custom_of(run_dir) if custom.get(name) is None]:
            raise ConfigError(
                f"{run_dir} was started from Python with its own {', '.join(missing)}; resume it from Python too: "
                f"AsyncTrainer.resume({str(run_dir)!r}, {', '.join(f'{name}=...' for name in missing)})"
            )
        trainer = cls(run_dir / CONFIG_FILE, overrides, **custom)
        trainer._resume_from(run_dir)
        return trainer

    @classmethod
    def begin_or_resume(cls, config: Config, file: str | Path) -> AsyncTrainer:
        """Resumes the run that ``file`` names. Without a file, or if that run never began, starts and names a new one.

        For schedulers that start a job again with the same command. `resume_file.resolve_config` returns ``config``.
        """
        trainer = cls(config)
        trainer._resume_file = Path(file)
        if (run_dir := read_resume_file(trainer._resume_file)) is not None:
            refuse_running(run_dir)
            trainer._resume_from(run_dir)
        return trainer

    def _resume_from(self, run_dir: Path) -> None:
        """Raises ConfigError when the run cannot resume with this configuration."""
        from megasync.trainer.checkpoint import latest, step_of

        self._run_dir, self._checkpoint = run_dir, latest(run_dir)
        step = 0 if self._checkpoint is None else step_of(self._checkpoint)
        check_changes(load_config(run_dir / CONFIG_FILE), with_names(self.config), step)

    def train(self) -> RunResult:
        """Runs to the end and prints a summary. Ctrl-C once finishes the step, saves and ends; twice ends immediately.

        A resumed run that has reached its goal starts nothing. Raises ConfigError or DataError for unusable data or
        functions before any process starts; another MegasyncError, with its cause, for what ended the run;
        KeyboardInterrupt after a second Ctrl-C; ConfigError inside a running event loop, such as a notebook's: `run`
        is for those.
        """
        refuse_running_loop("train()", "await trainer.run()")
        return run_to_end(self.run())

    async def run(self) -> RunResult:
        """`train` for callers with an event loop: `result = await trainer.run()`."""
        done = None if self._run_dir is None else await asyncio.to_thread(finished_run, self._run_dir, self.config)
        result = done or await self._execute()
        show_result(result, Terminal())
        return result

    async def _execute(self) -> RunResult:
        # Before the run directory is created: a refused dataset or function leaves nothing behind.
        workload = await asyncio.to_thread(invoke, prepare_workload, self.config, self._custom)
        if self._checkpoint is not None:
            from megasync.trainer.checkpoint import check_readable

            await asyncio.to_thread(check_readable, self._checkpoint)
        if self.config.rollout.external:
            await check_external_servers(self.config)
        run_dir = self._run_dir or new_run_dir(self.config, self._custom.described())
        if self._resume_file is not None:
            await asyncio.to_thread(write_resume_file, self._resume_file, run_dir)
        run = Run(self.config, run_dir, workload, self._checkpoint, self._custom)
        return await run_stoppable(run.execute(), run_dir, self.config, run)
