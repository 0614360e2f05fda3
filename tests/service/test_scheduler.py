"""Turns are fair by tokens among those who have work."""

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st

from megasync.service.scheduler import FairThread, FairTurns, Rounds

COSTS = st.integers(1, 1000)


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(COSTS, min_size=1, max_size=20), min_size=2))
def test_what_two_receive_while_both_have_work_differs_by_two_requests_at_most(work):
    turns, received = FairTurns(), dict.fromkeys(work, 0)
    left = {name: list(costs) for name, costs in work.items()}
    largest = max(max(costs) for costs in work.values())
    while all(left.values()):
        name = turns.next(left)
        cost = left[name].pop()
        turns.charge(name, cost)
        received[name] += cost
        assert max(received.values()) - min(received.values()) <= 2 * largest


@given(st.lists(COSTS, min_size=1, max_size=20))
def test_who_was_idle_saved_up_nothing(costs):
    turns = FairTurns()
    for cost in costs:
        assert turns.next(["busy"]) == "busy"
        turns.charge("busy", cost)
    taken = {"busy": 0, "idle": 0}
    for _ in range(10):
        name = turns.next(["busy", "idle"])
        turns.charge(name, 10)
        taken[name] += 1
    assert taken["busy"] >= 5 - max(costs) // 10


async def test_of_many_things_that_one_begins_another_waits_for_few():
    rounds, order = Rounds(), []

    async def begin(name):
        await rounds.turn(name)
        order.append(name)

    many = [asyncio.create_task(begin("many")) for _ in range(50)]
    await asyncio.sleep(0)
    # Whoever is gone takes nobody's turn.
    for task in many[10:20]:
        task.cancel()
    few = [asyncio.create_task(begin("few")) for _ in range(3)]
    await asyncio.wait(few)
    assert order.count("few") == 3 and order.count("many") <= 5
    await asyncio.gather(*many, return_exceptions=True)
    assert order.count("many") == 40
    # Nothing is left to wait for.
    await begin("many")
    assert order[-1] == "many"


async def test_in_a_thread_another_waits_for_few_of_many_and_for_those_that_nobody_waits_for():
    thread, order, go_on, began = FairThread(), [], threading.Event(), threading.Event()

    def hold():
        began.set()
        go_on.wait(60)
        order.append("held")

    held = asyncio.create_task(thread.run("many", hold))
    many = [asyncio.create_task(thread.run("many", order.append, "many")) for _ in range(50)]
    await asyncio.to_thread(began.wait, 60)
    for task in (held, *many[10:20]):
        task.cancel()
    few = asyncio.create_task(thread.run("few", order.append, "few"))
    await asyncio.wait([held])
    # It runs all the same, so nothing else begins.
    assert not order
    go_on.set()
    await few
    assert order[:2] == ["held", "few"]
    await asyncio.gather(*many, return_exceptions=True)
    assert order.count("many") == 40
    assert await thread.run("few", len, order) == 42
