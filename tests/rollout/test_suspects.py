"""Prompts that kill servers are found among their bystanders, in a fleet that lives in this file only."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.schema import HealthConfig
from megasync.rollout.suspects import ALONE_DEATHS, CROWD_DEATHS, REMEMBER_SECONDS, Death, Suspects
from megasync.serving.health import ServerHealth, ServerState


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def refunds() -> list[int]:
    return []


@pytest.fixture
def suspects(clock: FakeClock, refunds: list[int]) -> Suspects:
    return Suspects(refunds.append, clock)


def die_in_crowd(suspects: Suspects, clock: FakeClock, keys: list[str], slot: int = 0) -> None:
    sent, clock.now = clock.now, clock.now + 10
    for key in keys:
        suspects.near(key, Death(clock.now, slot), sent, clock.now)
    clock.now += 1


def suspect(suspects: Suspects, clock: FakeClock, keys: list[str]) -> None:
    for _ in range(CROWD_DEATHS):
        die_in_crowd(suspects, clock, keys)
    assert all(map(suspects.suspected, keys))


# A whole fleet


@dataclass
class Fleet:
    """Groups run on servers, tick by tick. A poison group kills its server when it is worked on; others complete after
    some ticks of `tick` seconds."""

    servers: int
    groups: int
    poison: set[str]
    rng: Random
    chance_deaths: int
    tick: float = 5.0
    config: HealthConfig = field(default_factory=HealthConfig)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.suspects = Suspects(lambda slot: self.health[slot].refund_restart(), self.clock)
        self.health = [ServerHealth(self.config, self.clock) for _ in range(self.servers)]
        for health in self.health:
            health.started()
            health.synced()
        self.at: dict[str, int] = {}
        self.sent: dict[str, float] = {}
        self.left = {f"{n}": self.rng.randint(1, 4) for n in range(self.groups)}
        self.owed: set[str] = set()
        self.trial: set[str] = set()
        self.trial_slot: int | None = None
        self.poison_deaths = self.ticks = 0
        # Chance deaths that each group was alone at: a second one would rightly be held against it.
        self.unlucky: set[str] = set()

    def run(self) -> None:
        while any(not self.suspects.poison(key) for key in self.left):
            self.ticks += 1
            assert self.ticks < 60 * self.groups + 400, "it does not end"
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
        if not self.trial:
            self.trial_slot = None
        if self.trial or not self.up():
            return
        waiting = [key for key in self.left if self.suspects.suspected(key) and not self.suspects.poison(key)]
        if keys := self.suspects.next_trial(waiting):
            avoid = self.suspects.avoid(keys)
            self.trial, self.trial_slot = set(keys), min(self.up(), key=lambda slot: slot in avoid)
            # What ran there goes on elsewhere.
            self.at = {key: where for key, where in self.at.items() if where != self.trial_slot}

    def send(self) -> None:
        for key in self.left:
            beside = [slot for slot in self.up() if slot != self.trial_slot]
            if key in self.at or self.suspects.poison(key):
                continue
            if key in self.trial and self.trial_slot is not None:
                self.at[key] = self.trial_slot
            elif not self.suspects.suspected(key) and beside:
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
                        self.trial.discard(key)
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
        if slot == self.trial_slot and len(self.trial) == 1:
            if self.trial <= self.unlucky:
                return
            self.unlucky |= self.trial
        self.chance_deaths -= 1
        self.kill(slot)

    def kill(self, slot: int) -> None:
        here = [key for key, where in self.at.items() if where == slot]
        self.clock.now += 0.5
        for key in here:
            del self.at[key]
            self.owed.add(key)
        self.health[slot].died("killed")
        if slot == self.trial_slot:
            self.suspects.trial_failed(self.trial, slot)
            self.trial, self.trial_slot = set(), None
            return
        for key in here:
            self.suspects.near(key, Death(self.clock.now, slot), self.sent[key], self.clock.now)


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
    assert fleet.poison_deaths <= len(killers) * (CROWD_DEATHS + 1 + ALONE_DEATHS)


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


def test_a_single_death_makes_no_prompt_a_suspect(suspects, clock):
    die_in_crowd(suspects, clock, ["a", "b"])
    assert not suspects.suspected("a")
    assert suspects.keys() == ["a", "b"]


def test_a_completed_request_clears_its_prompt_of_earlier_deaths(suspects, clock):
    die_in_crowd(suspects, clock, ["a", "b"])
    suspects.completed("a")
    die_in_crowd(suspects, clock, ["a", "b"])
    assert (suspects.suspected("a"), suspects.suspected("b")) == (False, True)


def test_deaths_that_cut_requests_of_the_same_time_count_once(suspects, clock):
    sent = clock.now
    for slot in range(8):
        clock.now += 1
        suspects.near("a", Death(clock.now, slot), sent, clock.now)
    assert not suspects.suspected("a")
    # It was sent again, and met another one.
    suspects.near("a", Death(clock.now + 2, 0), clock.now + 1, clock.now + 2)
    assert suspects.suspected("a")


def test_suspects_share_one_trial_and_run_one_at_a_time_once_its_server_died(suspects, clock):
    keys = [f"{n}" for n in range(8)]
    suspect(suspects, clock, keys)
    sizes, poison = [], None
    while poison is None:
        members = suspects.next_trial(key for key in keys if suspects.suspected(key))
        sizes.append(len(members))
        if "5" in members:
            poison = suspects.trial_failed(members, 0)
        else:
            for key in members:
                suspects.completed(key)
    assert (poison, suspects.poison("5")) == ("5", True)
    # All, five that complete, and the one that was alone at a death goes on being tried first.
    assert sizes == [8, *[1] * 7]
    assert not any(map(suspects.suspected, keys[:5]))


def test_suspects_without_a_killer_cost_one_trial(suspects, clock):
    keys = [f"{n}" for n in range(8)]
    suspect(suspects, clock, keys)
    assert suspects.next_trial(keys) == tuple(keys)
    for key in keys:
        suspects.completed(key)
    assert suspects.keys() == []


def test_a_prompt_that_killed_a_server_alone_is_retried_on_a_different_server(suspects, clock, refunds):
    suspect(suspects, clock, ["a"])
    assert suspects.avoid(["a"]) == set()
    assert suspects.trial_failed(["a"], 3) is None
    assert refunds == [3]
    assert suspects.avoid(["a"]) == {3}
    assert suspects.suspected("a")


def test_each_server_killed_by_a_poison_prompt_is_excused_only_once(suspects, clock, refunds):
    for slot in (0, 1):
        die_in_crowd(suspects, clock, ["a", "b"], slot)
    for key, excused in (("a", [2, 2, 0, 1]), ("b", [2, 2])):
        refunds.clear()
        assert [suspects.trial_failed([key], 2) for _ in range(ALONE_DEATHS)] == [None, key]
        assert refunds == excused


def test_completing_a_trial_resets_the_death_count_of_a_prompt(suspects, clock):
    suspect(suspects, clock, ["a"])
    suspects.trial_failed(["a"], 0)
    suspects.completed("a")
    die_in_crowd(suspects, clock, ["a"])
    assert not suspects.suspected("a")


def test_deaths_expire_after_the_retention_time(suspects, clock):
    die_in_crowd(suspects, clock, ["a"])
    clock.now += REMEMBER_SECONDS
    die_in_crowd(suspects, clock, ["a"])
    assert not suspects.suspected("a")
