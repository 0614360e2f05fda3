"""Sessions from outside: programs in any language, container or cluster play the samples of a run.

    POST   /sessions                  claims a sample: its row, a base_url and an api_key; 204 if there is none
    GET    /sessions                  counts
    POST   /sessions/<id>/heartbeat   says that the program lives; requests to the base_url say it too
    POST   /sessions/<id>/reward      closes the session: with a reward, without, or with one that comes "later"
    DELETE /sessions/<id>             gives the sample back

    offered ──claim──▶ open ──reward────────▶ closed ──▶ trajectories
       ▲                │  └──"later"──▶ open to a reward ──reward, or `timeouts.late_reward`──▶ closed
       └── given back, or silent for `timeouts.heartbeat`        past `timeouts.agent`: the sample has failed

The key of the run opens all of these, a session's own api_key only the routes below its base_url. So a program can
start an agent that it does not trust: the agent cannot grade itself.

Invariant: each sample has at most one session at a time, and a session ends once. Before a sample is offered again,
the requests of its last session have ended (`Gateway.session`). The answer to a close is kept, so a close that is sent
again gets the same answer and changes nothing.

    waits          for                                   woken by
    -------------  ------------------------------------  --------------------------------------------------------------
    a claim        a sample                              an offer; the claim's own `wait`
    an offer       a claim                               a claim; the run's watchdog (`timeouts.no_progress`)
    a session      its close                             the close; `timeouts.heartbeat`, `timeouts.agent`
    a late reward  the reward                            the reward; `timeouts.late_reward`
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from aiohttp import web

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import set_within
from megasync.config.schema import GatewayConfig, SamplingConfig, TimeoutConfig
from megasync.errors import DataError, ServerError, raised_as
from megasync.gateway.errors import RequestError
from megasync.gateway.server import Gateway, read_body
from megasync.gateway.session import Session, has_key
from megasync.rollout.workflow import SampleClient, SessionWorkflow
from megasync.trajectory import Trajectory

T = TypeVar("T")

log = logging.getLogger(__name__)

# Sessions of one attempt at a sample. A row that ends every program that plays it must not take all of them.
SESSIONS = 4
# Seconds that a claim may wait, and claims that may wait at once.
LONGEST_WAIT, CLAIMS = 60.0, 4096
# Sessions that have ended whose closes are still answered, the newest ones.
PAST = 16384
# Bytes of a body, which holds a reward and some metrics.
BODY_BYTES = 65536
# Seconds that a sample waits for a claim before a warning says so.
WARN_SECONDS = 60.0

LATER: Literal["later"] = "later"

# How sessions end.
CLOSED, GIVEN_BACK, SILENT, EXPIRED = "closed", "given_back", "silent", "expired"
# The run stopped or has enough samples; the late reward did not come.
UNUSED, UNGRADED = "unused", "ungraded"


@prepared
class Claim(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a claim."""

    # Seconds to wait for a sample.
    wait: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT)] = 20.0


@prepared
class Close(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of a close. Without a reward, the run's reward function scores the last response."""

    reward: float | bool | Literal["later"] | None = None
    metrics: Annotated[
        dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], float], msgspec.Meta(max_length=64)
    ] = {}


@dataclass(frozen=True, slots=True)
class _Past:
    """A session that has ended: how, why no other close is accepted, and the closes that were, with their answers."""

    end: str
    why: str
    closes: list[tuple[Close, dict[str, Any]]]


@dataclass(eq=False, slots=True)
class _Play:
    """A session of a sample, from its offer to its end."""

    client: SampleClient
    session: Session
    # The sample's row as JSON.
    row: bytes
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    # The first close, or None for a sample that was given back.
    end: asyncio.Future[Close | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # The close that follows "later".
    late: asyncio.Future[Close] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # Each close that was accepted, with its answer.
    closes: list[tuple[Close, dict[str, Any]]] = field(default_factory=list[tuple[Close, dict[str, Any]]])

    @property
    def state(self) -> str:
        if not self.claimed.is_set():
            return "offered"
        if not self.end.done():
            return "open"
        close = self.end.result()
        return "waiting" if close is not None and close.reward == LATER and not self.late.done() else "closing"


class ExternalAgents(SessionWorkflow):
    """`rollout(client, sample)` for programs outside: offers each sample, and returns what its session sampled.

    Nobody is admitted before `admit` has named the key. With `score_late`, a session that is not closed in time ends
    with its responses, which the reward function scores; otherwise its sample fails.
    """

    def __init__(
        self,
        config: GatewayConfig,
        sampling: SamplingConfig,
        model: str,
        timeouts: TimeoutConfig,
        *,
        score_late: bool = False,
    ) -> None:
        self._gateway = Gateway(config, sampling, model, self._answer)
        self._model = model
        self._timeouts = timeouts
        self._score_late = score_late
        # A key that nobody knows.
        self._key = secrets.token_urlsafe(32)
        self._numbers = itertools.count()
        # Samples that wait for a claim, in the order in which they were first offered; some are needed no more.
        self._offers: asyncio.PriorityQueue[tuple[int, _Play]] = asyncio.PriorityQueue()
        self._plays: dict[str, _Play] = {}
        self._past: OrderedDict[str, _Past] = OrderedDict()
        self._claims = 0
        self._warned = False
        # Claims so far, and sessions by how they ended.
        self._counts: Counter[str] = Counter()

    @property
    def url(self) -> str:
        """Where programs outside open sessions."""
        return self._gateway.url

    async def open(self) -> None:
        """Starts the gateway. Raises ConfigError when its address cannot be bound."""
        await self._gateway.start()

    def admit(self, key: str) -> None:
        """Lets the holders of this key open sessions."""
        self._key = key

    async def close(self) -> None:
        """Ends the sessions and the server."""
        await self._gateway.close()

    def metrics(self) -> dict[str, float]:
        """The counts by metric name. Those of sessions that are alive end with /inflight."""
        return {
            "rollout/sessions": float(self._counts["claimed"]),
            **{f"rollout/sessions_{end}": float(self._counts[end]) for end in (SILENT, GIVEN_BACK, EXPIRED, UNGRADED)},
            "rollout/sessions/inflight": float(sum(play.claimed.is_set() for play in self._plays.values())),
        }

    # The sample's side

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        """Offers the sample until a program has closed a session of it, and returns the trajectories.

        Raises ServerError when a server failed any request of the session; DataError for a session that is not closed
        in time, for a sample that `SESSIONS` programs have left, and for a row that is no JSON.
        """
        number, row, left = next(self._numbers), _as_json(sample), Counter[str]()
        while left.total() < SESSIONS:
            close, end, session = await self._play(number, client, row)
            if session.failure is not None:
                raise ServerError(f"a request of a session from outside failed: {session.failure}") from session.failure
            if close is not None:
                reward = None if close.reward is None or close.reward == LATER else float(close.reward)
                return client.conversation.trajectories(reward, dict(close.metrics))
            if end == EXPIRED:
                if self._score_late and client.conversation.generations:
                    return client.conversation.trajectories(metrics={"deadline": 1.0})
                raise DataError(
                    f"a session from outside was not closed within {self._timeouts.agent:g} s; raise timeouts.agent, "
                    f"or give the agent less to do"
                )
            if session.refusal is not None:
                # Nobody could go on. The responses are trained as they are: what led here should be unlearned.
                return client.conversation.trajectories(metrics={"template_refused": 1.0})
            left[end] += 1
            client = client.again()
        raise DataError(
            f"{SESSIONS} programs left the sample without closing its session: {left[SILENT]} were silent for "
            f"{self._timeouts.heartbeat:g} s (timeouts.heartbeat), {left[GIVEN_BACK]} gave it back; see their logs"
        )

    async def _play(self, number: int, client: SampleClient, row: bytes) -> tuple[Close | None, str, Session]:
        """One session: its close, if there was one, and how it ended."""
        end, play = UNUSED, None
        try:
            async with self._gateway.session(client) as session:
                play = self._plays[session.id] = _Play(client, session, row)
                self._offers.put_nowait((number, play))
                await self._until_claimed(play)
                end = await self._until_closed(play)
            # It may have been closed after its time, while its requests ended.
            close = play.end.result() if play.end.done() else None
            if close is not None and close.reward == LATER and session.failure is None:
                # If the run stops meanwhile.
                end = UNUSED
                close, end = await self._late_reward(play, close)
            elif close is not None:
                end = CLOSED
            return close, end, session
        finally:
            if play is not None:
                self._remember(play, end)

    async def _until_claimed(self, play: _Play) -> None:
        if not await set_within(play.claimed, WARN_SECONDS) and not self._warned:
            self._warned = True
            log.warning("No program has claimed a sample at %s/sessions for %.0f s", self.url, WARN_SECONDS)
        await play.claimed.wait()

    async def _until_closed(self, play: _Play) -> str:
        loop, session, timeouts = asyncio.get_running_loop(), play.session, self._timeouts
        deadline = loop.time() + timeouts.agent
        while True:
            now = loop.time()
            # A program that waits for an answer lives.
            silent = (now if session.busy else session.seen) + timeouts.heartbeat
            await asyncio.wait({play.end}, timeout=min(silent, deadline) - now)
            if play.end.done():
                return GIVEN_BACK if play.end.result() is None else CLOSED
            if loop.time() >= deadline:
                return EXPIRED
            if not session.busy and loop.time() >= session.seen + timeouts.heartbeat:
                return SILENT

    async def _late_reward(self, play: _Play, first: Close) -> tuple[Close, str]:
        """The close with the late reward; without a reward if none comes in time."""
        await asyncio.wait({play.late}, timeout=self._timeouts.late_reward)
        if not play.late.done():
            return Close(None, first.metrics), UNGRADED
        last = play.late.result()
        return Close(last.reward, {**first.metrics, **last.metrics}), CLOSED

    def _remember(self, play: _Play, end: str) -> None:
        del self._plays[play.session.id]
        if not play.claimed.is_set():
            return
        self._counts[end] += 1
        timeouts = self._timeouts
        why = {
            CLOSED: "the session was closed with another body",
            GIVEN_BACK: "the session was given back, and its sample was offered again",
            SILENT: f"the session was silent for {timeouts.heartbeat:g} s (timeouts.heartbeat), so its sample was "
            f"offered again",
            EXPIRED: f"the session was not closed within {timeouts.agent:g} s (timeouts.agent)",
            UNUSED: "the run does not need the session's sample anymore",
            UNGRADED: f"the reward did not come within {timeouts.late_reward:g} s (timeouts.late_reward), so the "
            f"reward function scored the sample, or it was dropped",
        }[end]
        self._past[play.session.id] = _Past(end, why, play.closes)
        if len(self._past) > PAST:
            self._past.popitem(last=False)

    # The programs' side

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request below /sessions. Nothing is looked up or read before the key is verified."""
        if not has_key(request.headers, self._key):
            raise RequestError(401, "invalid key; pass the key of the run's sessions as `Authorization: Bearer KEY`")
        name, _, what = request.path.removeprefix("/sessions").removeprefix("/").partition("/")
        match request.method, name, what:
            case "POST", "", "":
                return await self._claim(request)
            case "GET", "", "":
                return _json(self._overview())
            case "POST", _, "heartbeat":
                play = self._playing(name, "open", "waiting")
                play.session.show_life()
                return _json({"state": play.state})
            case "POST", _, "reward":
                return _json(self._close(name, _decoded(await _small_body(request), Close)))
            case "DELETE", _, "":
                return _json(self._give_back(name))
        raise RequestError(404, f"{request.method} {request.path} is not supported", code="not_supported")

    async def _claim(self, request: web.BaseRequest) -> web.StreamResponse:
        claim = _decoded(await _small_body(request), Claim)
        if self._claims == CLAIMS:
            raise RequestError(429, f"{CLAIMS} claims wait for a sample already; claim again later")
        self._claims += 1
        try:
            async with asyncio.timeout(claim.wait):
                play = await self._offered()
        except TimeoutError:
            return web.Response(status=204, headers={"Retry-After": "1"})
        finally:
            self._claims -= 1
        self._warned = False
        play.claimed.set()
        play.session.show_life()
        self._counts["claimed"] += 1
        # The address by which the program reached the gateway leads there, through whatever forwards it.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else "http"
        session, base = play.session, f"{scheme}://{request.host}/s/{play.session.id}/v1"
        return _json(
            {
                "id": session.id,
                "base_url": base,
                "api_key": session.key,
                "model": self._model,
                "sample": orjson.Fragment(play.row),
                "seconds": self._timeouts.agent,
                "heartbeat_seconds": self._timeouts.heartbeat,
            }
        )

    async def _offered(self) -> _Play:
        """Takes the oldest sample that is still needed."""
        while True:
            _, play = await self._offers.get()
            if self._plays.get(play.session.id) is play:
                return play

    def _close(self, name: str, close: Close) -> dict[str, Any]:
        play = self._plays.get(name)
        closes = play.closes if play is not None else self._ended(name).closes
        for earlier, answer in closes:
            if earlier == close:
                return answer
        play = self._playing(name, "open", "waiting")
        later = close.reward == LATER
        if play.state == "waiting":
            if later:
                raise RequestError(409, "the session waits for its reward already; send the reward")
            play.late.set_result(close)
            answer = {"state": CLOSED}
        elif play.session.failure is None and not play.client.conversation.generations:
            raise RequestError(
                400,
                "no request of the session has been answered, so there is nothing to train; send requests to its "
                "base_url with its api_key, or give it back with DELETE",
                code="nothing_sampled",
            )
        else:
            play.end.set_result(close)
            # A failed server is not the agent's fault.
            answer = {"state": "repeated" if play.session.failure is not None else "waiting" if later else CLOSED}
        closes.append((close, answer))
        return answer

    def _give_back(self, name: str) -> dict[str, Any]:
        past = self._past.get(name)
        if past is None or past.end != GIVEN_BACK:
            self._playing(name).end.set_result(None)
        return {"state": GIVEN_BACK}

    def _playing(self, name: str, *states: str) -> _Play:
        """The session, which is in one of these states, by default open. Raises RequestError."""
        play = self._plays.get(name)
        # Nobody outside knows the name of one that is only offered.
        if play is None or play.state == "offered":
            past = self._ended(name)
            raise RequestError(409 if past.end == CLOSED else 410, past.why, code=f"session_{past.end}")
        if play.state not in (states or ("open",)):
            raise RequestError(409, f"the session is {play.state}, not open", code="session_closed")
        return play

    def _ended(self, name: str) -> _Past:
        past = self._past.get(name)
        if past is None:
            raise RequestError(
                404,
                f"there is no session {name!r}: it never existed, ended long ago, or ended with its worker, and its "
                f"sample is offered again",
                code="session_not_found",
            )
        return past

    def _overview(self) -> dict[str, int]:
        states = Counter(play.state for play in self._plays.values())
        return {
            **{state: states[state] for state in ("offered", "open", "waiting")},
            "claims": self._claims,
            **{end: self._counts[end] for end in ("claimed", CLOSED, GIVEN_BACK, SILENT, EXPIRED, UNUSED, UNGRADED)},
        }


def _as_json(sample: Mapping[str, Any]) -> bytes:
    with raised_as(DataError, "a row cannot be sent to programs outside", "leave that column out", of=TypeError):
        return orjson.dumps(sample, option=orjson.OPT_SERIALIZE_NUMPY)


async def _small_body(request: web.BaseRequest) -> bytes:
    body = await read_body(request)
    if len(body) > BODY_BYTES:
        raise RequestError(413, f"the body has {len(body)} bytes; at most {BODY_BYTES} are read", code="body_too_large")
    return body


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except RecursionError:
        raise RequestError(400, "the body is nested too deep", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(400, f"the body cannot be used: {error}", code="invalid_json") from None


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
