"""A stand-in for CUDA graphs: calls are recorded with the tensors that they read and write, and repeated on these.

As on a GPU, a graph keeps addresses, shapes and what Python decided. It does not see that a parameter points to other
memory since, and a number that Python passed stays. To read a value of a tensor in Python is an error. What is computed
during the capture is overwritten with NaN, because a GPU computes nothing then.

Stand-ins that read values in Python where a GPU's kernel does are one call each (`kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
# Operators that allocate memory and write nothing, and those whose results Python reads.
_ALLOCATIONS = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty)
_READS = (_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.nonzero, _ATEN.masked_select)
# Part of what gloo computes for them is done in operators while a thread waits.
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
# Methods of tensors that read values without an operator.
_METHODS = ("tolist", "numpy")


def install() -> None:
    """Replaces CUDA graphs in this process. Call it before anything imports Transformer Engine or Megatron."""
    if torch.cuda.CUDAGraph is StandInGraph:
        return
    graphs: Any = torch.cuda.graphs
    graphs.CUDAGraph = StandInGraph
    graphs.graph = capture
    graphs.graph_pool_handle = lambda: (0, 0)
    torch.cuda.CUDAGraph, torch.cuda.graph = StandInGraph, capture
    for name in _COLLECTIVES:
        setattr(dist, name, _collective(getattr(dist, name)))


class StandInGraph:
    """Replaces `torch.cuda.CUDAGraph`: a list of recorded calls."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[_Call] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call.repeat()


@contextmanager
def capture(graph: StandInGraph, *_: Any, **__: Any) -> Iterator[None]:
    """Replaces `torch.cuda.graph`: records the calls made within the context."""
    stock = {name: getattr(torch.Tensor, name) for name in _METHODS}
    for name, read in stock.items():
        setattr(torch.Tensor, name, _guarded(read))
    try:
        with _Recorder(graph.calls):
            yield
    finally:
        for name, read in stock.items():
            setattr(torch.Tensor, name, read)
    for call in graph.calls:
        call.forget()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a kernel: a graph records it as one call, whatever happens inside."""

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> Any:
        recorder = _get_current_dispatch_mode()
        if not isinstance(recorder, _Recorder):
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
            recorder.add(function, args, kwargs, result)
        return result

    return launch


class _Ended:
    """A collective that has ended."""

    def wait(self) -> None: ...


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which a graph records as one call."""
    recorded = kernel(function)

    @wraps(function)
    def launch(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not isinstance(_get_current_dispatch_mode(), _Recorder):
            return function(*args, async_op=async_op, **kwargs)
        recorded(*args, **kwargs)
        return _Ended() if async_op else None

    return launch


class _Call:
    """A call, and the memory that its tensors had. Without a function it only allocated them."""

    def __init__(self, function: Callable[..., Any] | None, args: Any, kwargs: Any, result: Any) -> None:
        self._function = function
        # `data` keeps the address that a parameter has now, and autograd does not see what is written to it.
        self._args, self._kwargs, self._result = tree_map(_data, (args, kwargs, result))
        self._given = {_address(tensor) for tensor in _tensors((args, kwargs))}

    def forget(self) -> None:
        """Overwrites what the call has computed."""
        for tensor in _tensors(self._result):
            if _address(tensor) not in self._given and tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def repeat(self) -> None:
        if self._function is None:
            return
        result = self._function(*self._args, **self._kwargs)
        for old, new in zip(tree_leaves(self._result), tree_leaves(result), strict=True):
            if isinstance(new, torch.Tensor) and _address(new) != _address(old):
                old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS:
            _refuse(func)
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(None if func.overloadpacket in _ALLOCATIONS else func, args, kwargs, result)
        return result

    def add(self, function: Callable[..., Any] | None, args: Any, kwargs: Any, result: Any) -> None:
        self._calls.append(_Call(function, args, kwargs, result))


def _refuse(what: Any) -> None:
    raise RuntimeError(f"operation not permitted when stream is capturing: {what} reads values of a tensor")


def _guarded(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if isinstance(_get_current_dispatch_mode(), _Recorder):
            _refuse(read.__name__)
        return read(*args, **kwargs)

    return guarded


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _data(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, torch.Tensor) else leaf


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
