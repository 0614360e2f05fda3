"""Checks one configuration on this machine: model, disk space, access, devices, address, and contradictions.

As in `doctor`, each check is a function that yields findings, never raises, and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from megasync.config import Config
from megasync.config.access import check_access, describe_access, generation_needs_key
from megasync.config.host import is_loopback, resolve_host
from megasync.config.limits import check_limits
from megasync.config.pools import devices_needed, frozen_models, pool_specs, trainer_pool
from megasync.config.supervised import is_supervised
from megasync.device import check_machine, resolve_device
from megasync.errors import ConfigError, DataError
from megasync.layout.model_files import check_model_folder
from megasync.preflight.check import check_frozen_folder, check_weights, model_layout
from megasync.preflight.finding import (
    FAILURE,
    OK,
    WARNING,
    Finding,
    bytes_text,
    check_ports,
    check_space,
    verdict,
    writable,
)
from megasync.preflight.memory import checkpoint_bytes
from megasync.preflight.plan import resolve_plan

# What a rank or a server takes beside its tensors: the code of torch, Megatron or SGLang.
PROCESS_BYTES = 10**9

# Raises ConfigError or DataError for what a run would refuse; returns what could not be checked on this machine.
Refuse = Callable[[Config], Sequence[str]]


def examine_for(config: Config, refuse: Refuse) -> Iterator[Finding]:
    """All findings about a configuration on this machine, which may be one of several nodes."""
    try:
        check_limits(config)  # the other checks compute with these values
    except ConfigError as error:
        yield _refused(error)
        return
    frozen = [] if is_supervised(config) else check_frozen_models(config)
    found = [*check_model(config), *frozen, *check_run_folder(config), *check_keys(config)]
    yield from found
    if all(finding.status == OK for finding in found):  # else it would repeat them
        yield from check_contradictions(config, refuse)
        yield from check_cpu_memory(config)
    yield from check_gpus(config)
    yield from check_ports(resolve_host(config.cluster.host))


def _refused(error: ConfigError | DataError) -> Finding:
    return Finding("configuration", FAILURE, str(error), "change it in the file, or with an override KEY=VALUE")


def check_contradictions(config: Config, refuse: Refuse) -> Iterator[Finding]:
    """Checks what `megasync train`, or for a supervised run `megasync sft`, would refuse."""
    try:
        left_out = refuse(config)
    except (ConfigError, DataError) as error:
        yield _refused(error)
    else:
        later = f"; the run itself will check {', '.join(left_out)}" if left_out else ""
        yield Finding("configuration", OK, f"no contradictions{later}")


def check_model(config: Config) -> Iterator[Finding]:
    """Checks that the tokenizer loads, and that every tensor has the shape that config.json implies."""
    complete = "set model.path to a complete Hugging Face folder of a supported model"
    try:
        layout, source = model_layout(config)
        check_model_folder(config.model)
    except ConfigError as error:
        yield Finding("model", FAILURE, str(error), f"change the named keys, or {complete}")
        return
    try:
        check_weights(source.parent, layout)
    except ConfigError as error:
        yield Finding("model", FAILURE, str(error), f"copy the model again, or {complete}")
        return

    from megasync.data.render import load_tokenizer

    try:
        load_tokenizer(config.model.path)
    except DataError as error:
        yield Finding("model", FAILURE, str(error), f"copy its tokenizer files again, or {complete}")
        return
    yield Finding("model", OK, f"{config.model.path}, {len(layout.hf_tensors)} tensors and a tokenizer")


def check_frozen_models(config: Config) -> Iterator[Finding]:
    """Checks that each reward model, auxiliary model and teacher has the weights of its kind, by their headers."""
    for key, model in frozen_models(config).items():
        fix = f"copy the model again, or set {key}.path to another folder"
        try:
            tensors = check_frozen_folder(key, model)
        except ConfigError as error:
            yield Finding(key, FAILURE, str(error), fix)
        else:
            yield Finding(key, OK, f"{model.path}, {tensors} tensors")


def check_run_folder(config: Config) -> Iterator[Finding]:
    """Checks that run_root is writable and has room for the checkpoints."""
    root = Path(config.run_root).expanduser().absolute()
    if not writable(root):
        yield Finding("run folder", FAILURE, f"{root} is not writable", "set run_root to a writable folder")
        return
    try:
        layout, _ = model_layout(config)
    except ConfigError:  # reported by `check_model`
        return
    each, kept = checkpoint_bytes(config, layout), config.checkpoint.keep + 1
    present = next(place for place in (root, *root.parents) if place.exists())
    fix = f"free some space, lower checkpoint.keep={config.checkpoint.keep}, or set run_root to a larger disk"
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
    except ConfigError:  # reported by `check_contradictions`
        return
    servers = [plan.rollout, *(model.pool for model in plan.frozen_models)]
    programs = PROCESS_BYTES * (plan.trainer.spec.slots + sum(pool.spec.slots for pool in servers))
    needed, free = sum(plan.cpu_memory.values()) + programs, psutil.virtual_memory().available
    listed = ", ".join(f"{bytes_text(nbytes)} {key}" for key, nbytes in plan.cpu_memory.items())
    detail = f"about {bytes_text(needed)} needed ({listed}, {bytes_text(programs)} programs), {bytes_text(free)} free"
    fix = "lower max_total_tokens or the number of servers of the largest pool, or stop other programs"
    yield verdict("run memory", free >= needed, detail, fix, WARNING)


def check_keys(config: Config) -> Iterator[Finding]:
    """Checks the keys and certificates of servers and router, and reports who may generate."""
    cluster = config.cluster
    try:
        check_access(cluster)
    except ConfigError as error:
        yield Finding("access", FAILURE, str(error), "change the named keys, in the file or in the environment")
        return
    protected = is_loopback(cluster.host) or generation_needs_key(cluster)
    fix = "set cluster.generation_key=auto, or isolate that network"
    yield verdict("access", protected, describe_access(cluster), fix, WARNING)


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
    try:
        pools = {"trainer": trainer_pool(config)} if is_supervised(config) else pool_specs(config)
        needed = devices_needed(pools)
    except ConfigError:  # reported by `check_contradictions`
        return
    if device.kind == "cpu":
        yield Finding("devices", OK, f"{needed} ranks and servers on {len(os.sched_getaffinity(0))} core(s)")
        return
    import torch

    here = torch.cuda.device_count()
    enough = config.cluster.address is not None or needed <= here
    fix = "lower trainer.data_parallel or rollout.servers, or set cluster.address to run over several machines"
    yield verdict("devices", enough, f"{needed} GPUs needed, {here} available", fix)
