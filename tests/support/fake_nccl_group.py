"""torch's ProcessGroupNCCL and store, over `fake_nccl`: what real code does with them becomes actions of a machine.

`nccl()` puts the stand-ins in the place of torch's classes where `megasync.sync` uses them. A thread that uses them
acts for a process: either inside `recording`, which returns the actions as a program and waits for nothing, or started
by `Machine.thread`, where each call takes its virtual time and bytes really move.

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
from fake_nccl import Action, Host, Machine, Part, acting_host
from torch.overrides import TorchFunctionMode

from megasync.layout.digest import digest
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

    def now(self) -> float:
        return 0.0


class Actor:
    """A thread of a process in a running machine."""

    def __init__(self, machine: Machine, host: Host) -> None:
        self.machine, self.host = machine, host
        self.handles = count()
        self.limit: float | None = None

    def do(self, *action: Any) -> None:
        self.machine.act(self.host, action)

    def now(self) -> float:
        return self.machine.now


class _Local(threading.local):
    recorder: Recorder | None = None
    actor: Actor | None = None


_LOCAL = _Local()
_FORKS = count()


def who() -> Recorder | Actor:
    """For whom this thread acts."""
    if _LOCAL.recorder is not None:
        return _LOCAL.recorder
    machine, host = acting_host()
    if _LOCAL.actor is None or _LOCAL.actor.host is not host:
        _LOCAL.actor = Actor(machine, host)
    return _LOCAL.actor


@contextmanager
def recording() -> Iterator[list[Action]]:
    """What this thread does inside becomes a program."""
    before, _LOCAL.recorder = _LOCAL.recorder, Recorder()
    try:
        with _ZeroValues():
            yield _LOCAL.recorder.program
    finally:
        _LOCAL.recorder = before


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

    def __init__(self, actor: Recorder | Actor, handle: int, limit: float | None) -> None:
        self._actor, self._handle, self._limit = actor, handle, limit
        self._waited = False
        self._started = actor.now()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """In blocking mode the limit counts from the start of the operation, as torch's does."""
        if not self._waited:
            self._waited = True
            limit = self._limit if timeout is None else timeout.total_seconds()
            if limit is not None:
                limit -= self._actor.now() - self._started
            self._actor.do("wait", self._handle, limit)
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
        self._owner = who()
        self._owner.do("join", self._name, rank, size)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        self._communicator(range(self._size))
        self._eager = True

    def _communicator(self, ranks: Sequence[int]) -> str:
        whole = len(ranks) == self._size and self._size != 2
        name = self._name if whole or self._eager else f"{self._name}/{ranks[0]}:{ranks[-1]}"
        if name not in self._made:
            actor, timeout = who(), self.options._timeout.total_seconds()
            watch = None if self._blocking else timeout
            channels = self.options.config.max_ctas
            limit, abandon = actor.limit or timeout, actor.limit is not None
            actor.do("init", self._name, self._rank, name, tuple(ranks), channels, watch, limit, abandon)
            self._made.add(name)
        return name

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> FakeWork:
        return self._point_to_point("send", tensors[0], to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> FakeWork:
        return self._point_to_point("recv", tensors[0], source, tag)

    def _point_to_point(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> FakeWork:
        everybody = self._eager or self._size == 2
        name = self._communicator(range(self._size) if everybody else sorted((self._rank, peer)))
        return self._start(name, Part(kind, peer, tensor.numel() * tensor.element_size(), tag), tensor)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        part = Part("broadcast", options.rootRank, tensors[0].numel() * tensors[0].element_size(), 0)
        return self._start(self._communicator(range(self._size)), part, tensors[0])

    def _start(self, name: str, part: Part, tensor: torch.Tensor) -> FakeWork:
        actor = who()
        handle = next(actor.handles)
        actor.do("start", name, self._rank, part, handle, *([] if isinstance(actor, Recorder) else [tensor]))
        return FakeWork(actor, handle, self.options._timeout.total_seconds() if self._blocking else None)

    def abort(self) -> None:
        owner = self._owner
        if isinstance(owner, Recorder):
            who().do("abort", self._name)
        else:
            # Any thread of the process may call it.
            owner.machine.act(Host(owner.host.process), ("abort", self._name))


def _make_group(size: int, rank: int, ranks: Any, backend: Any, store: FakeStore, **options: Any) -> Any:
    """In the place of torch's `_new_process_group_helper`."""
    found = FakeNCCL.Options()
    found._timeout = options["timeout"]
    return FakeNCCL(store, rank, size, found), store


class _Thread:
    """In the place of threading.Thread: recorded as another thread of the process, or one of the machine."""

    def __init__(self, target: Callable[[], Any], name: str = "", daemon: bool = True) -> None:
        self._target, self._name = target, name
        self._host: Host | None = None

    def start(self) -> None:
        actor = who()
        if isinstance(actor, Actor):
            self._host = actor.machine.thread(actor.host.process, self._target, self._name)
            return
        with recording() as program:
            self._target()
        self._number = next(_FORKS)
        actor.do("fork", self._number, program)

    def join(self, timeout: float | None = None) -> None:
        actor = who()
        actor.do("rejoin", self._host if isinstance(actor, Actor) else self._number)


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
    actor = who()
    actor.limit = seconds
    try:
        call()
    finally:
        actor.limit = None


def _digest(message: torch.Tensor) -> int:
    """Zero without a look at the message where it has no values; torch would take a millisecond for each."""
    return 0 if message.device.type == "meta" else digest(message)


def _monotonic() -> float:
    try:
        return who().now()
    except AssertionError:
        return time.monotonic()


@contextmanager
def nccl() -> Iterator[None]:
    """The stand-ins, in `megasync.sync` and torch.distributed."""
    clock = SimpleNamespace(monotonic=_monotonic, time=time.time, sleep=lambda seconds: who().do("work", seconds))
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
            put(module, "digest", _digest)
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
