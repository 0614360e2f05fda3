"""torch's ProcessGroupNCCL and store, over `fake_nccl`: what real code does with them becomes actions of a machine.

`nccl()` puts the stand-ins in the place of torch's classes where `megasync.sync` uses them. A thread that uses them
acts for a process inside `recording`, which returns the actions as a program and waits for nothing.

A recorded program is what the code does as long as nothing fails: the order of its operations does not depend on when
they end. So a program of thousands of ranks is recorded with tensors on the meta device; values that code reads from
those (`tolist`) are zero.

As in torch's ProcessGroupNCCL.cpp (`pointToPoint`): without eager initialisation, an unbatched send or receive makes
and uses a communicator of its two ranks, with a stream of its own; after `eager_connect_single_device` the
communicator of all members is used, with one stream. The first of the members makes the id and stores it, the
others wait for it at most the group's timeout; nothing limits what follows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_nccl import Action, Part
from torch.overrides import TorchFunctionMode

from megasync.sync import attempt, groups
from megasync.sync.broadcast import sender as broadcast_sender
from megasync.sync.groups import BLOCKING_WAIT
from megasync.sync.shard import receiver as shard_receiver
from megasync.sync.shard import sender as shard_sender


class Recorder:
    """The actions of one thread of a process."""

    def __init__(self) -> None:
        self.program: list[Action] = []
        self.handles = count()
        self.limit: float | None = None

    def do(self, *action: Any) -> None:
        self.program.append(action)


_RECORDERS: list[Recorder] = []
_FORKS = count()


def who() -> Recorder:
    """For whom the code acts."""
    return _RECORDERS[-1]


@contextmanager
def recording() -> Iterator[list[Action]]:
    """What code does inside becomes a program."""
    _RECORDERS.append(Recorder())
    try:
        with _ZeroValues():
            yield who().program
    finally:
        _RECORDERS.pop()


class _ZeroValues(TorchFunctionMode):
    """Values of tensors on the meta device read as zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
            if func is torch.Tensor.tolist:
                return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()
            if func in (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__bool__):
                return 0
        return func(*args, **(kwargs or {}))


class FakeStore:
    """The keys that members set in a store, counted by what precedes their last hyphen."""

    port = 0

    def __init__(self, prefix: str = "", store: FakeStore | None = None) -> None:
        self.prefix = (f"{store.prefix}/" if store and store.prefix else "") + prefix

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        who().do("set_key", f"{self.prefix}/{key.rpartition('-')[0]}")

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        stem = keys[0].rpartition("-")[0]
        who().do("await_keys", f"{self.prefix}/{stem}", len(keys), timeout.total_seconds())


class FakeWork:
    """An operation that was started."""

    def __init__(self, recorder: Recorder, handle: int, limit: float | None) -> None:
        self._recorder, self._handle, self._limit = recorder, handle, limit
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            limit = self._limit if timeout is None else timeout.total_seconds()
            self._recorder.do("wait", self._handle, limit)
        return True


class FakeNCCL:
    """In the place of dist.ProcessGroupNCCL."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(max_ctas=None)
            self._timeout = timedelta(seconds=600)

    def __init__(self, store: FakeStore, rank: int, size: int, options: Options) -> None:
        self._rank, self._size, self.options = rank, size, options
        self._name = store.prefix
        self._blocking = os.environ.get(BLOCKING_WAIT) == "1"
        self._made: set[str] = set()
        self._eager = False
        who().do("join", self._name, rank, size)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        self._communicator(range(self._size))
        self._eager = True

    def _communicator(self, ranks: Sequence[int]) -> str:
        everybody = len(ranks) == self._size and self._size != 2
        name = self._name if everybody or self._eager else f"{self._name}/{ranks[0]}:{ranks[-1]}"
        if name not in self._made:
            recorder, timeout = who(), self.options._timeout.total_seconds()
            watch = None if self._blocking else timeout
            channels = self.options.config.max_ctas
            limit, abandon = recorder.limit or timeout, recorder.limit is not None
            recorder.do("init", self._name, self._rank, name, tuple(ranks), channels, watch, limit, abandon)
            self._made.add(name)
        return name

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> FakeWork:
        return self._point_to_point("send", tensors[0], to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> FakeWork:
        return self._point_to_point("recv", tensors[0], source, tag)

    def _point_to_point(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> FakeWork:
        everybody = self._eager or self._size == 2
        name = self._communicator(range(self._size) if everybody else sorted((self._rank, peer)))
        return self._start(name, Part(kind, peer, tensor.numel() * tensor.element_size(), tag))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        part = Part("broadcast", options.rootRank, tensors[0].numel() * tensors[0].element_size(), 0)
        return self._start(self._communicator(range(self._size)), part)

    def _start(self, name: str, part: Part) -> FakeWork:
        recorder = who()
        handle = next(recorder.handles)
        recorder.do("start", name, self._rank, part, handle)
        return FakeWork(recorder, handle, self.options._timeout.total_seconds() if self._blocking else None)

    def abort(self) -> None:
        who().do("abort", self._name)


def _make_group(size: int, rank: int, ranks: Any, backend: Any, store: FakeStore, **options: Any) -> Any:
    """In the place of torch's `_new_process_group_helper`."""
    group_options = FakeNCCL.Options()
    group_options._timeout = options["timeout"]
    return FakeNCCL(store, rank, size, group_options), store


class _Thread:
    """In the place of threading.Thread: recorded as another thread of the process."""

    def __init__(self, target: Callable[[], Any], name: str = "", daemon: bool = True) -> None:
        self._target = target

    def start(self) -> None:
        with recording() as program:
            self._target()
        self._number = next(_FORKS)
        who().do("fork", self._number, program)

    def join(self, timeout: float | None = None) -> None:
        who().do("rejoin", self._number)


class _Inline(_Thread):
    """A thread for which its starter waits at once."""

    def start(self) -> None:
        self._target()


class _Pool:
    """In the place of ThreadPoolExecutor: a thread for each call. ``serial``: the caller itself runs it at once."""

    serial = False

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "") -> None:
        self._prefix = thread_name_prefix

    def __enter__(self) -> _Pool:
        self._threads: list[_Thread] = []
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def submit(self, call: Callable[..., Any], *args: Any) -> Any:
        outcome: Future[Any] = Future()

        def run() -> None:
            try:
                outcome.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                outcome.set_exception(error)

        thread = _Inline(run) if self.serial else _Thread(run, self._prefix)
        thread.start()
        if self.serial:
            return outcome
        self._threads.append(thread)
        return SimpleNamespace(result=lambda: (thread.join(), outcome.result())[1], exception=lambda: None)

    def map(self, call: Callable[..., Any], *sequences: Any) -> list[Any]:
        return [future.result() for future in [self.submit(call, *args) for args in zip(*sequences, strict=True)]]


class _Serial(_Pool):
    serial = True


def _within(seconds: float, what: str, call: Callable[[], None]) -> None:
    """In the place of `groups._within`: the machine limits the call."""
    recorder = who()
    recorder.limit = seconds
    try:
        call()
    finally:
        recorder.limit = None


@contextmanager
def nccl() -> Iterator[None]:
    """The stand-ins, in `megasync.sync` and torch.distributed."""
    # No time passes while a program is recorded.
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=time.time, sleep=lambda seconds: who().do("work", seconds))
    store = lambda *_: FakeStore()  # noqa: E731 - in the place of two functions
    with ExitStack() as stack:

        def put(where: Any, name: str, what: Any) -> None:
            if hasattr(where, name):
                stack.enter_context(mock.patch.object(where, name, what))

        stack.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", FakeNCCL, create=True))
        for module in (groups, shard_sender, shard_receiver, broadcast_sender, attempt):
            put(module, "open_store", store)
            put(module, "join_store", store)
            put(module, "time", clock)
            # Messages have no values, and torch would take a millisecond for each.
            put(module, "digest", lambda message: 0)
        put(groups, "PrefixStore", FakeStore)
        put(groups, "_new_process_group_helper", _make_group)
        put(groups, "_within", _within)
        put(groups, "_world", SimpleNamespace(pg_group_ranks={}))
        destroy = dist.destroy_process_group
        put(dist, "destroy_process_group", lambda group=None: None if isinstance(group, FakeNCCL) else destroy(group))
        put(shard_receiver, "threading", SimpleNamespace(Thread=_Thread, Lock=threading.Lock))
        put(shard_sender, "ThreadPoolExecutor", _Pool)
        put(broadcast_sender, "ThreadPoolExecutor", _Serial)
        yield
