"""A trainer rank's device in a rehearsal: the layers, options and dispatcher of a GPU rank, on another device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasync.device import Device, set_cuda_environment

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RehearsalDevice(Device):
    """Computes with Transformer Engine's layers on the CPU, or with ``meta`` only shapes.

    ``kind`` is "cpu", so process groups use gloo and tensors stay in host memory.
    """

    kind: str = "cpu"
    meta: bool = False

    @property
    def torch_device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        import torch

        return torch.device("meta" if self.meta else "cpu")

    @property
    def spec(self) -> str:
        return "te"

    @property
    def expert_dispatcher(self) -> str:
        return "alltoall"

    def prepare_process(self, local_rank: int) -> None:
        """Installs the stand-ins and the patches of a CPU rank. Raises ConfigError as `transformer_engine.install`.

        No GPU function may have been used in this process, and Megatron must not have been imported.
        """
        from megasync.lab.rehearsal import cuda, deep_ep, gloo, transformer_engine

        set_cuda_environment()  # in an environment for GPUs, packages that Megatron imports look for CUDA
        transformer_engine.install(self.torch_device)
        deep_ep.install()
        super().prepare_process(local_rank)
        # The patches have replaced some functions of torch.cuda too, for the CPU only.
        cuda.install(self.torch_device)
        gloo.install()
