"""Classifies the error of a sample or reward, which decides whether it is retried or counted against the prompt.

    kind            cause                                                    reaction
    --------------  -------------------------------------------------------  ------------------------------------------
    infrastructure  a server, router or tool's service is down or slow       retried elsewhere, without a limit
    data            megasync refused a prompt, a tool call or a reward       counted against the prompt, then dropped
    unexpected      anything else that a workflow or reward function raised  as data, and its traceback is logged

Only the run's watchdog ends the retries of infrastructure failures, so that prompts are not lost while the fleet
recovers. A prompt that is known to crash servers is not an infrastructure failure: see `quarantine`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from megasync.errors import MegasyncError, ServerError

log = logging.getLogger(__name__)

# Number of errors of one type that are logged with a traceback. Later ones would only repeat them.
MAX_TRACEBACKS = 3


def is_infrastructure(error: BaseException) -> bool:
    """Whether the error or one of its explicit causes (`raise ... from`) is a ServerError."""
    return any(isinstance(cause, ServerError) for cause in _chain(error))


class UnexpectedErrors:
    """Counts errors of types that are not megasync's own, and logs the first few of each type with tracebacks."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def note(self, what: str, error: BaseException) -> None:
        """Counts the error, and logs it if it is one of the first of its type. `what` names what failed."""
        unexpected = next((cause for cause in _chain(error) if not isinstance(cause, MegasyncError)), None)
        if unexpected is None:
            return
        kind = type(unexpected).__name__
        self.seen[kind] += 1
        if self.seen[kind] <= MAX_TRACEBACKS:
            log.error("%s failed with an unexpected %s:", what, kind, exc_info=error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the errors of a group, and their explicit causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _chain(each)
        error = error.__cause__
