"""Checks one configuration on this machine: contradictions, tokenizer, disk space, access, memory, devices, ports.

As in `doctor`, each check is a function that yields findings, never raises, and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from megasync.base.files import bytes_text, writable
from megasync.config import Config
from megasync.config.access import describe_access, generation_needs_key
from megasync.config.commands import is_served, is_supervised
from megasync.config.host import is_loopback, resolve_host
from megasync.config.pools import devices_needed, pool_specs, trainer_pool
from megasync.device import check_machine, resolve_device
from megasync.errors import ConfigError, DataError
from megasync.models.hub import pending
from megasync.planning.finding import FAILURE, OK, WARNING, Finding, check_ports, check_space, verdict
from megasync.planning.memory import checkpoint_bytes
from megasync.planning.plan import resolve_plan
from megasync.preflight.check import model_layout
from megasync.tenants.checks import served_config, served_context

# What programs take beside tensors, as measured (docs/teachers.md): a rank; a server, which is four processes; and the
# driver, Ray and the router.
RANK_BYTES, SERVER_BYTES, DRIVER_BYTES = 4 * 10**8, 13 * 10**8, 8 * 10**8

# Raises ConfigError or DataError for what a run would refuse; returns what could not be checked on this machine.
Refuse = Callable[[Config], Sequence[str]]


def examine_for(config: Config, refuse: Refuse) -> Iterator[Finding]:
    """All findings about a configuration on this machine, which may be one of several nodes.

    One that a run would refuse is reported first, and alone: the other checks compute with its values.
    """
    first = find_contradiction(config, refuse)
    yield first
    if first.status == OK:
        yield from list(check_downloads(config)) or check_tokenizer(config)
        if is_served(config):
            config = served_config(config, served_context(config, planning=True))
        for check in (check_run_folder, check_keys, check_tenants, check_cpu_memory, check_gpus):
            yield from check(config)
        yield from check_ports(resolve_host(config.cluster.host))


def find_contradiction(config: Config, refuse: Refuse) -> Finding:
    """The first thing that the command that the configuration is for would refuse."""
    try:
        left_out = refuse(config)
    except (ConfigError, DataError) as error:
        fix = "change the named keys, in the file or with overrides KEY=VALUE, or repair what they name"
        return Finding("configuration", FAILURE, str(error), fix)
    later = f"; the run itself will check {', '.join(left_out)}" if left_out else ""
    return Finding("configuration", OK, f"no contradictions{later}")


def check_tokenizer(config: Config) -> Iterator[Finding]:
    """Checks that the model's tokenizer loads on this machine."""
    from megasync.data.tokenizer import load_tokenizer

    try:
        load_tokenizer(config.model.path)
    except DataError as error:
        yield Finding("model", FAILURE, str(error), "copy the tokenizer files of the model again")
    else:
        yield Finding("model", OK, f"{config.model.path}, with its weights and a tokenizer")


def check_downloads(config: Config) -> Iterator[Finding]:
    """Checks that there is room for what a run will download; without findings if all models are here."""
    waiting = pending(config)
    for folder, size in waiting.items():
        place = next(place for place in folder.parents if place.exists())
        fix = "free some space, or set HF_HOME to a folder on a larger disk"
        detail = f"; {bytes_text(size)} of {folder} will be downloaded"
        yield check_space("download", place, sum(waiting.values()), fix, detail)


def check_run_folder(config: Config) -> Iterator[Finding]:
    """Checks that run_root is writable and has room for the checkpoints."""
    root = Path(config.run_root).expanduser().absolute()
    if not writable(root):
        yield Finding("run folder", FAILURE, f"{root} is not writable", "set run_root to a writable folder")
        return
    layout, _ = model_layout(config)
    each, kept = checkpoint_bytes(config, layout), config.checkpoint.keep + 1
    less = f"checkpoint.keep={config.checkpoint.keep}"
    if config.serve is not None:
        kept, less = config.serve.models, f"serve.models={config.serve.models}"
    present = next(place for place in (root, *root.parents) if place.exists())
    fix = f"free some space, lower {less}, or set run_root to a larger disk"
    yield check_space("run folder", present, each * kept, fix, f"; {kept} checkpoints need {bytes_text(each * kept)}")


def check_cpu_memory(config: Config) -> Iterator[Finding]:
    """Checks that the pools of a run on this machine's CPUs fit into its free memory, with the servers' programs."""
    if (
        is_supervised(config)
        or config.cluster.address is not None
        or resolve_device(config.cluster.device).kind != "cpu"
    ):
        return
    try:
        plan = resolve_plan(replace(config, cluster=replace(config.cluster, device="cpu")))
    except ConfigError:  # what is for GPUs only is reported by `check_gpus`
        return
    servers = [plan.rollout, *(model.pool for model in plan.frozen_models)]
    programs = DRIVER_BYTES + RANK_BYTES * plan.trainer.spec.slots
    programs += SERVER_BYTES * sum(pool.spec.slots for pool in servers)
    needed, free = sum(plan.cpu_memory.values()) + programs, psutil.virtual_memory().available
    listed = ", ".join(f"{bytes_text(nbytes)} {key}" for key, nbytes in plan.cpu_memory.items())
    detail = f"about {bytes_text(needed)} needed ({listed}, {bytes_text(programs)} programs), {bytes_text(free)} free"
    fix = "lower max_total_tokens or the number of servers of the largest pool, or stop other programs"
    yield verdict("run memory", free >= needed, detail, fix, WARNING)


def check_keys(config: Config) -> Iterator[Finding]:
    """Reports who may reach the servers and generate."""
    cluster = config.cluster
    protected = is_loopback(cluster.host) or generation_needs_key(cluster)
    fix = "set cluster.generation_key=auto, or isolate that network"
    yield verdict("access", protected, describe_access(cluster), fix, WARNING)


def check_tenants(config: Config) -> Iterator[Finding]:
    """Checks that nobody else can read the keys of a service's tenants, in their file or on the network."""
    serve = config.serve
    if serve is None:
        return
    if serve.keys is not None:
        file = Path(serve.keys).expanduser()
        private = not file.exists() or file.stat().st_mode & 0o077 == 0
        readable = "" if private else ", which other users may read"
        yield verdict("tenants", private, f"keys are in {file}{readable}", f"chmod 600 {file}", WARNING)
    encrypted = config.cluster.tls_cert is not None
    sent = f"clients send their keys to {serve.host} by {'TLS' if encrypted else 'plain HTTP'}"
    fix = "set cluster.tls_cert and tls_key, or serve.host=127.0.0.1 behind a proxy that has a certificate"
    yield verdict("endpoint", encrypted or is_loopback(serve.host), sent, fix, WARNING)


def check_gpus(config: Config) -> Iterator[Finding]:
    """Checks that a run on this machine alone has enough GPUs. On a cluster, `cluster_checks` counts them."""
    device = resolve_device(config.cluster.device)
    try:
        check_machine(config.cluster.device, trains=True)
    except ConfigError as error:
        fix = "install what is missing, or set cluster.device=cpu"
        if config.cluster.address is None:
            yield Finding("devices", FAILURE, str(error), fix)
        else:
            yield Finding("devices", WARNING, str(error), f"to use this machine for more than the driver, {fix}")
        return
    needed = devices_needed({"trainer": trainer_pool(config)} if is_supervised(config) else pool_specs(config))
    if device.kind == "cpu":
        yield Finding("devices", OK, f"{needed} ranks and servers on {len(os.sched_getaffinity(0))} core(s)")
        return
    import torch

    here = torch.cuda.device_count()
    enough = config.cluster.address is not None or needed <= here
    fix = "lower trainer.data_parallel or rollout.servers, or set cluster.address to run over several machines"
    yield verdict("devices", enough, f"{needed} GPUs needed, {here} available", fix)
