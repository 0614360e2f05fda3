"""Each rule by which a prompt that kills servers is found among its bystanders; `test_placement` plays whole crews."""

from __future__ import annotations

import pytest
from passing_time import Clock

from megasync.rollout.placement import ALONE_DEATHS, CROWD_DEATHS, REMEMBER_SECONDS, Death, Suspects


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def refunds() -> list[int]:
    return []


@pytest.fixture
def suspects(clock: Clock, refunds: list[int]) -> Suspects:
    return Suspects(refunds.append, clock)


def die_in_crowd(suspects: Suspects, clock: Clock, keys: list[str], slot: int = 0) -> None:
    sent, clock.now = clock.now, clock.now + 10
    for key in keys:
        suspects.near(key, Death(clock.now, slot), sent, clock.now)
    clock.now += 1


def suspect(suspects: Suspects, clock: Clock, keys: list[str]) -> None:
    for _ in range(CROWD_DEATHS):
        die_in_crowd(suspects, clock, keys)
    assert all(map(suspects.suspected, keys))


def test_a_completed_request_clears_its_prompt_of_earlier_deaths(suspects, clock):
    die_in_crowd(suspects, clock, ["a", "b"])
    suspects.completed("a")
    die_in_crowd(suspects, clock, ["a", "b"])
    assert (suspects.suspected("a"), suspects.suspected("b")) == (False, True)


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


def test_deaths_expire_after_the_retention_time(suspects, clock):
    die_in_crowd(suspects, clock, ["a"])
    clock.now += REMEMBER_SECONDS
    die_in_crowd(suspects, clock, ["a"])
    assert not suspects.suspected("a")
