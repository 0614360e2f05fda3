"""Places beside the run directory that metrics go to: trackers and monitoring, each in a thread of its own.

    observer ──▶ queue of at most QUEUED calls ──▶ thread ──▶ sink

Invariant: a sink neither slows nor fails a run. `SinkThread.put` never waits: what a full queue cannot take is counted
and left out. What a sink raises becomes one warning. `close` waits CLOSE_SECONDS for what is queued, and then leaves
the thread, a daemon, behind. `metrics.jsonl` is the record of a run; a sink may lack rows of it.

A row belongs to a step, and steps may come again: a resumed run, or one whose ranks were lost, goes on after its newest
checkpoint. `metrics.jsonl` removes what it had of those steps; each sink says what it does with them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megasync.concurrency.foreign import explain, invoke

log = logging.getLogger(__name__)

# Calls that wait for a slow sink: a step makes one or two, so this is an hour of steps of a few seconds.
QUEUED = 1000
# Seconds for all sinks together to deliver what is queued when a run ends.
CLOSE_SECONDS = 30.0
# Seconds between two attempts to open a sink. What is measured meanwhile waits in the queue.
RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Measurements of a step, or of an evaluation of its weights, which may come much later."""

    step: int
    # Seconds since the epoch.
    time: float
    # Finite numbers by the names of `observe.registry`.
    values: Mapping[str, float]
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Answers:
    """Held-out answers by the weights of `version`, as (prompt, text, reward)."""

    step: int
    version: int
    answers: Sequence[tuple[str, str, float | None]]


class Sink(Protocol):
    """One place. All calls come from one thread, in the order in which things happened."""

    # As a user knows it: "Weights & Biases".
    name: str

    def open(self) -> str:
        """Connects, and returns a message for the user, such as an address. Tried again after an error."""
        ...

    def log(self, row: StepMetrics) -> None: ...

    def answers(self, answers: Answers) -> None:
        """Shows held-out answers; a sink of numbers alone leaves it as it is."""

    def close(self, failed: bool) -> None:
        """Delivers everything and disconnects, after a successful `open`. `failed` says how the run ended."""
        ...

    def abandon(self) -> None:
        """Ends what would delay the end of this process; another thread may be stuck in any other method."""


class SinkThread:
    """Calls one sink from a thread. Only `close` waits."""

    def __init__(self, sink: Sink, say: Callable[[str], None]) -> None:
        """`say` gets the sink's messages, in the sink's thread."""
        self._sink = sink
        self._say = say
        self._calls: deque[Callable[[Sink], None]] = deque()
        self._changed = threading.Condition()
        self._ending = self._failed = False
        self._warned = False
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Sink], None]) -> None:
        """Queues a call."""
        with self._changed:
            if room := len(self._calls) < QUEUED:
                self._calls.append(call)
                self._changed.notify_all()
        if not room:
            self._lose(f"it is too slow, {QUEUED} rows wait for it")

    def end(self, failed: bool) -> None:
        """Makes the thread end once the queue is empty."""
        with self._changed:
            self._ending, self._failed = True, failed
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Waits after `end` for the thread, for at most this long, and reports what was not delivered."""
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            log.warning("%s: not finished in time; the run ends without it", self._sink.name)
            self._sink.abandon()
        if lost := self._lost + len(self._calls):
            log.warning("%s: %d rows were not delivered; metrics.jsonl has them", self._sink.name, lost)

    def _run(self) -> None:
        if not self._open():
            return
        while (call := self._next()) is not None:
            self._guarded(partial(call, self._sink))
        self._guarded(lambda: self._sink.close(self._failed))

    def _next(self) -> Callable[[Sink], None] | None:
        """The oldest call in the queue; None once it is empty and no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._ending)
            return self._calls.popleft() if self._calls else None

    def _open(self) -> bool:
        """Tries until it works, or the run ends."""
        while True:
            try:
                if message := invoke(self._sink.open):
                    self._say(message)
                return True
            except Exception as error:  # noqa: BLE001 - other people's packages may raise anything
                self._warn(error)
            with self._changed:
                if self._changed.wait_for(lambda: self._ending, RETRY_SECONDS):
                    return False

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            invoke(call)
        except Exception as error:  # noqa: BLE001 - other people's packages may raise anything
            self._lose(error)

    def _lose(self, why: object) -> None:
        self._lost += 1
        self._warn(why)

    def _warn(self, why: object) -> None:
        if not self._warned:
            self._warned = True
            said = explain(why) if isinstance(why, Exception) else why
            log.warning("%s lacks metrics, and the run goes on: %s", self._sink.name, said)


class Sinks:
    """All sinks of a run. No method waits, except `close`."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._threads: list[SinkThread] = []
        self._said: deque[str] = deque()

    def start(self) -> None:
        self._threads = [SinkThread(sink, self._said.append) for sink in self._sinks]

    def messages(self) -> list[str]:
        """The messages of sinks since the last call."""
        return [self._said.popleft() for _ in range(len(self._said))]

    def log(self, row: StepMetrics) -> None:
        self._put(lambda sink: sink.log(row))

    def answers(self, answers: Answers) -> None:
        self._put(lambda sink: sink.answers(answers))

    def close(self, failed: bool = False) -> None:
        for thread in self._threads:
            thread.end(failed)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.close(deadline - time.monotonic())
        self._threads = []

    def _put(self, call: Callable[[Sink], None]) -> None:
        for thread in self._threads:
            thread.put(call)
