"""Which sinks a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megasync.config import Config
from megasync.observe.display import RunSnapshot
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
