"""Everything that differs between CPU and GPU runs. Other modules ask a `Device` and never test for CUDA themselves.

Importing this module imports neither torch nor Megatron, so the driver can use it too. The driver needs no GPU and
never initializes CUDA: even querying for a GPU would allocate memory on one and make it unsafe to fork the driver. The
driver selects the kind of device (`resolve_device`) and checks what is visible without CUDA (`check_machine`). Only a
trainer rank, which computes, initializes CUDA (`Device.prepare_process`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.errors import ConfigError

if TYPE_CHECKING:
    import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Environment variables of a trainer rank on a GPU, unless they are set already.
_CUDA_ENVIRONMENT = {
    # Sequence parallelism overlaps communication with computation only if kernels start in program order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # SGLang sets this for its servers, and NCCL cannot connect processes that allocate memory in different ways.
    "NCCL_CUMEM_ENABLE": "0",
}

# Device files of the GPU driver on a server, under WSL and on a Jetson.
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu")


@dataclass(frozen=True)
class Device:
    """The kind of device that the trainer ranks and servers of a run compute on: "cpu" or "cuda"."""

    kind: str

    @property
    def backend(self) -> str:
        """The backend of torch.distributed process groups."""
        return BACKENDS[self.kind]

    @cached_property
    def torch_device(self) -> torch.device:
        """The device of this process. On CUDA, it is the one that `prepare_process` selected."""
        import torch

        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @property
    def name(self) -> str:
        """CUDA's name for the GPU of this process; "cpu" on a CPU."""
        if self.kind == "cpu":
            return "cpu"
        import torch

        return torch.cuda.get_device_name()

    @property
    def spec(self) -> str:
        """The Megatron layer spec: "te" (Transformer Engine) on GPUs, "local" on a CPU."""
        return "te" if self.kind == "cuda" else "local"

    @property
    def expert_dispatcher(self) -> str:
        """Megatron's token dispatcher. With gloo, its all-to-all dispatcher receives tensors where it needs numbers."""
        return "allgather" if self.kind == "cpu" else "alltoall"

    def prepare_process(self, local_rank: int) -> None:
        """Prepares this process as a trainer rank: selects its device and patches upstream packages before first use.

        On a CPU the ranks and servers of a run share the cores, so a rank computes with one thread unless
        OMP_NUM_THREADS is set. Raises ConfigError on CUDA if there is no GPU or Transformer Engine is missing.
        """
        import torch

        if self.kind == "cuda":
            check_transformer_engine()
            set_cuda_environment()
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"the run needs GPUs, but torch {torch.__version__} sees none in this process on "
                    f"{os.uname().nodename}; run `megasync doctor` there, or set cluster.device=cpu"
                )
            # Under Ray a rank sees only its own GPU; elsewhere it sees all GPUs of its node.
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        else:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            # On import, Megatron warns in several places that CUDA packages are missing.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
            import_megatron_uncompiled()

        from megasync_patches import apply_all  # pyright: ignore[reportMissingImports] - the folder patches/

        apply_all(self.kind)

    def free_cache(self) -> None:
        """Returns memory cached by torch to the device, for other processes."""
        if self.kind == "cuda":
            import torch

            torch.cuda.empty_cache()


def import_megatron_uncompiled() -> None:
    """Imports Megatron without compiling the functions that it passes to `torch.compile`.

    A CPU rank calls none of them, and importing the compiler takes as long as importing Megatron. Megatron's own switch
    can only be set once it is imported, which is too late for the functions of its first modules.
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
    """Sets the variables that CUDA and NCCL read at their first use, and loads cuDNN. No effect on a CPU.

    With CUDNN_HOME, Transformer Engine loads the first of cuDNN's libraries by its path, and expects to find the others
    where the system looks. They are found here because they are loaded already.
    """
    os.environ.update(_CUDA_ENVIRONMENT | dict(os.environ) | compiler_environment(os.environ))
    if "CUDNN_HOME" in os.environ:
        for library in sorted(Path(os.environ["CUDNN_HOME"], "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compiler_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables by which processes on GPUs find the compilers of kernels that are built at their first use.

    CUDA_HOME is the toolkit that `megasync install gpu` has installed with torch, unless ``env`` names another;
    one that is found by PATH may be of a CUDA that torch is not built for. CUDNN_HOME is the cuDNN that torch loads:
    Transformer Engine takes any that the system has first, and two of them in one process leave it without fused
    attention. PATH begins with the folder of this Python, where ninja is.
    """
    programs = str(Path(sys.executable).parent)
    variables = {
        "PATH": os.pathsep.join([programs, *(p for p in env.get("PATH", "").split(os.pathsep) if p != programs)])
    }
    package = find_spec("nvidia")
    folders = package.submodule_search_locations if package is not None else None
    toolkits = [lib.parent for folder in folders or () for lib in sorted(Path(folder).glob("cu*/lib64"))]
    if toolkits and not env.get("CUDA_HOME") and not env.get("CUDA_PATH"):
        variables["CUDA_HOME"] = str(toolkits[-1])
    libraries = [lib.parents[1] for folder in folders or () for lib in Path(folder).glob("cudnn/lib/libcudnn.so.*")]
    if libraries and not env.get("CUDNN_HOME") and not env.get("CUDNN_PATH"):
        variables["CUDNN_HOME"] = str(libraries[0])
    return variables


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Runs this thread's GPU work on a separate stream, so that it and other threads do not wait for each other."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    return torch.cuda.stream(_side_stream(device))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for the life of the process, because torch's allocator caches memory per stream.

    High priority, because torch takes streams of default priority round-robin from a small pool, and an engine computes
    on one of those.
    """
    import torch

    return torch.cuda.Stream(device, priority=-1)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Marks the work that this thread has queued so far, for `wait_event`; None on a CPU, where it is already done."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_event(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Makes this thread's later GPU work wait for ``event``. The thread itself does not wait."""
    if event is not None:
        import torch

        torch.cuda.current_stream(device).wait_event(event)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished the work that this thread has queued."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def pin(memory: torch.Tensor) -> None:
    """Page-locks a host tensor, so that copies between it and a GPU need no buffer; `unpin` before it is freed.

    Memory that torch allocates as pinned takes the next power of two. Raises RuntimeError, with CUDA's error number.
    """
    if error := int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise RuntimeError(
            f"CUDA cannot page-lock {memory.nbytes / 2**20:.0f} MiB (error {error}); allow it (ulimit -l)"
        )


def unpin(memory: torch.Tensor) -> None:
    """Undoes `pin`."""
    if error := int(_cudart().cudaHostUnregister(memory.data_ptr())):
        raise RuntimeError(f"CUDA cannot unlock {memory.nbytes / 2**20:.0f} MiB (error {error})")


def _cudart() -> Any:
    """CUDA's runtime, which a build of torch without CUDA lacks."""
    import torch

    return torch.cuda.cudart()


def resolve_device(kind: str) -> Device:
    """The device of a run: ``kind`` is "auto" (CUDA if this machine has a GPU), "cpu" or "cuda".

    Touches no GPU: "cuda" is accepted unchecked. Raises ConfigError for any other kind.
    """
    if kind not in ("auto", *BACKENDS):
        raise ConfigError(f"cluster.device is {kind!r}; it must be auto, cpu or cuda")
    if kind == "auto":
        return Device("cuda" if why_no_gpu() is None else "cpu")
    return Device(kind)


def count_gpus() -> int:
    """The number of GPUs that this process can use. Touches none."""
    if why_no_gpu() is not None:
        return 0
    import torch

    return torch.cuda.device_count()


def check_machine(kind: str, *, trains: bool) -> None:
    """Raises ConfigError if a run on this machine alone lacks a GPU or Transformer Engine. Touches no GPU."""
    if resolve_device(kind).kind == "cpu":
        return
    if (trouble := why_no_gpu()) is not None:
        raise ConfigError(
            f"cluster.device is {kind!r}, but {trouble}; set cluster.device=cpu or auto, or cluster.address for "
            f"machines with GPUs"
        )
    if trains:
        check_transformer_engine()


def check_transformer_engine() -> None:
    """Raises ConfigError if Transformer Engine is missing, without which trainer ranks on GPUs have no layers."""
    if find_spec("transformer_engine") is None:
        raise ConfigError(
            f"trainer ranks on GPUs (cluster.device=cuda, or auto on a machine with a GPU) need Transformer Engine, "
            f"which is not installed on {os.uname().nodename}; run `megasync install gpu` (docs/install.md), or set "
            f"cluster.device=cpu"
        )


def check_deep_ep() -> None:
    """Raises ConfigError if DeepEP is missing, which `trainer.moe_deepep` needs on every trainer rank."""
    if "deep_ep" not in sys.modules and find_spec("deep_ep") is None:
        raise ConfigError(
            f"trainer.moe_deepep=true needs the package deep_ep, which is not installed on {os.uname().nodename}; "
            f"install it (https://github.com/deepseek-ai/DeepEP), or set moe_deepep=false"
        )


def why_no_gpu() -> str | None:
    """Why this process cannot use a GPU, according to environment, device files and torch build; None if it can."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    if not any(glob(pattern) for pattern in _DEVICE_FILES):
        return "this machine has no GPU"
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
