"""Makes Megatron track its tensor-parallel random states with the CPU generator.

Megatron tracks the state of the CUDA generator per parallel group, and forks it in each sequence-parallel forward pass
and recomputation. On a CPU there is only torch's default generator, whose state is tracked instead.
"""

from __future__ import annotations

from typing import Any

from megasync_patches import Patch


def _apply() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = get_state
    torch.cuda.manual_seed = manual_seed


PATCH = Patch(
    name="megatron-rng-state",
    package="megatron-core",
    versions=("0.16.1", "0.19.2"),
    reason="the random state tracker reads and writes the CUDA generator only",
    apply=_apply,
)
