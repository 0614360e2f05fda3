"""Rollout workers behind a fake process: the real ends of the connection, on one event loop, without Ray."""

from __future__ import annotations

import asyncio

from ray import cloudpickle

from megasync.config import Config
from megasync.errors import ProcessLost
from megasync.rollout.worker_link import PolledEnd, RemoteProcess, WorkerEnd


class NoTrials:
    """Servers of which none can be isolated."""

    async def isolate(self, avoid):
        return None

    def release(self, slot): ...
    def refund_restart(self, slot): ...


def sent(value):
    """As another process receives it."""
    return cloudpickle.loads(cloudpickle.dumps(value))


class LoopbackProcess(RemoteProcess):
    """A `RemoteProcess` whose worker lives here. `die` and `hang` are faults; `zombie` survives its kill."""

    def __init__(self, number, make_worker, zombie=False):
        self.number, self._make_worker, self._zombie = number, make_worker, zombie
        self.starts, self.killed = 0, False
        self.refuses_to_start = None
        self._dead = asyncio.Event()
        self._hangs = False
        self.polls, self.sent = 0, 0

    async def start(self, timeout):
        self.starts += 1
        await asyncio.sleep(0)
        if self.refuses_to_start is not None:
            raise self.refuses_to_start
        self.end = WorkerEnd()
        self.polled = PolledEnd(self.end)
        self.worker, commands, questions = self._make_worker(self)
        self.end.serve(self.worker, {"watch": lambda watched: None, **commands}, questions)

    def die(self):
        self._dead.set()

    def hang(self):
        self._hangs = True

    async def poll(self, seconds, timeout):
        self.polls += 1
        return sent(await self._call(self.polled.poll(seconds), timeout))

    async def send(self, commands, timeout):
        self.sent += len(commands)
        await self._call(self.polled.send(sent(commands)), timeout)

    async def _call(self, call, timeout):
        dead = asyncio.ensure_future(self._dead.wait())
        if self._hangs or self._dead.is_set():
            call.close()
            call = asyncio.sleep(3600)
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait({answer, dead}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise ProcessLost("it died")
            if self._hangs or not answer.done():
                loss = ProcessLost("it does not answer")
                loss.silent = True
                raise loss
            return answer.result()
        finally:
            answer.cancel()
            dead.cancel()

    def processes(self):
        return [("node", self.number)]

    async def kill(self):
        self.killed = True
        self._dead.set()
        if not self._zombie and hasattr(self, "end"):
            self.end.abandon()


def crew_config(workers, restarts=5, patience=10.0):
    config = Config()
    config.rollout.workers = workers
    config.rollout.health.restarts = restarts
    config.timeouts.rollout_worker = patience
    config.timeouts.shutdown = 1.0
    return config
