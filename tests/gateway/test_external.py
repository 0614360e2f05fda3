"""Sessions from outside: claims, closes, late rewards, programs that vanish, and what the unauthorised learn."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from gateway_rig import HI, openai
from mutations import SEEDS, mutated
from passing_time import pass_time
from waits import until

from megasync.config.schema import GatewayConfig, TimeoutConfig
from megasync.errors import DataError, ServerError
from megasync.gateway import ExternalAgents, external
from megasync.rollout.partials import PartialResponses

KEY = "the-key-of-the-run"
HEARTBEAT, AGENT, LATE = 60.0, 1500.0, 120.0


class Outside:
    """A run's samples, and a program outside that knows the run's key. `offer` begins a sample."""

    def __init__(self, rig, agents: ExternalAgents, http: httpx.AsyncClient) -> None:
        self.rig, self.agents, self.http = rig, agents, http
        self.samples: list[asyncio.Task] = []
        self.partials = PartialResponses()

    def offer(self, **row) -> asyncio.Task:
        responses = self.partials.sample(f"0:{len(self.samples)}", 0)
        sample = asyncio.create_task(self.agents(self.rig.sample_client(responses=responses), row))
        self.samples.append(sample)
        return sample

    async def claim(self, **body) -> dict:
        answer = await self.http.post("/sessions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def claimed(self, **row) -> tuple[asyncio.Task, dict]:
        sample = self.offer(**row)
        return sample, await self.claim()

    async def say(self, session: dict, text: str = "x", **message) -> None:
        """One request of the agent, which the model answers with this text."""
        self.rig.write(text)
        async with openai(session["base_url"], session["api_key"]) as client:
            reply = await client.chat.completions.create(model=session["model"], messages=[message] if message else HI)
        assert reply.choices[0].message.content == text

    async def close(self, session: dict, **body) -> httpx.Response:
        return await self.http.post(f"/sessions/{session['id']}/reward", json=body)

    async def give_back(self, session: dict) -> httpx.Response:
        return await self.http.delete(f"/sessions/{session['id']}")

    async def counts(self) -> dict:
        return (await self.http.get("/sessions")).json()


@pytest.fixture
async def outside(rig):
    async with make_outside(rig) as made:
        yield made


@asynccontextmanager
async def make_outside(rig):
    timeouts = TimeoutConfig(heartbeat=HEARTBEAT, agent=AGENT, late_reward=LATE)
    agents = ExternalAgents(GatewayConfig(), rig.sampling, "tiny", timeouts)
    await agents.open()
    agents.admit(KEY)
    async with httpx.AsyncClient(base_url=agents.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20.0) as http:
        made = Outside(rig, agents, http)
        try:
            yield made
        finally:
            for sample in made.samples:
                sample.cancel()
            await asyncio.gather(*made.samples, return_exceptions=True)
            await agents.close()


async def test_a_program_gets_the_row_plays_and_closes_with_a_reward_and_metrics(outside):
    sample, session = await outside.claimed(question="who?", answer=[1, 2])
    assert session["sample"] == {"question": "who?", "answer": [1, 2]}
    assert (session["model"], session["seconds"], session["heartbeat_seconds"]) == ("tiny", AGENT, HEARTBEAT)
    await outside.say(session, "hello")
    assert (await outside.close(session, reward=0.5, metrics={"found": 3})).json() == {"state": "closed"}
    (trajectory,) = await sample
    assert outside.rig.tokenizer.decode(trajectory.response_ids) == "hello<eos>"
    assert (trajectory.reward, trajectory.metrics["found"]) == (0.5, 3.0)
    assert (await outside.counts())["closed"] == 1


@pytest.mark.parametrize(("reward", "given"), [(None, None), (True, 1.0), (-2, -2.0), (1e300, 1e300)])
async def test_a_reward_may_be_any_finite_number_or_left_to_the_reward_function(outside, reward, given):
    sample, session = await outside.claimed()
    await outside.say(session)
    await outside.close(session, reward=reward)
    assert (await sample)[0].reward == given


async def test_without_a_body_the_reward_function_scores(outside):
    sample, session = await outside.claimed()
    await outside.say(session)
    assert (await outside.http.post(f"/sessions/{session['id']}/reward")).status_code == 200
    assert (await sample)[0].reward is None


@pytest.mark.parametrize(
    "body",
    [
        '{"reward": NaN}',
        '{"reward": 1e999}',
        '{"reward": "1"}',
        '{"reward": [1]}',
        '{"reward": 1' + "0" * 400 + "}",
        '{"rewards": 1}',
        '{"metrics": {"": 1}}',
        '{"metrics": {"x": "1"}}',
        '{"metrics": {"x": null}}',
        '{"metrics": {"' + "x" * 65 + '": 1}}',
        json.dumps({"metrics": {str(n): n for n in range(65)}}),
        "[" * 100_000,
        '{"metrics": ' + "[" * 50_000,
        b"\xff",
        " " * 65_537,
        "null",
    ],
)
async def test_a_bad_close_is_refused_and_the_session_stays_open(outside, body):
    sample, session = await outside.claimed()
    await outside.say(session)
    refused = await outside.http.post(f"/sessions/{session['id']}/reward", content=body)
    assert refused.status_code in (400, 413)
    assert refused.json()["error"]["message"]
    assert (await outside.close(session, reward=1)).status_code == 200
    assert (await sample)[0].reward == 1.0


@pytest.mark.parametrize("body", ['{"wait": -1}', '{"wait": 61}', '{"wait": "1"}', '{"sample": {}}', "[]", "{"])
async def test_a_bad_claim_is_refused_and_takes_no_sample(outside, body):
    outside.offer()
    assert (await outside.http.post("/sessions", content=body)).status_code == 400
    await outside.claim()


@pytest.mark.parametrize("seeds", SEEDS)
async def test_no_change_of_a_claim_or_a_close_is_an_internal_error(outside, seeds):
    for seed in seeds:
        chance, _ = random.Random(seed), outside.offer(n=seed)
        claim = json.dumps(mutated({"wait": 0.0}, chance)).encode()
        answer = await outside.http.post("/sessions", content=claim)
        assert answer.status_code in (200, 400), f"seed {seed}: {claim!r}"
        session = answer.json() if answer.status_code == 200 else await outside.claim()
        await outside.say(session)
        close = json.dumps(mutated({"reward": 0.5, "metrics": {"a": 1, "b": 0.5}}, chance)).encode()
        status = (await outside.http.post(f"/sessions/{session['id']}/reward", content=close)).status_code
        assert status in (200, 400), f"seed {seed}: {close!r}"
        if status == 400:
            assert (await outside.close(session, reward=0)).status_code == 200
        await outside.samples[-1]


async def test_a_claim_waits_for_a_sample_and_is_answered_without_one_after_its_wait(outside):
    none = await outside.http.post("/sessions", json={"wait": 0})
    assert (none.status_code, none.headers["Retry-After"], none.content) == (204, "1", b"")
    claim = asyncio.create_task(outside.claim(wait=60))
    await until(lambda: outside.agents._claims)
    outside.offer(n=1)
    assert (await claim)["sample"] == {"n": 1}


async def test_a_claim_whose_program_has_gone_takes_no_sample(outside):
    claim = asyncio.create_task(outside.claim(wait=60))
    await until(lambda: outside.agents._claims)
    claim.cancel()
    await until(lambda: not outside.agents._claims)
    outside.offer(n=1)
    assert (await outside.claim())["sample"] == {"n": 1}


async def test_more_claims_than_may_wait_are_told_to_come_again(outside, monkeypatch):
    monkeypatch.setattr(external, "CLAIMS", 1)
    claim = asyncio.create_task(outside.claim(wait=60))
    await until(lambda: outside.agents._claims)
    assert (await outside.http.post("/sessions")).status_code == 429
    outside.offer()
    await claim


async def test_a_sample_that_the_run_needs_no_more_is_not_claimed(outside):
    outside.offer(n=1).cancel()
    outside.offer(n=2)
    assert (await outside.claim())["sample"] == {"n": 2}


async def test_a_late_reward_is_taken_after_the_session_has_ended(outside):
    sample, session = await outside.claimed()
    await outside.say(session)
    for _ in range(2):
        assert (await outside.close(session, reward="later", metrics={"a": 1, "b": 1})).json() == {"state": "waiting"}
    await until(lambda: not outside.agents._gateway._sessions)
    assert (await outside.counts())["waiting"] == 1
    assert (await outside.close(session, reward="later")).status_code == 409
    assert (await outside.give_back(session)).status_code == 409
    for _ in range(2):
        assert (await outside.close(session, reward=0.25, metrics={"b": 2})).json() == {"state": "closed"}
    (trajectory,) = await sample
    assert trajectory.reward == 0.25
    assert (trajectory.metrics["a"], trajectory.metrics["b"]) == (1.0, 2.0)
    assert (await outside.close(session, reward="later", metrics={"a": 1, "b": 1})).json() == {"state": "waiting"}


async def test_a_close_before_any_answer_is_refused_with_the_fix(outside):
    sample, session = await outside.claimed()
    refused = await outside.close(session, reward=1)
    assert refused.status_code == 400
    assert "base_url" in refused.text and "DELETE" in refused.text
    await outside.say(session)
    await outside.close(session, reward=1)
    await sample


async def test_a_sample_that_is_given_back_goes_to_another_program_with_the_same_responses(outside):
    sample, session = await outside.claimed(n=1)
    await outside.say(session, "kept")
    outside.offer(n=2)
    for _ in range(2):
        assert (await outside.give_back(session)).json() == {"state": "given_back"}
    refused = await outside.close(session, reward=1)
    assert (refused.status_code, "offered again" in refused.text) == (410, True)
    # Before those that were offered later.
    again = await outside.claim()
    assert again["sample"] == {"n": 1}
    assert again["id"] != session["id"] and again["api_key"] != session["api_key"]
    requests = len(outside.rig.fake.requests)
    async with openai(again["base_url"], again["api_key"]) as client:
        await client.chat.completions.create(model="m", messages=HI)
    assert len(outside.rig.fake.requests) == requests
    await outside.close(again, reward=1)
    (trajectory,) = await sample
    assert outside.rig.tokenizer.decode(trajectory.response_ids) == "kept<eos>"
    assert (trajectory.reward, trajectory.metrics["turns"]) == (1.0, 1.0)


async def test_a_silent_program_loses_its_sample_to_another_and_nothing_of_it_is_trained(outside):
    sample, session = await outside.claimed()
    await outside.say(session, "lost", role="user", content="hello")
    pass_time(HEARTBEAT)
    again = await outside.claim()
    await outside.say(again, "kept")
    await outside.close(again, reward=1)
    (trajectory,) = await sample
    assert outside.rig.tokenizer.decode(trajectory.response_ids) == "kept<eos>"
    refused = await outside.close(session, reward=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_silent")
    assert "timeouts.heartbeat" in refused.text
    assert outside.agents.metrics() == {
        "rollout/sessions": 2.0,
        "rollout/sessions_silent": 1.0,
        "rollout/sessions_given_back": 0.0,
        "rollout/sessions_expired": 0.0,
        "rollout/sessions_ungraded": 0.0,
        "rollout/sessions/inflight": 0.0,
    }


async def test_heartbeats_and_requests_keep_a_session_alive_until_its_deadline(outside):
    sample, session = await outside.claimed()
    for _ in range(3):
        pass_time(HEARTBEAT - 10)
        assert (await outside.http.post(f"/sessions/{session['id']}/heartbeat")).json() == {"state": "open"}
        pass_time(HEARTBEAT - 10)
        await outside.say(session)
    assert not sample.done()
    pass_time(AGENT)
    with pytest.raises(DataError, match=r"was not closed within 1500 s; raise timeouts\.agent"):
        await sample
    refused = await outside.close(session, reward=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_expired")


async def test_a_program_that_waits_for_an_answer_is_not_silent(outside):
    sample, session = await outside.claimed()
    await outside.rig.gate.close(1.0)
    playing = asyncio.create_task(outside.say(session))
    await until(lambda: outside.rig.gate._waiting)
    pass_time(2 * HEARTBEAT)
    await outside.counts()
    outside.rig.gate.open()
    await playing
    await outside.close(session, reward=1)
    assert (await sample)[0].reward == 1.0


async def test_a_failed_server_repeats_the_sample_whatever_the_program_says(outside):
    sample, session = await outside.claimed()
    await outside.say(session)
    outside.agents._gateway._sessions[session["id"]].failure = ServerError("it died")
    assert (await outside.close(session, reward=1)).json() == {"state": "repeated"}
    with pytest.raises(ServerError, match="it died"):
        await sample


async def test_the_end_of_a_sample_ends_its_session(outside):
    sample, session = await outside.claimed()
    sample.cancel()
    await until(sample.done)
    refused = await outside.close(session, reward=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_unused")


async def test_the_unauthorised_learn_and_change_nothing(outside):
    sample, session = await outside.claimed()
    _, other = await outside.claimed()
    await outside.say(session)
    paths = ["/sessions", "/sessions/", "/sessions/x", f"/sessions/{session['id']}", "/", "/metrics", "/v1/models"]
    paths += [f"/sessions/{session['id']}/{what}" for what in ("reward", "heartbeat", "x")]
    answers = set()
    keys = ["", "Bearer", f"Bearer {KEY}x", f"Bearer {session['api_key']}", b"Bearer \xe9"]
    for key in keys:
        for path in paths:
            for method in ("GET", "POST", "DELETE", "PUT"):
                answer = await outside.http.request(method, path, headers={"Authorization": key}, content=b"{}")
                answers.add((answer.status_code, answer.content))
    assert len(answers) == 1 and next(iter(answers))[0] == 401
    # Neither the run's key nor that of another session opens a session's own routes.
    for key in (KEY, other["api_key"]):
        answer = await outside.http.get(f"{session['base_url']}/models", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401
    assert (await outside.close(session, reward=1)).status_code == 200
    assert (await sample)[0].reward == 1.0


async def test_nobody_is_admitted_before_the_run_has_named_its_key(rig):
    agents = ExternalAgents(GatewayConfig(), rig.sampling, "tiny", TimeoutConfig())
    await agents.open()
    async with httpx.AsyncClient(base_url=agents.url) as http:
        for key in ("", "Bearer", "Bearer None"):
            assert (await http.get("/sessions", headers={"Authorization": key})).status_code == 401
    await agents.close()


async def test_unknown_sessions_and_paths_are_named(outside):
    for method, path in (("POST", "reward"), ("POST", "heartbeat")):
        answer = await outside.http.request(method, f"/sessions/gone/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert (await outside.http.delete("/sessions/gone")).status_code == 404
    assert (await outside.http.put("/sessions")).json()["error"]["code"] == "not_supported"
    # An offered sample has no session that anybody could close.
    outside.offer()
    await until(lambda: outside.agents._plays)
    (hidden,) = outside.agents._plays
    assert (await outside.http.delete(f"/sessions/{hidden}")).status_code == 404


async def test_the_base_url_leads_back_the_way_the_program_came(outside):
    outside.offer()
    headers = {"Host": "gateway.example:8443", "X-Forwarded-Proto": "https"}
    session = (await outside.http.post("/sessions", headers=headers)).json()
    assert session["base_url"] == f"https://gateway.example:8443/s/{session['id']}/v1"


async def test_a_row_that_is_no_json_fails_its_sample_with_its_cause(outside):
    with pytest.raises(DataError, match="a row cannot be sent to programs outside"):
        await outside.offer(image=b"\x00")


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
async def test_the_shell_program_of_the_documentation_plays_samples(outside, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    (program,) = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    folder = tmp_path / "runs" / "my-run" / "sessions"
    folder.mkdir(parents=True)
    (folder / "key").write_text(KEY)
    (folder / "driver.url").write_text(outside.agents.url)
    outside.rig.write("right", "wrong")
    samples = [outside.offer(prompt=f'say "{n}"', answer="right") for n in range(2)]
    process = await asyncio.create_subprocess_exec("bash", "-c", program, cwd=tmp_path, start_new_session=True)
    try:
        async with asyncio.timeout(300):
            found = await asyncio.gather(*samples)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert [trajectory.reward for (trajectory,) in found] == [1.0, 0.0]
    assert 'user: say "1"' in outside.rig.sent()


async def test_old_sessions_are_forgotten(outside, monkeypatch):
    monkeypatch.setattr(external, "PAST", 1)
    first, second = [], []
    for sessions in (first, second):
        sample, session = await outside.claimed()
        await outside.say(session)
        await outside.close(session, reward=1)
        await sample
        sessions.append(session)
    assert (await outside.close(first[0], reward=1)).status_code == 404
    assert (await outside.close(second[0], reward=1)).status_code == 200
