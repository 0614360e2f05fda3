"""Lets Megatron's mixed-precision and distributed optimizers accept CPU parameters.

When they sort parameters by dtype and when they clip, those optimizers compare `Tensor.type()` with names such as
"torch.cuda.BFloat16Tensor" and reject all others. During exactly those calls, CPU tensors report the CUDA name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megasync_patches import Patch


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.overrides import TorchFunctionMode

    class CudaTypeNames(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            answer = func(*args, **(kwargs or {}))
            asked_for_name = func is torch.Tensor.type and isinstance(answer, str)
            return answer.replace("torch.", "torch.cuda.", 1) if asked_for_name else answer

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with CudaTypeNames():
            return function(*args, **kwargs)

    return call


def _apply() -> None:
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip
    Float16OptimizerWithFloat16Params.__init__ = _with_cuda_type_names(Float16OptimizerWithFloat16Params.__init__)
    DistributedOptimizer.__init__ = _with_cuda_type_names(DistributedOptimizer.__init__)


PATCH = Patch(
    name="megatron-tensor-types",
    package="megatron-core",
    versions=("0.16.1", "0.19.2"),
    reason="the optimizers recognise dtypes by the names of CUDA tensor types",
    apply=_apply,
)
