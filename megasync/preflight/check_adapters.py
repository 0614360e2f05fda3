"""Checks of low-rank adapters and of the servers that get them, for `check.check_config`."""

from __future__ import annotations

from megasync.config.limits import refuse_unused
from megasync.config.schema import Config, TrainerConfig
from megasync.errors import ConfigError
from megasync.layout.adapter import SERVED_TARGETS, adapter_layout
from megasync.layout.adapter_files import check_served_folder
from megasync.layout.layout import Layout

# On CPUs, SGLang pads the width of MLPs to a multiple of this on each rank.
_CPU_WIDTH = 32


def check_lora(trainer: TrainerConfig) -> None:
    """Refuses keys of `trainer.lora` that have no effect."""
    if not trainer.lora.rank:
        reason = "with trainer.lora.rank=0, which trains all weights; set rank above 0"
        refuse_unused(trainer.lora, "trainer.lora", ("alpha", "targets", "path"), reason)


def check_served_adapters(config: Config, layout: Layout) -> None:
    """Refuses adapters that servers cannot compute beside the model."""
    held_out = {f"eval.sets.{name}.adapter": each.adapter for name, each in config.eval.sets.items()}
    if config.sync.transport != "adapters":
        if key := next((key for key, path in held_out.items() if path is not None), None):
            raise ConfigError(
                f"{key}={held_out[key]!r} needs servers of adapters, but sync.transport={config.sync.transport}; set "
                f"sync.transport=adapters, or {key}=null"
            )
        return
    adapters = adapter_layout(layout, config.trainer)
    if adapters is None:
        raise ConfigError(
            "sync.transport=adapters publishes adapters alone, but trainer.lora.rank=0 trains all weights; set rank "
            "above 0, or transport=auto"
        )
    if layout.family.chunks:
        raise ConfigError(
            f"sync.transport=adapters is not supported for {layout.hf_config['model_type']}, whose adapters have not "
            f"been compared with SGLang's; set transport=auto, which merges them"
        )
    if config.rollout.external:
        raise ConfigError(
            "sync.transport=adapters needs servers that were started for it, but rollout.external names servers that "
            "run already; set transport=disk"
        )
    for key, path in held_out.items():
        if path is not None:
            check_served_folder(key, path, adapters)
    experts = any(each.item.ep is not None for each in adapters.adapted(0))
    if others := sorted(set(adapters.shape.targets) - SERVED_TARGETS):
        raise ConfigError(
            f"sync.transport=adapters serves adapters of {', '.join(sorted(SERVED_TARGETS))}, but trainer.lora.targets "
            f"includes {others[0]}; leave it out, or set transport=auto, which merges them"
        )
    tensor, padded = config.rollout.tensor_parallel, _CPU_WIDTH * config.rollout.tensor_parallel
    mlps = any(target in ("gate_proj", "up_proj", "down_proj") for target in adapters.shape.targets)
    for name, count in layout.sizes.widths.items() if mlps else ():
        if config.cluster.device == "cpu" and tensor > 1 and count % padded:
            raise ConfigError(
                f"sync.transport=adapters on a CPU needs {name} to be a multiple of {padded}, since servers of "
                f"rollout.tensor_parallel={tensor} pad it, but not its adapters; it is {count}: set tensor_parallel=1, "
                f"transport=auto, or name the projections of attention in trainer.lora.targets"
            )
    if experts:
        raise ConfigError(
            "sync.transport=adapters does not serve adapters of experts: SGLang computes them with kernels for GPUs "
            "only, which megasync has not compared with its own layers; name the projections of attention in "
            "trainer.lora.targets, or set transport=auto, which merges them"
        )
