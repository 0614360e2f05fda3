"""The simulator finds bugs: each of these is planted in the real code, and some schedule violates an invariant."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import megasync.control.restore
from megasync.buffer import AsyncBuffer
from megasync.buffer.ledger import Ledger
from megasync.buffer.state import BufferStatus, FailedStep, TrajectoryBuffer
from megasync.cluster.fleet import Fleet
from megasync.cluster.reservations import Reservations
from megasync.control.colocation import Colocation
from megasync.control.controller import Controller
from megasync.control.progress import Progress
from megasync.control.publishing import FleetSync
from megasync.control.watchdog import Watchdog
from megasync.evaluation import periodic
from megasync.evaluation.evaluate import Answer, AnswerJob, HeldOutAnswer
from megasync.lab.sim import simulate
from megasync.lab.sim.chance import OF_TURNS
from megasync.lab.sim.driver import OUTLIVED
from megasync.lab.sim.servers import POISON_ROW
from megasync.lab.sim.transport import SimPublisher
from megasync.lab.sim.world import DEADLY_ROW, FIRST_COLOCATED, FIRST_EXACT, FIRST_WITH_WORKERS
from megasync.rollout.client import RolloutClient
from megasync.rollout.partials import PartialResponse, PartialResponses
from megasync.rollout.placement import Placement, Suspects
from megasync.serving import answers
from megasync.serving.answers import GeneratedPiece
from megasync.serving.health import ServerHealth, ServerState
from megasync.trajectory import Partial

# Schedules within which each bug is found.
SEEDS = 300
# Bugs that few schedules find, and where the search for each begins: those before are known to find nothing.
RARE = {"begins_in_place": 125, "counts_what_is_trained": 215, "counts_no_failure": 35, "counts_recovery": 25}


# What only schedules with evaluations of an exact version have.
EXACT = OUTLIVED
# The fault that only schedules with shared devices have.
(TURN_FAULT,) = OF_TURNS


def first_failure(likely: str, after: int) -> BaseException:
    first = {DEADLY_ROW: FIRST_WITH_WORKERS, TURN_FAULT: FIRST_COLOCATED, EXACT: FIRST_EXACT}.get(likely, 0) + after
    for seed in range(first, first + SEEDS):
        try:
            simulate(seed, likely)
        except Exception as error:  # noqa: BLE001 - whatever a planted bug leads to
            assert any(f"seed {seed}" in note for note in error.__notes__), "a failing seed names itself"
            return error
    pytest.fail(f"none of {SEEDS} schedules found it")


def reused_version(self: Progress) -> int:
    self.claimed = self.version + 1
    return self.claimed


async def joins_without_weights(self: FleetSync) -> None:
    await self._fleet.joined({server.url for server in self._fleet.joiners()})


async def no_rollback(self, step: int, version: int) -> None: ...


async def saves_too_early(self: Controller, groups: list) -> None:
    """The step counts as trained before it is."""
    self.progress.trained(self.progress.step + 1)
    await self._save()
    await self._checkpoints.finish(wait=True)
    self.progress.step -= 1
    await TRAIN(self, groups)


TRAIN = Controller._train_step


def forgets_a_group(self: TrajectoryBuffer, version: int) -> None:
    """A publication frees the slot of a group that was not trained, which is then nowhere."""
    PUBLISH(self, version)
    for uid in self.live_uids()[:1]:
        self._groups._leave(self._groups.open[uid])


PUBLISH = TrajectoryBuffer.publish


async def counts_no_failure(self: AsyncBuffer, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
    return FailedStep(step, attempt=1)


@contextmanager
def counts_recovery(self: Watchdog) -> Iterator[None]:
    """A step, a restart or a publish within its own deadline counts as silence."""
    yield


# Devices that ranks and servers share


async def takes_what_others_hold(self: Colocation) -> None:
    self._servers_left = True


async def restarts_in_any_turn(self: Colocation) -> None:
    self._ranks_left = False


async def leaves_after_the_servers_came(self: Colocation) -> None:
    ranks_left, self._ranks_left = self._ranks_left, True
    await OF_SERVERS(self)
    self._ranks_left = ranks_left
    await OF_SERVERS(self)


OF_SERVERS = Colocation.to_servers


async def waits_for_no_start(self: Fleet) -> None:
    for slot in self.slots:
        await slot.release_memory(10.0)


# Responses


def gives_a_part_twice(partial: Partial) -> PartialResponse:
    parts = OF(partial)
    if len(parts):
        parts.begin_request(1)
        piece = GeneratedPiece(array("i", parts.token_ids[-1:]), array("f", [-0.5]), "", None, parts.versions[-1], [])
        parts.add(piece)
    return parts


OF = PartialResponse.from_saved


def gives_the_neighbours(self: PartialResponses, uid: str, saved: dict[tuple[int, int], Partial]) -> None:
    RESTORE(self, uid, {(1 - sample if sample < 2 else sample, turn): found for (sample, turn), found in saved.items()})


RESTORE = PartialResponses.restore


async def aborts_everywhere(self: RolloutClient, *arguments: Any) -> None:
    """A request that failed is aborted by its name on every server, since nobody knows which one has it."""
    body = next(argument for argument in arguments if isinstance(argument, dict) and "input_ids" in argument)
    self.named = getattr(self, "named", 0) + 1
    body["rid"] = f"request {self.named}"
    try:
        await REQUEST(self, *arguments)
    except BaseException:
        for server in self.servers:
            await server.post("/abort_request", {"rid": body["rid"]})
        raise


REQUEST = RolloutClient._request


# Disks and changed configurations


def begins_in_place(path: Path, step: int, version: int, counters: dict[str, Any], origin: dict[str, Any]) -> None:
    """An unfinished ledger lies where a whole one is looked for."""
    ledger = Ledger(path)
    try:
        status = BufferStatus.initial(step, version, counters)
        status.inherited["origin"] = origin
        ledger.write(status, to_disk=True)
    finally:
        ledger.close()


def counts_what_is_trained(self: TrajectoryBuffer) -> str | None:
    """As if every step that is trained had been one of the present size."""
    total, live = self._total_steps * self.pacing.groups_per_step, len(self.live_uids())
    return "a drop" if self._groups.trained + live >= total else BLOCKER(self)


BLOCKER = TrajectoryBuffer.admission_blocker


async def answers_before_its_record(self: AsyncBuffer, to_disk: bool = False) -> None:
    asyncio.get_running_loop().create_task(RECORD(self, to_disk)).add_done_callback(lambda done: None)


RECORD = AsyncBuffer._record


# Evaluations of an exact version


async def publishes_to_all(self: FleetSync, version: int, targets: set[str], only: set[str] | None) -> Any:
    return await PUBLISH_TO(self, version, targets, None)


PUBLISH_TO = FleetSync._publish_to


async def asks_the_router(answer: Answer, pinned: Any, job: AnswerJob) -> HeldOutAnswer:
    return await answer(job)


def routes_pinned(self: Reservations) -> list:
    return [slot for slot in self._slots if slot.health.serves]


# Workers


def isolates_nothing(self: Placement, worker: Any, why: str = "", by_prompts: bool = True) -> None:
    """No loss of a worker is held against what ran there."""
    REMOVE(self, worker, why, by_prompts=False)


REMOVE = Placement.remove


# Servers


def blames_nobody(self: Suspects, *evidence: Any) -> None:
    """No death of a server is held against what ran there."""


# What it is planted in, the invariant that it violates, and the fault that brings it to light sooner.
BUGS = [
    (Progress, "next_version", reused_version, "names weights of", ""),
    (AsyncBuffer, "rollback", no_rollback, "asks for a batch", ""),
    (FleetSync, "sync_joiners", joins_without_weights, "answers from version|names weights of", ""),
    (
        ServerHealth,
        "started",
        lambda self: self._enter(ServerState.HEALTHY),
        "answers from version|names weights of",
        "",
    ),
    (SimPublisher, "forget_ranks", lambda self, size: None, "the transport knows the ranks", ""),
    (TrajectoryBuffer, "_check_age", lambda self, entry: True, "over the bound", ""),
    (TrajectoryBuffer, "publish", forgets_a_group, "admitted == trained", ""),
    (AsyncBuffer, "_wake_next", lambda self: None, "no group was finished|is not over|no task can run", ""),
    (AsyncBuffer, "step_failed", counts_no_failure, "is set aside after its attempts", "step raises"),
    (
        AsyncBuffer,
        "_record",
        answers_before_its_record,
        "was answered, and the ledger",
        "driver dies",
    ),
    (Watchdog, "bounded", counts_recovery, "no group was finished", "default timeouts"),
    (Controller, "_train_step", saves_too_early, "does not fit the last trained step", ""),
    (PartialResponse, "finished", property(lambda self: False), "behind the end", ""),
    (PartialResponse, "from_saved", gives_a_part_twice, "does not follow|is longer than", ""),
    (PartialResponses, "restore", gives_the_neighbours, "does not follow", ""),
    (answers, "_check_tokens", lambda *_: None, "does not follow", "server lies"),
    (RolloutClient, "_request", aborts_everywhere, "is to abort", ""),
    (
        megasync.control.restore,
        "begin_ledger",
        begins_in_place,
        "does not hold how its run began|damaged",
        "disk is full",
    ),
    (
        TrajectoryBuffer,
        "admission_blocker",
        counts_what_is_trained,
        "no group was finished",
        "schedule.groups_per_step",
    ),
    (Suspects, "near", blames_nobody, "the servers are lost", POISON_ROW),
    (Placement, "remove", isolates_nothing, "all workers are lost", DEADLY_ROW),
    (Colocation, "_take_from_servers", takes_what_others_hold, "have room for one", TURN_FAULT),
    (Colocation, "to_new_ranks", restarts_in_any_turn, "have room for one", TURN_FAULT),
    (Colocation, "to_servers", leaves_after_the_servers_came, "have room for one", TURN_FAULT),
    (Colocation, "to_ranks", restarts_in_any_turn, "not offloaded", TURN_FAULT),
    (FleetSync, "_publish_to", publishes_to_all, "is pinned and gets another version", EXACT),
    (Reservations, "published", routes_pinned, "is pinned and gets", EXACT),
    (ServerHealth, "missed_sync", lambda self, reason: None, "answers from version", EXACT),
    (periodic, "exact_answer", asks_the_router, "counts for the score of version", EXACT),
    (Fleet, "release_memory", waits_for_no_start, "have room for one", TURN_FAULT),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("owner", "name", "bug", "violation", "likely"),
    BUGS,
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Any, violation: str, likely: str
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(Exception, match=violation):
        raise first_failure(likely, RARE.get(getattr(bug, "__name__", ""), 0))
