"""The CPU as a verl platform, as verl supports only accelerators. Select it with VERL_PLATFORM=cpu."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from megasync_patches import verl_cpu_group, verl_cpu_pinning  # pyright: ignore[reportMissingImports] - the folder patches/
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _host_memory(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


# The functions of `torch.cuda` that verl calls and torch.cpu lacks. Host memory is not tracked per process.
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
    """Uses gloo for collectives and CPUs for Ray workers. There is no device to profile, and only torch to seed."""

    @classmethod
    def install(cls) -> None:
        """Registers the platform; call it once per process, before importing verl's workers."""
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
        """Never auto-detected: if verl fails to find an accelerator, it must not silently train on the CPU."""
        return False

    # verl declares an index, but takes whatever torch.device takes.
    def current_device(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is only one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Ignored: the settings are for a GPU allocator."""

    def empty_cache(self) -> None:
        """Does nothing: torch does not cache host memory."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride] - verl declares none
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
