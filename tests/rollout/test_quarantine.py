"""A prompt that kills servers, met by the real client over HTTP and by the rollout."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
from clients import make_rollout_client
from fake_sglang import FakeSGLang, complete

from megasync.config.schema import SamplingConfig
from megasync.errors import PoisonPrompt, ServerError
from megasync.evaluation.evaluate import Answerer, evaluate
from megasync.evaluation.held_out import HeldOutSet
from megasync.rollout import client as client_module
from megasync.rollout import quarantine as quarantine_module
from megasync.rollout.generation import Generation
from megasync.rollout.quarantine import Quarantine, QuarantineClient
from megasync.rollout.suspects import ALONE_DEATHS, CROWD_DEATHS

POISON, SLOW = 66, 55
PATIENCE = 20


class FakeServers:
    """One server behind a router at one address, and by itself at another. `crash` is its death by a request."""

    def __init__(self, router: FakeSGLang, server: FakeSGLang) -> None:
        self.router, self.server = router, server
        self.deaths: list[str] = []
        self.excused: list[int] = []
        self.isolated = False
        self.alone: list[int] = []
        # Connections of slow requests, which end when `finish` is set.
        self.running: set[asyncio.Transport] = set()
        self.finish = asyncio.Event()
        for place, fake in (("router", router), ("alone", server)):
            fake.script = Endless(lambda place=place: self._behave(place))

    def _behave(self, place: str):
        async def behave(fake: FakeSGLang, body: dict):
            if place == "alone":
                assert self.isolated, "a server is asked directly only while it is out of the router"
                self.alone.append(body["input_ids"][0])
            if body["input_ids"][0] == SLOW and place == "router":
                self.running.add(fake.http.transport)
                await self.finish.wait()
            if body["input_ids"][0] == POISON:
                for transport in (fake.http.transport, *self.running):
                    transport.close()
                self.running.clear()
                asyncio.get_running_loop().call_later(0.02, self.crash, place)
            return await complete(fake, body)

        return behave

    def crash(self, place: str) -> None:
        self.deaths.append(place)
        self.quarantine.left(0, True, True)

    async def isolate(self, avoid):
        assert not self.isolated
        self.isolated = True
        return 0, self.server.url

    def release(self, slot: int) -> None:
        self.isolated = False

    def refund_restart(self, slot: int) -> None:
        self.excused.append(slot)


def client_of(quarantine, name="client", told=None):
    """What one worker's client uses, connected by calls; `told` collects those that reach the driver."""

    def enter(number, attempt):
        if told is not None:
            told.append(attempt.key)
        return quarantine.enter(name, number, attempt)

    made = QuarantineClient(enter, partial(quarantine.end, name))
    quarantine.follow(made.watch)
    return made


class Endless:
    """A script whose every entry is made anew."""

    def __init__(self, make) -> None:
        self._make = make

    def popleft(self):
        return self._make()


def break_connections(servers, times):
    """Breaks the connections of the next requests, without a death."""
    servers.crash = lambda place: None
    left = iter(range(times))

    async def one(fake: FakeSGLang, body: dict):
        if next(left, None) is not None:
            fake.http.transport.close()
        return await complete(fake, body)

    servers.router.script = Endless(lambda: one)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(client_module, "_FAILURE_WAIT", (0.01, 0.02))


@asynccontextmanager
async def serving(folder, **options):
    async with FakeSGLang() as router, FakeSGLang() as server:
        servers = FakeServers(router, server)
        quarantine = Quarantine(servers, folder, verdict_seconds=0.1)
        servers.quarantine = quarantine
        limits = {
            "vocab_size": 100,
            "context_length": 200,
            "sampling": SamplingConfig(max_new_tokens=4),
            "timeout": 5.0,
        }
        client = make_rollout_client(router.url, quarantine=client_of(quarantine), **limits, **options)
        try:
            yield client, servers, quarantine
        finally:
            await client.close()
            await quarantine.close()


async def test_a_prompt_that_kills_servers_is_refused_after_two_deaths_in_the_crowd_and_two_alone(tmp_path, caplog):
    async with serving(tmp_path / "poison") as (client, servers, quarantine), asyncio.timeout(PATIENCE):
        with pytest.raises(PoisonPrompt, match=r"prompt 0:7 was in flight at 2 server deaths .* alone at 2 more"):
            await client.generate([POISON, 1], routing_key="0:7", temperature=0.5)
        assert servers.deaths == ["router", "router", "alone", "alone"]
        assert servers.excused == [0] * 4
        # The same prompt again, such as in the next epoch: no server sees it.
        with pytest.raises(PoisonPrompt):
            await client.generate([POISON, 1], routing_key="1:7")
        assert len(servers.deaths) == 4
        # The trial returns its server in a task of its own.
        while servers.isolated:
            await asyncio.sleep(0.01)
        assert quarantine.metrics() == {"rollout/suspect_prompts": 0.0, "rollout/poison_prompts": 2.0}
    dump = json.loads((tmp_path / "poison" / "0-7.json").read_text())
    assert (dump["uid"], dump["prompt_ids"], dump["input_ids"]) == ("0:7", [[POISON, 1]], [POISON, 1])
    assert dump["sampling_params"]["temperature"] == 0.5
    assert [len(dump["deaths"][kind]) for kind in ("crowd", "alone")] == [2, 2]
    assert [path.name for path in (tmp_path / "poison").iterdir()] == ["0-7.json"]
    assert "prompt 0:7" in caplog.text


async def test_a_prompt_held_back_as_a_suspect_holds_back_the_same_prompt_under_another_key(tmp_path):
    """Such as two epochs of a small dataset that are in flight together."""
    async with serving(tmp_path) as (client, servers, _), asyncio.timeout(PATIENCE):
        first = asyncio.create_task(client.generate([POISON, 1], routing_key="0:7"))
        while not client._quarantine._watched:
            await asyncio.sleep(0.001)
        with pytest.raises(PoisonPrompt):
            await client.generate([POISON, 1], routing_key="1:7")
        with pytest.raises(PoisonPrompt):
            await first
        assert client._quarantine.evidence("0:7") == client._quarantine.evidence("1:7")
        assert servers.deaths.count("router") == 2


async def test_bystanders_of_a_killer_complete(tmp_path):
    async with serving(tmp_path) as (client, servers, _), asyncio.timeout(PATIENCE):
        bystander = asyncio.create_task(client.generate([SLOW], routing_key="0:1"))
        while not servers.running:
            await asyncio.sleep(0.001)
        with pytest.raises(PoisonPrompt):
            await client.generate([POISON], routing_key="0:2")
        servers.finish.set()
        answer = await bystander
        assert len(answer.token_ids) == 4
        assert len(servers.router.requests) > 2, "it was cut, and sent again"
        assert client._quarantine.evidence("0:1") is None


async def test_a_trial_without_a_death_clears_its_members(tmp_path, monkeypatch):
    """A request that takes very long is no killer; it goes on where it is."""
    monkeypatch.setattr(quarantine_module, "TRIAL_SECONDS", 0.2)
    async with serving(tmp_path) as (client, servers, quarantine), asyncio.timeout(PATIENCE):
        deaths, finish = iter(range(2)), asyncio.Event()

        def crowd():
            async def one(fake: FakeSGLang, body: dict):
                assert next(deaths, None) is not None
                fake.http.transport.close()
                asyncio.get_running_loop().call_later(0.02, servers.crash, "router")
                return await complete(fake, body)

            return one

        async def slow(fake: FakeSGLang, body: dict):
            await finish.wait()
            return await complete(fake, body)

        servers.router.script, servers.server.script = Endless(crowd), Endless(lambda: slow)
        request = asyncio.create_task(client.generate([5], routing_key="0:1"))
        while not servers.isolated:
            await asyncio.sleep(0.01)
        while servers.isolated:
            await asyncio.sleep(0.01)
        finish.set()
        assert len((await request).token_ids) == 4
        assert quarantine.metrics()["rollout/suspect_prompts"] == 0.0


async def test_connections_that_break_without_a_death_make_no_prompt_a_suspect(tmp_path):
    async with serving(tmp_path) as (client, servers, quarantine), asyncio.timeout(PATIENCE):
        make = servers.router.script._make
        break_connections(servers, 4)
        assert len((await client.generate([5], routing_key="0:1")).token_ids) == 4
        servers.router.script = Endless(make)
        assert quarantine.metrics()["rollout/suspect_prompts"] == 0.0
        assert servers.alone == []


async def test_time_held_back_does_not_count_against_the_deadline(tmp_path):
    """The verdict takes longer than the request's own deadline."""
    async with serving(tmp_path) as (client, _, quarantine), asyncio.timeout(PATIENCE):
        client._timeout = 0.5
        quarantine._verdict_seconds = 0.8
        with pytest.raises(PoisonPrompt):
            await client.generate([POISON], routing_key="0:7")


async def test_a_request_that_waits_for_the_verdict_on_a_death_counts_as_held_back(tmp_path):
    """Its deadline is paused meanwhile, which the gate must take into account."""
    async with serving(tmp_path) as (client, servers, quarantine), asyncio.timeout(PATIENCE):
        break_connections(servers, 1)
        request = asyncio.create_task(client.generate([5], routing_key="0:1"))
        while not quarantine.busy:
            assert not request.done()
            await asyncio.sleep(0.01)
        await request
        assert not quarantine.busy
        assert quarantine.holds == 1


async def test_an_invalid_answer_has_the_servers_checked(tmp_path):
    doubts = []
    async with serving(tmp_path, on_invalid_answer=lambda: doubts.append(1)) as (client, servers, _):

        async def nonsense(fake: FakeSGLang, body: dict):
            answer = await complete(fake, body)
            answer.text = "{}"
            return answer

        servers.router.script = Endless(lambda: nonsense)
        with pytest.raises(ServerError):
            await client.generate([5], routing_key="0:1")
        assert doubts


async def test_an_evaluation_prompt_that_kills_servers_is_counted_as_failed(tmp_path, by_length):
    async with serving(tmp_path) as (client, servers, _), asyncio.timeout(PATIENCE):
        found = await evaluate(Answerer(client, single), [by_length([POISON], [5])], max_inflight=1)
        again = await evaluate(Answerer(client, single), [by_length([POISON], [5])], max_inflight=1)
        assert [(each.n, each.failed) for each in found + again] == [(2, 1), (2, 1)]
        assert len(servers.deaths) == 4
        assert client._quarantine.evidence("eval:numbers:0")


async def single(client, sample):
    return (await client.generate(sample["prompt_ids"])).trajectory()


@pytest.fixture
def by_length():
    from megasync.rewards import RewardRunner
    from megasync.trajectory import Prompt

    def reward(completions, **columns):
        return [1.0 for _ in completions]

    def make(*prompts):
        rows = [Prompt(str(n), ids, {"prompt": f"{ids}"}) for n, ids in enumerate(prompts)]
        return HeldOutSet("numbers", rows, RewardRunner(reward))

    return make


# Several clients of one driver


class Workers:
    """Clients of one quarantine, and its fleet: slot 0 behind the router, slot 1 isolated."""

    def __init__(self, folder=None):
        self.quarantine = Quarantine(self, folder, verdict_seconds=0.01)
        self.told, self.refunds = [], []
        self.clients = [client_of(self.quarantine, name, self.told) for name in range(2)]

    async def isolate(self, avoid):
        return 1, "http://alone"

    def release(self, slot): ...

    def refund_restart(self, slot):
        self.refunds.append(slot)

    async def play(self, number, key, prompt, dies=None):
        """One generation, retried until it completes. `dies(url)` is whether its server dies under it."""
        client = self.clients[number]
        async with client.request(key, prompt) as ticket:
            while True:
                url = await client.enter(ticket, {"input_ids": prompt})
                await asyncio.sleep(0.001)
                if dies is None or not dies(url):
                    return url
                client.cut(ticket)
                self.quarantine.left(1 if url else 0, died=True, by_requests=True)

    async def suspect(self, key, prompt, suspected):
        """A generation that met two deaths beside others, and completes."""
        client = self.clients[0]
        async with client.request(key, prompt) as ticket:
            for _ in range(CROWD_DEATHS):
                await client.enter(ticket, {})
                await asyncio.sleep(0.001)
                client.cut(ticket)
                self.quarantine.left(0, died=True, by_requests=True)
            entering = asyncio.ensure_future(client.enter(ticket, {}))
            await asyncio.sleep(0.001)
            suspected.set()
            return await entering


@pytest.fixture
async def workers():
    made = Workers()
    async with asyncio.timeout(PATIENCE):
        yield made
    await made.quarantine.close()


async def test_requests_that_no_death_is_near_cost_the_driver_nothing(workers):
    await asyncio.gather(*(workers.play(n % 2, f"0:{n}", [n]) for n in range(50)))
    assert workers.told == []


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
    alone = deaths.count("http://alone")
    assert ALONE_DEATHS <= alone <= 2 * (ALONE_DEATHS + 1)
    # A later request for it, or for another turn of its group, is refused without another death.
    for key, prompt in (("1:7", [7]), ("0:7", [7, 8])):
        with pytest.raises(PoisonPrompt):
            await workers.play(1, key, prompt, dies)
    assert deaths.count("http://alone") == alone


async def test_a_suspect_is_held_back_in_every_worker(workers):
    suspected = asyncio.Event()
    first = asyncio.create_task(workers.suspect("0:7", [7], suspected))
    await suspected.wait()
    other = await workers.play(1, "1:7", [7])
    assert (await first, other) == ("http://alone", "http://alone")
    assert await workers.play(1, "0:8", [8]) is None
    assert workers.quarantine.metrics()["rollout/suspect_prompts"] == 0.0


async def test_the_tickets_of_a_lost_worker_end(workers):
    suspected = asyncio.Event()

    async def never():
        await workers.suspect("0:7", [7], suspected)
        await asyncio.Event().wait()

    task = asyncio.create_task(never())
    await suspected.wait()
    workers.quarantine.lost(0)
    assert workers.quarantine._attempts == {} == workers.quarantine._prompts
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_loss_of_a_node_is_one_death_for_a_prompt_with_requests_on_several_of_its_servers(workers):
    client, quarantine = workers.clients[0], workers.quarantine
    async with client.request("0:7", [7]) as one, client.request("0:7", [7]) as two:
        for ticket in (one, two):
            await client.enter(ticket, {})
        await asyncio.sleep(0.001)
        for slot in (0, 1):
            quarantine.left(slot, died=True, by_requests=True)
        for ticket in (one, two):
            client.cut(ticket)
        assert [await client.enter(ticket, {}) for ticket in (one, two)] == [None, None]
    assert not quarantine.busy


# The rollout


async def test_a_group_that_kills_servers_is_dropped_with_its_reason_and_row(make_bench, tmp_path):
    """Every server that prompt 2 is sent to dies at once, and takes all others that it runs with it."""

    class Fleet:
        """Slot 0 behind the router, slot 1 for whoever is alone."""

        def __init__(self):
            self.running, self.deaths = {0: set(), 1: set()}, 0

        async def isolate(self, avoid):
            return 1, "http://alone"

        def release(self, slot): ...
        def refund_restart(self, slot): ...

        def crash(self, slot, culprit):
            if culprit in self.running[slot]:
                self.deaths += 1
                victims, self.running[slot] = self.running[slot], set()
                for victim in victims:
                    victim.set_result("cut")
                quarantine.left(slot, True, True)

    fleet = Fleet()
    quarantine = Quarantine(fleet, tmp_path, verdict_seconds=0.01)
    guard = client_of(quarantine)

    async def generate(prompt_ids, *, routing_key, **options):
        async with guard.request(routing_key, prompt_ids) as ticket:
            while True:
                url = await guard.enter(ticket, {"input_ids": prompt_ids, "sampling_params": {}})
                slot, request = int(url is not None), asyncio.get_running_loop().create_future()
                fleet.running[slot].add(request)
                if prompt_ids == [2]:
                    asyncio.get_running_loop().call_later(0.001, fleet.crash, slot, request)
                try:
                    await asyncio.wait_for(request, 5.0 if prompt_ids == [2] else 0.001)
                except TimeoutError:
                    return Generation(list(prompt_ids), [5, 5], [-0.1] * 2, [0] * 2, "stop", "x")
                finally:
                    fleet.running[slot].discard(request)
                guard.cut(ticket)

    bench = make_bench(total=12, size=4, samples=2, quarantine=quarantine, guard=guard)
    bench.client.generate = generate
    async with asyncio.timeout(PATIENCE):
        await bench.rollouter.run()
    await quarantine.close()
    assert bench.buffer.dropped
    assert set(bench.buffer.dropped.values()) == {"kills_servers"}
    assert {uid.split(":")[1] for uid in bench.buffer.dropped} == {"2"}
    assert len(bench.buffer.committed) == 12
    # Twice in the crowd, once in the common trial, twice alone; and groups of the same row beside each other.
    assert fleet.deaths <= 8
    # Groups of the same prompt are known by its tokens.
    (file,) = tmp_path.iterdir()
    dump = json.loads(file.read_text())
    assert dump["row"] == {"prompt": "2", "answer": {"value": 2}}
    assert bench.rollouter.metrics()["rollout/dropped_kills_servers"] == len(bench.buffer.dropped)
