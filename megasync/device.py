"""Everything that differs between a CPU and a GPU run. Other modules ask a `Device` and never test for CUDA themselves.

Importing this module imports neither torch nor Megatron, so the driver may ask it too. The driver needs no GPU and asks
CUDA nothing: even the question whether there is a GPU would take memory of one, and forbid the driver to fork. It names
the device (`resolve_device`) and looks for what can be seen without (`check_machine`); a trainer rank, which computes,
asks CUDA itself (`Device.prepare_process`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from glob import glob
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

# Where a GPU's driver shows it: on a server, under WSL, on a Jetson.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu")


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

    @property
    def spec(self) -> str:
        """Flavour of Megatron's layers: "te" (Transformer Engine) on GPUs, "local" on a CPU."""
        return "te" if self.kind == "cuda" else "local"

    @property
    def expert_dispatcher(self) -> str:
        """Megatron's way to bring tokens to experts. Over gloo, its all-to-all gets tensors where it needs numbers."""
        return "allgather" if self.kind == "cpu" else "alltoall"

    def prepare_process(self, local_rank: int) -> None:
        """Makes this process a trainer rank: selects its device and bends upstream packages before they are used.

        On a CPU the ranks and servers of a run share the cores, so a rank computes with one thread unless
        OMP_NUM_THREADS says otherwise. Raises ConfigError for a GPU without what its ranks take.
        """
        import torch

        if self.kind == "cuda":
            check_transformer_engine()
            set_cuda_environment()
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"the run takes GPUs, but torch {torch.__version__} sees none in this process on {os.uname().nodename}; "
                    f"run `megasync doctor` there, or set cluster.device=cpu"
                )
            # Ray shows each rank only its own GPU; elsewhere a rank sees all of its node's.
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
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
    """The device of a run. ``kind`` is "auto" (CUDA when this machine has a GPU), "cpu" or "cuda". Raises ConfigError for
    any other. Touches no GPU, so that "cuda" is taken at its word.
    """
    if kind not in ("auto", *BACKENDS):
        raise ConfigError(f"cluster.device is {kind!r}; it must be auto, cpu or cuda")
    if kind == "auto":
        return Device("cuda" if gpu_trouble() is None else "cpu")
    return Device(kind)


def check_machine(kind: str, *, trains: bool) -> None:
    """Raises ConfigError where a run on this machine alone lacks what ``kind`` takes, as far as can be seen untouched."""
    if resolve_device(kind).kind == "cpu":
        return
    if (trouble := gpu_trouble()) is not None:
        raise ConfigError(
            f"cluster.device is {kind!r}, but {trouble}; set cluster.device=cpu or auto, or cluster.address for machines "
            f"with GPUs"
        )
    if trains:
        check_transformer_engine()


def check_transformer_engine() -> None:
    """Raises ConfigError where trainer ranks on GPUs have no layers: the local ones are for CPUs."""
    if find_spec("transformer_engine") is None:
        raise ConfigError(
            f"trainer ranks take Transformer Engine's layers on GPUs (cluster.device=cuda, or auto where there is one), and "
            f"it is not installed on {os.uname().nodename}; pip install 'megasync[gpu]' (docs/install.md), or set "
            f"cluster.device=cpu"
        )


def gpu_trouble() -> str | None:
    """Why this process has no use for a GPU, by its environment, torch's build and the machine's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    if not any(glob(pattern) for pattern in _DEVICE_FILES):
        return "this machine has no GPU"
    import torch

    return None if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
