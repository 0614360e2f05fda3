"""What one configuration needs of this machine: its model, room for what it leaves, its devices, its address.

The same rules as in `doctor`: functions that yield findings, never raise, and leave nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megasync.config import Config
from megasync.config.check import model_layout
from megasync.config.host import resolve_host
from megasync.config.model_files import check_model_folder
from megasync.config.pools import pool_specs
from megasync.device import resolve_device
from megasync.errors import ConfigError
from megasync.preflight.finding import FAILURE, OK, Finding
from megasync.preflight.memory import checkpoint_bytes
from megasync.preflight.space import check_ports, check_space, writable


def examine_for(config: Config) -> Iterator[Finding]:
    """All findings about a configuration on this machine, which may be one of several."""
    yield from check_model(config)
    yield from check_reward_models(config)
    yield from check_run_folder(config)
    yield from check_gpus(config)
    yield from check_address(config)


def check_model(config: Config) -> Iterator[Finding]:
    """Whether every file of the model can be opened, down to the tensors' names."""
    try:
        layout, _ = model_layout(config)
        check_model_folder(config.model)
    except ConfigError as error:
        yield Finding("model", FAILURE, str(error), "set model.path to a whole Hugging Face folder")
        return
    yield from _tensors("model", "model.path", config.model.path, set(layout.hf_tensors))


def check_reward_models(config: Config) -> Iterator[Finding]:
    for name, model in config.reward_models.items():
        yield from _tensors(f"reward model {name}", f"reward_models.{name}.path", model.path, set())


def _tensors(subject: str, key: str, path: str, wanted: set[str]) -> Iterator[Finding]:
    from safetensors import SafetensorError, safe_open

    folder = Path(path).expanduser()
    files, found = sorted(folder.glob("*.safetensors")), set()
    again = f"copy the model there again, or set {key} to another folder"
    if not files:
        yield Finding(subject, FAILURE, f"{path} has no *.safetensors on this machine", again)
        return
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                found |= set(opened.keys())
        except (OSError, SafetensorError) as error:
            yield Finding(subject, FAILURE, f"{file} cannot be read: {error}", again)
            return
    if missing := sorted(wanted - found):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield Finding(subject, FAILURE, f"{path} lacks {missing[0]}{more}", again)
        return
    yield Finding(subject, OK, f"{path}, {len(found)} tensors in {len(files)} file(s)")


def check_run_folder(config: Config) -> Iterator[Finding]:
    root = Path(config.run_root).expanduser().absolute()
    if not writable(root):
        yield Finding("run folder", FAILURE, f"{root} cannot be written", "set run_root to a folder of yours")
        return
    try:
        layout, _ = model_layout(config)
    except ConfigError:  # `check_model` says why
        return
    each, kept = checkpoint_bytes(config, layout), config.checkpoint.keep + 1
    present = next(place for place in (root, *root.parents) if place.exists())
    fix = f"free some space, lower checkpoint.keep={config.checkpoint.keep}, or set run_root to a larger disk"
    yield check_space("run folder", present, each * kept, fix, f"; {kept} checkpoints take {each * kept / 1e9:.1f} GB")


def check_gpus(config: Config) -> Iterator[Finding]:
    """Whether a run on this machine alone finds the GPUs that its pools take. On several, the cluster's doctor counts."""
    try:
        device = resolve_device(config.cluster.device)
    except ConfigError as error:
        yield Finding("devices", FAILURE, str(error), "install a CUDA build of torch, or set cluster.device=cpu")
        return
    if device.kind == "cpu":
        cores, ranks = len(os.sched_getaffinity(0)), sum(spec.total_devices for spec in pool_specs(config).values())
        yield Finding("devices", OK, f"{ranks} ranks and servers on {cores} core(s)")
        return
    import torch

    needed, here = sum(spec.total_devices for spec in pool_specs(config).values()), torch.cuda.device_count()
    enough = config.cluster.address is not None or needed <= here
    fix = "lower trainer.data_parallel or rollout.servers, or set cluster.address to run over several machines"
    yield Finding("devices", OK if enough else FAILURE, f"{needed} GPUs taken, {here} here", "" if enough else fix)


def check_address(config: Config) -> Iterator[Finding]:
    yield from check_ports(resolve_host(config.cluster.host))
