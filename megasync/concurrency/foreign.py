"""The one place through which foreign code is called: functions of users, templates of models, other people's packages.

    code                         is called by          runs                        is over at the latest
    ---------------------------  --------------------  --------------------------  --------------------------------
    sync                         `DaemonThreads.call`  in a daemon thread          at its deadline
    async                        `run`                 on the caller's event loop  at its deadline, or LEAVE_SECONDS
                                                                                   after the caller is cancelled
    sync, short: import, pickle  `invoke`              here                        when it returns
    chat templates               `invoke`              on the event loop           when they return, or `event_loop`
                                                                                   interrupts them

A chat template is called for each request, and a thread for each would cost more than most templates do. It has no I/O
(Jinja's sandbox), so only a loop in it can block, and that fails its sample.

Invariant: what leaves foreign code is a value or an Exception, so it can fail the sample that it worked on and nothing
else. `invoke` and `_Guarded` guarantee it, the latter also for tasks that the code starts. A SystemExit, or a
CancelledError that nobody asked for, would otherwise end the caller's task or the whole process without an error.

What code leaves changed for the whole process is put back when it returns or awaits (`_put_back`), with a warning: the
working directory, handlers of signals, and what turns recursion or warnings into errors or logging off. A thread of
`DaemonThreads` has a working directory of its own.

A coroutine cannot refuse to end. One that is still there LEAVE_SECONDS after its cancellation is left behind: its
caller goes on, and a warning names it. CUT_SECONDS later it is cut off: it is not resumed any more, whatever it awaits
(`_Guarded`). A thread cannot be stopped, but threads of `DaemonThreads` keep no process alive.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - the functions of `signal` without its enums
import asyncio
import ctypes
import inspect
import logging
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from megasync.errors import DataError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Seconds that a caller waits for a cancelled coroutine to end.
LEAVE_SECONDS = 2.0
# Seconds that a coroutine then has for its cleanup, before it is cut off.
CUT_SECONDS = 8.0
# Characters of an error's own text, and errors of a group, in messages.
SHOWN_CHARACTERS = 2000
SHOWN_ERRORS = 3


class ForeignExit(DataError, RuntimeError):
    """Foreign code raised what would have ended its caller, such as SystemExit. The message is `explain`'s."""


class DeadlineExceeded(Exception):
    """Foreign code did not return within its deadline. Not a TimeoutError, which the code itself may raise."""


class Interruption(KeyboardInterrupt):
    """The user's Ctrl-C, or a signal that ends what blocks an event loop. Foreign code does not raise it."""

    # What happened to the code that it ended; empty for a Ctrl-C, which passes through foreign code.
    problem = ""


@dataclass(slots=True, eq=False)
class Stretch:
    """Foreign code from its call to its return, or of a coroutine from one await to the next."""

    name: str


# What foreign code runs in this context, and by thread: what runs at this moment.
_scope: ContextVar[_Scope | None] = ContextVar("foreign code", default=None)
_running: dict[int, Stretch] = {}
# Abandoned calls by name. The first, second, fourth, eighth, ... is logged.
_abandoned: Counter[str] = Counter()
# Signals whose handlers are the run's.
_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1)))
_MAIN_THREAD = threading.main_thread().ident
# What was put back, by the code's name; said once.
_put_back_for = set[tuple[str, str]]()


def invoke(function: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
    """Calls a sync function here. Raises Exceptions only, apart from a Ctrl-C of the user."""
    thread = threading.get_ident()
    before, shared = _running.get(thread), _shared()
    try:
        _running[thread] = before or Stretch(_name(function))
        return function(*arguments, **keywords)
    except BaseException as error:
        if (failure := _failure(error)) is error:
            raise
        raise failure from error
    finally:
        _put_back(shared, before.name if before else _thread_name() or _name(function))
        if before:
            _running[thread] = before
        else:
            _running.pop(thread, None)


def guard(function: Callable[..., T], what: str) -> Callable[..., T]:
    """A sync function as `invoke` calls it, named as `what` in a ForeignExit."""
    return partial(_invoked_as, what, function)


def _invoked_as(what: str, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
    try:
        return invoke(function, *arguments, **keywords)
    except ForeignExit as error:
        raise ForeignExit(f"{what} raised {error}") from error


async def run(
    function: Callable[..., Any], name: str, seconds: float | None = None, /, *arguments: Any, **keywords: Any
) -> Any:
    """Calls an async function on this event loop, as a task of its own, and returns its result.

    Raises DeadlineExceeded after `seconds`, and otherwise what the function raises, as `invoke` does. A function that
    returns no awaitable is accepted. `name` names the code in messages.
    """
    loop = asyncio.get_running_loop()
    _guard_tasks(loop)
    scope, context = _Scope(name), copy_context()
    context.run(_scope.set, scope)
    caller = asyncio.current_task()
    work = loop.create_task(
        _Guarded(scope, _called(function, arguments, keywords)),
        name=caller.get_name() if caller else name,
        context=context,
    )
    work.add_done_callback(_retrieve)
    try:
        try:
            await asyncio.wait({work}, timeout=seconds)
        finally:
            if late := not work.done():
                await scope.leave(work)
    finally:
        scope.over = True
    if late:
        raise DeadlineExceeded(f"{name} did not return within {seconds:g} s")
    if work.cancelled():
        raise ForeignExit("CancelledError: it cancelled itself")
    return work.result()


def explain(error: BaseException) -> str:
    """An error as `type: text`, also if its own text cannot be had; of a group, the first few errors."""
    if isinstance(error, ForeignExit):
        return str(error)
    kind = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        shown = [explain(each) for each in error.exceptions[:SHOWN_ERRORS]]
        more = len(error.exceptions) - len(shown)
        return f"{kind}: {'; '.join(shown)}{f'; {more} more' if more else ''}"
    try:
        text = str.__getitem__(str(error), slice(SHOWN_CHARACTERS))
    except BaseException as failure:  # noqa: BLE001 - the error's own code may raise anything
        text = f"(its text cannot be shown: {type(failure).__name__})"
    return f"{kind}: {text}"


def shown(value: object, characters: int = 200) -> str:
    """`repr` of a foreign object for a message, cut, and whatever its own code does."""
    try:
        return str.__getitem__(invoke(repr, value), slice(characters))
    except Exception as failure:  # noqa: BLE001 - the object's own code may raise anything
        return f"<{type(value).__name__}, whose repr raises {type(failure).__name__}>"


def is_async(function: object) -> bool:
    """Whether a function, method, partial or callable object is written as `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - a partial's or an instance's own method
    )


def running_on(thread: int) -> Stretch | None:
    """The foreign code that a thread is executing at this moment. The same object until it returns or awaits."""
    return _running.get(thread)


class _Scope:
    """One call of `run`, with all tasks that its code starts."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Whether the call has ended; tasks that its code has started may go on.
        self.over = False
        # Whether its tasks end at the next cancellation, unheard.
        self.cut_off = False

    async def leave(self, work: asyncio.Task[Any]) -> None:
        """Cancels the task and waits for it, but not for long."""
        work.cancel()
        try:
            await asyncio.wait({work}, timeout=LEAVE_SECONDS)
        finally:
            if not work.done():
                _abandoned[self.name] += 1
                if (count := _abandoned[self.name]).bit_count() == 1:
                    log.warning(
                        "Abandoned %s, call %d of it: it has not ended %g s after its cancellation, and is cut off in "
                        "%g s",
                        *(self.name, count, LEAVE_SECONDS, CUT_SECONDS),
                    )
                self.cut_later(work)

    def cut_later(self, work: asyncio.Task[Any]) -> None:
        work.get_loop().call_later(CUT_SECONDS, self._cut, work)

    def _cut(self, work: asyncio.Task[Any]) -> None:
        self.cut_off = True
        work.cancel()


class _TaskFactory:
    """Guards the tasks that foreign code starts. All others are as before."""

    def __init__(self, before: Callable[..., asyncio.Future[Any]] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
        context = options.get("context")
        scope = _scope.get() if context is None else context.get(_scope)
        if scope is not None and inspect.iscoroutine(coroutine):
            coroutine = _Guarded(scope, coroutine)
        if self._before is not None:
            return self._before(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)


def _guard_tasks(loop: asyncio.AbstractEventLoop) -> None:
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))  # pyright: ignore[reportArgumentType] - of any future


async def _called(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    result = function(*arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine of foreign code, stepped as its task steps it until it ends or is cut off."""

    def __init__(self, scope: _Scope, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._scope = scope
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        if self._scope.cut_off:
            _keep(self._coroutine)
            raise asyncio.CancelledError
        if self._scope.over and (task := _cancelled_task()) is not None:
            # Its code has left this task behind, and it is cancelled, by the end of the loop at the latest.
            self._scope.cut_later(task)
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())

    def __getattr__(self, name: str) -> Any:
        # Its frame, and what it awaits.
        return getattr(self._coroutine, name)

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        thread, shared, own = threading.get_ident(), _shared(), _of_loop()
        try:
            _running[thread] = Stretch(self._scope.name)
            try:
                awaited = step(*arguments)
            finally:
                _put_back(shared, self._scope.name)
                _put_back_of_loop(own, self._scope.name)
            _running.pop(thread, None)
            return awaited
        except BaseException as error:
            _running.pop(thread, None)
            # The end of a coroutine is a StopIteration.
            asked = isinstance(error, asyncio.CancelledError) and _cancelled_task() is not None
            if asked or isinstance(error, StopIteration) or (failure := _failure(error)) is error:
                raise
            raise failure from error


def _shared() -> tuple[int, int, list[Any]]:
    """Returns what may break all code of the process: recursion limit, disabled logging, what warnings become."""
    return sys.getrecursionlimit(), logging.root.manager.disable, list(warnings.filters)


def _put_back(before: tuple[int, int, list[Any]], name: str) -> None:
    """Only what is stricter than before: other threads may have put back in the meantime."""
    limit, disabled, filters = before
    if logging.root.manager.disable > disabled:
        logging.disable(disabled)
        _say(name, "disabled logging")
    if sys.getrecursionlimit() < limit:
        sys.setrecursionlimit(limit)
        _say(name, "lowered the recursion limit")
    if warnings.filters == filters:
        return
    if added := [each for each in warnings.filters if each[0] == "error" and each not in filters]:
        warnings.filters[:] = [each for each in warnings.filters if each not in added]  # pyright: ignore[reportIndexIssue]
        _say(name, "made warnings errors")


def _of_loop() -> tuple[str | None, list[Any]] | None:
    """The working directory and the handlers of the run's signals, in the main thread."""
    if threading.get_ident() != _MAIN_THREAD:
        return None
    # The functions in C: those of `signal` take a hundred times as long, and this is called twice for each step.
    return _working_directory(), [_signal.getsignal(number) for number in _SIGNALS]


def _put_back_of_loop(before: tuple[str | None, list[Any]] | None, name: str) -> None:
    if before is None or (after := _of_loop()) == before or after is None:
        return
    (folder, handlers), (new_folder, new_handlers) = before, after
    if folder is not None and folder != new_folder:
        os.chdir(folder)
        _say(name, f"changed the working directory to {new_folder}")
    for number, old, new in zip(_SIGNALS, handlers, new_handlers, strict=True):
        if old is not None and old != new:
            signal.signal(number, old)
            _say(name, f"replaced the handler of {signal.Signals(number).name}")


def _thread_name() -> str:
    """The name of this thread, which is its code's; empty for the main thread."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else thread.name


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _say(name: str, change: str) -> None:
    if (name, change) not in _put_back_for:
        _put_back_for.add((name, change))
        log.warning("%s %s, for the whole process; put back. Such code needs a process of its own", name, change)


def _keep(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Leaks a reference to a coroutine that refuses to end.

    It would refuse in its destructor too, and there, without an event loop to wait for, its retries would never end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))


def _cancelled_task() -> asyncio.Task[Any] | None:
    """The current task, if it was cancelled."""
    task = asyncio.current_task()
    return task if task is not None and task.cancelling() else None


def _failure(error: BaseException) -> BaseException:
    """What the caller of foreign code gets for what that raised: the error itself, or a ForeignExit."""
    if isinstance(error, Interruption):
        return ForeignExit(error.problem) if error.problem else error
    if isinstance(error, Exception):
        # A future cannot hold a StopIteration.
        return ForeignExit(explain(error)) if isinstance(error, StopIteration) else error
    if isinstance(error, KeyboardInterrupt) and _default_ctrl_c():
        return error
    return ForeignExit(explain(error))


def _default_ctrl_c() -> bool:
    """Whether a KeyboardInterrupt here may be a Ctrl-C: Python's own handler raises it in the main thread."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _retrieve(work: asyncio.Task[Any]) -> None:
    """Marks the error of a task as seen: its caller may be cancelled at the same moment."""
    if not work.cancelled():
        work.exception()


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
