"""Decides which worker runs a prompt, and finds the prompts that kill workers, or servers.

    place ── free ──▶ the worker with the fewest prompts
        │
        suspected ──▶ waits ──▶ trial: alone on one worker ──▶ all end: free
                                                          └──▶ it is lost: tried again, one at a time

Code that exits, crashes, exhausts its memory or blocks the event loop takes the whole worker down, and the prompts of a
lost worker are run again by others. `Suspects` finds the cause among them, as it does for the servers of `quarantine`.
A trial takes a worker that is idle, such as the replacement of the one that was lost; if there is none, one that gets
no new prompts until it is.

Invariant: the worker of a trial runs its members and nothing else. Every trial ends: with its members, each of which
has its own deadlines, or with its worker. So nothing here waits for the clock.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

from megasync.base.files import atomic_write
from megasync.errors import PoisonPrompt
from megasync.rollout.selection import KILLS_WORKERS
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Hashable)

# A prompt is suspected after this many deaths of servers that also ran other prompts. After one, every prompt of the
# server would need a trial, and most deaths have other causes.
CROWD_DEATHS = 2
# A prompt is poison after this many deaths of servers that ran nothing else. One may be unrelated, such as a pre-empted
# machine or an injected fault.
ALONE_DEATHS = 2
# Seconds after which a prompt that is not suspected is no longer blamed for the deaths that it was near.
REMEMBER_SECONDS = 3600.0


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


# Suspects and their reports. What is said of servers holds for workers too.


@dataclass(frozen=True, slots=True)
class Death:
    """The clock reading of a death, and the number of the server or worker."""

    when: float
    slot: int


@dataclass(slots=True)
class _Evidence:
    # Deaths of servers that also ran other prompts, and of servers that ran only this one.
    crowd: list[Death] = field(default_factory=list[Death])
    alone: list[Death] = field(default_factory=list[Death])
    # How many of the former came one after the other, and the clock reading at which the last of these cut a request.
    independent: int = 0
    cut: float = 0.0
    # Whether the server of one of its trials has died.
    tried: bool = False


class Suspects:
    """The evidence against each prompt, by its key: a pure state machine.

                 near CROWD_DEATHS deaths                alone at ALONE_DEATHS deaths
        free ─────────────────────────────▶ suspected ────────────────────────────────▶ poison: final
          ▲                                     │
          └────────────── completed ────────────┘

    Suspects run only in *trials*, on a server that runs nothing else. Their first trial is a common one, because most
    are bystanders; what completes is free. If its server dies, they run one at a time. So `k` poison prompts among `n`
    suspects cost at most CROWD_DEATHS + 1 + k * ALONE_DEATHS deaths and n + k trials.

    Invariant: a prompt is poison only after `ALONE_DEATHS` deaths of a server that ran it alone (`trial_failed`). So a
    bystander is never condemned, however many deaths it was near, and neither is a prompt that met one unrelated death.

    `refund(slot)` returns the restart after a death in a trial, or one that a poison prompt explains, to a server's
    budget.
    """

    def __init__(self, refund: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._refund = refund
        self._clock = clock
        self._evidence: dict[str, _Evidence] = {}
        # Deaths in a crowd that a poison prompt explains.
        self._explained: set[Death] = set()

    def suspected(self, key: str) -> bool:
        """Whether the prompt may only run in a trial; true of a poison prompt."""
        return key in self._evidence and self._evidence[key].independent >= CROWD_DEATHS

    def poison(self, key: str) -> bool:
        return key in self._evidence and len(self._evidence[key].alone) >= ALONE_DEATHS

    def keys(self) -> list[str]:
        """The prompts that were near a death and have not completed since, and the poison ones."""
        return list(self._evidence)

    def deaths(self, key: str, place: str) -> dict[str, list[dict[str, Any]]]:
        """The deaths that count against a prompt, for its report; `place` is the name of what died."""
        offset, evidence = time.time() - self._clock(), self._evidence[key]
        return {
            kind: [{place: death.slot, "unix_time": round(offset + death.when, 3)} for death in deaths]
            for kind, deaths in (("crowd", evidence.crowd), ("alone", evidence.alone))
        }

    def near(self, key: str, death: Death, sent: float, cut: float) -> None:
        """A death has cut a request of this prompt, which ran beside others; `sent` and `cut` are clock readings.

        Deaths count only if they come one after the other: a lost node, with requests for one prompt on several of its
        servers, is one cause.
        """
        oldest = self._clock() - REMEMBER_SECONDS
        for old in [key for key, each in self._evidence.items() if each.cut < oldest and not self.suspected(key)]:
            del self._evidence[old]
        evidence = self._evidence.setdefault(key, _Evidence())
        evidence.crowd.append(death)
        if not evidence.independent or sent >= evidence.cut:
            evidence.independent += 1
            evidence.cut = cut

    def completed(self, key: str) -> None:
        """All requests of the prompt that were cut have completed: it kills nothing."""
        if not self.poison(key):
            self._evidence.pop(key, None)

    def next_trial(self, waiting: Iterable[str]) -> tuple[str, ...]:
        """The prompts of the next trial, among suspects that wait: all that were in none, or else a single one."""
        suspects = [key for key in waiting if self.suspected(key) and not self.poison(key)]
        waiting = sorted(suspects, key=lambda key: -len(self._evidence[key].alone))
        untried = [key for key in waiting if not self._evidence[key].tried]
        return tuple(untried or waiting[:1])

    def avoid(self, keys: Collection[str]) -> set[int]:
        """The slots on which one of these prompts was alone at a death: another one shows if the slot was the cause."""
        return {death.slot for key in keys for death in self._evidence[key].alone}

    def trial_failed(self, keys: Collection[str], slot: int) -> str | None:
        """The server of a slot has died while it ran only these prompts. Returns the one that is poison, if any."""
        for key in keys:
            self._evidence[key].tried = True
        if keys:
            self._refund(slot)
        if len(keys) != 1:
            return None
        (key,) = keys
        evidence = self._evidence[key]
        evidence.alone.append(Death(self._clock(), slot))
        if not self.poison(key):
            return None
        for death in evidence.crowd:
            if death not in self._explained:
                self._explained.add(death)
                self._refund(death.slot)
        return key


def write_report(folder: Path | None, key: str, report: Mapping[str, Any]) -> None:
    """Writes the report of a poison prompt, unless `folder` is None. A write error is only logged."""
    if folder is None:
        return
    path = report_path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(report, indent=1, default=repr))
    except OSError as error:
        log.error("The report of a poison prompt could not be written to %s: %s", path, error)


def report_path(folder: Path, key: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', key)}.json"
