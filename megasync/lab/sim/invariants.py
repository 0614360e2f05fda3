"""The invariants that every schedule must keep, asserted at the moment of a violation.

trajectories  admitted == trained + dropped + live, after every event of the buffer; slots are within the capacity
              trained trajectories are within the staleness bound, and each version names the weights that sampled them
              what the buffer answered is in its ledger, at whatever moment the driver dies
weights       a version names one set of weights forever; published versions only increase
              a server answers from one whole version: the published one, or one whose publish has begun since
responses     a group contains exactly what was sampled: no token is lost, duplicated, foreign or sampled after the end
              no token is labelled newer than the version that sampled it, nor older if the server's report arrived
              what is trained is what was committed
requests      a server receives aborts only for requests that it has
training      a group whose steps raise errors is set aside after its attempts, counted over all drivers
              the final weights have seen `total_steps` batches and no group twice, and the buffer's counts agree
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megasync.buffer.groups import LIVE
from megasync.buffer.payload import EncodedGroup, LeasedGroup
from megasync.buffer.segments import load
from megasync.buffer.state import BufferCounts, TrajectoryBuffer
from megasync.config.pacing import Pacing
from megasync.config.schema import TrainerConfig
from megasync.evaluation.evaluate import HeldOutAnswer
from megasync.lab.sim.language import fault_in, sampled_by
from megasync.rollout.workflow import request_seed
from megasync.trajectory import Group, Trajectory

# A set of weights is identified by the groups that each of its steps trained on.
Weights = tuple[tuple[str, ...], ...]
INITIAL: Weights = ()

# Methods that change the buffer's state machine.
EVENTS = ("admit", "commit", "drop", "reclaim", "lease", "ack", "step_failed", "publish", "rollback", "close")


class Broken(Exception):
    """An invariant was violated."""


class Invariants:
    """The state behind the checks. `pacing` and `samples` belong to the current driver; `seed` seeds all sampling."""

    def __init__(self, seed: int, clock: Callable[[], float], run_dir: Path) -> None:
        self._seed = seed
        self._clock = clock
        self._run_dir = run_dir
        self.pacing: Pacing
        self.samples = 0
        # The first violation, wherever it was detected.
        self.broken: Exception | None = None
        # Groups that the buffer took, by call; of committed ones those that were not returned since.
        self._answered: dict[str, set[str]] = {"commit": set(), "drop": set()}
        # Groups with a response whose final piece, which carries the server's report of versions, did not arrive.
        self._unreported: set[str] = set()
        self._committed: dict[str, list[Trajectory]] = {}
        self._named: dict[int, Weights] = {0: INITIAL}
        # Versions of all tokens that were committed to the buffer.
        self._sampled: set[int] = set()
        self.published = 0
        # The newest version that was published to the buffer.
        self._buffer_version = 0
        # Versions whose publish has begun since then; a server may hold one even if its publish failed.
        self._begun: set[int] = set()
        # Steps that raised an error, counted by the group that caused it; the number of drivers so far.
        self._raised: Counter[str] = Counter()
        self._drivers = 0
        # Whether ranks and servers share their devices, and who is on them whole now: "ranks", and URLs of servers.
        self.shared_devices = False
        self._on_devices: set[str] = set()
        # Servers that are pinned for an evaluation; those of them that have no other requests anymore; and those that
        # were pinned since their last sync, with whether they had no other requests.
        self.pinned: Callable[[], set[str]] = set
        self._apart: set[str] = set()
        self._unpinned: dict[str, bool] = {}
        # The event log, for debugging a failing seed.
        self.history: list[str] = []

    def note(self, text: str) -> None:
        # The run directory has a different name each time.
        self.history.append(f"{self._clock():10.3f}  {text.replace(str(self._run_dir), 'RUN')}")

    def need(self, holds: bool, violation: str) -> None:
        if not holds:
            self.fail(violation)

    def fail(self, violation: str) -> NoReturn:
        self.note(f"BROKEN: {violation}")
        self.broken = self.broken or Broken(violation)
        raise Broken(violation)

    def record(self, error: BaseException) -> None:
        """Keep an error raised in a task that is not awaited."""
        self.broken = self.broken or (error if isinstance(error, Exception) else Broken(repr(error)))

    def watch(self, state: TrajectoryBuffer) -> None:
        """Wrap every event of this state machine so that its counts are checked afterwards."""
        for name in EVENTS:
            setattr(state, name, self._watched(state, name))

    def _watched(self, state: TrajectoryBuffer, name: str) -> Callable[..., Any]:
        method = getattr(state, name)

        def event(*args: Any) -> Any:
            result = method(*args)
            if name == "reclaim" and result is not None:
                self._answered["commit"].discard(result)
            if result is not None or name in ("ack", "publish", "rollback", "close"):
                self.note(f"buffer {name}({', '.join(map(_shown, args))}) -> {_shown(result)}")
            self.balance(state.counts())
            return result

        return event

    def commits(self, encoded: EncodedGroup) -> None:
        """Check a group that is handed to the buffer."""
        group = load(LeasedGroup(encoded.header, encoded.body))
        self._is_sampled(group)
        self._sampled.update(version for trajectory in group.trajectories for version in trajectory.versions)

    def answered(self, call: str, uid: str) -> None:
        """Record that the buffer has taken a group: whatever dies, its ledger has it."""
        self._answered[call].add(uid)

    def buffer_publishes(self, version: int) -> None:
        """Record that the buffer has answered the publication of this version."""
        self._buffer_version = version

    def survives(self, ledger: Path) -> None:
        """Check that the ledger of a killed driver has everything that was answered."""
        with closing(sqlite3.connect(ledger)) as file:
            file.execute("PRAGMA locking_mode=EXCLUSIVE")
            states = dict(file.execute("SELECT uid, state FROM groups"))
        for call, lost in (("commit", (None, "generating")), ("drop", (None, *LIVE))):
            for uid in self._answered[call]:
                state = states.get(uid)
                self.need(state not in lost, f"the {call} of {uid} was answered, and the ledger has it as {state}")

    def balance(self, counts: BufferCounts) -> None:
        dropped = sum(counts["dropped"].values())
        self.need(
            counts["admitted"] == counts["trained"] + dropped + counts["live"],
            f"admitted == trained + dropped + live, but the counts are {counts}",
        )
        self.need(min(counts["slots"].values()) >= 0 and counts["live"] >= 0, f"no count is negative: {counts}")

    # Weights

    def new_devices(self, shared: bool) -> None:
        """A driver begins, with processes of its own."""
        self.shared_devices = shared
        self._on_devices.clear()

    def takes_device(self, name: str) -> None:
        """Ranks and servers are never both whole on devices that they share."""
        self._on_devices.add(name)
        both = "ranks" in self._on_devices and len(self._on_devices) > 1
        self.need(not (self.shared_devices and both), f"the devices have room for one of {sorted(self._on_devices)}")

    def leaves_device(self, name: str) -> None:
        self._on_devices.discard(name)

    def driver_died(self, newest: int) -> None:
        """Forget the versions that only the dead driver knew; all its servers died with it.

        A version number may be reused if it was neither published to the buffer nor used to label a token, as far as
        the ledger has it. `newest` is the newest number there.
        """
        self._drivers += 1
        self._sampled = {number for number in self._sampled if number <= newest}
        self.published = self._buffer_version = min(self._buffer_version, newest)
        kept = {number for number in self._named if number <= self.published} | self._sampled
        self._named = {number: weights for number, weights in self._named.items() if number in kept}
        self._begun.clear()

    def names(self, version: int, weights: Weights) -> None:
        """Check that a version always names the same weights. A server holds `weights` as `version`."""
        first_weights = self._named.setdefault(version, weights)
        self.need(
            first_weights == weights,
            f"version {version} names weights of {len(first_weights)} steps and of {len(weights)} steps",
        )

    def publish_begins(self, version: int, weights: Weights) -> None:
        self.need(version >= self.published, f"version {version} is published after version {self.published}")
        self.names(version, weights)
        self._begun.add(version)

    def publish_ends(self, version: int) -> None:
        """Record that all target servers hold the version."""
        self._begun = {begun for begun in self._begun if begun > version}
        self.published = max(self.published, version)

    def serves(self, url: str, version: int, weights: Weights | None, key: str) -> None:
        """Check the weights from which a server answers a request. None stands for a mixture of versions."""
        if weights is None:
            self.fail(f"{url} answers from a mixture of versions")
        self.names(version, weights)
        allowed = {self.published, *self._begun}
        # After an evaluation its last requests may still run, and rollouts only if the server was never set apart.
        left = url in self._unpinned and (not self._unpinned[url] or _asks_for_evaluation(key))
        kept = url in self.pinned() or left
        self.need(version in allowed or kept, f"{url} answers from version {version}; {sorted(allowed)} may serve")

    # Evaluations of an exact version

    def set_apart(self, url: str) -> None:
        """Record that a server is pinned, and that its requests have ended."""
        self._apart.add(url)

    def unpinned(self, url: str) -> None:
        """Record that a server is no longer pinned. It keeps what it holds until its next sync."""
        self._unpinned[url] = url in self._apart
        self._apart.discard(url)

    def synced(self, url: str) -> None:
        self._unpinned.pop(url, None)
        self.need(url not in self.pinned(), f"{url} is pinned and gets another version")

    def asked(self, url: str, key: str) -> None:
        """Check that a pinned server is asked for nothing but an evaluation and the checks of the fleet."""
        alone = url not in self._apart or _asks_for_evaluation(key)
        self.need(alone, f"{url} is pinned and gets a request of {key}")

    def scored(self, version: int, answers: Iterable[HeldOutAnswer]) -> None:
        """Check that a score belongs to one version. The text of an answer names the versions that sampled it."""
        for answer in answers:
            text = answer.text or str(version)
            self.need(text == str(version), f"an answer of versions {text} counts for the score of version {version}")

    # Responses

    def unreported(self, key: str) -> None:
        """Record that a request with this routing key ended before its final piece arrived.

        Its group's tokens may then be labelled too old. After invalid answers the client appends "#" and their number
        to the key.
        """
        self._unreported.add(key.partition("#")[0])

    def _is_sampled(self, group: Group) -> None:
        """Check that each response belongs to a sample of the group, and no two to the same."""
        left = list(range(self.samples))
        for trajectory in group.trajectories:
            faults = {}
            for index in left:
                seed = request_seed(self._seed, group.uid, index)
                faults[index] = fault_in(trajectory, lambda turn, seed=seed: request_seed(seed, turn))
                if not faults[index]:
                    left.remove(index)
                    break
            else:
                self.fail(f"a response of {group.uid} is of none of its samples: {faults}")
            self._is_versioned(group.uid, trajectory)
        self._committed.setdefault(group.uid, []).extend(group.trajectories)

    def _is_versioned(self, uid: str, trajectory: Trajectory) -> None:
        versions = list(trajectory.versions)
        for at, trained in enumerate(trajectory.loss_mask):
            if not trained:
                continue
            value, claimed = float(trajectory.logprobs[at]), versions[at]
            self.need(value < 0, f"a log-prob of {uid} is {value!r}")
            true = sampled_by(value)
            self.need(
                claimed == true or (claimed < true and uid in self._unreported),
                f"token {at} of {uid} has version {claimed}, and was sampled by {true}",
            )

    # Training

    def raises(self, uid: str) -> None:
        """Count a step that fails because of this group.

        A driver that is killed right after the failure does not record the attempt, so each driver allows one more.
        """
        self._raised[uid] += 1
        most = TrainerConfig().step_attempts + self._drivers
        self.need(self._raised[uid] <= most, f"{uid} is set aside after its attempts, but failed step after step")

    def trains(self, seen: Weights, step: int, version: int, groups: Sequence[LeasedGroup]) -> None:
        """Check a batch that the trainer receives. `seen` are the groups that its weights were trained on."""
        uids = [group.uid for group in groups]
        self.need(len(uids) == self.pacing.groups_per_step, f"step {step} trains {len(uids)} groups")
        trained = {uid for earlier in seen for uid in earlier}
        self.need(not set(uids) & trained and len(set(uids)) == len(uids), f"step {step} trains a group twice: {uids}")
        self.need(len(seen) == step - 1, f"step {step} trains weights that have seen {len(seen)} steps")
        self.need(
            version == self.published, f"step {step} trains at version {version}, but {self.published} is published"
        )
        for group in groups:
            for trajectory in load(group).trajectories:
                self.need(
                    any(_same(trajectory, committed) for committed in self._committed.get(group.uid, ())),
                    f"a response of {group.uid} is trained as it was never committed",
                )
                oldest, bound = trajectory.oldest_version, self.pacing.staleness_bound
                self.need(
                    oldest is not None and version - oldest <= bound,
                    f"{group.uid} is trained at version {version} on tokens of {oldest}, over the bound of {bound}",
                )

    def ends(self, steps: int, seen: Weights, counts: BufferCounts) -> None:
        """Check the final weights and counts of a run that finished all its steps."""
        groups = [uid for step in seen for uid in step]
        self.need(len(seen) == steps, f"{len(seen)} steps were trained at the end, not {steps}")
        self.need(len(groups) == len(set(groups)), f"a group was trained twice among {groups}")
        self.need(
            counts["trained"] == len(groups), f"the buffer counts {counts['trained']} trained groups, not {len(groups)}"
        )
        self.balance(counts)


def _asks_for_evaluation(key: str) -> bool:
    """Return whether this is the routing key of an evaluation, or of a check by the fleet, which has none."""
    return key.startswith("eval:") or not key


def _same(trajectory: Trajectory, committed: Trajectory) -> bool:
    """Return whether both are equal, apart from tokens that the loss mask has excluded since."""
    return (
        np.array_equal(trajectory.response_ids, committed.response_ids)
        and np.array_equal(trajectory.logprobs, committed.logprobs)
        and trajectory.versions == committed.versions
        and all(now <= then for now, then in zip(trajectory.loss_mask, committed.loss_mask, strict=True))
    )


def _shown(value: Any) -> str:
    if isinstance(value, EncodedGroup | LeasedGroup):
        return value.header.uid
    return ", ".join(map(_shown, value)) if isinstance(value, list | dict) else str(value)
