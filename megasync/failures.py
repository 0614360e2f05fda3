"""Whose fault a failed sample or reward is, which decides what happens next.

    kind            what it is                                            what happens
    --------------  ----------------------------------------------------  ------------------------------------------
    infrastructure  a server, router or tool's service is down or slow    tried again, elsewhere, for as long as it takes
    data            a prompt, tool call or reward that megasync refused    counted against the prompt, then dropped
    unknown         anything else that a workflow or reward raised         as data, and its traceback is logged

Nothing but the run's own watchdog ends the tries of the first kind, since a fleet that can recover must not cost prompts. A
prompt that kills the servers it is sent to is none of the first kind once it was found: see `suspects`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

from megasync.errors import MegasyncError, ServerError

log = logging.getLogger(__name__)

# Tracebacks of the same type of error that are logged in full; later ones would only repeat them.
LOUD = 3


def is_infrastructure(error: BaseException) -> bool:
    """Also when a workflow has wrapped the error in one of its own with `raise ... from`."""
    return any(isinstance(cause, ServerError) for cause in _chain(error))


def asked_to_end(error: BaseException) -> bool:
    """Whether somebody has cancelled this very task.

    Other cancellations come out of what it awaits, such as a task that users' code shares and that another one cancelled.
    They are failures like any other: a task that ended by them would end without a word.
    """
    return isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling() > 0


class UnknownErrors:
    """Logs the first few errors of each type that nobody foresaw, with their tracebacks."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def note(self, what: str, error: BaseException) -> None:
        unknown = next((cause for cause in _chain(error) if not isinstance(cause, MegasyncError)), None)
        if unknown is None:
            return
        kind = type(unknown).__name__
        self.seen[kind] += 1
        if self.seen[kind] <= LOUD:
            log.error("%s failed with an error that megasync does not know, %s:", what, kind, exc_info=error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its explicit causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
