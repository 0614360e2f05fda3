"""The main thread's loop: signals reach it, what blocks it is interrupted, and nothing keeps its process alive."""

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from waits import PATIENCE

from megasync.concurrency import event_loop
from megasync.concurrency.event_loop import handle_signals, run_to_end
from megasync.concurrency.foreign import ForeignExit, invoke, run, running_on

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(event_loop, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(event_loop, "TAKE_SECONDS", 0.1)
    monkeypatch.setattr(event_loop, "SLOW_SECONDS", 0.1)


async def blocks():
    while True:
        try:
            time.sleep(60)  # noqa: ASYNC251 - what this test is about
        except Exception:  # noqa: BLE001 - as people write their retries
            continue


async def test_signals_are_handled_in_the_loop_and_the_handlers_before_come_back():
    before, received = signal.getsignal(signal.SIGTERM), asyncio.Queue()
    with handle_signals(SIGNALS, received.put_nowait):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
            assert await received.get() is number
    assert signal.getsignal(signal.SIGTERM) is before


ALARM = """
import asyncio, logging, signal
from megasync.concurrency.event_loop import handle_signals
from megasync.concurrency.threads import DaemonThreads

# As the harness of HumanEval: in a thread, it cannot set the handler of the alarm that it has set.
def time_limit():
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)

async def main():
    ignored = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: ignored.set() if "Ignored an alarm" in record.msg else None
    logging.getLogger("megasync").addHandler(handler)
    with handle_signals([], lambda number: None):
        try:
            await DaemonThreads(1).call(time_limit, "time limit")
        except ValueError as error:
            print(error)
        await ignored.wait()
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

asyncio.run(main())
"""


@pytest.mark.processes
def test_an_alarm_that_code_sets_in_a_thread_does_not_end_the_process():
    ended = subprocess.run([sys.executable, "-c", ALARM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "main thread" in ended.stdout


@pytest.mark.processes
def test_a_process_whose_main_thread_is_another_programs_ignores_alarms():
    script = """
import os, signal, threading
from megasync.concurrency.event_loop import ignore_alarms
thread = threading.Thread(target=ignore_alarms)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGALRM)
signal.signal(signal.SIGALRM, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGALRM)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "handled\n", "")


async def test_a_signal_interrupts_what_blocks_the_loop(quick, caplog):
    received = []

    async def blocks_until_a_signal():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        await blocks()

    with handle_signals(SIGNALS, received.append):
        with pytest.raises(ForeignExit, match="blocked the event loop for .* when a signal came"):
            await run(blocks_until_a_signal, "the workflow blocks")
        while not received:
            await asyncio.sleep(0)
    assert received == [signal.SIGTERM]
    assert "by the workflow blocks" in caplog.text and "time.sleep(60)" in caplog.text


async def test_what_blocks_the_loop_for_too_long_fails(quick):
    with (
        handle_signals(SIGNALS, lambda number: None, patience=0.2),
        pytest.raises(ForeignExit, match="blocked the event loop"),
    ):
        await run(blocks, "the workflow blocks")


async def test_sync_code_that_loops_on_the_event_loop_fails(quick):
    """As a chat template might, which is called there for each request."""

    def loops():
        while True:
            pass

    with handle_signals(SIGNALS, lambda number: None, patience=0.2), pytest.raises(ForeignExit, match="it blocked the"):
        invoke(loops)


@pytest.fixture
def looks(quick, monkeypatch):
    """A queue with what the watch has found running at each of its looks."""
    found = queue.SimpleQueue()

    def look(thread):
        code = running_on(thread)
        if thread != threading.get_ident():
            found.put(code)
        return code

    monkeypatch.setattr(event_loop, "running_on", look)
    return found


# More looks than code may block the loop for in these tests.
LOOKS = 20


async def test_short_calls_that_fill_a_turn_of_the_loop_do_not_block_it(looks):
    """As many requests' chat templates on a busy machine."""
    with handle_signals(SIGNALS, lambda number: None, patience=0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        found = [invoke(looks.get) for _ in range(LOOKS)]
    assert len({code for code in found if code}) > 1


async def test_code_that_waits_for_a_core_does_not_block_the_loop(looks, monkeypatch):
    monkeypatch.setattr(event_loop, "_starved", lambda thread: time.monotonic())
    with handle_signals(SIGNALS, lambda number: None, patience=0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        found = invoke(lambda: [looks.get() for _ in range(LOOKS)])
    assert len({code for code in found if code}) == 1


async def test_time_in_which_the_process_has_no_core_counts_as_one_look(looks, monkeypatch):
    """After a pause of the whole process, which the watch finds at its first look after it."""
    hours = SimpleNamespace(monotonic=count(0.0, 3600.0).__next__)
    monkeypatch.setattr(event_loop, "time", hours)
    with handle_signals(SIGNALS, lambda number: None, patience=60):
        invoke(lambda: [looks.get() for _ in range(LOOKS)])


async def test_a_debugger_does_not_block_the_loop(quick):
    """Code at a breakpoint waits for its user, however long."""
    names = {"__name__": "pdb"}
    exec("def prompt(wait): wait()", names)
    waited = []

    async def looks():
        names["prompt"](lambda: waited.append(threading.Event().wait(0.5)))

    with handle_signals(SIGNALS, lambda number: None, patience=0.2):
        await run(looks, "the workflow looks")
    assert waited == [False]


def test_an_exit_in_a_callback_does_not_end_the_loop():
    async def main():
        asyncio.get_running_loop().call_soon(sys.exit, 0)
        await asyncio.sleep(0.01)
        return "the end"

    assert run_to_end(main()) == "the end"


def test_an_exit_of_the_program_itself_is_an_error():
    async def main():
        sys.exit(0)

    with pytest.raises(ForeignExit, match="some code raised SystemExit: 0"):
        run_to_end(main())


def test_a_task_and_a_thread_that_do_not_end_are_left(monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "END_SECONDS", 0.1)
    release = threading.Event()

    async def refuses():
        while not release.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async def main():
        asyncio.create_task(refuses(), name="stubborn")._log_destroy_pending = False
        asyncio.get_running_loop().run_in_executor(None, release.wait)
        await asyncio.sleep(0)
        return "the end"

    assert run_to_end(main()) == "the end"
    release.set()
    assert "Left 1 tasks that did not end within 0.1 s: stubborn" in caplog.text


# What user code leaves behind in a program of `megasync`.
LEFT = {
    "a thread": "threading.Thread(target=time.sleep, args=(600,), name='left behind').start()",
    "an executor": "ThreadPoolExecutor(1).submit(time.sleep, 600)",
    "an exit handler": "atexit.register(time.sleep, 600)",
    "a child": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,)).start()",
}
PROGRAM = """
import atexit, multiprocessing, threading, time
from concurrent.futures import ThreadPoolExecutor
from megasync.cli import commands
commands.EXIT_SECONDS = 0.5
def app():
    {left}
    raise SystemExit(7)
commands.app = app
commands.main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("left", list(LEFT))
def test_nothing_that_is_left_keeps_a_command_from_its_end(left):
    command = [sys.executable, "-c", PROGRAM.format(left=LEFT[left])]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as program:
        try:
            line = program.stderr.readline()
            assert program.wait(PATIENCE) == 7
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert "ends this process with status 7" in line


INTERRUPTED = """
import asyncio, signal, sys
from megasync.concurrency.event_loop import handle_signals, run_to_end
async def main():
    with handle_signals((signal.SIGINT,), lambda number: None, last=0.2):
        print("ready", flush=True)
        while True:
            try: await asyncio.sleep(600)
            except BaseException: pass
run_to_end(main())
"""


@pytest.mark.processes
def test_two_interruptions_always_end_the_process():
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"ready\n"
        program.send_signal(signal.SIGINT)
        program.send_signal(signal.SIGINT)
        while program.poll() is None:
            program.send_signal(signal.SIGINT)
            time.sleep(0.05)
    assert program.returncode == event_loop.INTERRUPTED
