"""Stand-ins for what Transformer Engine's and Megatron's Python expect of CUDA: calls of torch.cuda, CUDA tensors.

The stand-in GPU is a Hopper. It has one stream, on which everything happens in program order. Its tensors are CPU or
meta tensors that report `is_cuda`, except for pinned memory of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

# What Transformer Engine chooses kernels by: the properties of an H100.
PROPERTIES = SimpleNamespace(
    name="stand-in for an H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30
)


class StandInEvent:
    """An event of a device that has already finished everything."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class StandInStream:
    """A stream whose work is finished as soon as it is queued."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        return event or StandInEvent()


class PinnedTensor(torch.Tensor):
    """A tensor in pinned memory of the host; so is what is computed of it alone."""

    is_cuda = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def install(device: torch.device) -> None:
    """Replaces functions of torch.cuda in this process; ``device``, cpu or meta, becomes the current CUDA device.

    All tensors but a `PinnedTensor` report `is_cuda`. See `redirect` for tensors that modules create with
    ``device="cuda"``.
    """
    stream = StandInStream()

    @contextmanager
    def inside(*_: Any, **__: Any) -> Iterator[None]:
        yield

    replaced: dict[str, Any] = {
        "current_device": lambda: device,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda *_: PROPERTIES,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed) and None,
        "synchronize": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "stream": inside,
        "device": inside,
        "Stream": StandInStream,
        "Event": StandInEvent,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # Optimizers ask it whether a graph is captured, also for tensors in host memory.
    torch.accelerator.current_stream = lambda *_: stream  # pyright: ignore[reportAttributeAccessIssue]
    Tensor: Any = torch.Tensor
    Tensor.cuda = lambda self, *_, **__: self
    Tensor.to = _to
    Tensor.is_cuda = property(lambda self: True)
    Tensor.record_stream = lambda self, stream: None
    Tensor.pin_memory = lambda self, *_: self.clone().as_subclass(PinnedTensor)
    torch.empty = _empty
    _Redirected.current = device


def current_device() -> torch.device:
    """The stand-in for the current CUDA device: the device of `install`, or the CPU."""
    return _Redirected.current


def _redirect_device(kwargs: dict[str, Any]) -> None:
    device = kwargs.get("device")
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
        kwargs["device"] = _Redirected.current


_tensor_empty = torch.empty


def _empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    if not kwargs.pop("pin_memory", False):
        return _tensor_empty(*args, **kwargs)
    return _tensor_empty(*args, **kwargs | {"device": _Redirected.current}).as_subclass(PinnedTensor)


_tensor_to = torch.Tensor.to


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    _redirect_device(kwargs)
    return _tensor_to(self, *args, **kwargs)


class _Redirected:
    """torch for a module whose ``device="cuda"`` means another device, built with CUDA; forwards everything else."""

    current = torch.device("cpu")
    version = SimpleNamespace(cuda="13.0", hip=None)

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            _redirect_device(kwargs)
            return value(*args, **kwargs)

        return create


# Functions that create tensors on a given device.
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "tensor", "zeros", "zeros_like")


def redirect(*packages: str) -> None:
    """Creates tensors with ``device="cuda"`` on the current device in all imported modules of these packages."""
    proxy = _Redirected()
    for name, module in list(sys.modules.items()):
        if name.startswith(tuple(f"{package}." for package in packages)) and vars(module).get("torch") is torch:
            vars(module)["torch"] = proxy
