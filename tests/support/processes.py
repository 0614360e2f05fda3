"""Inspects processes that may end at any moment."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil
from waits import PATIENCE


def lives(process: psutil.Process | int) -> bool:
    """Whether a process is running: it has not ended, even during this check, and is not a zombie."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """The command line of a process; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def family(root: psutil.Process | int | None) -> list[psutil.Process]:
    """The process and all of its descendants; empty when it has ended."""
    if root is None:
        return []
    try:
        root = psutil.Process(root) if isinstance(root, int) else root
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def living(processes: Iterable[psutil.Process | int]) -> list[psutil.Process | int]:
    return [process for process in processes if lives(process)]


def gone(find: Callable[[], list[psutil.Process]], seconds: float = PATIENCE) -> bool:
    """Whether `find` returns nothing within `seconds`. On a busy machine a killed process takes a moment to end."""
    deadline = time.monotonic() + seconds
    while living(find()):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def with_word(word: str) -> list[psutil.Process]:
    """Processes with this text in their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if word in " ".join(p.info["cmdline"] or [])]


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """TCP addresses on which the processes listen, each with the name of such a process."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            places = [one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found.update((address.removeprefix("::ffff:"), process.name()) for address in places)
    return found
