"""The hooks of a pipelined server in a model of SGLang's loop: stages are threads, messages go through queues.

`Stage.run` has the order of `event_loop_pp`: requests, schedule, compute, and outputs of an earlier batch from the last
stage around to all others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megasync.sglang import pipeline as sglang_pipeline
from megasync.sglang.pipeline import Pipeline

SECONDS = 20
TURNS = 1_000_000


class CheckWeightsReqInput:
    pass


class PauseGenerationReqInput:
    def __init__(self, mode: str) -> None:
        self.mode = mode


class UpdateWeightsFromDistributedReqInput:
    pass


class ContinueGenerationReqInput:
    pass


class StopReqInput:
    """Ends the loop of every stage."""


class Meeting:
    """A group of threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size), [b""] * size

    def exchange(self, stage: int, data: bytes) -> list[bytes]:
        self._given[stage] = data
        self._barrier.wait(SECONDS)
        given = list(self._given)
        self._barrier.wait(SECONDS)
        return given


@dataclass
class Batch:
    reqs: list[Any]
    prefill: bool = False
    batch_is_full: bool = True

    @property
    def forward_mode(self) -> SimpleNamespace:
        return SimpleNamespace(is_extend=lambda: self.prefill)

    def filter_batch(self) -> None:
        self.reqs = [each for each in self.reqs if each != "finished"]


@dataclass
class Stage:
    number: int
    size: int
    links: list[dict[str, queue.Queue[Any]]]
    inbox: queue.SimpleQueue[Any]
    commits: Meeting
    answers: Meeting
    said: list[Any] = field(default_factory=list)
    # (batch number, version) of every batch that was computed.
    computed: list[tuple[int, int]] = field(default_factory=list)
    in_flight_at_commit: list[int] = field(default_factory=list)
    finished_at_commit: int = 0
    # The requests of all batches at a pause, and those that SGLang took back.
    running: list[list[str]] = field(default_factory=list)
    retracted: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pp_group = SimpleNamespace(is_first_rank=self.number == 0)
        self.mbs: list[Any] = [None] * self.size
        self.last_mbs: list[Any] = [None] * self.size
        self.running_mbs: list[Any] = [Batch([]) for _ in range(self.size)]
        self.running_batch: Any = None
        self.last_batch: Any = None
        self._engine_paused, self.version, self.batches, self.stopped = False, 0, 0, False
        self.hooks = Pipeline()
        self.hooks._answers = queue.SimpleQueue()
        group = SimpleNamespace(exchange=lambda data: self.answers.exchange(self.number, data))
        threading.Thread(target=self.hooks._collect, args=(group,), daemon=True).start()

    # What SGLang calls

    def process_input_requests(self, requests: list[Any]) -> None:
        self.hooks.around_process(type(self).handle, self, requests)

    def send_control_output(self, answer: Any, request: Any) -> None:
        self.said.append(answer.payload)

    def handle(self, requests: list[Any]) -> None:
        for request in requests:
            match request:
                case CheckWeightsReqInput():
                    self.hooks.around_command(self.check, None, request)
                case PauseGenerationReqInput():
                    self.running.append([each for batch in self.running_mbs for each in batch.reqs])
                    self.hooks.around_pause(type(self).pause, self, request)
                case ContinueGenerationReqInput():
                    self._engine_paused = False
                case UpdateWeightsFromDistributedReqInput():
                    self.in_flight_at_commit.append(sum(batch is not None for batch in self.mbs))
                    self.finished_at_commit += sum("finished" in batch.reqs for batch in self.running_mbs)
                    self.commits.exchange(self.number, b"ready")
                    self.version += 1
                case _:
                    self.stopped = True

    def check(self, manager: object, request: object) -> Any:
        return SimpleNamespace(success=True, message="", payload=[{"stage": self.number}])

    def pause(self, request: PauseGenerationReqInput) -> None:
        self._engine_paused = True
        if request.mode == "retract":
            self.retracted.append(self.running_batch.reqs)
            self.running_batch.reqs, self.last_batch = [], None

    def schedule(self, *, running_batch: Any, last_batch: Any) -> Any:
        self.batches += 1
        running_batch.reqs = [f"request {self.batches}", "finished"]
        return SimpleNamespace(batch_to_run=(self.batches, running_batch), running_batch=running_batch)

    # The loop

    def run(self) -> None:
        first, last = self.number == 0, self.number == self.size - 1
        own, following = self.links[self.number], self.links[(self.number + 1) % self.size]
        outputs = None
        for turn in range(TURNS):
            place, next_place = turn % self.size, (turn + 1) % self.size
            self.running_batch, self.last_batch = self.running_mbs[place], self.last_mbs[place]
            if first:
                requests = [] if self.inbox.empty() else [self.inbox.get()]
            else:
                requests = own["requests"].get(timeout=SECONDS)
            self.process_input_requests(requests)
            if not last:
                following["requests"].put(requests)
            plan = self.hooks.around_schedule(
                type(self).schedule, self, running_batch=self.running_batch, last_batch=self.last_batch
            )
            self.running_batch, self.mbs[place] = plan.running_batch, plan.batch_to_run
            self.running_mbs[place] = self.running_batch
            batch = self.mbs[place]
            if batch and not first:
                assert own["proxies"].get(timeout=SECONDS) == batch[0]
            if batch:
                self.computed.append((batch[0], self.version))
            if last and batch:
                following["outputs"].put(batch[0])
            elif not last and outputs is not None:
                following["outputs"].put(outputs)
            target, outputs = self.mbs[next_place], None
            if target is not None:
                outputs = own["outputs"].get(timeout=SECONDS)
                assert outputs == target[0]
                # As of a prompt that is computed in chunks.
                self.last_mbs[next_place] = Batch(list(target[1].reqs), prefill=True)
            if batch and not last:
                following["proxies"].put(batch[0])
            if self.stopped and all(batch is None for batch in self.mbs):
                return
        raise AssertionError("the loop was not stopped")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_stages_change_weights_between_the_same_batches_and_answer_as_one(size, mode, monkeypatch):
    monkeypatch.setattr(sglang_pipeline, "gather", lambda data, group: group.exchange(data))
    links = [{name: queue.Queue() for name in ("requests", "proxies", "outputs")} for _ in range(size)]
    inbox, commits, answers = queue.SimpleQueue(), Meeting(size), Meeting(size)
    stages = [Stage(number, size, links, inbox, commits, answers) for number in range(size)]
    failures: list[BaseException] = []

    def run(stage: Stage) -> None:
        try:
            stage.run()
        except (AssertionError, queue.Empty, threading.BrokenBarrierError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in stages]
    for thread in threads:
        thread.start()

    def wait_for(holds: Callable[[], bool]) -> None:
        while not holds() and not failures:
            threading.Event().wait(0.001)

    def answered(count: int) -> bool:
        return len(stages[0].said) == count

    def committed(version: int) -> bool:
        return all(stage.version == version for stage in stages)

    def generated(batches: int) -> bool:
        return stages[0].batches > batches

    publishes = 3
    for version in range(1, publishes + 1):
        inbox.put(CheckWeightsReqInput())
        wait_for(partial(answered, version))
        inbox.put(PauseGenerationReqInput(mode))
        inbox.put(UpdateWeightsFromDistributedReqInput())
        inbox.put(ContinueGenerationReqInput())
        wait_for(partial(committed, version))
        wait_for(partial(generated, stages[0].batches + size))
    inbox.put(PauseGenerationReqInput("in_place"))
    inbox.put(StopReqInput())
    for thread in threads:
        thread.join(SECONDS)
    assert failures == []
    assert stages[0].said == [[{"stage": number} for number in range(size)]] * publishes
    assert all(not stage.said for stage in stages[1:])
    for stage in stages:
        assert stage.in_flight_at_commit == [0] * publishes
        assert stage.finished_at_commit == 0
        assert stage.retracted == (stage.running[:publishes] if mode == "retract" else [])
        assert stage.computed == stages[0].computed[: len(stage.computed)]
    assert {version for _, version in stages[-1].computed} == set(range(publishes + 1))


def test_a_server_does_not_sleep_while_an_answer_is_outstanding():
    hooks, slept, group = Pipeline(), [], SimpleNamespace(is_first_rank=False)
    hooks._answers = queue.SimpleQueue()
    assert hooks.around_command(lambda manager, request: "answer", None, "request") is None
    hooks.around_sleep(slept.append, "idle")
    assert slept == []
    hooks._complete.put(hooks._answers.get())
    hooks.around_process(lambda scheduler, requests: None, SimpleNamespace(pp_group=group), [])
    hooks.around_sleep(slept.append, "idle")
    assert slept == ["idle"]


def test_an_answer_that_cannot_be_collected_ends_the_loop(monkeypatch):
    def lost(data: bytes, group: object) -> list[bytes]:
        raise ConnectionError("stage 1 is gone")

    monkeypatch.setattr(sglang_pipeline, "gather", lost)
    hooks, answer = Pipeline(), SimpleNamespace(success=True, message="", payload=None)
    hooks._answers = queue.SimpleQueue()
    threading.Thread(target=hooks._collect, args=(None,), daemon=True).start()
    hooks.around_command(lambda manager, request: answer, None, "request")
    with pytest.raises(ConnectionError, match="stage 1 is gone"):
        while True:
            hooks.around_process(lambda scheduler, requests: None, SimpleNamespace(), [])
