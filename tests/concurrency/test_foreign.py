"""Foreign code: whatever it raises is an Exception of its caller, and no coroutine can refuse to end."""

import asyncio
import logging
import os
import signal
import sys
import threading
import warnings

import pytest
from waits import PATIENCE

from megasync.concurrency import foreign
from megasync.concurrency.foreign import DeadlineExceeded, ForeignExit, explain, invoke, is_async, run, shown
from megasync.concurrency.threads import DaemonThreads
from megasync.observe.stacks import describe_tasks


@pytest.fixture
def impatient(monkeypatch):
    """Abandoned code is left and cut off at once."""
    monkeypatch.setattr(foreign, "LEAVE_SECONDS", 0.02)
    monkeypatch.setattr(foreign, "CUT_SECONDS", 0.02)


class Unspeakable(Exception):
    def __str__(self):
        sys.exit(0)


FATAL = [
    SystemExit(0),
    KeyboardInterrupt("k"),
    GeneratorExit("g"),
    asyncio.CancelledError("c"),
    BaseExceptionGroup("several", [SystemExit(0), ValueError("v")]),
    type("Own", (BaseException,), {})("o"),
]


def raiser(error):
    def fails():
        raise error

    async def fails_later():
        await asyncio.sleep(0)
        raise error

    async def fails_in_a_task():
        await asyncio.create_task(fails_later())

    return {
        "sync": lambda: invoke(fails),
        "before the first await": lambda: run(fails, "f"),
        "async": lambda: run(fails_later, "f"),
        "task": lambda: run(fails_in_a_task, "f"),
        "thread": lambda: DaemonThreads(1).call(fails, "f"),
    }


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", list(raiser(None)))
async def test_what_would_end_the_caller_becomes_its_error(place, error):
    with pytest.raises(ForeignExit) as caught:
        result = raiser(error)[place]()
        await result
    assert type(error).__name__ in str(caught.value)


async def test_an_exit_in_a_task_that_nobody_awaits_ends_nothing():
    ended = asyncio.Event()

    async def exits():
        try:
            sys.exit(0)
        finally:
            ended.set()

    async def leaves_it():
        tasks.append(asyncio.create_task(exits()))

    tasks = []
    await run(leaves_it, "f")
    await ended.wait()
    with pytest.raises(ForeignExit, match="SystemExit: 0"):
        await tasks[0]


async def test_an_ordinary_error_and_a_result_are_unchanged():
    error = ValueError("v")

    async def fails():
        raise error

    with pytest.raises(ValueError) as caught:
        await run(fails, "f")
    assert caught.value is error
    assert await run(lambda x, *, y: x + y, "f", 20.0, 1, y=2) == 3


async def test_code_that_cancels_itself_fails_alone():
    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with pytest.raises(ForeignExit, match="cancelled itself"):
        await run(cancels_itself, "f")
    assert not asyncio.current_task().cancelling()


async def test_a_timeout_of_the_codes_own_is_not_a_cancellation():
    async def keeps_a_deadline():
        try:
            async with asyncio.timeout(0):
                await asyncio.sleep(600)
        except TimeoutError:
            return "in time"

    assert await run(keeps_a_deadline, "f") == "in time"


async def refuses():
    while True:
        try:
            await asyncio.sleep(3600)
        except:  # noqa: E722 - as people write their retries
            continue


async def refuses_for_its_task():
    while True:
        try:
            await asyncio.create_task(refuses())
        except:  # noqa: E722 - as people write their retries
            continue


async def leaves_a_task_that_refuses():
    asyncio.create_task(refuses())  # noqa: RUF006 - left behind on purpose


@pytest.mark.parametrize("code", [refuses, refuses_for_its_task])
def test_code_that_refuses_to_end_is_named_and_cut_off(impatient, caplog, code):
    name = f"the workflow {code.__name__}"

    async def main():
        call = asyncio.create_task(run(code, name))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(DeadlineExceeded, match=f"{name} did not return within 0.01 s"):
            await run(code, name, 0.01)

    with caplog.at_level(logging.WARNING, foreign.__name__):
        # Ends only if every task ends.
        asyncio.run(main())
    assert f"Abandoned {name}, call 1 of it" in caplog.text


def test_a_task_that_code_leaves_behind_cannot_keep_the_loop(impatient):
    asyncio.run(run(leaves_a_task_that_refuses, "f"))


async def test_cancelled_code_may_clean_up():
    cleaned = []

    async def cleans():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    call = asyncio.create_task(run(cleans, "f"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled() and cleaned == [True]


async def test_dumps_show_what_guarded_code_awaits():
    async def workflow():
        await asyncio.create_task(nested())

    async def nested():
        await asyncio.Event().wait()

    call = asyncio.create_task(run(workflow, "f"))
    for _ in range(5):
        await asyncio.sleep(0)
    dump = describe_tasks()
    call.cancel()
    await asyncio.wait({call})
    assert " workflow" in dump and " nested > " in dump


async def test_the_code_that_blocks_a_thread_is_known_from_one_await_to_the_next():
    def look():
        return foreign.running_on(threading.get_ident())

    async def workflow():
        first = [look(), invoke(look)]
        await asyncio.sleep(0)
        return first, [look(), invoke(look)]

    first, second = await run(workflow, "the workflow w")
    assert {code.name for code in (*first, *second)} == {"the workflow w"}
    assert first[0] is first[1] and second[0] is second[1] and first[0] is not second[0]
    assert look() is None


def spoil():
    """What code may leave changed for the whole process."""
    sys.setrecursionlimit(sys.getrecursionlimit() - 1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")


async def spoil_the_loop():
    spoil()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    await asyncio.sleep(0)


def shared_state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    return sys.getrecursionlimit(), logging.root.manager.disable, list(warnings.filters), os.getcwd(), handlers


@pytest.mark.parametrize("place", ["sync", "async", "thread"])
async def test_what_code_changes_for_the_whole_process_is_put_back(monkeypatch, tmp_path, caplog, place):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "_put_back_for", set())
    before = shared_state()
    if place == "sync":
        invoke(spoil)
    elif place == "async":
        await run(spoil_the_loop, "spoil the loop")
    else:
        await DaemonThreads(1).call(spoil, "spoil")
    assert shared_state() == before
    changes = ["lowered the recursion limit", "disabled logging", "made warnings errors"]
    changes += ["changed the working directory to /", "replaced the handler of SIGTERM"] * (place == "async")
    name = {"sync": "spoil", "async": "spoil the loop", "thread": "spoil"}[place]
    assert all(f"{name} {change}" in caplog.text for change in changes)


async def test_a_thread_has_a_working_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    moved, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def move():
        os.chdir("/")
        loop.call_soon_threadsafe(moved.set)
        released.wait(PATIENCE)
        return os.getcwd()

    call = asyncio.create_task(DaemonThreads(1).call(move, "move"))
    await moved.wait()
    try:
        if os.getcwd() == "/":
            pytest.skip("this system gives a thread no working directory of its own")
        assert os.getcwd() == str(tmp_path)
    finally:
        released.set()
    assert await call == "/"


def test_errors_and_objects_are_shown_whatever_they_do():
    class Object:
        def __repr__(self):
            raise SystemExit

    assert explain(ValueError("x" * 10**6)) == f"ValueError: {'x' * foreign.SHOWN_CHARACTERS}"
    assert explain(Unspeakable()) == "Unspeakable: (its text cannot be shown: SystemExit)"
    group = ExceptionGroup("several", [Unspeakable()] * 5)
    assert explain(group).endswith("; 2 more")
    assert shown(Object()) == "<Object, whose repr raises ForeignExit>"
    assert shown("x" * 300, 10) == "'xxxxxxxxx"


def test_async_functions_are_recognised_in_every_form():
    from functools import partial

    class Callable:
        async def __call__(self):
            """Async."""

        async def method(self):
            """Async."""

    async def function():
        """Async."""

    assert all(map(is_async, (function, partial(function), Callable(), Callable().method)))
    assert not any(map(is_async, (raiser, Callable, len, lambda: function())))
