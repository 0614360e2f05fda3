"""A rollout worker is built in one way, in the driver and in a process of its own, from the configuration of a run."""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from functools import partial

import httpx
import pytest
from fake_sglang import FakeSGLang
from rollout_bench import FakeBuffer
from waits import PATIENCE, until
from worker_crew import NoTrials, sent

from megasync.app.rollout_worker import WorkerSetup, answers_of, local_worker, start_worker
from megasync.app.workload import PythonArguments, prepare_workload
from megasync.cluster.rollout_workers import RolloutWorkers
from megasync.config import load_config
from megasync.config.access import Keys
from megasync.evaluation.evaluate import AnswerJob
from megasync.observe.context import RunContext
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.worker_link import LocalProcess, RemoteProcess


class PolledProcess(RemoteProcess):
    """A worker that is opened as in a process of its own, and gets copies of what is said to it."""

    def __init__(self, setup):
        self._setup = setup

    async def start(self, timeout):
        self._polled = await start_worker(sent(self._setup), 0.0)

    async def poll(self, seconds, timeout):
        return sent(await self._polled.poll(seconds))

    async def send(self, commands, timeout):
        await self._polled.send(sent(commands))

    def processes(self):
        return []

    async def kill(self):
        self._polled.end.abandon()


@dataclass
class Run:
    workers: RolloutWorkers
    rollouter: Rollouter
    buffer: FakeBuffer
    held_out: object


@pytest.fixture
def own_log_handlers():
    """What a worker adds ends with its process."""
    logger = logging.getLogger("megasync")
    handlers = list(logger.handlers)
    yield
    for handler in [handler for handler in logger.handlers if handler not in handlers]:
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(params=[0, 1], ids=["in the driver", "polled"])
async def run(request, config_file, tmp_path, monkeypatch, own_log_handlers):
    monkeypatch.setattr("megasync.rollout.worker_link.BATCH_SECONDS", 0.001)
    config = load_config(config_file)
    config.rollout.workers = request.param
    config.schedule.groups_per_step, config.schedule.samples_per_group = 2, 2
    config.rollout.groups.drop_uniform = False
    workload, keys, buffer = (
        prepare_workload(config, PythonArguments()),
        Keys("admin", "router"),
        FakeBuffer(total=4, capacity=4),
    )
    async with FakeSGLang(vocab=workload.vocab_size) as fake:

        def process(number):
            parts = fake.url, keys, workload, PythonArguments(), False
            setup = WorkerSetup.of(config, tmp_path, number, *parts)
            if not config.rollout.workers:
                return LocalProcess(partial(local_worker, setup, workload, buffer))
            return PolledProcess(setup)

        async def of_worker(call, *arguments):
            return {"commit": True, "partials": {}, "save_partials": None}[call]

        quarantine = Quarantine(NoTrials())
        workers = RolloutWorkers(
            config, process, quarantine, lambda: None, RunContext(), questions={"buffer": of_worker}
        )
        rollouter = Rollouter(workload.source, buffer, config.schedule, placement=workers.placement)
        workers.follow(rollouter.add, rollouter.remove)
        workers.add_server("", fake.url)
        await workers.start()
        try:
            yield Run(workers, rollouter, buffer, workload.eval_sets[0]), fake
        finally:
            await workers.stop()
            await quarantine.close()


async def test_it_generates_groups_and_answers_prompts_of_evaluations(run):
    made, fake = run
    await made.workers.announce(3, 4)
    fake.version = 4
    async with asyncio.timeout(PATIENCE):
        answer = await answers_of(made.workers)(AnswerJob("", 0.0, 0, made.held_out.prompts[0], 0))
        assert answer.versions == {4: 5} and answer.reward is not None
        rolling = asyncio.create_task(made.rollouter.run())
        await until(lambda: made.rollouter.finished_groups >= 4)
        assert made.rollouter.metrics()["rollout/tokens"] == 4 * 2 * 5.0
        made.rollouter.stop()
        await rolling
    # A version that the driver has not announced is not taken.
    fake.version = 5
    pending = asyncio.create_task(answers_of(made.workers)(AnswerJob("", 0.0, 1, made.held_out.prompts[1], 0)))
    await until(lambda: made.workers._links[0].status.client["rollout/invalid_answers"])
    await made.workers.announce(5, 5)
    assert (await asyncio.wait_for(pending, PATIENCE)).versions == {5: 5}


async def test_a_worker_writes_where_programs_outside_open_sessions(config_file, tmp_path, own_log_handlers):
    config = load_config(config_file, ["rollout.agent=external", "rollout.workers=4"])
    # An agent needs a chat template.
    config.model.path = str(shutil.copytree(config.model.path, tmp_path / "chat"))
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    workload, keys = prepare_workload(config, PythonArguments()), Keys("admin", "router", sessions="the key of the run")
    setup = WorkerSetup.of(config, tmp_path, 3, "http://router", keys, workload, PythonArguments(), False)
    polled = await start_worker(sent(setup), 0.0)
    try:
        url = (tmp_path / "sessions" / "worker-3.url").read_text()
        async with httpx.AsyncClient() as http:
            answers = [
                await http.get(f"{url}/sessions", headers={"Authorization": f"Bearer {key}"})
                for key in ("the key of the run", "another")
            ]
        assert [answer.status_code for answer in answers] == [200, 401]
        assert polled.end.status.client["rollout/sessions"] == 0.0
    finally:
        await polled.end.questions["close"]()
