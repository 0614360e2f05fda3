"""Joins MLflow: the metrics of a run and, as parameters, its configuration without secrets.

The id of the MLflow run lies in the run directory, so a resumed run continues it. MLflow keeps every value of a step:
of one that is trained again it has two, with their times. Parameters cannot change, so a key that was changed for a
resume is a tag: `resumed.schedule.total_steps`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasync.base.confidential import masked
from megasync.base.files import atomic_write
from megasync.config import Config, saved_values
from megasync.config.schema import MlflowConfig
from megasync.observe.sinks import Sink, StepMetrics

# Below the run directory.
ID_FILE = "mlflow-run-id"
# Limits of tracking servers: parameters of one request, and characters of a value.
PARAMS_AT_ONCE = 100
LONGEST_VALUE = 500


class MlflowSink(Sink):
    """`open` imports the package mlflow, which takes seconds.

    Answers would be artifacts, whose store may need a key of its own: RUN/samples.jsonl has them.
    """

    name = "MLflow"

    def __init__(self, settings: MlflowConfig, config: Config, run_dir: Path) -> None:
        self._settings = settings
        self._config = config
        self._run_dir = run_dir.absolute()
        self._client: Any = None
        self._run_id = ""

    def open(self) -> str:
        # No run asked for reports about its use of mlflow.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Whoever names a folder wants one; mlflow recommends a database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient(self._settings.tracking_uri)
        self._run_id = self._continued() or self._created()
        self._log_params()
        return f"MLflow: run {self._run_id} of experiment {self._settings.experiment}"

    def log(self, row: StepMetrics) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        metrics = [
            Metric(metric_name(name), value, int(row.time * 1000), row.step) for name, value in row.values.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _continued(self) -> str | None:
        """The run of an earlier start, if the server still has it."""
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        path = self._run_dir / ID_FILE
        if not path.is_file():
            return None
        run_id = path.read_text(encoding="utf-8").strip()
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run_id

    def _created(self) -> str:
        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run_name = self._settings.run_name or self._run_dir.name
        run = self._client.create_run(experiment_id, run_name=run_name, tags={"run_dir": str(self._run_dir)})
        atomic_write(self._run_dir / ID_FILE, run.info.run_id)
        return run.info.run_id

    def _log_params(self) -> None:
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        logged = self._client.get_run(self._run_id).data.params
        configured = dict(_flat(saved_values(self._config)))
        new = [Param(key, value) for key, value in configured.items() if key not in logged]
        for at in range(0, len(new), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[at : at + PARAMS_AT_ONCE])
        changed = {key: value for key, value in configured.items() if logged.get(key, value) != value}
        if changed:
            tags = [RunTag(f"resumed.{key}", value) for key, value in changed.items()]
            self._client.log_batch(self._run_id, tags=tags)


def metric_name(name: str) -> str:
    """A metric's name as MLflow takes it: `eval/hard/score@0.7` is `eval/hard.score_at_0.7`.

    MLflow allows no @. Later slashes become points, because a folder cannot hold both `a/b` and `a/b/c`.
    """
    section, slash, rest = name.partition("/")
    return re.sub(r"[^\w.\- /]", "_", section + slash + rest.replace("/", ".").replace("@", "_at_"))


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a configuration and their values, as text without secrets."""
    for key, value in masked(values).items():
        name = prefix + re.sub(r"[^\w.-]", "_", str(key))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, str(value)[:LONGEST_VALUE]
