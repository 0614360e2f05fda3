"""Random histories of programs outside, against a model of what each may do and of what each sample becomes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from passing_time import pass_time
from waits import until

from megasync.config.schema import GatewayConfig, SamplingConfig, TimeoutConfig
from megasync.errors import DataError
from megasync.gateway import ExternalAgents
from megasync.gateway.errors import RequestError
from megasync.gateway.external import SESSIONS

KEY = "the-key-of-the-run"
HEARTBEAT, LATE, AGENT = 60.0, 1e5, 1e9
SAMPLES = 3

REWARDS = st.sampled_from(["later", 0.0, "later", None])
STEPS = st.one_of(
    st.just(("claim",)),
    st.tuples(st.just("close"), st.integers(0, 5), REWARDS),
    st.tuples(st.just("give back"), st.integers(0, 5)),
    st.sampled_from([("silence",), ("no late reward",)]),
)


@dataclass
class Known:
    """What the model knows of a session."""

    id: str
    sample: int
    state: str = "open"
    answers: dict = field(default_factory=dict)


class Model:
    """A reference: samples are offered, in their order, while no session of theirs is alive and none was closed."""

    def __init__(self) -> None:
        self.sessions: list[Known] = []
        self.lost: defaultdict[int, int] = defaultdict(int)
        self.rewards: dict[int, float | None] = {}

    def offered(self) -> list[int]:
        busy = {known.sample for known in self.sessions if known.state in ("open", "waiting")}
        ended = {*self.rewards, *(sample for sample in self.lost if self.lost[sample] == SESSIONS)}
        return [sample for sample in range(SAMPLES) if sample not in busy | ended]

    def lose(self, known: Known, state: str) -> None:
        known.state = state
        self.lost[known.sample] += 1

    def close(self, known: Known, reward) -> tuple[int, str]:
        """The status and state that a close is answered with."""
        if reward in known.answers:
            return 200, known.answers[reward]
        if known.state == "closed" or (known.state == "waiting" and reward == "later"):
            return 409, ""
        if known.state not in ("open", "waiting"):
            return 410, ""
        known.state = known.answers[reward] = "waiting" if reward == "later" else "closed"
        if known.state == "closed":
            self.rewards[known.sample] = reward
        return 200, known.state

    def give_back(self, known: Known) -> int:
        if known.state == "open":
            self.lose(known, "given_back")
        return 200 if known.state == "given_back" else 409 if known.state in ("waiting", "closed") else 410

    def silence(self) -> None:
        for known in self.sessions:
            if known.state == "open":
                self.lose(known, "silent")

    def no_late_reward(self) -> None:
        self.silence()
        for known in self.sessions:
            if known.state == "waiting":
                known.state = "ungraded"
                self.rewards[known.sample] = None


class Client:
    """A sample whose agent has had an answer."""

    def __init__(self) -> None:
        self.conversation = SimpleNamespace(generations=[1], trajectories=lambda reward, metrics: reward)

    def again(self) -> Client:
        return Client()


async def asked(agents: ExternalAgents, method: str, path: str, **body) -> tuple[int, dict]:
    async def read() -> bytes:
        return orjson.dumps(body)

    headers = {"Authorization": f"Bearer {KEY}"}
    content = SimpleNamespace(is_eof=lambda: True)
    request = SimpleNamespace(method=method, path=path, headers=headers, host="here", content=content, read=read)
    try:
        answer = await agents._answer(request)
    except RequestError as error:
        return error.status, {}
    return answer.status, orjson.loads(answer.body) if answer.body else {}


async def play(steps) -> None:
    timeouts = TimeoutConfig(heartbeat=HEARTBEAT, late_reward=LATE, agent=AGENT)
    agents, model = ExternalAgents(GatewayConfig(), SamplingConfig(), "tiny", timeouts), Model()
    agents.admit(KEY)
    await agents.open()
    samples = [asyncio.create_task(agents(Client(), {"n": n})) for n in range(SAMPLES)]

    def settled() -> bool:
        live = {play.session.id for play in agents._plays.values() if play.claimed.is_set()}
        known = {known.id for known in model.sessions if known.state in ("open", "waiting")}
        return live == known and len(agents._plays) - len(live) == len(model.offered())

    try:
        for step in steps:
            await until(settled)
            for _ in range(10):
                # Until every sample has come to its next wait: what it waits for begins before time passes.
                await asyncio.sleep(0)
            match step:
                case ("claim",):
                    status, session = await asked(agents, "POST", "/sessions", wait=0)
                    expected = model.offered()[:1]
                    assert (status, [session["sample"]["n"]] if session else []) == (200 if expected else 204, expected)
                    if session:
                        assert session["id"] not in {known.id for known in model.sessions}
                        model.sessions.append(Known(session["id"], session["sample"]["n"]))
                case ("close", number, reward) if model.sessions:
                    known = model.sessions[number % len(model.sessions)]
                    status, answer = await asked(agents, "POST", f"/sessions/{known.id}/reward", reward=reward)
                    assert (status, answer.get("state", "")) == model.close(known, reward)
                case ("give back", number) if model.sessions:
                    known = model.sessions[number % len(model.sessions)]
                    status, _ = await asked(agents, "DELETE", f"/sessions/{known.id}")
                    assert status == model.give_back(known)
                case ("silence",):
                    model.silence()
                    pass_time(HEARTBEAT)
                case ("no late reward",):
                    model.no_late_reward()
                    pass_time(LATE)
        await until(settled)
        for number, sample in enumerate(samples):
            if model.lost[number] == SESSIONS:
                assert isinstance((await asyncio.gather(sample, return_exceptions=True))[0], DataError)
            elif number in model.rewards:
                assert await sample == model.rewards[number]
            else:
                assert not sample.done()
    finally:
        for sample in samples:
            sample.cancel()
        await asyncio.gather(*samples, return_exceptions=True)
        await agents.close()
    assert not agents._plays


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=12, max_size=24))
def test_each_sample_has_one_session_at_a_time_and_becomes_what_its_one_close_said(steps):
    asyncio.run(play([("claim",)] * SAMPLES + steps))
