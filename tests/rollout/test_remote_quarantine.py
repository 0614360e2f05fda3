"""The driver's quarantine, seen from workers: no work for ordinary requests; the evidence of all workers combined."""

import asyncio
from functools import partial

import pytest

from megasync.errors import PoisonPrompt
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.remote_quarantine import RemoteQuarantine, TicketDesk
from megasync.rollout.suspects import ALONE_DEATHS, CROWD_DEATHS

PATIENCE = 20


class Servers:
    """Slots 0 and 1; an isolated server is slot 1."""

    def __init__(self):
        self.refunds = []

    async def isolate(self, avoid):
        return 1, "http://alone"

    def release(self, slot): ...

    def refund_restart(self, slot):
        self.refunds.append(slot)


class Connected:
    """Workers that reach one driver at once. `told` counts what reached it."""

    def __init__(self, workers=2, **options):
        self.quarantine = Quarantine(Servers(), verdict_seconds=0.01, **options)
        self.told = []
        self.workers, self.desks = [], []
        for number in range(workers):
            self.connect(number)
        self.quarantine.follow(self.watch)

    def connect(self, number):
        worker = RemoteQuarantine(partial(self.tell, number))
        self.workers.append(worker)
        self.desks.append(TicketDesk(self.quarantine, worker.entered))

    def tell(self, number, what, *arguments):
        self.told.append((number, what))
        self.desks[number].told(what, *arguments)

    def watch(self):
        for worker in self.workers:
            worker.watch(self.quarantine.watched())

    async def play(self, number, key, prompt, dies=None):
        """One generation, retried until it completes. `dies(url)` is whether its server dies under it."""
        worker = self.workers[number]
        async with worker.request(key, prompt) as ticket:
            while True:
                url = await worker.enter(ticket, {"input_ids": prompt})
                await asyncio.sleep(0.001)
                if dies is None or not dies(url):
                    return url
                worker.cut(ticket)
                self.quarantine.left(1 if url else 0, died=True, by_requests=True)


@pytest.fixture
async def connected():
    made = Connected()
    yield made
    await made.quarantine.close()


async def test_ordinary_requests_cost_the_driver_nothing(connected):
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(connected.play(n % 2, f"0:{n}", [n]) for n in range(50)))
    assert connected.told == []


async def test_a_prompt_that_kills_servers_of_two_workers_is_condemned_by_the_evidence_of_both(connected):
    deaths = []

    def dies(url):
        deaths.append(url)
        return True

    async def fails(number):
        with pytest.raises(PoisonPrompt):
            await connected.play(number, "0:7", [7], dies)
        assert connected.workers[number].evidence("0:7")

    async with asyncio.timeout(PATIENCE):
        # Two samples of one prompt, such as those of two workers after one of them took over the group.
        await asyncio.gather(fails(0), fails(1))
    # Each sample counts the deaths that it sees: both may be cut by the same one.
    alone = deaths.count("http://alone")
    assert ALONE_DEATHS <= alone <= 2 * ALONE_DEATHS
    assert len(deaths) - alone <= 2 * CROWD_DEATHS
    assert connected.quarantine.evidence("0:7")
    # A later request for it, from any worker, is refused without another death.
    with pytest.raises(PoisonPrompt):
        await connected.play(1, "1:7", [7], dies)
    assert deaths.count("http://alone") == alone


async def test_a_suspect_is_held_back_in_every_worker(connected):
    cut = asyncio.Event()

    async def suspect():
        worker = connected.workers[0]
        async with worker.request("0:7", [7]) as ticket:
            for _ in range(CROWD_DEATHS):
                await worker.enter(ticket, {})
                worker.cut(ticket)
                connected.quarantine.left(0, died=True, by_requests=True)
            cut.set()
            return await worker.enter(ticket, {})

    async with asyncio.timeout(PATIENCE):
        first = asyncio.create_task(suspect())
        await cut.wait()
        other = await connected.play(1, "1:7", [7])
        assert (await first, other) == ("http://alone", "http://alone")
        assert await connected.play(1, "0:8", [8]) is None
    assert connected.quarantine.metrics()["rollout/suspect_prompts"] == 0.0


async def test_the_tickets_of_a_lost_worker_end(connected):
    worker = connected.workers[0]

    async def held():
        async with worker.request("0:7", [7]) as ticket:
            for _ in range(CROWD_DEATHS):
                await worker.enter(ticket, {})
                worker.cut(ticket)
                connected.quarantine.left(0, died=True, by_requests=True)
            await worker.enter(ticket, {})
            await asyncio.sleep(3600)

    task = asyncio.create_task(held())
    async with asyncio.timeout(PATIENCE):
        while not connected.quarantine.busy:
            await asyncio.sleep(0.001)
        connected.desks[0].close()
        while connected.quarantine.busy:
            await asyncio.sleep(0.001)
    assert not connected.quarantine._open
    task.cancel()
    connected.desks[0].told = lambda *late: None
    with pytest.raises(asyncio.CancelledError):
        await task
