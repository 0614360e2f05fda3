"""Prompts that kill servers are held back, tried and refused: over HTTP, and by the evidence of several workers."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from fake_sglang import FakeSGLang, complete
from passing_time import pass_time
from waits import until

from megasync.errors import PoisonPrompt
from megasync.rollout import quarantine as quarantine_module
from megasync.rollout.inflight import QuarantineClient
from megasync.rollout.placement import ALONE_DEATHS, CROWD_DEATHS
from megasync.rollout.quarantine import Quarantine

ALONE = "http://alone"


def client_of(quarantine, name="client", told=None):
    """What one worker's client uses, connected by calls; `told` collects those that reach the driver."""

    def enter(number, attempt):
        if told is not None:
            told.append(attempt.key)
        return quarantine.enter(name, number, attempt)

    made = QuarantineClient(enter, partial(quarantine.end, name))
    quarantine.follow(made.watch)
    return made


class Fleet:
    """Slot 0 behind the router, slot 1 isolated."""

    def __init__(self, alone=ALONE):
        self.alone, self.isolated, self.trials, self.refunds = alone, False, 0, []
        # Whether a server can be isolated.
        self.free = asyncio.Event()
        self.free.set()

    async def isolate(self, avoid):
        assert not self.isolated
        await self.free.wait()
        self.isolated = True
        self.trials += 1
        return 1, self.alone

    def release(self, slot):
        self.isolated = False

    def refund_restart(self, slot):
        self.refunds.append(slot)


# Over HTTP


class Deadly:
    """A script in which every request kills its server."""

    def __init__(self, crash):
        self._crash = crash

    def popleft(self):
        async def behave(fake: FakeSGLang, body: dict):
            fake.http.transport.close()
            asyncio.get_running_loop().call_later(0.02, self._crash)
            return await complete(fake, body)

        return behave


@pytest.fixture
async def served(fake, make_client, tmp_path):
    """A client, its quarantine and fleet, and the places of deaths: every request kills its server."""
    deaths = []
    async with FakeSGLang() as server:
        fleet = Fleet(server.url)
        quarantine = Quarantine(fleet, tmp_path / "poison", verdict_seconds=0.1)

        def crash(slot):
            assert slot == 0 or fleet.isolated, "a server is asked directly only while it is out of the router"
            deaths.append(slot)
            quarantine.left(slot, True, True)

        fake.script, server.script = Deadly(partial(crash, 0)), Deadly(partial(crash, 1))
        yield make_client(quarantine=client_of(quarantine)), quarantine, fleet, deaths
        await quarantine.close()


async def test_a_prompt_that_kills_servers_is_refused_after_two_deaths_in_the_crowd_and_two_alone(
    served, tmp_path, caplog
):
    client, quarantine, fleet, deaths = served
    with pytest.raises(PoisonPrompt, match=r"prompt 0:7 was in flight at 2 server deaths .* alone at 2 more"):
        await client.generate([66, 1], routing_key="0:7", temperature=0.5)
    assert deaths == [0, 0, 1, 1]
    assert sorted(fleet.refunds) == deaths
    # The same prompt again, such as in the next epoch: no server sees it.
    with pytest.raises(PoisonPrompt):
        await client.generate([66, 1], routing_key="1:7")
    assert len(deaths) == 4
    # The trial returns its server in a task of its own.
    await until(lambda: not fleet.isolated)
    assert quarantine.metrics() == {"rollout/suspect_prompts": 0.0, "rollout/poison_prompts": 2.0}
    quarantine.describe("0:7", {"answer": 4})
    (file,) = (tmp_path / "poison").iterdir()
    report = json.loads(file.read_text())
    assert (file.name, report["uid"], report["row"]) == ("0-7.json", "0:7", {"answer": 4})
    assert (report["prompt_ids"], report["input_ids"]) == ([[66, 1]], [66, 1])
    assert report["sampling_params"]["temperature"] == 0.5
    assert [len(report["deaths"][kind]) for kind in ("crowd", "alone")] == [2, 2]
    assert "prompt 0:7" in caplog.text


async def test_time_held_back_does_not_count_against_the_deadline(served, monkeypatch):
    """Each verdict takes longer than the request's own deadline."""
    pass_time(0.0)
    client, quarantine, *_ = served
    verdict = quarantine._verdict

    async def slow(cut):
        pass_time(1000.0)
        await verdict(cut)

    monkeypatch.setattr(quarantine, "_verdict", slow)
    with pytest.raises(PoisonPrompt):
        await client.generate([66], routing_key="0:7")


# Several workers of one driver


class Workers(Fleet):
    """Clients of one quarantine, and its fleet."""

    def __init__(self):
        super().__init__()
        self.quarantine = Quarantine(self, None, verdict_seconds=0.01)
        self.told = []
        self.clients = [client_of(self.quarantine, name, self.told) for name in range(2)]

    @property
    def suspects(self):
        return self.quarantine.metrics()["rollout/suspect_prompts"]

    async def play(self, number, key, prompt, dies=lambda url: False):
        """One generation, retried until it completes; its place. `dies(url)` is whether its server dies under it, or
        None if only its connection breaks.
        """
        client = self.clients[number]
        with client.request(key, prompt) as ticket:
            while True:
                url = await client.enter(ticket, {"input_ids": prompt})
                await asyncio.sleep(0.001)
                if (death := dies(url)) is False:
                    return url
                client.cut(ticket)
                if death:
                    self.quarantine.left(1 if url else 0, died=True, by_requests=True)

    def suspect(self, number, key, prompt, then=lambda url: False):
        """A generation that met two deaths beside others, and goes on alone as `then` says."""
        crowd = iter([True] * CROWD_DEATHS)
        return self.play(number, key, prompt, lambda url: next(crowd, None) or then(url))


@pytest.fixture
async def workers(monkeypatch):
    monkeypatch.setattr(quarantine_module, "TRIAL_SECONDS", 0.2)
    made = Workers()
    yield made
    await made.quarantine.close()


async def test_requests_that_no_death_is_near_cost_the_driver_nothing(workers):
    await asyncio.gather(*(workers.play(n % 2, f"0:{n}", [n]) for n in range(50)))
    assert workers.told == []


@pytest.mark.parametrize(
    ("events", "place"),
    [([True], None), ([None] * 4, None), ([None, True], None), ([True] * CROWD_DEATHS, ALONE)],
    ids=["one death", "broken connections", "both", "two deaths"],
)
async def test_a_bystander_completes_and_is_tried_alone_only_after_two_deaths(workers, events, place):
    left = iter(events)
    assert await workers.play(0, "0:1", [1], lambda url: next(left, False)) == place
    assert workers.suspects == 0.0 and workers.clients[0].evidence("0:1") is None
    assert workers.quarantine.holds == events.count(None) + (place is not None), "a death explains a cut at once"


async def test_a_trial_that_no_server_dies_in_clears_its_prompt_while_it_runs(workers):
    """A request that takes very long is no killer; it goes on where it is."""
    client, finish = workers.clients[0], asyncio.Event()

    async def long():
        with client.request("0:1", [1]) as ticket:
            for _ in range(CROWD_DEATHS):
                await client.enter(ticket, {})
                await asyncio.sleep(0.001)
                client.cut(ticket)
                workers.quarantine.left(0, died=True, by_requests=True)
            assert await client.enter(ticket, {}) == ALONE
            await finish.wait()

    running = asyncio.create_task(long())
    await until(lambda: workers.trials and not workers.isolated)
    assert workers.suspects == 0.0 and not running.done()
    finish.set()
    await running


async def test_a_prompt_is_condemned_by_the_evidence_of_all_workers(workers):
    deaths = []

    def dies(url):
        deaths.append(url)
        return True

    async def fails(number):
        with pytest.raises(PoisonPrompt):
            await workers.play(number, "0:7", [7], dies)
        assert workers.clients[number].evidence("0:7")

    # Two samples of one prompt, such as those of two workers after one of them took over the group.
    await asyncio.gather(fails(0), fails(1))
    # Each sample counts the deaths that it sees: both may be cut by the same one.
    alone = deaths.count(ALONE)
    assert ALONE_DEATHS <= alone <= 2 * (ALONE_DEATHS + 1)
    # A later request for it, or for another turn of its group, is refused without another death.
    for key, prompt in (("1:7", [7]), ("0:7", [7, 8])):
        with pytest.raises(PoisonPrompt):
            await workers.play(1, key, prompt, dies)
    assert deaths.count(ALONE) == alone


async def test_a_suspect_is_held_back_in_every_worker(workers):
    workers.free.clear()
    first = asyncio.create_task(workers.suspect(0, "0:7", [7]))
    while not workers.clients[1]._watched:
        await asyncio.sleep(0)
    # Such as the same row in the next epoch.
    other = asyncio.create_task(workers.play(1, "1:7", [7]))
    await asyncio.sleep(0)
    workers.free.set()
    assert (await first, await other) == (ALONE, ALONE)
    assert await workers.play(1, "0:8", [8]) is None
    while workers.quarantine.busy:
        await asyncio.sleep(0)
    assert workers.suspects == 0.0


async def test_the_tickets_of_a_lost_worker_end(workers):
    workers.free.clear()
    task = asyncio.create_task(workers.suspect(0, "0:7", [7]))
    while not workers.clients[1]._watched:
        await asyncio.sleep(0)
    assert workers.quarantine.busy
    workers.quarantine.lost(0)
    assert workers.quarantine._attempts == {} == workers.quarantine._prompts
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_loss_of_a_node_is_one_death_for_a_prompt_with_requests_on_several_of_its_servers(workers):
    client, quarantine = workers.clients[0], workers.quarantine
    with client.request("0:7", [7]) as one, client.request("0:7", [7]) as two:
        for ticket in (one, two):
            await client.enter(ticket, {})
        await asyncio.sleep(0.001)
        for slot in (0, 1):
            quarantine.left(slot, died=True, by_requests=True)
        for ticket in (one, two):
            client.cut(ticket)
        assert [await client.enter(ticket, {}) for ticket in (one, two)] == [None, None]
    assert not quarantine.busy
