"""The gate, and what every request of a sample carries."""

import asyncio

import pytest

from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient, request_seed


async def test_the_gate_admits_the_lowest_priority_number_first_and_equal_ones_in_order():
    gate, order = RequestGate(), []
    gate.shut()

    async def request(priority, name):
        async with gate.request(priority):
            order.append(name)

    asked = [(3, "new turn"), (5, "later batch"), (2, "running turn"), (3, "second"), (0, "evaluation")]
    tasks = [asyncio.create_task(request(*request_)) for request_ in asked]
    await asyncio.sleep(0)
    gate.set_limit(1)
    gate.open()
    await asyncio.gather(*tasks)
    assert order == ["evaluation", "running turn", "new turn", "second", "later batch"]


async def test_further_turns_go_before_first_ones_and_earlier_batches_before_later_ones(fake_client):
    async def priorities(batch):
        client = fake_client()
        sample = SampleClient(client, RequestGate(), routing_key="0:1", batch=batch)
        for _ in range(3):
            await sample.generate([1])
        return [options.get("priority", 0) for _, options in client.calls]

    earlier, later, untrained = [await priorities(batch) for batch in (4, 5, None)]
    assert earlier[2] == earlier[1] < earlier[0] < later[1] < later[0]
    assert untrained == [0, 0, 0] and min(await priorities(0)) > 0


async def test_a_failed_request_leaves_the_gate():
    gate = RequestGate()
    with pytest.raises(RuntimeError):
        async with gate.request():
            raise RuntimeError
    await gate.close(1)


async def test_requests_carry_the_samples_defaults_and_the_workflow_wins(fake_client):
    client = fake_client()
    sample = SampleClient(client, RequestGate(), routing_key="0:1", temperature=0.0)
    options = {"temperature": 0.7}
    await sample.generate([1])
    await sample.chat([{"role": "user", "content": "x"}], **options)
    assert [o for _, o in client.calls] == [
        {"routing_key": "0:1", "temperature": 0.0},
        {"routing_key": "0:1", "temperature": 0.7},
    ]
    assert options == {"temperature": 0.7}


async def test_seeds_differ_by_turn_and_repeat_with_the_sample(fake_client):
    async def seeds(seed):
        client = fake_client()
        sample = SampleClient(client, RequestGate(), routing_key="0:1", seed=seed)
        for _ in range(3):
            await sample.generate([1])
        return [options["seed"] for _, options in client.calls]

    assert len(set(await seeds(1))) == 3
    assert await seeds(1) == await seeds(1) != await seeds(2)


def test_a_seed_depends_on_every_part_and_fits_31_bits():
    seeds = {request_seed(*parts) for parts in [(0, "0:1", 0), (1, "0:1", 0), (0, "0:2", 0), (0, "0:1", 1)]}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_a_lower_limit_leaves_running_requests_alone_and_a_higher_one_lets_waiting_ones_in():
    gate, release = RequestGate(), asyncio.Event()

    async def request():
        async with gate.request():
            await release.wait()

    tasks = [asyncio.create_task(request()) for _ in range(6)]
    await asyncio.sleep(0)
    gate.set_limit(2)
    assert gate.inflight == 6
    tasks += [asyncio.create_task(request()) for _ in range(4)]
    await asyncio.sleep(0)
    assert gate.inflight == 6
    gate.set_limit(8)
    assert gate.inflight == 8
    release.set()
    await asyncio.gather(*tasks)
    assert gate.inflight == 0


async def test_a_cancelled_waiter_does_not_hold_a_slot():
    gate, release = RequestGate(), asyncio.Event()
    gate.set_limit(1)

    async def request():
        async with gate.request():
            await release.wait()

    first, second, third = (asyncio.create_task(request()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await asyncio.gather(first, third)
    # Let in and cancelled in the same moment: the place goes to the next.
    release.clear()
    first, second = (asyncio.create_task(request()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert gate.inflight == 0
    await gate.close(1)
