"""Learns where a serving engine puts each Hugging Face tensor, by running its own loader on stand-ins.

The stand-ins are tensors without memory. While the model's `load_weights` runs, a dispatch mode sees each operation on
them and on the parameters: views pass, copies and fills into parameters are recorded instead of executed, and anything
that needs values is refused. So nothing is allocated for the tensors, no parameter changes
(`_Recorder.__torch_dispatch__` has no branch that executes a write), and the placement (fused projections, experts,
padding) becomes known without any knowledge of the model.

A trace does not contain values that a model derives from loaded ones, as DeepSeek's split of kv_b_proj
(`post_load_weights`) or the 1 + w of Qwen3-Next's norms (`REFRESHING`). Whoever writes the slots calls the model's hook
afterwards, as SGLang's own loaders do, and `refresh_derived`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasync.errors import TraceError
from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.strided import (
    Loop,
    NotRectangular,
    align,
    clip,
    coalesce,
    fill_rectangles,
    overlap,
    position,
    rectangles,
    unrolled,
)

# Methods of modules that derive values from their parameters.
REFRESHING = ("refresh_gemma_weight",)
# Set by SGLang on parameters that a checkpoint may lack, such as the scales of an 8-bit key-value cache.
OPTIONAL = "_skip_weight_check"

# Any callable of the traced model or of torch; its arguments are passed through.
AnyCallable = Callable[..., Any]


class _Source(NamedTuple):
    """The storage of a stand-in."""

    name: str
    tensor: torch.Tensor


class _Made(NamedTuple):
    """The storage of a tensor that the loader made of others: ``parts`` (first, length, tensor) along ``dim``."""

    dim: int
    parts: list[tuple[int, int, torch.Tensor]]
    tensor: torch.Tensor


class _Filled(NamedTuple):
    """The storage of a stand-in that the loader overwrote with a constant."""

    value: float


class _Target(NamedTuple):
    """The storage of a parameter or buffer."""

    name: str
    tensor: torch.Tensor


def trace_load(model: torch.nn.Module, specs: Iterable[tuple[str, Sequence[int]]]) -> EngineRank:
    """Where ``model.load_weights`` puts each tensor of a checkpoint with these names and shapes, in this order.

    Covers parameters, and buffers that loading writes. Casts are not recorded: a copy into a slot casts.

    Raises TraceError when the loader does something that slots and fills cannot express, or refuses the specs.
    """
    held, buffers = _data(model.named_parameters()), _data(model.named_buffers())
    recorder = _Recorder(held | buffers, type(model).__name__)
    dtype = next((tensor.dtype for tensor in held.values() if tensor.is_floating_point()), torch.float32)
    recorder.add(specs, dtype)
    with torch.no_grad(), _unreplaced(model, held | buffers), _work_in_place(), _without_deriving(model), recorder:
        try:
            cast(Any, model).load_weights(recorder.checkpoint())
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"{recorder.loader}: {type(error).__name__} while it loaded {recorder.loading}: {error}"
            ) from error
    optional = {name for name, param in model.named_parameters() if getattr(param, OPTIONAL, False)}
    return recorder.result(held, buffers, optional)


def refresh_derived(model: torch.nn.Module) -> None:
    """Derives the values of modules again that loading would derive."""
    for module in model.modules():
        for name in REFRESHING:
            if refresh := getattr(module, name, None):
                refresh()


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers themselves, under the names that slots and fills give them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _data(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.data for name, tensor in named}


class _Recorder(TorchDispatchMode):
    def __init__(self, targets: Mapping[str, torch.Tensor], model: str) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves a parameter untyped
        self.loader = f"{model}.load_weights"
        self.loading = "its first tensor"
        self._slots: dict[str, list[Slot]] = {}
        self._fills: list[Fill] = []
        self._checkpoint: list[_Source] = []
        self._sources: dict[int, _Source | _Made | _Filled] = {}
        self._targets: dict[int, list[_Target]] = {}
        for name, tensor in targets.items():
            self._targets.setdefault(_storage(tensor), []).append(_Target(name, tensor))

    def add(self, specs: Iterable[tuple[str, Sequence[int]]], dtype: torch.dtype) -> None:
        """Makes the stand-ins of a checkpoint's tensors."""
        for name, shape in specs:
            source = _Source(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))
            self._checkpoint.append(source)
            self._sources[_storage(source.tensor)] = source

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stand-ins, in the checkpoint's order."""
        for source in self._checkpoint:
            self.loading = source.name
            yield source.name, source.tensor

    def result(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], optional: Collection[str]
    ) -> EngineRank:
        loaded = [slot for slots in self._slots.values() for slot in slots]
        # An element that is loaded twice keeps the last value.
        last = {(slot.param, slot.offset, slot.hf_box[1::2], slot[4:]): slot for slot in loaded}
        slots = coalesce(last.values())
        written = {slot.param for slot in slots} | {fill.param for fill in self._fills}
        kept = parameters | {name: buffer for name, buffer in buffers.items() if name in written}
        return EngineRank(
            slots=tuple(slots),
            fills=tuple(dict.fromkeys(self._fills)),
            dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in kept.items()},
            sizes={name: tensor.numel() for name, tensor in kept.items()},
            unwritten=tuple(name for name in parameters if name not in written and name not in optional),
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.overloadpacket.__name__
        if name in ("zeros", "new_zeros", "zeros_like"):
            return _zeros(func(*args, **kwargs))
        tracked = [tensor for tensor in _tensors(args) if self._origin(tensor)]
        if not tracked or name in ("empty_like", "new_empty"):
            return func(*args, **kwargs)
        if name in self._HANDLERS:
            return self._HANDLERS[name](self, *args, **kwargs)
        if _composite(func):
            # In inference mode, which SGLang's scheduler uses, they arrive undecomposed.
            with self:
                return func.decompose(*args, **kwargs)
        if (func.is_view or name in ("_unsafe_view", "_reshape_alias")) and func != torch.ops.aten.view.dtype:
            return func(*args, **kwargs)
        raise TraceError(
            f"{self.loader} uses {func} on {self._describe(tracked[0])}: only copies and fills can be traced"
        )

    def _origin(self, tensor: torch.Tensor) -> _Source | _Made | _Filled | _Target | None:
        storage = _storage(tensor)
        if storage in self._sources:
            return self._sources[storage]
        targets = self._targets.get(storage, ())
        first = tensor.storage_offset()
        inside = (t for t in targets if t.tensor.storage_offset() <= first < _end(t.tensor))
        return next(inside, targets[0] if targets else None)

    def _describe(self, tensor: torch.Tensor) -> str:
        match self._origin(tensor):
            case _Source(name):
                return f"tensor {name!r}"
            case _Target(name):
                return f"parameter {name!r}"
            case _Made(_, parts):
                return self._describe(parts[0][2])
            case _Filled() | None:
                pass
        return f"a tensor of shape {list(tensor.shape)} made while loading {self.loading!r}"

    # What the loader may make of stand-ins

    def _same(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        if isinstance(self._origin(tensor), _Target):
            raise TraceError(f"{self.loader} reads {self._describe(tensor)}, whose values a trace does not have")
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        part = tensor if tensor.dim() else tensor.unsqueeze(0)
        self._sources[_storage(made)] = _Made(0, [(0, len(part), part)], made if tensor.dim() else made.unsqueeze(0))
        return made

    def _cat(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        # A vector without elements may be concatenated with anything.
        tensors = [tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors[:1])
        dim %= tensors[0].dim()
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        made = torch.empty(shape, dtype=tensors[0].dtype, device="meta")
        parts: list[tuple[int, int, torch.Tensor]] = []
        first = 0
        for tensor in tensors:
            parts.append((first, tensor.shape[dim], tensor))
            first += tensor.shape[dim]
        self._sources[_storage(made)] = _Made(dim, parts, made)
        return made

    def _stack(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        return self._cat([tensor.unsqueeze(dim) for tensor in tensors], dim)

    def _pad(self, tensor: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
        if min(pad) < 0:
            raise TraceError(f"{self.loader} pads {self._describe(tensor)} by {list(pad)}: negative padding")
        for i in range(0, len(pad), 2):
            dim = tensor.dim() - 1 - i // 2
            sides: list[torch.Tensor] = []
            for width in pad[i : i + 2]:
                shape = list(tensor.shape)
                shape[dim] = width
                sides.append(torch.full((), value, dtype=tensor.dtype).expand(shape))
            tensor = self._cat([sides[0], tensor, sides[1]], dim)
        return tensor

    # What it may do to parameters

    def _copy(self, to: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        source = source.expand(to.shape)
        if to.numel():
            target, loops, at = self._place(to, source)
            self._write(target.name, at, loops, source, _start(source))
        return to

    def _fill(self, to: torch.Tensor, value: torch.Tensor | float = 0) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and self._origin(value):
            return self._copy(to, value)
        origin = self._origin(to)
        if isinstance(origin, _Source | _Made) and to.numel() == origin.tensor.numel():
            # A tensor that this rank does not need.
            self._sources[_storage(to)] = _Filled(float(value))
        elif to.numel():
            target, loops, at = self._place(to, to)
            self._record_fill(target.name, at, loops, float(value))
        return to

    def _place(self, to: torch.Tensor, source: torch.Tensor) -> tuple[_Target, list[Loop], int]:
        target = self._origin(to)
        if not isinstance(target, _Target):
            raise TraceError(
                f"{self.loader} writes {self._describe(source)} into {self._describe(to)}, "
                "which is neither a parameter nor a buffer of the model"
            )
        loops = [Loop(*step) for step in zip(to.shape, source.stride(), to.stride(), strict=True)]
        return target, loops, _start(to) - _start(target.tensor)

    def _write(self, param: str, at: int, loops: list[Loop], source: torch.Tensor, offset: int) -> None:
        """Records a copy from ``offset`` of ``source``'s storage to element ``at`` of ``param``."""
        origin = self._origin(source)
        if origin is None or isinstance(origin, _Filled):
            constant = self._constant(source, param) if origin is None else origin.value
            self._record_fill(param, at, loops, constant)
            return
        repeated = [loop for loop in loops if loop.source == 0 and loop.steps > 1]
        loops = [loop for loop in loops if loop.source]
        for _, further in unrolled(repeated):
            try:
                match origin:
                    case _Source(name, tensor):
                        rows = prod(tensor.shape[:-1]) if tensor.dim() > 1 else tensor.numel()
                        shape = (rows, tensor.numel() // rows)
                        slots = rectangles(loops, offset, shape, name, param, at + further)
                        self._slots.setdefault(param, []).extend(slots)
                    case _Made():
                        self._write_parts(param, at + further, loops, origin, offset)
                    case _Target():
                        raise TraceError(f"{self.loader} copies {self._describe(source)} into parameter {param!r}")
            except NotRectangular:
                raise TraceError(
                    f"{self.loader} copies elements of {self._describe(source)} into parameter {param!r} "
                    f"that do not form a rectangle: loops {[tuple(loop[:2]) for loop in loops]} from element {offset}"
                ) from None

    def _write_parts(self, param: str, at: int, loops: list[Loop], made: _Made, offset: int) -> None:
        shape = made.tensor.shape
        walks, start = align(loops, offset, shape), position(offset, shape)
        for first, length, part in made.parts:
            for relative, clipped, further in clip(walks[made.dim], start[made.dim], first, length):
                place = [*start[: made.dim], relative, *start[made.dim + 1 :]]
                clipped_walks = [*walks[: made.dim], clipped, *walks[made.dim + 1 :]]
                begin = _start(part) + sum(i * step for i, step in zip(place, part.stride(), strict=True))
                inner = [
                    Loop(loop.steps, loop.source * step, loop.target)
                    for walk, step in zip(clipped_walks, part.stride(), strict=True)
                    for loop in walk
                ]
                self._write(param, at + further, inner, part, begin)

    def _constant(self, tensor: torch.Tensor, param: str) -> float:
        if tensor.device.type != "meta":
            # An expanded scalar is read once, not once per repetition.
            values = tensor.as_strided(
                [n if s else 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride()
            )
            first = values.reshape(-1)[0]
            if bool((values == first).all()):
                return float(first)
        raise TraceError(
            f"{self.loader} writes {self._describe(tensor)} into parameter {param!r}, which is not a constant"
        )

    def _record_fill(self, param: str, at: int, loops: list[Loop], value: float) -> None:
        for fill in fill_rectangles(loops, param, at, value):
            for slot in self._slots.get(param, ()):
                if overlap(fill.rectangle, slot.rectangle):
                    raise TraceError(f"{self.loader} fills a part of {param!r} that it loaded from {slot.hf_name!r}")
            self._fills.append(fill)

    # A table of the class: one of the object would keep the parameters referred to until the next garbage collection.
    _HANDLERS: ClassVar[dict[str, AnyCallable]] = {
        "copy_": _copy,
        "fill_": _fill,
        "zero_": _fill,
        "clone": _same,
        "_to_copy": _same,
        "cat": _cat,
        "stack": _stack,
        "constant_pad_nd": _pad,
    }


@cache
def _composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # pyright: ignore[reportPrivateUsage]  # no public way
    return has_kernel(func.name(), "CompositeImplicitAutograd")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # the identity of a storage


def _start(tensor: torch.Tensor) -> int:
    """The first element of the tensor in its storage."""
    return int(tensor.storage_offset())


def _end(tensor: torch.Tensor) -> int:
    """The first element after the tensor in its storage."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _start(tensor) + (extent + 1 if tensor.numel() else 0)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(cast(Sequence[Any], arg))


def _zeros(made: torch.Tensor) -> torch.Tensor:
    """Zeros that can be read, although they were requested on the meta device; one element of memory."""
    return torch.zeros((), dtype=made.dtype).expand(made.shape) if made.device.type == "meta" else made


@contextmanager
def _work_in_place() -> Generator[None]:
    """Executors run what this thread submits at once, in this thread: dispatch modes do not reach other threads."""
    tracing, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def run(self: ThreadPoolExecutor, fn: AnyCallable, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != tracing:
            return submit(self, fn, *args, **kwargs)
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done

    ThreadPoolExecutor.submit = run
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit


@contextmanager
def _without_deriving(model: torch.nn.Module) -> Generator[None]:
    """Disables the model's post-load hook, which some loaders call themselves, and those of its modules."""
    hooks = [(model, "post_load_weights"), *((module, name) for module in model.modules() for name in REFRESHING)]
    hooks = [(owner, name) for owner, name in hooks if hasattr(owner, name)]

    def skip(*args: Any, **kwargs: Any) -> None:
        pass

    for owner, name in hooks:
        vars(owner)[name] = skip
    try:
        yield
    finally:
        for owner, name in hooks:
            del vars(owner)[name]


@contextmanager
def _unreplaced(model: torch.nn.Module, held: Mapping[str, torch.Tensor]) -> Generator[None]:
    """Restores and refuses parameters that a loader replaced instead of filling."""
    owners = dict(model.named_parameters()) | dict(model.named_buffers())
    try:
        yield
    finally:
        replaced: list[str] = []
        for name, tensor in held.items():
            now = owners[name].data
            if _storage(now) != _storage(tensor) or (now.shape, now.stride()) != (tensor.shape, tensor.stride()):
                owners[name].data = tensor
                replaced.append(name)
    if replaced:
        raise TraceError(
            f"{type(model).__name__}.load_weights replaces parameter {replaced[0]!r} instead of filling it"
        )
