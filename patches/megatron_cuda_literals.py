"""Answers `device="cuda"` with the CPU in the Megatron modules that write the device as a literal.

Those modules look up `torch` among their own globals. They get a stand-in there that forwards every attribute to
torch, and drops the literal from the few factory functions they call. torch itself is untouched, and so is the speed
of every other call.
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
    """torch, but for `tensor` and `zeros`, whose device "cuda" is the CPU."""

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

    stand_in = _CpuTorch(torch)
    for module in MODULES:
        import_module(module).torch = stand_in


PATCH = Patch(
    name="megatron-cuda-literals",
    package="megatron-core",
    versions=("0.16.1", "0.19.2"),
    reason='schedules, optimizers and gradient clipping create tensors with device="cuda"',
    apply=_apply,
)
