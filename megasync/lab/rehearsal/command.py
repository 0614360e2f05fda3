"""`megasync rehearse`: every kind of rank of a configuration, built without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from rich.progress import Progress

from megasync.base.terminal import Terminal
from megasync.config import load_config
from megasync.config.commands import is_served
from megasync.errors import ConfigError
from megasync.lab.rehearsal.driver import MEGATRONS, installed_megatron, rehearse, sampled_ranks
from megasync.lab.rehearsal.render import rehearsal_data, rehearsal_tables
from megasync.models.hub import resolve_names
from megasync.preflight.check import model_layout
from megasync.tenants.checks import check_as_run


def rehearse_config(source: Path, overrides: list[str], rank: str, megatron: str | None, as_json: bool) -> bool:
    """Rehearses ranks of a configuration, prints what was found, and returns whether all are as planned.

    Raises ConfigError for a configuration that `megasync plan` refuses, for a rank that does not exist, for an unknown
    version of megatron-core and for a package that is missing.
    """
    config = resolve_names(load_config(source, overrides), weights=False)
    if is_served(config):
        raise ConfigError(
            "serve is set, and the ranks of a service hold adapters of many models, which rehearsed ranks do not; use "
            "`megasync plan` for their memory"
        )
    check_as_run(config, planning=True)
    layout, _ = model_layout(config, planning=True)
    ranks = _chosen_ranks(rank, layout.topology.world, sampled_ranks(layout))
    versions = _chosen_versions(megatron)
    with Progress(console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task(f"rehearsing {config.name}", total=len(ranks) * len(versions))
        runs = [rehearse(config, ranks, version, lambda report: progress.advance(task)) for version in versions]
    if as_json:
        print(json.dumps(rehearsal_data(runs, layout), indent=2))
    else:
        Terminal().print(rehearsal_tables(runs, layout))
    return all(run.difference is None for run in runs)


def _chosen_ranks(text: str, world: int, sample: list[int]) -> list[int]:
    if text in ("sample", "all"):
        return sample if text == "sample" else [*range(world)]
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < world for part in parts):
        raise ConfigError(f"--rank {text} must be sample, all, or ranks from 0 to {world - 1} such as 0,{world - 1}")
    return sorted({int(part) for part in parts})


def _chosen_versions(text: str | None) -> tuple[str, ...]:
    if text == "all":
        return MEGATRONS
    if text not in (None, *MEGATRONS):
        raise ConfigError(f"--megatron {text} is not supported; it must be {', '.join(MEGATRONS)} or all")
    return (text or installed_megatron(),)
