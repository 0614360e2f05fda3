"""Devices that ranks and servers share: who leaves before whom, how often, and what a loss in between changes."""

from __future__ import annotations

from typing import Any

import pytest

from megasync.control.colocation import Colocation
from megasync.control.watchdog import Watchdog
from megasync.errors import RankLost


class Party:
    """Ranks and servers, whose calls are listed; the call `fails` loses a rank."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        async def call() -> None:
            self.calls.append(name)
            if name == self.fails:
                raise RankLost("rank 1 died")

        return call

    def activity(self, part: str, doing: str) -> None: ...

    def since(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def colocation_of(party: Any, enabled: bool = True) -> Colocation:
    clock = iter(range(10_000))
    return Colocation(enabled, party, party, party, Watchdog(lambda: 0.0), lambda: float(next(clock)))


async def test_those_who_have_the_devices_leave_first_and_only_once() -> None:
    party = Party()
    colocation = colocation_of(party)
    for _ in range(2):
        await colocation.to_servers()
        assert party.since() == [], "the servers hold the devices first"
    for _ in range(2):
        await colocation.to_ranks()
    assert party.since() == ["release_memory", "restore"]
    for _ in range(2):
        await colocation.to_servers()
    assert party.since() == ["offload", "resume_memory"]
    assert colocation.metrics() == {"time/turns": 4.0} and colocation.metrics() == {"time/turns": 0.0}


async def test_new_ranks_are_whole_when_they_start() -> None:
    party = Party()
    colocation = colocation_of(party)
    await colocation.to_new_ranks()
    assert party.since() == ["release_memory"]
    await colocation.to_ranks()
    assert party.since() == []
    await colocation.to_servers()
    assert party.since() == ["offload", "resume_memory"]


@pytest.mark.parametrize(("fails", "done"), [("restore", ["release_memory", "restore"]), ("offload", ["offload"])])
async def test_servers_stay_away_until_ranks_that_were_lost_have_left(fails: str, done: list[str]) -> None:
    party = Party()
    colocation = colocation_of(party)
    if fails == "offload":
        await colocation.to_ranks()
        party.since()
    party.fails = fails
    with pytest.raises(RankLost):
        await (colocation.to_servers() if fails == "offload" else colocation.to_ranks())
    assert party.since() == done
    party.fails = ""
    # A restart: the servers are away already.
    await colocation.to_new_ranks()
    assert party.since() == []
    await colocation.to_servers()
    assert party.since() == ["offload", "resume_memory"]


async def test_without_shared_devices_nothing_is_handed_over() -> None:
    party = Party()
    colocation = colocation_of(party, enabled=False)
    await colocation.to_ranks()
    await colocation.to_new_ranks()
    await colocation.to_servers()
    assert party.calls == [] and colocation.metrics() == {}
