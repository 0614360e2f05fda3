"""The CPU as a platform of verl, which knows only accelerators. VERL_PLATFORM=cpu chooses it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from megasync_patches import verl_cpu_group, verl_cpu_pinning
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _host_memory(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


# What verl asks of `torch.cuda` and torch.cpu lacks. Nothing counts the host's memory by process and tensor.
CPU = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__ if not name.startswith("_")},
    get_device_name=lambda device=None: "CPU",
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    mem_get_info=_host_memory,
    memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    max_memory_allocated=lambda device=None: 0,
    max_memory_reserved=lambda device=None: 0,
    reset_peak_memory_stats=lambda device=None: None,
)


class CpuPlatform(PlatformBase):
    """Collectives over gloo; Ray's workers take CPUs. There is nothing to profile or to seed but torch itself."""

    @classmethod
    def install(cls) -> None:
        """Makes it known to verl; once per process, before verl's workers are imported."""
        PlatformRegistry.register("cpu")(cls)
        for patch in (verl_cpu_group.PATCH, verl_cpu_pinning.PATCH):
            if patch.needed():
                patch.apply()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return CPU

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never found by itself: a machine whose accelerator verl misses must not train on its CPU unasked."""
        return False

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is only one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside the caller."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings are those of a GPU's allocator."""

    def empty_cache(self) -> None:
        """torch keeps no cache of host memory."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager:
        return nullcontext()

    def profiler_start(self) -> None:
        """No device to profile."""

    def profiler_stop(self) -> None:
        """No device to profile."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
