"""Makes verl open its process group with gloo alone if the device is the CPU.

verl requests one backend for the CPU and one for the device. If the device is the CPU, torch rejects the second.
Applied by the CPU platform of the verl plugin, before verl's workers import the function.
"""

from __future__ import annotations

from functools import wraps

from megasync_patches import Patch


def _apply() -> None:
    from verl.utils import distributed
    from verl.utils.device import get_device_name

    original = distributed.initialize_global_process_group_ray

    @wraps(original)
    def open_group(timeout_second: float | None = None, backend: str | None = None) -> None:
        if backend is None and get_device_name() == "cpu":
            backend = "gloo"
        original(timeout_second, backend)

    distributed.initialize_global_process_group_ray = open_group


PATCH = Patch(
    name="verl-cpu-group",
    package="verl",
    versions=("0.9.1",),
    reason="verl names two backends for the same device when it trains on CPUs",
    apply=_apply,
    optional=True,
)
