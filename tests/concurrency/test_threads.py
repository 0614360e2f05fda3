"""Threads for user functions: their order, their deadlines, and the effect of a stuck function."""

import asyncio
import logging
import threading

import pytest
from passing_time import pass_time
from waits import PATIENCE, until

from megasync.concurrency.threads import AllThreadsStuck, DaemonThreads, DeadlineExceeded


@pytest.fixture
def release():
    """What functions wait for; they all return when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def test_calls_start_in_fifo_order():
    begun = []
    threads = DaemonThreads(1)
    await asyncio.gather(*(threads.call(lambda n=n: begun.append(n), "append", 20.0) for n in range(50)))
    assert begun == list(range(50))


async def test_only_run_time_counts_against_the_deadline(release):
    threads = DaemonThreads(1)
    first = asyncio.create_task(threads.call(lambda: release.wait(PATIENCE), "f", 600.0))
    # It looks for stuck threads many times while it waits, and is not late for any of that.
    second = asyncio.create_task(threads.call(lambda: "second", "f", 20.0))
    for _ in range(3):
        await asyncio.sleep(0)
        pass_time(20.0)
    await asyncio.sleep(0)
    assert not second.done()
    release.set()
    assert (await first, await second) == (True, "second")


async def test_a_function_that_never_returns_blocks_no_other_name_and_is_reported(release, caplog):
    threads = DaemonThreads(2)
    calls = [threads.call(lambda: release.wait(PATIENCE), "stuck", 0.05) for _ in range(5)]
    with caplog.at_level(logging.WARNING, "megasync.concurrency.threads"):
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in ended] == [DeadlineExceeded] * 2 + [AllThreadsStuck] * 3
    assert "2 of its 2 threads are held" in caplog.text
    assert await threads.call(lambda: 1, "other", 20.0) == 1
    # Once they return, the function can be called again.
    release.set()
    await until(lambda: "stuck" not in threads._lanes)
    assert await threads.call(lambda: 2, "stuck", 20.0) == 2


async def test_a_cancelled_call_in_the_queue_never_runs(release):
    ran = []
    threads = DaemonThreads(1)
    first = asyncio.create_task(threads.call(lambda: release.wait(PATIENCE), "f"))
    second = asyncio.create_task(threads.call(lambda: ran.append(2), "f"))
    third = asyncio.create_task(threads.call(lambda: ran.append(3), "f"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    release.set()
    await asyncio.gather(first, third)
    assert ran == [3]


async def test_queued_calls_do_not_wake_up_before_their_turn(release, monkeypatch):
    threads = DaemonThreads(1)
    calls = [asyncio.create_task(threads.call(lambda: release.wait(PATIENCE), "f", 600.0)) for _ in range(100)]
    await asyncio.sleep(0)
    woken = []
    turn = asyncio.Event.wait
    loop = asyncio.get_running_loop()
    at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args, **options: woken.append(args) or at(*args, **options))
    monkeypatch.setattr(asyncio.Event, "wait", lambda self: woken.append(self) or turn(self))
    await asyncio.sleep(0.2)
    assert len(woken) <= 2  # this test's own sleep, and the deadline of the call that runs
    release.set()
    assert await asyncio.gather(*calls) == [True] * 100


async def test_event_loops_share_threads_and_a_closed_loop_holds_none(release):
    threads = DaemonThreads(1)
    first = asyncio.create_task(threads.call(lambda: release.wait(PATIENCE), "f", 60.0))
    await asyncio.sleep(0)
    ran = []

    def other_loop():
        loop = asyncio.new_event_loop()
        task = loop.create_task(threads.call(lambda: ran.append("nobody waits"), "f"))
        loop.call_later(0.05, loop.stop)
        loop.run_forever()
        task._log_destroy_pending = False
        loop.close()

    await asyncio.to_thread(other_loop)
    answers = asyncio.to_thread(lambda: asyncio.run(threads.call(lambda: "from another loop", "f", 60.0)))
    other = asyncio.ensure_future(answers)
    await until(lambda: len(threads._lanes["f"].queue) == 2)
    release.set()
    assert await first is True
    assert await other == "from another loop"
    assert ran == []


@pytest.mark.parametrize(
    "error", [StopIteration("x"), SystemExit("x"), KeyboardInterrupt("x"), asyncio.CancelledError("x")]
)
async def test_an_exception_that_would_end_the_caller_becomes_an_error(error):
    def fails():
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: x"):
        await DaemonThreads(1).call(fails, "f", 20.0)
