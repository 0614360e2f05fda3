"""The checks before a run starts, in one list: `train`, `sft`, `serve`, `plan` and `doctor` refuse the same in the same
words.

`check_run` goes through the configuration (`preflight.check`) and through everything that the run prepares before its
first process: reward, workflow, tools, tokenizer, every row. The run itself prepares it by the same functions. Modules
that import Ray are imported where they are needed, because a plan should not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megasync.app.workload import PythonArguments, load_workflow, prepare_workload
from megasync.config import Config
from megasync.config.commands import is_served, is_supervised
from megasync.config.pools import frozen_models
from megasync.config.schema import DatasetConfig
from megasync.data import load_dataset
from megasync.data.datasets import load_conversations
from megasync.data.tokenizer import load_tokenizer
from megasync.layout.model_files import has_tokenizer
from megasync.models.hub import with_names
from megasync.rewards import load_reward
from megasync.tenants.checks import check_as_run

# Packages that read a kind of dataset. A plan may be read where they are not installed.
READERS = {"parquet": "pyarrow", "hf": "datasets", "reasoning_gym": "reasoning_gym"}


def check_run(config: Config, *, planning: bool = False) -> list[str]:
    """Raises ConfigError and DataError as the command that the configuration is for. Starts nothing.

    Returns what could not be checked because it is not on this machine: datasets of a hub, which are not downloaded
    here, and with `planning` also folders of models and files of rows.
    """
    check_as_run(config, planning=planning)
    missing = list(_missing(config, planning))
    if missing:
        _check_present(config, planning)
    elif is_served(config):
        load_tokenizer(config.model.path)
    elif is_supervised(config):
        from megasync.supervised.run import prepare_supervised

        prepare_supervised(config)
    else:
        asyncio.run(prepare_workload(config, PythonArguments()).close())
    return missing


def _datasets(config: Config) -> dict[str, DatasetConfig]:
    """The datasets that the run reads, by their keys."""
    data, sft = config.data, config.sft
    if is_served(config):
        return {}
    named = {"sft.train": sft.train, "sft.validation": sft.validation}
    if not is_supervised(config):
        named = {"data.train": data.train} | {f"data.sets.{name}.data": each.data for name, each in data.sets.items()}
        named |= {"data.eval": data.eval} | {f"eval.sets.{name}.data": e.data for name, e in config.eval.sets.items()}
    return {key: dataset for key, dataset in named.items() if dataset is not None}


def _is_here(dataset: DatasetConfig, planning: bool) -> bool:
    package = READERS.get(dataset.kind)
    if planning and package is not None and find_spec(package) is None:
        return False
    return dataset.kind in ("digits", "reasoning_gym") or Path(dataset.source).expanduser().exists()


def _missing(config: Config, planning: bool) -> Iterator[str]:
    """The keys, with their values, of what is not on this machine."""
    alone = is_served(config) or is_supervised(config)
    models, named = {"model": config.model, **({} if alone else frozen_models(config))}, with_names(config)
    names = {"model": named.model, **frozen_models(named)}
    if planning:
        missing = (key for key, model in models.items() if not has_tokenizer(Path(model.path).expanduser()))
        yield from (f"{key}.path={names[key].path}" for key in missing)
    for key, dataset in _datasets(config).items():
        if not _is_here(dataset, planning):
            yield f"{key} ({dataset.kind}:{dataset.source})"


def _check_present(config: Config, planning: bool) -> None:
    """Checks functions and rows one by one where the whole cannot be prepared."""
    supervised = is_supervised(config)
    for dataset in _datasets(config).values():
        if _is_here(dataset, planning):
            (load_conversations if supervised else load_dataset)(dataset, config.data)
    if supervised or is_served(config):
        return
    for name, reward in config.rollout.rewards.items():
        if reward.model is None:
            load_reward(reward.function or name, reward.options)
    for name in (config.rollout.reward, *(held_out.reward for held_out in config.eval.sets.values())):
        if name is not None:
            load_reward(name)
    load_workflow(config, PythonArguments(), None)
