"""Rollout workers over fake processes: whatever dies or hangs, every prompt ends once."""

import asyncio
import logging
import random
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_bench import FakeBuffer, FakeClient, FakeSource, by_place
from waits import PATIENCE, until
from worker_crew import LoopbackProcess, NoTrials, crew_config

from megasync.buffer import BufferClosed
from megasync.cluster import rollout_workers
from megasync.cluster.rollout_workers import RolloutWorkers, check_travels
from megasync.config.schema import GroupConfig, ScheduleConfig
from megasync.errors import ConfigError, DataError, HttpStatusError, MegasyncError, PoisonPrompt, ServerError
from megasync.observe.context import RunContext
from megasync.rewards import RewardRunner
from megasync.rollout.group_worker import FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.selection import Selection
from megasync.rollout.worker_link import LocalProcess, WorkerEnd
from megasync.rollout.workflow import single_turn
from megasync.trajectory import Prompt

PROMPT = Prompt("0:0", [1], {})


class Buffer(FakeBuffer):
    """Idempotent, as the real one: only the first end of a group counts."""

    async def _end(self, uid, ended, value):
        await asyncio.sleep(0)
        async with self.changed:
            if self.reason:
                raise BufferClosed(self.reason)
            if uid in self.live:
                self.live.remove(uid)
                ended[uid] = value
            self.changed.notify_all()


class Crew:
    """Rollouter, workers, and the fake processes of all workers so far."""

    def __init__(
        self,
        workers=2,
        total=10**9,
        capacity=8,
        behave=None,
        reward=by_place,
        zombies=False,
        restarts=5,
        patience=10.0,
        killers=(),
        context=None,
    ):
        self.buffer, self.source = Buffer(total, capacity), FakeSource(5)
        self.processes, self.clients, self.told = [], [], []
        self.behave, self.reward, self.zombies = behave, reward, zombies
        # Rows whose workflow kills its worker.
        self.killers = killers
        self.questions = {}
        self.refuse = None
        self.quarantine = Quarantine(NoTrials(), verdict_seconds=0.01)
        self.config = crew_config(workers, restarts, patience)
        self.workers = RolloutWorkers(
            self.config, self.process, self.quarantine, lambda: self.told.append("invalid"), context or RunContext()
        )
        schedule = ScheduleConfig(groups_per_step=2, samples_per_group=2)
        self.rollouter = Rollouter(self.source, self.buffer, schedule, placement=self.workers.placement)

    def process(self, number):
        if not self.config.rollout.workers:
            return LocalProcess(self.local)
        self.processes.append(LoopbackProcess(number, self.worker, self.zombies))
        self.processes[-1].refuses_to_start = self.refuse
        return self.processes[-1]

    def local(self):
        end = WorkerEnd()
        worker, commands, questions = self.worker(SimpleNamespace(number=0, end=end))
        end.serve(worker, {"watch": lambda watched: None, **commands}, questions)
        return end

    def worker(self, process):
        client = FakeClient(self.behave)
        self.clients.append(client)

        async def workflow(client, sample):
            if sample["prompt"] in self.killers:
                process.die()
                await asyncio.Event().wait()
            return await single_turn(client, sample)

        spec = GroupSpec(workflow, RewardRunner(self.reward), Selection(GroupConfig(), 2, 8))
        told = {"on_ended": partial(process.end.tell, "ended"), "on_failed": partial(process.end.tell, "failed")}
        worker = GroupWorker(client, self.buffer, spec, FailurePolicy(backoff_seconds=(0.0, 0.0)), **told)
        number = process.number
        commands = {
            "set_versions": lambda *versions: self.told.append((number, "versions", *versions)),
            "set_servers": lambda *servers: self.told.append((number, "servers", *servers)),
        }

        async def versions(*known):
            self.told.append((number, "versions", *known))

        async def close():
            self.told.append((number, "closed"))

        return worker, commands, {"versions": versions, "close": close, **self.questions}

    async def __aenter__(self):
        await self.workers.start()
        self.workers.follow(self.rollouter.add, self.rollouter.remove)
        return self

    async def __aexit__(self, *error):
        await self.workers.stop()
        for process in self.processes:
            if hasattr(process, "end"):
                process.end.abandon()


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr("megasync.rollout.worker_link.POLL_SECONDS", 0.05)
    monkeypatch.setattr("megasync.rollout.worker_link.BATCH_SECONDS", 0.001)
    monkeypatch.setattr("megasync.serving.restart_budget.FIRST_WAIT", 0.01)
    monkeypatch.setattr(rollout_workers, "ANNOUNCE_SECONDS", 0.05)


async def test_a_worker_in_the_driver_gets_the_objects_themselves_and_is_not_watched():
    lock, refusal = threading.Lock(), DataError("with a lock", threading.Lock())
    async with Crew(workers=0) as crew:

        async def takes(value):
            assert value is lock, "it could not be pickled"
            raise refusal

        (link,) = crew.workers._links.values()
        link.source.questions["take"] = takes
        with pytest.raises(DataError) as raised:
            await crew.workers.ask("eval", PROMPT, "take", lock)
        assert raised.value is refusal
        assert crew.workers.states() == [] == crew.workers.processes()


async def test_a_replacement_learns_the_state_that_the_others_were_told():
    async with Crew(workers=1) as crew:
        crew.workers.tell("set_servers", "", "", ["http://a"])
        crew.workers.tell("set_servers", "grader", "grader", ["http://g"])
        crew.workers.tell("set_servers", "", "", ["http://a", "http://b"])
        await crew.workers.announce(3, 4)
        await until(lambda: (0, "versions", 3, 4) in crew.told)
        crew.told.clear()
        crew.processes[0].die()
        await until(lambda: len(crew.told) == 3)
        assert set(map(repr, crew.told)) == {
            repr((0, "versions", 3, 4)),
            repr((0, "servers", "", ["http://a", "http://b"])),
            repr((0, "servers", "grader", ["http://g"])),
        }


async def test_an_announcement_reaches_every_worker_first_but_does_not_wait_for_one_that_hangs():
    async with Crew(workers=2) as crew:
        await crew.workers.announce(0, 1)
        assert {(0, "versions", 0, 1), (1, "versions", 0, 1)} <= set(crew.told)
        crew.processes[0].hang()
        async with asyncio.timeout(PATIENCE):
            await crew.workers.announce(1, 2)
        assert (1, "versions", 1, 2) in crew.told


async def test_an_announcement_reaches_a_worker_that_was_busy_for_longer():
    async with Crew(workers=1) as crew:
        (process,), free = crew.processes, asyncio.Event()
        send = process.send

        async def busy(commands, timeout):
            await free.wait()
            await send(commands, timeout)

        process.send = busy
        await crew.workers.announce(1, 2)
        free.set()
        await until(lambda: (0, "versions", 1, 2) in crew.told)


async def test_a_worker_that_keeps_dying_is_retired_and_the_run_ends_with_the_last_one():
    async with Crew(workers=2, restarts=1) as crew:
        for _ in range(2):
            crew.processes[0].die()
            await until(lambda: all(p.killed for p in crew.processes if p.number == 0) or len(crew.processes) > 2)
            await asyncio.sleep(0.05)
            crew.processes[-1].die()
        await until(lambda: crew.rollouter.metrics()["rollout/workers"] == 1.0)
        await crew.workers.watch()
        crew.refuse = MegasyncError("no room for it")
        crew.processes[1].die()
        await until(lambda: crew.rollouter.metrics()["rollout/workers"] == 0.0)
        with pytest.raises(ServerError, match=r"no rollout worker is left.*rollout\.health\.restarts.*no room for it"):
            async with asyncio.timeout(PATIENCE):
                while True:
                    await crew.workers.watch()
                    await asyncio.sleep(0.01)


async def test_a_lost_worker_and_its_replacement_are_recorded():
    class Recorded:
        def fault(self, what, text, **fields):
            events.append(("fault", what))

        def recovery(self, what, text, **fields):
            events.append(("recovery", what))

    events = []
    async with Crew(workers=2, context=RunContext(events=Recorded())) as crew:
        crew.processes[1].die()
        await until(lambda: len(events) == 2)
        assert events == [("fault", "worker-1"), ("recovery", "worker-1")]
        await until(lambda: [worker.state for worker in crew.workers.states()] == ["up", "up"])
        assert [worker.name for worker in crew.workers.states()] == ["worker-0", "worker-1"]
    assert len(events) == 2, "a worker that is stopped is no fault"


async def test_a_worker_that_hangs_is_reported_before_it_is_killed():
    class Reports:
        async def report(self, reason, only=None):
            seen.append((only, crew.processes[0].killed))

    seen = []
    async with Crew(workers=2, patience=1.0, context=RunContext(reports=Reports())) as crew:
        crew.processes[0].hang()
        await until(lambda: len(crew.processes) == 3)
        assert seen == [({"worker-0"}, False)]
        crew.processes[1].die()
        await until(lambda: len(crew.processes) == 4)
        assert len(seen) == 1, "a worker that died is not asked what it does"


async def test_a_worker_that_does_not_start_fails_the_start_and_leaves_none_behind():
    crew = Crew(workers=3)
    crew.refuse = ConfigError("the gateway cannot listen at port 80")
    with pytest.raises(ConfigError, match="port 80"):
        await crew.workers.start()
    assert all(process.killed for process in crew.processes)


async def test_a_question_is_asked_again_when_its_worker_is_lost():
    asked = []

    async def answer(value):
        asked.append(value)
        if len(asked) == 1:
            await asyncio.sleep(3600)
        return 2 * value

    crew = Crew(workers=2)
    crew.questions = {"double": answer}
    async with crew:
        question = asyncio.create_task(crew.workers.ask("question", PROMPT, "double", 21))
        await until(lambda: asked)
        crew.processes[0].die()
        assert await asyncio.wait_for(question, PATIENCE) == 42


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_a_prompt_whose_code_kills_its_worker_is_dropped_and_the_run_goes_on(workers, caplog):
    async with Crew(workers, total=12, capacity=6, killers=("3",)) as crew:
        await asyncio.wait_for(crew.rollouter.run(), PATIENCE)
        rows = {uid.partition(":")[2] for uid in crew.buffer.committed}
        assert rows == {"0", "1", "2", "4"}
        assert set(crew.buffer.dropped.values()) == {"kills_workers"}
        assert {uid.partition(":")[2] for uid in crew.buffer.dropped} == {"3"}
        assert len(crew.buffer.dropped) > 1, "later epochs have it too"
        metrics = crew.rollouter.metrics()
        assert metrics["rollout/dropped_kills_workers"] == len(crew.buffer.dropped)
        assert (metrics["rollout/worker_poison"], metrics["rollout/worker_suspects"]) == (1.0, 0.0)
        # Copies of later epochs, in flight at the same time, may have been on trial too; dropped ones never run again.
        assert metrics["rollout/workers_lost"] <= 10
        await crew.workers.watch()
    assert "Poison prompt, not run again" in caplog.text


async def test_an_evaluation_prompt_that_kills_its_worker_fails_and_those_beside_it_are_answered():
    crew = Crew(workers=2)

    async def answer(row):
        await asyncio.sleep(0.005)
        if row == 3:
            next(process for process in reversed(crew.processes) if running_here(process)).die()
            await asyncio.Event().wait()
        return row

    def running_here(process):
        return asyncio.current_task() in process.end.answering()

    crew.questions = {"double": answer}
    async with crew:
        questions = [crew.workers.ask("eval", Prompt("0:0", [row], {}), "double", row) for row in range(6)]
        answers = await asyncio.wait_for(asyncio.gather(*questions, return_exceptions=True), PATIENCE)
    assert isinstance(answers[3], PoisonPrompt)
    assert answers[:3] + answers[4:] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("error", [DataError("a bad row"), HttpStatusError("refused", 503), ValueError("x")])
async def test_errors_of_workers_reach_the_driver(error):
    async def answer():
        raise error

    crew = Crew(workers=1)
    crew.questions = {"fail": answer}
    async with crew:
        with pytest.raises(Exception, match=str(error)):
            await asyncio.wait_for(crew.workers.ask("question", PROMPT, "fail"), PATIENCE)


async def test_an_error_that_is_no_groups_fault_ends_the_run():
    async with Crew(workers=2) as crew:

        async def broken(group):
            raise RuntimeError("a bug")

        crew.buffer.commit = broken
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(crew.rollouter.run(), PATIENCE)


async def test_the_gate_closes_over_all_workers_and_for_a_replacement():
    release = asyncio.Event()

    async def behave():
        await release.wait()
        return "x"

    async with Crew(workers=2, total=8, capacity=4, behave=lambda ids, options: behave()) as crew:
        run = asyncio.create_task(crew.rollouter.run())
        await until(lambda: sum(client.running for client in crew.clients) == 8)
        with pytest.raises(ServerError, match="requests still ran"):
            await crew.rollouter.gate(0.02)
        gate = asyncio.create_task(crew.rollouter.gate(PATIENCE))
        await asyncio.sleep(0.02)
        crew.processes[0].die()
        await until(lambda: len(crew.clients) == 3)
        assert not gate.done()
        release.set()
        await asyncio.wait_for(gate, PATIENCE)
        asked = [len(client.calls) for client in crew.clients]
        await asyncio.sleep(0.05)
        assert [len(client.calls) for client in crew.clients] == asked
        crew.rollouter.open()
        await asyncio.wait_for(run, PATIENCE)
        assert len(crew.buffer.committed) == 8


async def test_warnings_of_a_worker_are_repeated_but_not_without_bound(caplog):
    async with Crew(workers=1) as crew:
        polled = crew.processes[0].polled
        logger = logging.getLogger("a worker's process")
        logger.propagate = False
        logger.addHandler(polled)
        with caplog.at_level(logging.WARNING):
            for number in range(1000):
                logger.warning("problem %d", number)
            await until(lambda: "problem 0" in caplog.text)
            await asyncio.sleep(0.05)
        assert "Rollout worker 0: problem 0" in caplog.text
        assert caplog.text.count("problem") <= 10


async def test_the_number_of_calls_does_not_follow_the_number_of_groups():
    async with Crew(workers=1, total=400, capacity=100) as crew:
        await asyncio.wait_for(crew.rollouter.run(), PATIENCE)
        (process,) = crew.processes
        assert len(crew.buffer.committed) == 400
        assert process.polls < 400 / 4


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), workers=st.integers(1, 3), zombies=st.booleans())
async def test_every_prompt_ends_once_whatever_happens_to_the_workers(seed, workers, zombies):
    choice = random.Random(seed)

    async def behave():
        await asyncio.sleep(choice.choice([0, 0, 0.002, 0.01]))
        if choice.random() < 0.1:
            raise ServerError("a server died")
        return "x"

    total = choice.randint(1, 25)
    crew = Crew(workers, total, 6, lambda ids, options: behave(), zombies=zombies, restarts=1000, patience=0.2)
    # A row that was taken for the cause is dropped in every later epoch too: here there is one epoch.
    crew.source.size = 100
    async with crew:
        run = asyncio.create_task(crew.rollouter.run())
        # Fewer than a run ends at, however many a slow machine would fit between two groups: a drop takes two of them,
        # and the first eight groups must not all be dropped.
        losses = 0
        async with asyncio.timeout(PATIENCE):
            while not run.done():
                await asyncio.sleep(choice.choice([0.001, 0.01]))
                if losses < (50 if crew.rollouter.finished_groups else 14) and choice.random() < 0.3:
                    losses += 1
                    process = choice.choice([p for p in crew.processes if not p.killed] or crew.processes)
                    choice.choice([process.die, process.die, process.hang])()
            await run
        # A prompt that happens to be alone on two lost workers, after two others, is taken for the cause.
        committed, dropped = crew.buffer.committed, crew.buffer.dropped
        assert set(dropped.values()) <= {"kills_workers"}
        assert sorted([*committed, *dropped]) == sorted(f"0:{n}" for n in range(total + len(dropped)))
        assert len(committed) == total


def test_what_cannot_be_pickled_is_refused_with_its_name_and_the_fix():
    lock = threading.Lock()

    async def rollout(client, sample):
        return lock

    check_travels("reward=", by_place)
    with pytest.raises(ConfigError, match=r"sends rollout= to other processes, but .*rollout cannot be pickled"):
        check_travels("rollout=", rollout)
