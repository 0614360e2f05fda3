"""Which sinks a configuration names, and what `plan` reports about them before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from megasync.config import Config
from megasync.observe.display import RunSnapshot
from megasync.observe.metrics import METRICS_FILE
from megasync.observe.mlflow_sink import MlflowSink
from megasync.observe.prometheus import PrometheusSink
from megasync.observe.sinks import Sink
from megasync.observe.wandb_sink import WandbSink


def configured_sinks(
    config: Config, run_dir: Path, snapshot: Callable[[], RunSnapshot], server_metrics: Callable[[], Mapping[str, str]]
) -> list[Sink]:
    """The sinks of a run; opens nothing. The functions are called from other threads."""
    observe = config.observe
    sinks: list[Sink] = []
    if observe.wandb is not None and observe.wandb.mode != "disabled":
        sinks.append(WandbSink(observe.wandb, config, run_dir))
    if observe.mlflow is not None:
        sinks.append(MlflowSink(observe.mlflow, config, run_dir))
    if observe.prometheus is not None:
        sinks.append(PrometheusSink(observe.prometheus, snapshot, server_metrics))
    return sinks


def describe_sinks(config: Config) -> str:
    """One sentence that says where the metrics of a run go."""
    observe = config.observe
    places = [METRICS_FILE] + ["TensorBoard"] * observe.tensorboard
    if (wandb := observe.wandb) is not None and wandb.mode != "disabled":
        project = wandb.project if wandb.entity is None else f"{wandb.entity}/{wandb.project}"
        places.append(f"Weights & Biases ({project}, {wandb.mode})")
    if (mlflow := observe.mlflow) is not None:
        uri = "MLFLOW_TRACKING_URI" if mlflow.tracking_uri is None else urlsplit(mlflow.tracking_uri).geturl()
        places.append(f"MLflow (experiment {mlflow.experiment} at {uri})")
    if (prometheus := observe.prometheus) is not None:
        port = f"port {prometheus.port}" if prometheus.port else "a free port"
        places.append(f"Prometheus (scrapes {prometheus.host}, {port})")
    return ", ".join(places)
