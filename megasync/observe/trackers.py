"""Which sinks a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megasync.base.importing import load_function
from megasync.config import Config
from megasync.config.builtin import TRACKERS
from megasync.observe.display import RunSnapshot
from megasync.observe.prometheus import PrometheusSink
from megasync.observe.sinks import Sink


def configured_sinks(
    config: Config, run_dir: Path, snapshot: Callable[[], RunSnapshot], server_metrics: Callable[[], Mapping[str, str]]
) -> list[Sink]:
    """The sinks of a run; opens nothing. The functions are called from other threads."""
    observe = config.observe
    named = {name: settings for name in TRACKERS if (settings := getattr(observe, name)) is not None}
    if observe.wandb is not None and observe.wandb.mode == "disabled":
        del named["wandb"]
    sinks: list[Sink] = [load_function(TRACKERS[name])(settings, config, run_dir) for name, settings in named.items()]
    if observe.prometheus is not None:
        sinks.append(PrometheusSink(observe.prometheus, snapshot, server_metrics))
    return sinks
