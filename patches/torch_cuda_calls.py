"""Lets CPU ranks run code that queries the current CUDA device.

Megatron uses `torch.cuda.current_device()` as the device of its communication buffers, calls `torch.cuda.synchronize()`
around them, moves a tied embedding with `Tensor.cuda()` and, from 0.19 on, looks up the current stream before it
reduces gradients. With the patch the current device is the CPU, `synchronize()` does nothing, `Tensor.cuda()` returns
the tensor itself, and the current stream is torch's CPU stream.
"""

from __future__ import annotations

from typing import Any

from megasync_patches import Patch


def _apply() -> None:
    import torch

    cpu = torch.device("cpu")

    def current_device() -> torch.device:
        return cpu

    def synchronize(device: Any = None) -> None:
        return None

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.cuda.current_device = current_device
    torch.cuda.current_stream = torch.cpu.current_stream
    torch.cuda.synchronize = synchronize
    torch.Tensor.cuda = stay


PATCH = Patch(
    name="torch-cuda-calls",
    package="torch",
    # 2.13.0 has a CPU build; 2.14.1 is the CUDA build that SGLang pins, where a run may still set cluster.device=cpu.
    versions=("2.13.0", "2.14.1"),
    reason="Megatron queries the current CUDA device, which raises in a CPU build of torch",
    apply=_apply,
)
