"""Makes `Tensor.pin_memory` return the tensor itself without an accelerator.

verl's trainer with separate servers copies the trainer's weights to pinned memory, which torch rejects without an
accelerator. Applied by the CPU platform of the verl plugin.
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
    reason="verl copies weights to pinned memory, which requires an accelerator",
    apply=_apply,
    optional=True,
)
