"""Leaves a tensor where it is when verl pins it on a CPU.

verl's trainer with separate servers copies the trainer's weights to pinned memory. Without an accelerator there is nothing
to pin memory for, and torch refuses. Applied by the CPU platform that the verl plugin registers.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from megasync_patches import Patch


def _apply() -> None:
    import torch

    original = torch.Tensor.pin_memory

    @wraps(original)
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(self, *args, **kwargs) if torch.accelerator.is_available() else self

    torch.Tensor.pin_memory = pin_memory


PATCH = Patch(
    name="verl-cpu-pinning",
    package="verl",
    versions=("0.9.1",),
    reason="verl copies a trainer's weights to pinned memory, which there is none of without an accelerator",
    apply=_apply,
    optional=True,
)
