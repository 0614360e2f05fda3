"""Everything that differs between a CPU and a GPU run. Other modules ask a `Device` and never test for CUDA themselves.

Importing this module imports neither torch nor Megatron, so the driver may ask it too.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megasync.errors import ConfigError

if TYPE_CHECKING:
    import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Of a trainer rank that uses GPUs, unless they are set otherwise.
_CUDA_ENVIRONMENT = {
    # Sequence parallelism overlaps communication with computation only where kernels start in the order of the program.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # What SGLang sets for its servers; NCCL cannot join two processes of which one takes its memory in another way.
    "NCCL_CUMEM_ENABLE": "0",
}


@dataclass(frozen=True)
class Device:
    """The kind of device that ranks and servers of this run compute on: "cpu" or "cuda"."""

    kind: str

    @property
    def backend(self) -> str:
        """Backend of torch.distributed process groups."""
        return BACKENDS[self.kind]

    @cached_property
    def torch_device(self) -> torch.device:
        """This process's device; on CUDA the one that `prepare_process` selected."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @cached_property
    def spec(self) -> str:
        """Flavour of Megatron's layers: "te" (Transformer Engine) on GPUs that have it, "local" everywhere else."""
        return "te" if self.kind == "cuda" and find_spec("transformer_engine") else "local"

    @property
    def expert_dispatcher(self) -> str:
        """Megatron's way to bring tokens to experts. Over gloo, its all-to-all gets tensors where it needs numbers."""
        return "allgather" if self.kind == "cpu" else "alltoall"

    def prepare_process(self, local_rank: int) -> None:
        """Makes this process a trainer rank: selects its device and bends upstream packages before they are used.

        On a CPU the ranks and servers of a run share the cores, so a rank computes with one thread unless
        OMP_NUM_THREADS says otherwise.
        """
        import torch

        if self.kind == "cuda":
            set_cuda_environment()
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            # Megatron announces on import, in several places, that it does without CUDA packages.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
            _import_megatron_uncompiled()

        from megasync_patches import apply_all

        apply_all(self.kind)

    def free_cache(self) -> None:
        """Gives memory that torch keeps for later back to the device, for other processes."""
        if self.kind == "cuda":
            import torch

            torch.cuda.empty_cache()


def _import_megatron_uncompiled() -> None:
    """Imports Megatron with the functions that it hands to torch's compiler left as they are.

    A CPU rank calls none of them, and the compiler's own import takes as long as Megatron's. Megatron can be told to do
    without it, but only once it has been imported, which is too late for the functions of its first modules.
    """
    import torch

    def leave(function: Callable | None = None, **options: Any) -> Callable:
        return leave if function is None else function

    compiling, torch.compile = torch.compile, leave
    try:
        from megatron.core.jit import disable_jit_fuser
    finally:
        torch.compile = compiling
    disable_jit_fuser()


def set_cuda_environment() -> None:
    """What must be set before a process asks CUDA or NCCL for anything; without effect on a CPU."""
    for name, value in _CUDA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Within it GPU work of this thread neither waits for that of other threads nor holds it up."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.stream(_side_stream(device))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the whole life of the process: memory that torch has used on one stream it keeps for that stream.

    Of high priority: those of usual priority come from one small pool, in turn, and an engine computes on one of them.
    """
    import torch

    return torch.cuda.Stream(device, priority=-1)


def point_in_stream(device: torch.device) -> torch.cuda.Event | None:
    """What this thread has asked of the device so far, for `wait_for`; None on a CPU, which has done it already."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(device).record_event()


def wait_for(point: torch.cuda.Event | None, device: torch.device) -> None:
    """What this thread asks of the device from now on begins after ``point``; the thread itself does not wait."""
    if point is not None:
        import torch

        torch.cuda.current_stream(device).wait_event(point)


def finish(device: torch.device) -> None:
    """Returns once the device has done what this thread asked of it."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def resolve_device(kind: str) -> Device:
    """The device of a run. ``kind`` is "auto" (CUDA when there is one), "cpu" or "cuda".

    Raises:
        ConfigError: an unknown kind, or CUDA on a machine without it.
    """
    if kind not in ("auto", *BACKENDS):
        raise ConfigError(f"cluster.device is {kind!r}; it must be auto, cpu or cuda")
    if kind == "cpu":
        return Device("cpu")
    import torch

    present = torch.cuda.is_available()
    if kind == "cuda" and not present:
        raise ConfigError("cluster.device is 'cuda', but torch sees no GPU here; set cluster.device=cpu or auto")
    return Device("cuda" if present else "cpu")
