"""Decides which worker runs a prompt, and finds the prompts whose user code kills its worker.

    place ── free ──▶ the worker with the fewest prompts
        │
        suspected ──▶ waits ──▶ trial: alone on one worker ──▶ all end: free
                                                          └──▶ it is lost: tried again, one at a time

Code that exits, crashes, exhausts its memory or blocks the event loop takes the whole worker down, and the prompts of a
lost worker are run again by others. `suspects` finds the cause among them, as it does for servers. A trial takes a
worker that is idle, such as the replacement of the one that was lost; if there is none, one that gets no new prompts
until it is.

Invariant: the worker of a trial runs its members and nothing else. Every trial ends: with its members, each of which
has its own deadlines, or with its worker. So nothing here waits for the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Generic, TypeVar

from megasync.errors import PoisonPrompt
from megasync.rollout.quarantine import report_path, write_report
from megasync.rollout.selection import KILLS_WORKERS
from megasync.rollout.suspects import Death, Suspects
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Hashable)


@dataclass(slots=True)
class _Process:
    """One process of a worker. Its replacement has the same `number`."""

    number: int
    running: dict[str, Prompt] = field(default_factory=dict[str, Prompt])


class Placement(Generic[W]):
    """Places prompts, identified by unique keys, on the workers that `add` and `remove` name.

    A report of each poison prompt is written to `folder`, unless it is None. `refund(number)` returns a restart to the
    budget of a worker, whose loss a prompt explains.
    """

    def __init__(
        self,
        folder: Path | None = None,
        refund: Callable[[int], None] = lambda number: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._suspects = Suspects(refund, clock)
        self._processes: dict[W, _Process] = {}
        self._where: dict[str, W] = {}
        # Suspects that run nowhere, in the order of their losses.
        self._waiting: dict[str, None] = {}
        # The worker that gets no prompts but those of a trial, which has begun once there are some.
        self._reserved: W | None = None
        self._trial: set[str] = set()
        # Evidence by the digest of a poison prompt: it recurs, for example in the next epoch.
        self._poison: dict[bytes, str] = {}
        self._followers: list[Callable[[], None]] = []

    def follow(self, on_change: Callable[[], None]) -> None:
        """Calls `on_change` when prompts that had no place may have one now, except after `add`."""
        self._followers.append(on_change)

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/worker_suspects": float(len(self._waiting) + len(self._trial)),
            "rollout/worker_poison": float(len(self._poison)),
        }

    # Workers

    def add(self, worker: W, number: int = 0) -> None:
        """Prompts that had no place may have one now. Does nothing for a worker that is known."""
        if worker in self._processes:
            return
        self._processes[worker] = _Process(number)
        self._reserve()

    def remove(self, worker: W, why: str = "", by_prompts: bool = True) -> None:
        """The worker is lost, with what ran there. Its prompts are to be placed again, or ended.

        `by_prompts` is whether a prompt may have caused it. Does nothing for a worker that is unknown.
        """
        if (process := self._processes.pop(worker, None)) is None:
            return
        for key in process.running:
            del self._where[key]
        if worker == self._reserved and self._trial:
            log.warning("Rollout worker %d was lost while it ran only %s", process.number, sorted(process.running))
            # What was not placed yet is not at fault.
            self._waiting |= dict.fromkeys(sorted(self._trial - process.running.keys()))
            self._trial = set()
            if (
                by_prompts
                and (poison := self._suspects.trial_failed(process.running.keys(), process.number)) is not None
            ):
                self._mark_poison(poison, process.running[poison], why)
        elif by_prompts:
            death = Death(self._clock(), process.number)
            for key in process.running:
                self._suspects.near(key, death, sent=death.when, cut=death.when)
        suspects = (key for key in process.running if self._suspects.suspected(key) and not self._suspects.poison(key))
        self._waiting |= dict.fromkeys(suspects)
        self._reserve()
        self._changed()

    # Prompts

    def place(self, key: str, prompt: Prompt) -> W | None:
        """The worker that runs this prompt from now on, until `ended`; None if it has to wait for a change.

        Raises PoisonPrompt for a prompt that kills its workers.
        """
        if self._poison and (evidence := self._poison.get(_digest(prompt))):
            raise PoisonPrompt(evidence)
        if key in self._trial:
            worker = self._reserved
        elif self._suspects.suspected(key):
            return None
        else:
            free = (worker for worker in self._processes if worker != self._reserved)
            worker = min(free, key=lambda worker: len(self._processes[worker].running), default=None)
        if worker is not None:
            self._processes[worker].running[key] = prompt
            self._where[key] = worker
        return worker

    def ended(self, key: str) -> None:
        """The prompt needs no worker anymore: it has completed, was dropped or given up."""
        busy = False
        if (worker := self._where.pop(key, None)) is not None:
            running = self._processes[worker].running
            del running[key]
            busy = bool(running)
        self._waiting.pop(key, None)
        self._trial.discard(key)
        self._suspects.completed(key)
        if self._reserved is not None and not self._trial and not busy:
            self._reserve()
            self._changed()

    def _changed(self) -> None:
        for on_change in self._followers:
            on_change()

    # Trials

    def _reserve(self) -> None:
        """Reserves a worker while there are suspects, and begins their trial once it is idle."""
        if self._trial:
            return
        self._reserved = None
        suspects = self._suspects.next_trial(self._waiting)
        if not suspects or not self._processes:
            return
        self._reserved = min(self._processes, key=lambda worker: len(self._processes[worker].running))
        process = self._processes[self._reserved]
        if process.running:
            return
        log.warning("Rollout worker %d runs only %s, which ran on lost workers", process.number, list(suspects))
        self._trial = set(suspects)
        for key in suspects:
            del self._waiting[key]

    # Poison prompts

    def _mark_poison(self, key: str, prompt: Prompt, why: str) -> None:
        losses = self._suspects.deaths(key, "worker")
        path = "" if self._folder is None else f"; see {report_path(self._folder, key)}"
        evidence = (
            f"prompt {key} ran on {len(losses['crowd'])} rollout workers that were lost beside others, and alone on "
            f"{len(losses['alone'])} more. The last: {why or 'unknown'}{path}"
        )
        self._poison[_digest(prompt)] = evidence
        log.error("Poison prompt, not run again: %s", evidence)
        report = {"uid": key, "reason": KILLS_WORKERS, "deaths": losses, "last_death": why}
        report |= {"prompt_ids": [list(prompt.prompt_ids)], "row": dict(prompt.columns)}
        write_report(self._folder, key, report)


def _digest(prompt: Prompt) -> bytes:
    """The same for two prompts whose user code gets the same row."""
    columns: Mapping[str, object] = dict(sorted(prompt.columns.items()))
    return sha256(repr((list(prompt.prompt_ids), columns)).encode()).digest()
