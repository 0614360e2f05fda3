"""Joins Weights & Biases: the metrics of a run, its configuration without secrets, and its sample answers as a table.

The id of the W&B run lies in the run directory, so a resumed run continues it. W&B keeps all that it was sent: a step
that is trained again has two points in it, of which the later one counts. Offline, each start of a run writes a folder
of its own below RUN/wandb; `wandb sync --append` joins them.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from megasync.base.confidential import masked
from megasync.base.files import atomic_write
from megasync.config import Config, saved_values
from megasync.config.schema import WandbConfig
from megasync.observe.metrics import STEP
from megasync.observe.registry import METRICS
from megasync.observe.sinks import Answers, Sink, StepMetrics

# Below the run directory. W&B writes to the same folder.
FOLDER = "wandb"
ID_FILE = "run-id"
# Seconds that W&B may take to create or find the run.
INIT_SECONDS = 90.0
# The process that wandb starts.
SERVICE = "wandb-core"


class WandbSink(Sink):
    """`open` imports the package wandb, which takes seconds and starts a process of its own."""

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, config: Config, run_dir: Path) -> None:
        self._settings = settings
        self._config = config
        self._run_dir = run_dir.absolute()
        self._run: Any = None

    def open(self) -> str:
        # Crash reports of wandb itself: no run asked for them, and an offline run sends nothing.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # pyright: ignore[reportMissingImports]

        settings, online = self._settings, self._settings.mode == "online"
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=list(settings.tags),
            name=self._run_dir.name,
            id=_run_id(self._run_dir / FOLDER),
            resume="allow" if online else None,
            mode="online" if online else "offline",
            dir=str(self._run_dir),
            # A run that the caller's own code has open stays open.
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                silent=True,
                init_timeout=INIT_SECONDS,
            ),
        )
        units = {metric.name: metric.unit for metric in METRICS if metric.unit}
        # A resumed run may have changed some of it.
        configured = masked(saved_values(self._config))
        self._run.config.update({**configured, "run_dir": str(self._run_dir), "units": units}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if online:
            return f"Weights & Biases: {self._run.url}"
        return f"Weights & Biases, offline: send it with `wandb sync --append {Path(self._run.dir).parent}`"

    def log(self, row: StepMetrics) -> None:
        self._run.log({STEP: row.step, "_timestamp": row.time, **row.values})

    def answers(self, answers: Answers) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        rows: list[Any] = [[answers.step, answers.version, *answer] for answer in answers.answers]
        table = wandb.Table(columns=["step", "version", "prompt", "text", "reward"], data=rows)
        self._run.log({STEP: answers.step, "samples": table})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def abandon(self) -> None:
        """Ends wandb's process, which Python would wait for. What it has not sent lies in the run directory."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if child.name().startswith(SERVICE):
                    child.kill()


def _run_id(folder: Path) -> str:
    """The id of the run in W&B, the same at each start."""
    path = folder / ID_FILE
    if not path.is_file():
        folder.mkdir(exist_ok=True)
        atomic_write(path, secrets.token_hex(6))
    return path.read_text(encoding="utf-8").strip()
