"""One server of the fleet: its actor, the process in it, and the loops that keep `ServerHealth` informed.

    start ──▶ look: alive? · probe · request · check ──(dead)──▶ bury ──▶ wait ──▶ start again, as another server at another URL
                                                                  └──▶ retired

`live` is the whole life; it ends when the slot is retired. Whoever owns the slot hears of each transition by `on_change`.
A dead process is known at once from its owner; what is alive and says nothing only from streaks of unanswered calls,
with deadlines that a server in a long prefill or paused for a weight sync meets easily.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import orjson

from megasync.config.schema import HealthConfig
from megasync.errors import InvalidAnswer, MegasyncError, ServerError
from megasync.rollout.event_stream import events
from megasync.rollout.inflight import ServerLoad
from megasync.rollout.partials import PartialResponse
from megasync.serving.answers import AnsweredError, Asked, read_generated, read_scored
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerHealth, ServerState

log = logging.getLogger(__name__)

# Lines of a dead process's log that go into the reason.
TAIL_LINES = 30
# Seconds between two looks at the process itself, and for the actor's answer to that.
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 30.0
# Seconds between two checks of a server's answers, and the least between two when there is doubt.
CHECK_SECONDS = 60.0
DOUBT_SECONDS = 1.0
# Any vocabulary has these. Two tokens: what does not end shows only behind the first one.
CHECK = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
}
STREAMED_CHECK = CHECK | {"stream": True}
# Seconds between two looks at a server that is to finish its requests.
_DRAIN_POLL = 0.2


class ServerProcess(Protocol):
    """A server's process, wherever it runs. Every call may raise MegasyncError."""

    async def start(self, timeout: float) -> str:
        """Starts and waits; the URL."""

    async def alive(self) -> bool: ...

    async def tail(self, lines: int) -> str: ...

    async def visible_devices(self) -> str:
        """The GPUs that it runs on, as CUDA_VISIBLE_DEVICES has them."""

    async def stop(self, timeout: float) -> None:
        """Ends the process and what holds it, whatever state they are in. Does not raise."""


class Judge(Protocol):
    """Compares a server with its peers. `reported` and `checked` say why the server must be restarted, or None.

    `asked` bounds the answer to `CHECK`; `streams` says whether servers send the tokens of a response piece by piece.
    """

    asked: Asked
    streams: bool

    def reported(self, slot: int, load: ServerLoad) -> str | None: ...
    def checked(self, slot: int, problem: str | None) -> str | None: ...
    def unanswered(self, slot: int) -> None: ...


class ServerSlot:
    """`control` is that of the server that runs here now; None while none does."""

    def __init__(
        self,
        index: int,
        health: ServerHealth,
        make_process: Callable[[], ServerProcess],
        config: HealthConfig,
        start_timeout: float,
        stop_timeout: float,
        reach: Callable[[str], ServerControl],
        on_change: Callable[[ServerSlot, ServerState], None],
        name: str = "server",
        judge: Judge | None = None,
    ) -> None:
        """`reach` makes the control of the server at a URL. `on_change` is told of each transition with the state before it, while `control` still is what it was. With a `judge` the server's answers are checked while it serves."""
        self.index = index
        self.health = health
        self.control: ServerControl | None = None
        self.load: ServerLoad | None = None
        self.starts = 0
        self._make_process = make_process
        self._config = config
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._reach = reach
        self._on_change = on_change
        self._process: ServerProcess | None = None
        self._shown = health.state
        self._name = f"{name} {index}"
        self._judge = judge
        self._doubted = asyncio.Event()
        self._throughput = 0.0
        self._wake = asyncio.Event()

    @property
    def url(self) -> str:
        """Empty while no server runs here."""
        return self.control.url if self.control is not None else ""

    def note(self, event: Callable[..., None], *arguments: str) -> None:
        """Tells the health machine of an event, one of its methods, and the owner of the transition if it is one."""
        event(*arguments)
        self._show()

    def _show(self) -> None:
        state = self.health.state
        if state is self._shown:
            return
        before, self._shown = self._shown, state
        level = (
            logging.INFO
            if state in (ServerState.HEALTHY, ServerState.STALE, ServerState.RESTARTING)
            else logging.WARNING
        )
        log.log(level, "%s: %s -> %s %s %s", self._name, before, state, self.url, self.health.reason)
        self._wake.set()
        self._on_change(self, before)

    async def start(self) -> None:
        """Starts the process. Raises MegasyncError, and leaves nothing running, when it does not serve."""
        self.starts += 1
        self._process = self._make_process()
        try:
            url = await self._process.start(self._start_timeout)
        except BaseException:
            await self._end_process()
            raise
        self.control = self._reach(url)
        self.note(self.health.started)

    async def live(self) -> None:
        """Watches the started server, and starts it again whenever it died, until the slot is retired."""
        while True:
            if self.health.up:
                await self._watch()
            await self._bury()
            if self.health.state is ServerState.RETIRED:
                return
            wait = self.health.next_restart()
            self._show()
            if wait is None:
                return
            await asyncio.sleep(wait)
            self.note(self.health.begin_restart)
            if self.health.state is ServerState.RETIRED:
                return
            try:
                await self.start()
            except MegasyncError as error:
                self.note(self.health.died, str(error))

    async def visible_devices(self) -> str:
        """Of the running process. Raises MegasyncError when there is none."""
        if self._process is None:
            raise ServerError(f"{self._name} does not run")
        return await self._process.visible_devices()

    def doubt(self) -> None:
        """Somebody got an answer that makes no sense, perhaps from this server: its next check is due now."""
        self._doubted.set()

    async def drain(self, seconds: float) -> bool:
        """Aborts what runs here, which goes on elsewhere from its partial tokens; False when something is left."""
        control = self.control
        deadline = asyncio.get_running_loop().time() + seconds
        while control is not None and asyncio.get_running_loop().time() < deadline:
            left = max(_DRAIN_POLL, deadline - asyncio.get_running_loop().time())
            try:
                # Repeated: a request that the router sent before it let go of the server may arrive only now.
                await control.post("/abort_request", {"abort_all": True}, timeout=left)
                await asyncio.sleep(_DRAIN_POLL)
                load = ServerLoad.parse(await control.get("/v1/loads?include=core", timeout=left))
            except MegasyncError:
                return False
            if load.running + load.waiting == 0:
                return True
        return False

    async def close(self) -> None:
        """Ends the process; the slot is not used again."""
        await self._bury()

    async def _watch(self) -> None:
        """Returns when the server no longer counts as up."""
        control = self.control
        looks = [
            asyncio.create_task(self._look_at_process(), name=f"process of {self._name}"),
            asyncio.create_task(self._probe(control), name=f"probe of {self._name}"),
            asyncio.create_task(self._request(control), name=f"request to {self._name}"),
            asyncio.create_task(self._until_down(), name=f"end of {self._name}"),
        ]
        if self._judge is not None:
            looks.append(asyncio.create_task(self._check(control, self._judge), name=f"check of {self._name}"))
        try:
            done, _ = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _until_down(self) -> None:
        while self.health.up:
            self._wake.clear()
            await self._wake.wait()

    async def _look_at_process(self) -> None:
        while True:
            try:
                alive = await self._process.alive()
            except MegasyncError as error:
                self.note(self.health.died, f"its actor is gone: {error}")
                return
            if not alive:
                self.note(self.health.died, f"its process has ended. Last lines of its log:\n{await self.last_words()}")
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def last_words(self) -> str:
        try:
            return await self._process.tail(TAIL_LINES)
        except MegasyncError as error:
            return f"(unknown: {error})"

    async def _probe(self, control: ServerControl) -> None:
        """Asks the HTTP process for the scheduler's last report, which also is what the in-flight cap goes by."""
        while True:
            try:
                answer = await control.get("/v1/loads?include=core", timeout=self._config.probe_timeout)
                self.load = replace(ServerLoad.parse(answer), throughput=self._throughput)
            except ServerError as error:
                self.note(self.health.probe_failed, f"{type(error).__name__}: {error}")
            else:
                self.note(self.health.probe_ok)
                if self._judge is not None and self.health.serves:
                    self._judged(self._judge.reported(self.index, self.load))
            await asyncio.sleep(self._config.probe_seconds)

    async def _request(self, control: ServerControl) -> None:
        """Asks what only the scheduler knows; it answers between two batches, also while it is paused."""
        while True:
            await asyncio.sleep(self._config.request_seconds)
            try:
                self._throughput = throughput(await control.get("/server_info", timeout=self._config.request_timeout))
            except ServerError as error:
                self.note(self.health.request_failed, str(error))
            else:
                self.note(self.health.request_ok)

    async def _check(self, control: ServerControl, judge: Judge) -> None:
        """Asks for two tokens and the log-probs of a few, as any request would."""
        while True:
            try:
                await asyncio.wait_for(self._doubted.wait(), CHECK_SECONDS)
            except TimeoutError:
                pass
            self._doubted.clear()
            # Paused, it would not answer; what it holds is checked after the sync.
            if self._settled and await self._check_once(control, judge):
                # Soon again: one bad answer decides nothing.
                await asyncio.sleep(DOUBT_SECONDS)
                self._doubted.set()
            await asyncio.sleep(DOUBT_SECONDS)

    async def _check_once(self, control: ServerControl, judge: Judge) -> bool:
        """Whether it is to be asked again soon."""
        owes, syncs = self._owes_answers, self.health.syncs
        try:
            problem = await self._problem(control, judge)
        except CheckAborted:
            return True
        except ServerError as error:
            if not self._settled or self.health.syncs != syncs:
                return False
            if not (owes and self._owes_answers):
                log.debug("%s: its answers could not be checked: %s", self._name, error)
                judge.unanswered(self.index)
                return True
            problem = f"it answers probes and its queue is empty, but it does not answer the check: {error}"
        if not self._settled:
            return False
        if problem:
            log.warning("%s: its answers make no sense: %s", self._name, problem)
        self._judged(judge.checked(self.index, problem))
        return problem is not None

    @property
    def _settled(self) -> bool:
        """It serves, and no weights are on their way into it."""
        return self.health.serves and not self.health.syncing

    @property
    def _owes_answers(self) -> bool:
        """Nothing excuses silence: its probes and requests are answered, and nothing waits in its queue."""
        return self.health.state is ServerState.HEALTHY and self.load is not None and self.load.waiting == 0

    async def _problem(self, control: ServerControl, judge: Judge) -> str | None:
        """What is wrong with its answer to `CHECK`. Raises ServerError where there is none in time, CheckAborted."""
        seconds, clock = self._config.request_timeout, asyncio.get_running_loop().time
        answer = CheckAnswer(judge.asked)
        try:
            if not judge.streams:
                answer.add(orjson.dumps(await control.post("/generate", CHECK, seconds)))
                return answer.problem()
            async with asyncio.timeout(seconds) as deadline, control.stream("/generate", STREAMED_CHECK) as response:
                async for piece in events(response, judge.asked.most_bytes):
                    answer.add(piece)
                    # It has begun. A stream without an end is told by its empty pieces, which may come slowly.
                    deadline.reschedule(clock() + max(seconds, CHECK_SECONDS))
                return answer.problem()
        except TimeoutError:
            raise ServerError(f"no complete answer to a check within its time, after {answer.tokens} tokens") from None
        except (InvalidAnswer, AnsweredError) as error:
            return str(error)

    def _judged(self, verdict: str | None) -> None:
        if verdict is not None:
            self.note(self.health.mark_dead, verdict)

    async def _bury(self) -> None:
        control, self.control, self.load, self._throughput = self.control, None, None, 0.0
        if control is not None:
            await control.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop(self._stop_timeout)


def throughput(info: Any) -> float:
    """Tokens a second over the last decoding steps, from `/server_info`; 0 where it does not say."""
    try:
        return float(sum(rank["last_gen_throughput"] for rank in info["internal_states"]))
    except (KeyError, TypeError, ValueError):
        return 0.0


class CheckAborted(Exception):
    """Whoever aborted all requests of the server aborted its check too."""


class CheckAnswer:
    """An answer to `CHECK` as it arrives, read as the client reads answers, and its scores as the parity check does."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._parts = PartialResponse()
        self._parts.begin_request(asked.tokens)
        self._last = b""
        self._finished = False

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return len(self._parts.token_ids)

    def add(self, piece: bytes) -> None:
        """Takes a piece, or the whole answer. Raises InvalidAnswer, AnsweredError, CheckAborted."""
        generated = read_generated(piece, self._asked)
        self._finished = self._parts.add(generated)
        self._last = piece
        if generated.finish is not None and generated.finish.type == "abort":
            if generated.finish.status_code:
                raise AnsweredError(generated.finish.status_code, generated.finish.message)
            raise CheckAborted

    def problem(self) -> str | None:
        """What is wrong with it, now that no more comes. Raises InvalidAnswer."""
        if not self._finished:
            return "it has no finish_reason"
        read_scored(orjson.loads(self._last), CHECK["input_ids"])
        return None


def nonsense(answer: Any, asked: Asked) -> str | None:
    """Why the client would refuse a whole answer to `CHECK`, or the parity check its scores.

    Servers write NaN as null.
    """
    check = CheckAnswer(asked)
    try:
        check.add(orjson.dumps(answer))
        return check.problem()
    except (InvalidAnswer, AnsweredError) as error:
        return str(error)
