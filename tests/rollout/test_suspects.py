"""Prompts that kill servers are found among their bystanders, in a fleet that lives in this file only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.schema import HealthConfig
from megasync.rollout.suspects import (
    ALONE_DEATHS,
    CROWD_DEATHS,
    MATCH_SECONDS,
    REMEMBER_SECONDS,
    Suspects,
    SuspectStatus,
)
from megasync.serving.health import ServerHealth, ServerState


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def die_in_crowd(suspects: Suspects, clock: FakeClock, keys: list[str], slot: int = 0) -> None:
    sent, clock.now = clock.now, clock.now + 10
    for key in keys:
        suspects.cut(key, sent)
    clock.now += 1
    suspects.died(slot)
    clock.now += 1


def quarantine(suspects: Suspects, clock: FakeClock, keys: list[str]) -> None:
    for _ in range(CROWD_DEATHS):
        die_in_crowd(suspects, clock, keys)
    assert all(suspects.status(key) is SuspectStatus.QUARANTINED for key in keys)


# A whole fleet


@dataclass
class Fleet:
    """Groups run on servers, tick by tick. A poison group kills its server `delay` ticks after it was sent; others
    complete after `work` ticks. A tick is `tick` seconds."""

    servers: int
    groups: int
    poison: set[str]
    rng: Random
    chance_deaths: int
    tick: float = 5.0
    config: HealthConfig = field(default_factory=HealthConfig)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.suspects = Suspects(self.clock)
        self.health = [ServerHealth(self.config, self.clock) for _ in range(self.servers)]
        for health in self.health:
            health.started()
            health.synced()
        self.at: dict[str, int] = {}
        self.sent: dict[str, float] = {}
        self.left = {f"{n}": self.rng.randint(1, 4) for n in range(self.groups)}
        self.owed: set[str] = set()
        self.poison_deaths = self.ticks = 0
        # Chance deaths that each group was alone at: a second one would rightly be held against it.
        self.unlucky: set[str] = set()

    def run(self) -> None:
        while any(self.suspects.status(key) is not SuspectStatus.POISON for key in self.left):
            self.ticks += 1
            assert self.ticks < 40 * self.groups + 400, "it does not end"
            self.clock.now += self.tick
            self.start_again()
            self.try_suspects()
            self.send()
            self.work()
            if self.chance_deaths and self.rng.random() < 0.3:
                self.strike()

    def start_again(self) -> None:
        for health in self.health:
            if health.state is ServerState.DEAD and health.next_restart() is not None:
                health.begin_restart()
                health.started()
                health.synced()

    def up(self) -> list[int]:
        return [slot for slot, health in enumerate(self.health) if health.serves]

    def try_suspects(self) -> None:
        if self.suspects.members or not self.up():
            return
        waiting = [key for key in self.left if self.suspects.status(key) is SuspectStatus.QUARANTINED]
        if members := self.suspects.choose(waiting):
            avoid = self.suspects.avoid(members)
            slot = min(self.up(), key=lambda slot: slot in avoid)
            # What ran there goes on elsewhere.
            self.at = {key: where for key, where in self.at.items() if where != slot}
            self.suspects.begin_trial(members, slot)

    def send(self) -> None:
        for key in self.left:
            if key in self.at:
                continue
            standing = self.suspects.status(key)
            beside = [slot for slot in self.up() if slot != self.suspects.trial_slot]
            if standing is SuspectStatus.ON_TRIAL:
                self.at[key] = self.suspects.trial_slot
            elif standing is SuspectStatus.FREE and beside:
                self.at[key] = self.rng.choice(beside)
            else:
                continue
            self.sent[key] = self.clock.now

    def work(self) -> None:
        for slot in self.up():
            here = [key for key, where in self.at.items() if where == slot]
            for key in here:
                if key not in self.poison:
                    self.left[key] -= 1
                    if not self.left[key]:
                        del self.left[key], self.at[key]
                        if key in self.owed:
                            self.owed.discard(key)
                            self.suspects.completed(key)
            if any(key in self.poison for key in here):
                self.poison_deaths += 1
                self.kill(slot)

    def strike(self) -> None:
        """A server dies of itself, never twice with the same group alone on trial."""
        if not self.up():
            return
        slot = self.rng.choice(self.up())
        members = self.suspects.members
        if slot == self.suspects.trial_slot and len(members) == 1:
            if members <= self.unlucky:
                return
            self.unlucky |= members
        self.chance_deaths -= 1
        self.kill(slot)

    def kill(self, slot: int) -> None:
        here = [key for key, where in self.at.items() if where == slot]
        late = self.rng.random() < 0.5
        self.clock.now += 0.5
        health = self.health[slot]
        for key in here:
            del self.at[key]
            self.owed.add(key)
            if not late:
                self.suspects.cut(key, self.sent[key])
        health.died("killed")
        self.clock.now += 0.5
        for excused in self.suspects.died(slot, health.requests_suspected).excused:
            self.health[excused].refund_restart()
        for key in here if late else ():
            self.suspects.cut(key, self.sent[key])


@settings(deadline=None, max_examples=300)
@given(
    servers=st.integers(1, 6),
    groups=st.integers(1, 64),
    poison=st.integers(0, 4),
    chance_deaths=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)
def test_exactly_the_poison_prompts_are_identified_within_a_bound_on_server_deaths(
    servers, groups, poison, chance_deaths, seed
):
    rng = Random(seed)
    killers = set(rng.sample([f"{n}" for n in range(groups)], min(poison, groups)))
    # Chance deaths alone may use up the restarts of one server.
    fleet = Fleet(servers, groups, killers, rng, chance_deaths, config=HealthConfig(restarts=1000))
    fleet.run()
    assert set(fleet.left) == killers
    most = len(killers) * (CROWD_DEATHS + math.ceil(math.log2(groups)) + 1 + ALONE_DEATHS)
    assert fleet.poison_deaths <= most


@settings(deadline=None, max_examples=200)
@given(servers=st.integers(1, 6), groups=st.integers(1, 64), poison=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_poison_prompts_do_not_exhaust_the_restart_budget_of_any_server(servers, groups, poison, seed):
    """The default budget is 5 in 600 s; each tick here is a second, so all that happens falls into one window."""
    rng = Random(seed)
    killers = set(rng.sample([f"{n}" for n in range(groups)], min(poison, groups)))
    fleet = Fleet(servers, groups, killers, rng, chance_deaths=1, tick=1.0)
    fleet.run()
    assert ServerState.RETIRED not in {health.state for health in fleet.health}


# One rule each


def test_a_single_death_with_concurrent_requests_quarantines_no_prompt(clock):
    suspects = Suspects(clock)
    die_in_crowd(suspects, clock, ["a", "b"])
    assert suspects.status("a") is SuspectStatus.FREE
    assert suspects.count(SuspectStatus.FREE) == 2


def test_a_completed_request_clears_its_prompt_of_earlier_deaths(clock):
    suspects = Suspects(clock)
    die_in_crowd(suspects, clock, ["a", "b"])
    suspects.completed("a")
    die_in_crowd(suspects, clock, ["a", "b"])
    assert (suspects.status("a"), suspects.status("b")) == (SuspectStatus.FREE, SuspectStatus.QUARANTINED)


def test_a_broken_connection_without_a_server_death_is_not_counted(clock):
    suspects = Suspects(clock)
    for _ in range(5):
        suspects.cut("a", clock.now)
        clock.now += 1
    clock.now += MATCH_SECONDS
    suspects.died(0)
    assert suspects.count(SuspectStatus.FREE) == 0


def test_a_server_death_counts_once_per_prompt_regardless_of_its_requests(clock):
    suspects = Suspects(clock)
    sent = clock.now
    clock.now += 5
    for _ in range(8):
        suspects.cut("a", sent)
    suspects.died(0)
    for _ in range(8):
        suspects.cut("a", sent)
    clock.now += 1
    suspects.died(1)
    assert suspects.status("a") is SuspectStatus.FREE


def test_requests_sent_after_a_server_death_are_not_attributed_to_it(clock):
    suspects = Suspects(clock)
    suspects.died(0)
    clock.now += 1
    assert not suspects.cut("a", clock.now)
    clock.now += 1
    assert suspects.count(SuspectStatus.FREE) == 0


def test_a_request_cut_after_its_hung_server_was_declared_dead_is_matched_to_the_death(clock):
    suspects = Suspects(clock)
    sent = clock.now
    clock.now += 200
    suspects.died(0)
    clock.now += 2
    assert suspects.cut("a", sent)
    assert suspects.count(SuspectStatus.FREE) == 1


def test_deaths_during_a_weight_sync_are_not_attributed_to_any_prompt(clock):
    suspects = Suspects(clock)
    for _ in range(5):
        sent, clock.now = clock.now, clock.now + 5
        suspects.cut("a", sent)
        suspects.died(0, by_requests=False)
    assert suspects.count(SuspectStatus.FREE) == 0
    quarantine(suspects, clock, ["a"])
    for _ in range(5):
        suspects.begin_trial(["a"], 0)
        assert suspects.died(0, by_requests=False).poison == ()
    assert suspects.status("a") is SuspectStatus.QUARANTINED


def test_trials_bisect_the_suspects_until_the_poison_prompt_is_isolated(clock):
    suspects = Suspects(clock)
    keys = [f"{n}" for n in range(8)]
    quarantine(suspects, clock, keys)
    sizes, poison = [], ()
    while not poison:
        members = suspects.choose(keys)
        sizes.append(len(members))
        suspects.begin_trial(members, 0)
        if "5" in members:
            poison = suspects.died(0).poison
        else:
            for key in members:
                suspects.completed(key)
            suspects.end_trial()
    assert poison == ("5",)
    # Four complete, half of the others die, one of these completes, and the last one dies twice.
    assert sizes == [4, 2, 1, 1, 1]
    assert suspects.status("5") is SuspectStatus.POISON
    assert {suspects.status(key) for key in ("0", "1", "2", "3")} == {SuspectStatus.FREE}


def test_a_prompt_that_killed_a_server_alone_is_retried_on_a_different_server(clock):
    suspects = Suspects(clock)
    quarantine(suspects, clock, ["a"])
    assert suspects.avoid(["a"]) == set()
    suspects.begin_trial(["a"], 3)
    assert suspects.died(3).excused == (3,)
    assert suspects.avoid(["a"]) == {3}
    assert suspects.status("a") is SuspectStatus.QUARANTINED


def test_each_server_killed_by_a_poison_prompt_is_excused_only_once(clock):
    suspects = Suspects(clock)
    for slot in (0, 1):
        die_in_crowd(suspects, clock, ["a", "b"], slot)
    for key, excused in (("a", (2, 0, 1)), ("b", (2,))):
        suspects.begin_trial([key], 2)
        suspects.died(2)
        suspects.begin_trial([key], 2)
        assert suspects.died(2).excused == excused


def test_completing_a_trial_resets_the_death_count_of_a_prompt(clock):
    suspects = Suspects(clock)
    quarantine(suspects, clock, ["a"])
    suspects.begin_trial(["a"], 0)
    suspects.died(0)
    suspects.begin_trial(["a"], 1)
    suspects.completed("a")
    suspects.end_trial()
    die_in_crowd(suspects, clock, ["a"])
    assert suspects.status("a") is SuspectStatus.FREE


def test_deaths_expire_after_the_retention_time(clock):
    suspects = Suspects(clock)
    die_in_crowd(suspects, clock, ["a"])
    clock.now += REMEMBER_SECONDS
    die_in_crowd(suspects, clock, ["a"])
    assert suspects.status("a") is SuspectStatus.FREE
