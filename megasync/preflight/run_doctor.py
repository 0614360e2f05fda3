"""What one configuration needs of this machine: its model, room for what it leaves, its devices, its address; and whether
it contradicts itself.

The same rules as in `doctor`: functions that yield findings, never raise, and leave nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megasync.config import Config
from megasync.config.access import check_access, describe_access, generation_needs_key
from megasync.config.host import is_loopback, resolve_host
from megasync.config.limits import check_limits
from megasync.config.pools import pool_specs
from megasync.device import check_machine, resolve_device
from megasync.errors import CheckpointError, ConfigError, DataError
from megasync.layout.model_files import check_model_folder
from megasync.preflight.check import check_config, model_layout
from megasync.preflight.finding import FAILURE, OK, WARNING, Finding, bytes_text, check_ports, check_space, writable
from megasync.preflight.memory import checkpoint_bytes


def examine_for(config: Config) -> Iterator[Finding]:
    """All findings about a configuration on this machine, which may be one of several."""
    try:
        check_limits(config)  # what the other checks calculate with
    except ConfigError as error:
        yield _refused(error)
        return
    found = [*check_model(config), *check_reward_models(config), *check_run_folder(config), *check_keys(config)]
    yield from found
    if all(finding.status == OK for finding in found):  # else it would say the same again
        yield from check_contradictions(config)
    yield from check_gpus(config)
    yield from check_address(config)


def _refused(error: ConfigError) -> Finding:
    return Finding("configuration", FAILURE, str(error), "change that in the file, or by an override, KEY=VALUE")


def check_contradictions(config: Config) -> Iterator[Finding]:
    """What `megasync train` would refuse."""
    try:
        check_config(config)
    except ConfigError as error:
        yield _refused(error)
    else:
        yield Finding("configuration", OK, "nothing in it contradicts the rest")


def check_model(config: Config) -> Iterator[Finding]:
    """Whether the model can be loaded: every tensor of its config.json is there in its shape, and the tokenizer."""
    whole = "set model.path to a whole Hugging Face folder of a supported model"
    try:
        layout, _ = model_layout(config)
        check_model_folder(config.model)
    except ConfigError as error:
        yield Finding("model", FAILURE, str(error), f"change the keys that are named, or {whole}")
        return

    from megasync.data.tokenizer import load_tokenizer
    from megasync.layout.shards import HfFolder

    try:
        with HfFolder(Path(config.model.path)) as folder:
            for name, shape in layout.hf_tensors.items():
                folder.reader(name, shape)
    except (CheckpointError, OSError) as error:
        yield Finding("model", FAILURE, str(error), f"copy the model there again, or {whole}")
        return
    try:
        load_tokenizer(config.model.path)
    except DataError as error:
        yield Finding("model", FAILURE, str(error), f"copy its tokenizer files there again, or {whole}")
        return
    yield Finding("model", OK, f"{config.model.path}, {len(layout.hf_tensors)} tensors and a tokenizer")


def check_reward_models(config: Config) -> Iterator[Finding]:
    """Whether the weights of each can be opened; their layouts are SGLang's matter."""
    from safetensors import SafetensorError, safe_open

    for name, model in config.reward_models.items():
        subject, tensors = f"reward model {name}", 0
        fix = f"copy the model there again, or set reward_models.{name}.path to another folder"
        files = sorted(Path(model.path).expanduser().glob("*.safetensors"))
        try:
            for file in files:
                with safe_open(file, framework="numpy") as opened:
                    tensors += len(opened.keys())
        except (OSError, SafetensorError) as error:
            yield Finding(subject, FAILURE, f"{file} cannot be read: {error}", fix)
            continue
        if files:
            yield Finding(subject, OK, f"{model.path}, {tensors} tensors in {len(files)} file(s)")
        else:
            yield Finding(subject, FAILURE, f"{model.path} has no *.safetensors on this machine", fix)


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
    yield check_space("run folder", present, each * kept, fix, f"; {kept} checkpoints take {bytes_text(each * kept)}")


def check_keys(config: Config) -> Iterator[Finding]:
    """Whether the keys and certificates of the servers and their router can be used, and who may generate."""
    cluster = config.cluster
    try:
        check_access(cluster)
    except ConfigError as error:
        yield Finding("access", FAILURE, str(error), "change what is named there, in the file or in the environment")
        return
    if is_loopback(cluster.host) or generation_needs_key(cluster):
        yield Finding("access", OK, describe_access(cluster))
    else:
        fix = "set cluster.generation_key=auto, or keep others off that network"
        yield Finding("access", WARNING, describe_access(cluster), fix)


def check_gpus(config: Config) -> Iterator[Finding]:
    """Whether a run on this machine alone finds the GPUs that its pools take. On several, the cluster's doctor counts."""
    device = resolve_device(config.cluster.device)
    try:
        check_machine(config.cluster.device, trains=True)
    except ConfigError as error:
        fix = "install what is named there, or set cluster.device=cpu"
        if config.cluster.address is None:
            yield Finding("devices", FAILURE, str(error), fix)
        else:
            yield Finding("devices", WARNING, str(error), f"for more than the driver, which needs no GPU, {fix}")
        return
    try:
        needed = sum(spec.total_devices for spec in pool_specs(config).values())
    except ConfigError:  # `check_contradictions` says why
        return
    if device.kind == "cpu":
        yield Finding("devices", OK, f"{needed} ranks and servers on {len(os.sched_getaffinity(0))} core(s)")
        return
    import torch

    here = torch.cuda.device_count()
    enough = config.cluster.address is not None or needed <= here
    fix = "lower trainer.data_parallel or rollout.servers, or set cluster.address to run over several machines"
    yield Finding("devices", OK if enough else FAILURE, f"{needed} GPUs taken, {here} here", "" if enough else fix)


def check_address(config: Config) -> Iterator[Finding]:
    yield from check_ports(resolve_host(config.cluster.host))
