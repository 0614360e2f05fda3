"""Replaces `device="cuda"` with the CPU in the Megatron modules that hard-code the device.

Those modules look up `torch` in their globals. The patch puts a proxy there that forwards every attribute to torch, and
replaces the device in the few factory functions that they call. torch itself is untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megasync_patches import Patch

MODULES = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)


class _CpuTorch:
    """A proxy of torch whose `tensor` and `zeros` replace device "cuda" with the CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.tensor = _on_cpu(torch.tensor)
        self.zeros = _on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _apply() -> None:
    import torch

    proxy = _CpuTorch(torch)
    for module in MODULES:
        import_module(module).__dict__["torch"] = proxy


PATCH = Patch(
    name="megatron-cuda-literals",
    package="megatron-core",
    versions=("0.16.1", "0.19.2"),
    reason='schedules, optimizers and gradient clipping create tensors with device="cuda"',
    apply=_apply,
)
