"""A GPU's memory and streams, claimed by host tensors: real code runs on them, and its races are found.

    with StreamedGpu() as gpu:           # also in each further thread: `with gpu.here():`
        ...                              # torch.empty(n, device="cuda"), torch.cuda.Stream, events, pinned memory
    assert gpu.races == []

Every operation really runs, at once and in the order of the program. What a GPU would only promise is kept beside it: a
vector clock for the host and each stream, which launches, events and waits join, and for each byte its last write and
its last read on each stream. An access that is not ordered after an earlier one of the same byte, one of them a write,
is a race: on a GPU its result depends on time.

As in CUDA: work is ordered after all that the host had waited for when it was launched; a copy from the GPU holds up
the host, unless it goes to pinned memory with ``non_blocking``; a copy to the GPU reads pageable memory before it
returns. Threads count as one host, in the order in which they ran, and all share one default stream. Reuse of freed
memory by the allocator is not modelled.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = 0
MOST_STREAMS = 32
# Reading these gives the host a value.
HOST_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")
DEVICE = torch.device("cuda", 0)


@dataclass
class Memory:
    """The accesses of one storage's bytes; ``where`` is device, pinned or pageable."""

    where: str
    storage: torch.UntypedStorage
    writer: np.ndarray = field(init=False)
    written: np.ndarray = field(init=False)
    read: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        size = self.storage.nbytes()
        self.writer, self.written = np.zeros(size, np.int8), np.zeros(size, np.int64)
        self.read = np.zeros((MOST_STREAMS, size), np.int64)


class Stream:
    """In the place of torch.cuda.Stream."""

    def __init__(self, gpu: StreamedGpu) -> None:
        self.gpu, self.actor = gpu, gpu.new_actor()

    def wait_event(self, event: Event) -> None:
        self.gpu.join(self.actor, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.gpu.join(self.actor, self.gpu.clocks[other.actor])

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.join(HOST, self.gpu.clocks[self.actor])


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, gpu: StreamedGpu) -> None:
        self.gpu, self.clock = gpu, np.zeros(MOST_STREAMS, np.int64)

    def record(self, stream: Stream | None = None) -> None:
        self.clock = self.gpu.clocks[(stream or self.gpu.stream).actor].copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.stream).wait_event(self)

    def synchronize(self) -> None:
        self.gpu.join(HOST, self.clock)


class StreamedGpu:
    """One GPU. ``races`` are sentences, one for each pair of operations that race."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.clocks = np.zeros((MOST_STREAMS, MOST_STREAMS), np.int64)
        self._actors = 1
        self._names: dict[tuple[int, int], str] = {}
        self._memory: dict[int, Memory] = {}
        self._registered: set[int] = set()
        self._lock = threading.RLock()
        self._here = threading.local()
        self.default = Stream(self)

    # Clocks

    def new_actor(self) -> int:
        with self._lock:
            self._actors += 1
            assert self._actors <= MOST_STREAMS
            return self._actors - 1

    def join(self, actor: int, clock: np.ndarray) -> None:
        with self._lock:
            np.maximum(self.clocks[actor], clock, out=self.clocks[actor])

    @property
    def stream(self) -> Stream:
        return getattr(self._here, "stream", self.default)

    @property
    def is_hidden(self) -> bool:
        return getattr(self._here, "hidden", False)

    # Memory

    def memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        where = "pinned" if storage.data_ptr() in self._registered else "pageable"
        return self._memory.setdefault(storage.data_ptr(), Memory(where, storage))

    def place(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        self.memory(tensor).where = where
        return tensor

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self._registered.add(address)
        if address in self._memory:
            self._memory[address].where = "pinned"
        return 0

    def _unregister(self, address: int) -> int:
        self._registered.remove(address)
        if address in self._memory:
            self._memory[address].where = "pageable"
        return 0

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self.memory(tensor).where == "device"

    def run(self, actor: int, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Orders one operation of a stream or of the host, and notes its races."""
        with self._lock:
            self.join(actor, self.clocks[HOST])
            self.clocks[actor][actor] += 1
            now = self.clocks[actor]
            self._names[actor, int(now[actor])] = name
            for tensor in reads:
                memory, at = self.memory(tensor), _bytes(tensor)
                self._after_write(memory, at, now, f"{name} reads")
                memory.read[actor][at] = now[actor]
            for tensor in writes:
                memory, at = self.memory(tensor), _bytes(tensor)
                self._after_write(memory, at, now, f"{name} writes")
                for other in range(self._actors):
                    late = memory.read[other][at]
                    if (late > now[other]).any():
                        self._race(f"{name} writes", "read", other, int(late.max()))
                memory.writer[at], memory.written[at] = actor, now[actor]

    def _after_write(self, memory: Memory, at: np.ndarray, now: np.ndarray, what: str) -> None:
        writer, written = memory.writer[at], memory.written[at]
        if (unordered := written > now[writer]).any():
            worst = int(np.argmax(unordered))
            self._race(what, "written", int(writer[worst]), int(written[worst]))

    def _race(self, what: str, earlier: str, actor: int, seq: int) -> None:
        race = f"{what} what {self._names[actor, seq]} has {earlier}, without waiting for it"
        if race not in self.races:
            self.races.append(race)

    # Threads

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """What this thread does inside is no operation of the program."""
        before, self._here.hidden = getattr(self._here, "hidden", False), True
        try:
            yield
        finally:
            self._here.hidden = before

    @contextmanager
    def here(self) -> Iterator[None]:
        """Makes this thread's tensors the GPU's."""
        if getattr(self._here, "active", False):
            yield
            return
        self._here.active = True
        try:
            with _Accesses(self), _Places(self):
                yield
        finally:
            self._here.active = False

    def _enter(self) -> None:
        """Makes this thread's tensors the GPU's until it ends."""
        if not getattr(self._here, "active", False):
            self._here.entered = ExitStack()
            self._here.entered.enter_context(self.here())

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """In the place of torch.cuda.stream."""
        before, self._here.stream = self.stream, stream
        try:
            with self.here():
                yield
        finally:
            self._here.stream = before

    def stand_in(self, monkeypatch: Any) -> None:
        """Puts this GPU in the place of torch.cuda's streams and events."""
        from megasync import device

        device._side_stream.cache_clear()
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda *_, **__: Event(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.stream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        registered = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: registered)
        # A thread that selects the device works with it.
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: self._enter())
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", partial(StreamedNccl, self), raising=False)
        torch.distributed.ProcessGroupNCCL.Options = NcclOptions


class NcclOptions:
    """In the place of ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


class StreamedNccl:
    """In the place of dist.ProcessGroupNCCL, for members in threads of this process: messages between two members.

    Each member has one stream. An operation follows what its thread's current stream has done; a wait makes that stream
    follow the operation, and holds up the host, as torch does with blocking waits.
    """

    _rooms: ClassVar[dict[bytes, dict[tuple[int, int], _Pair]]] = defaultdict(lambda: defaultdict(_Pair))

    def __init__(self, gpu: StreamedGpu, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        self._gpu, self._rank = gpu, rank
        self._stream = Stream(gpu)
        self._pairs = self._rooms[bytes(store.compare_set("room", "", uuid4().hex))]

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == DEVICE

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> NcclWork:
        return self._start("send", tensors[0], self._pairs[self._rank, to].sent)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> NcclWork:
        return self._start("recv", tensors[0], self._pairs[source, self._rank].awaited)

    def _start(self, name: str, tensor: torch.Tensor, queue: deque[tuple[torch.Tensor, Future[None]]]) -> NcclWork:
        gpu, done = self._gpu, Future[None]()
        with gpu.hidden():
            assert gpu.on_device(tensor), f"NCCL cannot {name} host memory"
            self._stream.wait_stream(gpu.stream)
            reads, writes = ([tensor], []) if name == "send" else ([], [tensor])
            gpu.run(self._stream.actor, name, reads, writes)
            queue.append((tensor, done))
            for pair in list(self._pairs.values()):
                pair.move()
        return NcclWork(gpu, self._stream, done)

    def abort(self) -> None:
        pass


class NcclWork:
    """An operation that was started."""

    def __init__(self, gpu: StreamedGpu, stream: Stream, done: Future[None]) -> None:
        self._gpu, self._done = gpu, done
        self._event = Event(gpu)
        self._event.record(stream)

    def wait(self, limit: timedelta) -> None:
        try:
            self._done.result(limit.total_seconds())
        except TimeoutError:
            raise RuntimeError("timed out") from None
        self._event.wait()
        self._event.synchronize()


class _Pair:
    """Messages from one member to another, in order: those that were sent and those that are awaited."""

    def __init__(self) -> None:
        self.sent: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self.awaited: deque[tuple[torch.Tensor, Future[None]]] = deque()
        self._lock = threading.Lock()

    def move(self) -> None:
        with self._lock:
            while self.sent and self.awaited:
                (message, left), (target, arrived) = self.sent.popleft(), self.awaited.popleft()
                target.copy_(message)
                left.set_result(None)
                arrived.set_result(None)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Offsets in its storage of all bytes of a tensor."""
    offsets = np.arange(tensor.untyped_storage().nbytes())
    item = tensor.element_size()
    shape, strides = (*tensor.shape, item), (*(8 * item * stride for stride in tensor.stride()), 8)
    return np.lib.stride_tricks.as_strided(offsets[item * tensor.storage_offset() :], shape, strides).reshape(-1)


class _Accesses(TorchDispatchMode):
    """Sees every operation with its real arguments."""

    def __init__(self, gpu: StreamedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu, schema = kwargs or {}, self.gpu, func._schema
        result = func(*args, **kwargs)
        if gpu.is_hidden:
            return result
        name = schema.name.removeprefix("aten::")
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for value in tree_leaves(given.get(argument.name)):
                if isinstance(value, torch.Tensor) and value.numel():
                    (writes if written else reads).append(value)
                    # What an operation computes it may write without reading; what it changes it reads too.
                    if written and not name.startswith(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")):
                        reads.append(value)
        made = [
            value
            for value in tree_leaves(result)
            if isinstance(value, torch.Tensor) and value.numel() and not any(value is given for given in writes)
        ]
        shares = (back.alias_info for back in schema.returns)
        if any(alias is not None and not alias.is_write for alias in shares):
            return result  # A view touches no element.
        device = any(gpu.on_device(tensor) for tensor in reads + writes)
        for value in made:
            if device:
                gpu.place(value, "device")
        if name.startswith(("empty", "new_empty")):
            return result
        if name.startswith(("copy_", "_foreach_copy_")):
            blocking = not given.get("non_blocking", False)
            for target, source in zip(writes, reads, strict=True):
                self._copy(name, target, source, blocking)
        elif device:
            host = [tensor for tensor in reads if not gpu.on_device(tensor)]
            if host:
                gpu.run(HOST, name, host, [])
            gpu.run(gpu.stream.actor, name, [tensor for tensor in reads if gpu.on_device(tensor)], writes + made)
        elif reads or writes:
            gpu.run(HOST, name, reads, writes + made)
        return result

    def _copy(self, name: str, target: torch.Tensor, source: torch.Tensor, blocking: bool) -> None:
        gpu = self.gpu
        to, origin = gpu.memory(target).where, gpu.memory(source).where
        if "device" not in (to, origin):
            gpu.run(HOST, name, [source], [target])
        elif origin == "pageable":
            gpu.run(HOST, name, [source], [])
            gpu.run(gpu.stream.actor, name, [], [target])
        else:
            gpu.run(gpu.stream.actor, name, [source], [target])
            if to == "pageable" or (blocking and to != origin):
                gpu.stream.synchronize()


class _Places(TorchFunctionMode):
    """Makes tensors where they are asked for, and answers where they are."""

    def __init__(self, gpu: StreamedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = dict(kwargs or {}), self.gpu
        if gpu.is_hidden:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return DEVICE if gpu.on_device(args[0]) else func(*args)
        if func == torch.Tensor.is_cuda.__get__:
            return gpu.on_device(args[0])
        if name == "is_pinned":
            return gpu.memory(args[0]).where == "pinned"
        if name in HOST_READS and gpu.on_device(args[0]):
            gpu.run(gpu.stream.actor, name, [args[0]], [])
            gpu.stream.synchronize()
            return func(*args, **kwargs)
        if name in HOST_READS:
            gpu.run(HOST, name, [args[0]], [])
            return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, args, kwargs)
        if name == "pin_memory":
            return gpu.place(torch.empty(args[0].shape, dtype=args[0].dtype), "pinned").copy_(args[0])
        where = "pinned" if kwargs.pop("pin_memory", False) else "pageable"
        if kwargs.get("device") is not None:
            where = "device" if torch.device(kwargs["device"]).type == "cuda" else where
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if where != "pageable":
            gpu.place(made, where)
            if not name.startswith("empty"):
                gpu.run(gpu.stream.actor if where == "device" else HOST, name, [], [made])
        return made

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """``to``, ``cpu`` or ``cuda``: a new tensor in the other place, or what torch does within one."""
        tensor, *rest = args
        device = {"cpu": "cpu", "cuda": "cuda"}.get(name) or kwargs.pop("device", None)
        if device is None and rest and isinstance(rest[0], str | torch.device | int):
            device = rest.pop(0)
        if device is None:
            return func(*args, **kwargs)
        to_device = torch.device(device).type == "cuda"
        blocking, copy = not kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        dtype = kwargs.pop("dtype", None) or (rest[0] if rest else tensor.dtype)
        assert not kwargs, kwargs
        if to_device == self.gpu.on_device(tensor) and not copy and dtype == tensor.dtype:
            return tensor
        made = torch.empty(tensor.shape, dtype=dtype)
        self.gpu.place(made, "device" if to_device else "pageable")
        return made.copy_(tensor, non_blocking=not blocking)
