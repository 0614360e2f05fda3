"""What a server with several pipeline stages (`rollout.pipeline_parallel`) needs for weight syncs, inside SGLang.

In SGLang 0.5.23 each stage runs a loop of its own. In one turn a stage takes requests, hands them on, schedules a batch
and computes it; the next stage does the same with the same requests and batch a little later. As many batches are in
flight as there are stages, and a stage may run ahead of the next one. Three things are missing, which `Pipeline` adds:

- Only the first stage answers a request. Of commands, which arrive while a server generates, a thread collects the
  answers of all stages (`around_command`): a stage that waited for the next one would hold up a batch that this needs.
- The loop ignores a pause, and retracting takes back the requests of one batch alone. Here a stage keeps back what
  changes its state (`_WAITING`) and schedules nothing until no batch is in flight, which is so in the same turn at
  every stage (`around_schedule`). A paused stage goes on to schedule nothing.
- A change of weights has to succeed on all stages or on none. Where no batch is in flight, stages may wait for one
  another: they have passed on the requests of this turn, and need nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.sglang.hooks import Stock, gather, hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_STAGE = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin."
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
# Requests that wait until no batch is in flight, in their order.
_WAITING = frozenset(
    {
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "FlushCacheReqInput",
        "BeginWeightUpdateReqInput",
        "EndWeightUpdateReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
    }
)

# Seconds between two turns of an idle server that has to answer.
_TURN = 0.001


@prepared
class _Outcome(msgspec.Struct):
    """What one stage answers to a request."""

    success: bool
    message: str
    payload: Any = None


class Pipeline:
    """Hooks around SGLang's methods, in the process of one rank."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._releasing = False
        # Requests and this stage's answers, and those that all stages have answered; of a stage's first rank alone.
        self._answers: queue.SimpleQueue[tuple[Any, Any]] | None = None
        self._complete: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._unanswered = 0

    def register(self) -> None:
        hooks = {
            _STAGE + "init_pp_loop_state": self.around_start,
            _SCHEDULER + "process_input_requests": self.around_process,
            _SCHEDULER + "get_next_batch_to_run": self.around_schedule,
            _SCHEDULER + "pause_generation": self.around_pause,
            _SCHEDULER + "maybe_sleep_on_idle": self.around_sleep,
            _UPDATES + "check_weights": self.around_command,
            _UPDATES + "update_weights_from_disk": self.around_load,
        }
        for target, around in hooks.items():
            hook("AROUND", target, around)

    # Answers to commands

    def around_start(self, stock: Stock, scheduler: Any) -> None:
        """Starts the thread that collects answers. All ranks of the server start their loops together."""
        import torch.distributed as dist
        from sglang.srt.runtime_context import get_parallel

        stock(scheduler)
        parallel = get_parallel()
        first = range(0, parallel.pp_size * parallel.tp_size, parallel.tp_size)
        group = dist.new_group([parallel.world_group.ranks[rank] for rank in first], backend="gloo")
        if parallel.tp_rank == 0:
            self._answers = queue.SimpleQueue()
            collect = threading.Thread(target=self._collect, args=(group,), name="megasync-answers", daemon=True)
            collect.start()

    def _collect(self, group: Any) -> None:
        assert self._answers is not None
        while True:
            request, answer = self._answers.get()
            try:
                self._complete.put((request, joined(answer, group)))
            except Exception as error:  # noqa: BLE001 - raised again by the loop, where it ends the server
                self._complete.put((request, error))

    def around_command(self, stock: Stock, manager: Any, request: Any) -> Any:
        """Answers later, for all stages (`around_process`)."""
        answer = stock(manager, request)
        if self._answers is None:
            return answer
        self._answers.put((request, answer))
        self._unanswered += 1
        return None

    def around_sleep(self, stock: Stock, scheduler: Any) -> None:
        """Keeps the loop turning while answers are outstanding. SGLang sleeps for a second, or until a request."""
        if self._unanswered:
            time.sleep(_TURN)
        else:
            stock(scheduler)

    def around_load(self, stock: Stock, manager: Any, request: Any) -> Any:
        """Answers for all stages, which wait for one another."""
        from sglang.srt.runtime_context import get_parallel

        return joined(stock(manager, request), get_parallel().pp_group.cpu_group)

    # Pauses

    def around_process(self, stock: Stock, scheduler: Any, requests: list[Any]) -> None:
        """Keeps back the requests that wait. The loop hands all of them on after this."""
        while not self._complete.empty():
            request, answer = self._complete.get()
            self._unanswered -= 1
            if isinstance(answer, Exception):
                raise answer
            if scheduler.pp_group.is_first_rank:
                scheduler.send_control_output(answer, request)
        if self._releasing:
            stock(scheduler, requests)
            return
        now: list[Any] = []
        for request in requests:
            (self._held if type(request).__name__ in _WAITING else now).append(request)
        stock(scheduler, now)

    def around_schedule(self, stock: Stock, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
        """Schedules nothing while requests wait or the server is paused."""
        if self._held and all(batch is None for batch in scheduler.mbs):
            for batch in (*scheduler.running_mbs, *filter(None, scheduler.last_mbs)):
                # Otherwise finished requests go when the batch is scheduled, and until then the server is not idle.
                batch.filter_batch()
                batch.batch_is_full = False
            held, self._held = self._held, []
            self._releasing = True
            try:
                scheduler.process_input_requests(held)
            finally:
                self._releasing = False
            last_batch = scheduler.last_batch
        if self._held or scheduler._engine_paused:
            # What the loop reads of a plan.
            return SimpleNamespace(batch_to_run=None, running_batch=running_batch)
        return stock(scheduler, running_batch=running_batch, last_batch=last_batch)

    def around_pause(self, stock: Stock, scheduler: Any, request: Any) -> None:
        """Pauses all batches: SGLang retracts the one whose turn it is."""
        if request.mode != "retract":
            stock(scheduler, request)
            return
        prompts = [batch for batch in scheduler.last_mbs if batch is not None and batch.forward_mode.is_extend()]
        batches = [*scheduler.running_mbs, *prompts]
        # Once each: a prompt that is computed in chunks is in several batches.
        scheduler.running_batch.reqs = list({id(each): each for batch in batches for each in batch.reqs}.values())
        scheduler.last_batch = None
        stock(scheduler, request)
        for batch in batches:
            batch.reqs, batch.batch_is_full = [], False
        scheduler.last_mbs = [None] * len(scheduler.last_mbs)


def joined(answer: Any, group: Any) -> Any:
    """One answer for all stages: what each of them returns, and the errors of those that failed."""
    outcome = _Outcome(answer.success, answer.message, getattr(answer, "payload", None))
    gathered = gather(msgspec.msgpack.encode(outcome), group)
    stages = [msgspec.msgpack.decode(message, type=_Outcome) for message in gathered]
    failed = [f"stage {number}: {stage.message}" for number, stage in enumerate(stages) if not stage.success]
    answer.success, answer.message = not failed, "; ".join(failed) or answer.message
    if outcome.payload is not None:
        parts = (part for stage in stages for part in stage.payload or ())
        answer.payload = [msgspec.convert(part, type(outcome.payload[0])) for part in parts]
    return answer
