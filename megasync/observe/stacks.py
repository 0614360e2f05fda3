"""Python stacks of other processes of this machine, for hang reports: where each thread is, what each task awaits.

    py-spy reads the memory of a process from outside, also of a stopped one, where that is permitted; it pauses none
    a process that called `answer` tells what only it knows, and its own stacks if py-spy may not read them
    its signal handler writes them even if its interpreter is blocked, such as by a regular expression

Nothing that could hold a secret is shown: no local variables, no environment, no command line. Every step has a
deadline.

The stack of a suspended task shows only its outermost frame, so `describe_tasks` follows the chain of awaits itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

# Innermost frames of a chain that are shown; they say what the task waits for.
SHOWN_FRAMES = 5
# A chain is a handful of awaits; a longer one must be a cycle.
MAX_CHAIN = 100
# Seconds for py-spy, for the answer of a process, and for its signal handler. A busy machine needs most of it.
SPY_SECONDS = 8.0
ANSWER_SECONDS = 2.0
SIGNAL_SECONDS = 1.0
# Processes below one process of the run, such as sandboxes, and frames of a thread that are shown.
MOST_PROCESSES = 24
MOST_FRAMES = 60
AT_ONCE = 4

# The event loop of this process, if it has told one.
_LOOPS: list[asyncio.AbstractEventLoop] = []
_SIGNAL = signal.SIGUSR2
_MEMORY = "megasync-stacks"
# Where threads wait for work.
_IDLE = (
    *("/selectors.py", "/threading.py", "/queue.py", "/concurrent/futures/thread.py"),
    *("/asyncio/runners.py", "/asyncio/base_events.py", "/ray/_private/worker.py"),
)
# Helpers without anything to tell.
_DULL = ("supervisor.py", "multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({_short(self.file)}:{self.line})"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread and its frames, innermost first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The threads of one process. ``name`` is that of the process of the run above it, or its own."""

    name: str
    pid: int
    # Its name in the process table, and its state there, such as `sleeping` or `stopped`.
    title: str
    state: str
    # In a line: the method and the collective that it is in, or its innermost frame.
    place: str
    text: str


# The side of the process that is described


def answer(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Lets other processes of this user ask this one for its stacks, and for what the tasks of ``loop`` await.

    It costs a sleeping thread. Another call replaces the loop.
    """
    _LOOPS[:] = [] if loop is None else [loop]
    if any(thread.name == _MEMORY for thread in threading.enumerate()):
        return
    # Neither is worth a failed start: a container may forbid one of them.
    with suppress(OSError, ValueError, RuntimeError):
        # Whoever has a use of its own for the signal keeps it.
        if signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            memory = os.memfd_create(_MEMORY)
            fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(_SIGNAL, os.fdopen(memory, "ab", buffering=0), all_threads=True)
    with suppress(OSError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_address(os.getpid()))
        listener.listen()
        threading.Thread(target=_answer_all, args=(listener,), name=_MEMORY, daemon=True).start()


def own_stacks() -> list[Thread]:
    """The stacks of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = []
    for number, frame in sys._current_frames().items():
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        frames = tuple(Frame(each.name, each.filename, each.lineno or 0) for each in summary)
        threads.append(Thread(names.get(number, str(number)), frames))
    return [thread for thread in threads if thread.name != _MEMORY]


def _answer_all(listener: socket.socket) -> None:
    while True:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                if _peer(connection)[1] == os.getuid():
                    connection.settimeout(ANSWER_SECONDS)
                    connection.sendall(json.dumps(_own_answer()).encode())


def _own_answer() -> dict[str, Any]:
    threads = [[thread.name, [[f.function, f.file, f.line] for f in thread.frames]] for thread in own_stacks()]
    more: dict[str, str] = {}
    for loop in _LOOPS:
        with suppress(RuntimeError):
            more["tasks, by what they await"] = describe_tasks(asyncio.all_tasks(loop))
    if collectives := _flight_recorder():
        more["flight recorder of collectives"] = collectives
    return {"threads": threads, "more": more}


def _flight_recorder() -> str:
    """The collectives that have not completed, by NCCL's flight recorder; empty where there is none."""
    if "torch" not in sys.modules:
        return ""
    try:
        # Only builds for GPUs have it.
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # pyright: ignore[reportAttributeAccessIssue]

        entries = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=True)).get("entries", [])
    except Exception:  # noqa: BLE001 - its absence must not hide the stacks
        return ""
    keys = ("pg_name", "collective_seq_id", "profiling_name", "state", "input_sizes", "time_created_ns")
    return "\n".join(", ".join(f"{key}={entry[key]}" for key in keys if key in entry) for entry in entries)


# The side that asks


def stacks_of_family(name: str, pid: int, deadline: float) -> list[ProcessStacks]:
    """A process of the run and everything that it has started. ``deadline`` is a reading of `time.monotonic`."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return [ProcessStacks(name, pid, "", "gone", "it has ended", "")]
    told = [process for process in family if not _is_dull(process)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stacks = list(pool.map(lambda each: stacks_of(name, each.pid, deadline), told[:MOST_PROCESSES]))
    if (left := len(told) - MOST_PROCESSES) > 0:
        stacks.append(ProcessStacks(name, pid, "", "", f"{left} more processes are not shown", ""))
    return stacks


def stacks_of_families(families: Sequence[tuple[str, int]], seconds: float) -> list[ProcessStacks]:
    """Several families, (name, process id), within ``seconds``."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(AT_ONCE) as pool:
        stacks = pool.map(lambda family: stacks_of_family(family[0], family[1], deadline), families)
        return [each for family in stacks for each in family]


def stacks_of(name: str, pid: int, deadline: float) -> ProcessStacks:
    """One process. Never raises: ``text`` says what could not be read, and why."""
    try:
        process = psutil.Process(pid)
        title, state = process.name(), str(process.status())
    except psutil.Error:
        return ProcessStacks(name, pid, "", "gone", "it has ended", "")
    if deadline - time.monotonic() <= 0:
        return ProcessStacks(name, pid, title, state, "not read in time", "")
    threads, problem = _spy(pid, min(SPY_SECONDS, deadline - time.monotonic()))
    more: dict[str, str] = {}
    raw = ""
    # A stopped process answers nothing.
    if state != psutil.STATUS_STOPPED:
        reply = _ask(pid)
        if reply is not None:
            more = reply["more"]
            threads = threads or [Thread(n, tuple(Frame(*frame) for frame in frames)) for n, frames in reply["threads"]]
        elif not threads:
            raw = _signal_dump(pid)
    lines = [f"({problem})"] if problem else []
    for thread in threads:
        lines += [f"thread {thread.name}", *(f"    {frame}" for frame in thread.frames[:MOST_FRAMES])]
    lines += [raw] if raw else []
    for what, text in more.items():
        lines += [f"{what}:", *(f"    {line}" for line in text.splitlines())]
    return ProcessStacks(name, pid, title, state, place_of(threads) or problem, "\n".join(lines))


def place_of(threads: Sequence[Thread]) -> str:
    """Where a process is, in a line: the method and the collective of a trainer rank, or the innermost frame."""
    for thread in threads:
        method = next((f for f in reversed(thread.frames) if f.file.endswith("megasync/trainer/rank.py")), None)
        if method is None:
            continue
        entered = [frame for frame in thread.frames if "torch/distributed/" in frame.file]
        inside = f"{method.function}(): "
        if entered:
            # Its logger wraps every collective.
            called = next((frame for frame in reversed(entered) if "c10d_logger" not in frame.file), entered[-1])
            caller = thread.frames[thread.frames.index(entered[-1]) + 1]
            return f"{inside}in the collective {called.function}, called by {caller}"
        return f"{inside}{thread.frames[0]}, in no collective"
    first = sorted((t for t in threads if t.frames), key=lambda thread: not thread.name.startswith("MainThread"))
    busy = next((t for t in first if not t.frames[0].file.endswith(_IDLE)), None)
    if busy is not None:
        return str(busy.frames[0])
    return f"idle, {first[0].frames[0]}" if first else ""


def _spy(pid: int, seconds: float) -> tuple[list[Thread], str]:
    """The stacks that py-spy reads, or none and why."""
    folder = str(Path(sys.executable).parent)
    command = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if command is None:
        return [], "py-spy is not installed: pip install py-spy"
    if seconds <= 0:
        return [], "py-spy was not asked, for lack of time"
    why = ""
    # A process that runs on while it is read may be read wrong the first time.
    for _ in range(2):
        try:
            done = subprocess.run(
                [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [], f"py-spy failed: {type(error).__name__}"
        with suppress(ValueError, KeyError, TypeError):
            threads = [_spied(thread) for thread in json.loads(done.stdout)]
            return [thread for thread in threads if not thread.name.startswith(_MEMORY)], ""
        why = done.stderr.decode("utf-8", "replace")
        if "ermission" in why or "not permitted" in why:
            return [], "py-spy is not permitted to read it (ptrace); docs/troubleshooting.md says how to permit it"
    return [], f"py-spy cannot read it: {' '.join(why.split())[:200]}"


def _spied(thread: dict[str, Any]) -> Thread:
    name = thread.get("thread_name") or f"{thread.get('thread_id')}"
    holds = ", holds the interpreter" if thread.get("owns_gil") else ""
    frames = tuple(Frame(each["name"], each["filename"], each["line"]) for each in thread["frames"])
    return Thread(f"{name}{holds}", frames)


def _ask(pid: int) -> dict[str, Any] | None:
    """The answer of a process that called `answer`; None if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(_address(pid))
            # Another process may have taken the address.
            if _peer(connection)[0] != pid:
                return None
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        return json.loads(b"".join(parts))
    except (OSError, ValueError):
        return None


def _signal_dump(pid: int) -> str:
    """The stacks that the signal handler of a process writes; empty if it never called `answer`."""
    try:
        links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if _MEMORY in os.readlink(link)]
        if not links:
            return ""
        with links[0].open("r+b") as memory:
            memory.truncate(0)
            os.kill(pid, _SIGNAL)
            deadline, text = time.monotonic() + SIGNAL_SECONDS, b""
            while time.monotonic() < deadline:
                time.sleep(0.05)
                memory.seek(0)
                last, text = text, memory.read()
                if text and text == last:
                    break
        return text.decode("utf-8", "replace")
    except OSError:
        return ""


def _is_dull(process: psutil.Process) -> bool:
    try:
        return any(dull in part for part in process.cmdline() for dull in _DULL)
    except psutil.Error:
        return True


def _address(pid: int) -> str:
    """In the abstract namespace: it leaves no file behind."""
    return f"\0{_MEMORY}-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _short(file: str) -> str:
    """Packages by their names."""
    return file.rpartition("/site-packages/")[2]


# What the tasks of an event loop await


def describe_tasks(tasks: Iterable[asyncio.Task[Any]] | None = None) -> str:
    """One line for all tasks that wait at the same place: number, kind, and the chain of awaits, outermost first."""
    places: Counter[tuple[str, str]] = Counter()
    for task in asyncio.all_tasks() if tasks is None else tasks:
        # Names of group and sample tasks end in numbers; the first word is their kind.
        kind = task.get_name().split()[0]
        places["task" if kind.startswith("Task-") else kind, _chain(task.get_coro())] += 1
    return "\n".join(f"{count:4d} x {kind}: {chain}" for (kind, chain), count in sorted(places.items()))


def _chain(coroutine: Any) -> str:
    frames: list[str] = []
    awaited = coroutine
    for _ in range(MAX_CHAIN):
        frame, inner = _frame(awaited)
        if frame is None:
            break
        frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = inner
    shown = [*(["..."] if len(frames) > SHOWN_FRAMES else []), *frames[-SHOWN_FRAMES:]]
    return " > ".join(shown) or "not started"


def _frame(awaited: Any) -> tuple[FrameType | None, Any]:
    """The frame of a coroutine or generator, and what it awaits; (None, None) for anything else."""
    for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaited, f"{prefix}_frame"):
            return getattr(awaited, f"{prefix}_frame"), getattr(awaited, inner)
    return None, None
