"""Reward models: what they are asked, how a score is read, and whose fault a failure is. No server."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import byte_tokenizer
from trajectories import trajectory

from megasync.config.schema import RewardModelConfig
from megasync.errors import ConfigError, DataError, HttpStatusError, InvalidAnswer, ServerError, is_infrastructure
from megasync.rewards import RewardFunction, RewardRunner
from megasync.rewards.model_reward import (
    ClassifierScore,
    ModelPrompt,
    ModelReward,
    WrittenNumber,
    YesProbability,
    score_reader,
)
from megasync.serving import frozen_client as module

TOKENIZER = byte_tokenizer()


class FakeServer:
    """Answers with what `behave(path, body)` gives, after a moment, or raises it."""

    def __init__(self, url, behave):
        self.url, self.behave = url, behave
        self.asked, self.running, self.most_running = 0, 0, 0

    async def post(self, path, body, timeout):
        self.asked += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            answer = self.behave(path, body)
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running -= 1


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "_FAILURE_WAIT", (0.001, 0.01))


def length(path, body):
    return {"embedding": [float(len(body["input_ids"]))]}


def reward_of(*servers, max_inflight=8, timeout=30.0, context_length=1000):
    config = RewardModelConfig("m", kind="classifier", format="raw")
    limits = {"max_inflight": max_inflight, "timeout": timeout, "context_length": context_length}
    reward = ModelReward("grader", ModelPrompt("key", config, TOKENIZER), ClassifierScore(0), **limits)
    for server in servers:
        reward.add_server(server)
    return reward


def read(text, **settings):
    return WrittenNumber(RewardModelConfig("m", kind="generative", **settings)).read({"text": text})


def text_of(row, completion, **settings):
    ids = ModelPrompt("reward_models.m", RewardModelConfig(**settings), TOKENIZER).ids(row, completion)
    return TOKENIZER.decode(ids)


# Reading scores


@pytest.mark.parametrize(
    ("text", "score"),
    [("8", 0.8), ("First 3, then: 7.5", 0.75), ("Score: 0/10 ... 10", 0.0), ("good", None), ("11", None), ("-1", None)],
)
def test_a_labelled_or_the_last_number_within_the_scale_is_the_score(text, score):
    assert read(text) == score


@pytest.mark.parametrize("settings", [{}, {"pattern": r"(\d+)"}], ids=["as written", "pattern"])
@pytest.mark.parametrize("reason", [{"type": "length", "length": 256}, "length"], ids=repr)
def test_a_judge_that_was_cut_off_or_did_not_end_its_reasoning_gives_no_score(settings, reason):
    reader = WrittenNumber(RewardModelConfig("m", kind="generative", **settings))
    assert reader.read({"text": "Score: 8", "meta_info": {"finish_reason": reason}}) is None
    assert reader.read({"text": "<think>Score: 8", "meta_info": {"finish_reason": {"type": "stop"}}}) is None
    assert (
        reader.read({"text": "<think>3</think>8", "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}})
        == 0.8
    )


def test_the_pattern_selects_the_number_and_the_scale_normalizes_it():
    pattern = r"Score: (\d+)"
    assert read("Score: 4. I have 9 reasons.", pattern=pattern, low=1, high=5) == 0.75
    assert read("I have 9 reasons.", pattern=pattern) is None
    assert read("Score: none", pattern=r"Score: (\w+)") is None


@given(yes=st.floats(-50, 0), no=st.floats(-50, 0))
def test_a_yes_or_no_score_is_the_probability_of_yes(yes, no):
    config = RewardModelConfig("m", kind="generative", read="yes_no", yes_token="Y", no_token="N")
    verdict = score_reader("key", config, TOKENIZER)
    y, n = (TOKENIZER(word)["input_ids"][0] for word in "YN")
    answer = {"meta_info": {"output_token_ids_logprobs": [[[yes, y, None], [no, n, None]]]}}
    assert verdict.read(answer) == pytest.approx(math.exp(yes) / (math.exp(yes) + math.exp(no)), rel=1e-6)
    assert verdict.body([5])["token_ids_logprob"] == [y, n]


def test_a_word_of_several_tokens_is_refused():
    config = RewardModelConfig("m", kind="generative", read="yes_no")
    with pytest.raises(ConfigError, match=r"reward_models.j.yes_token='Yes' is 3 tokens"):
        score_reader("reward_models.j", config, TOKENIZER)


@pytest.mark.parametrize(
    "verdict", [ClassifierScore(1), WrittenNumber(RewardModelConfig("m", kind="generative")), YesProbability(3, 4)]
)
@pytest.mark.parametrize(
    "answer",
    [
        *({}, [], "a page", None, {"embedding": [1.0]}, {"embedding": 1.0}, {"embedding": [0.0, "high"]}),
        *({"embedding": [0.0, None]}, {"embedding": [0.0, math.inf]}, {"text": 5}, {"text": None}, {"meta_info": 1}),
        {"meta_info": {"output_token_ids_logprobs": []}},
        {"meta_info": {"output_token_ids_logprobs": [None]}},
        {"meta_info": {"output_token_ids_logprobs": [[[None, 3, None], [-1.0, 4, None]]]}},
        {"meta_info": {"output_token_ids_logprobs": [[[-1.0, 3, None]]]}},
    ],
    ids=repr,
)
def test_a_malformed_answer_is_a_server_error(verdict, answer):
    with pytest.raises(InvalidAnswer):
        verdict.read(answer)


# Prompts


def test_a_classifier_gets_the_conversation():
    # The template of these tests always begins an answer.
    assert text_of({"prompt": "2+2?"}, "4", kind="classifier") == "user: 2+2?\nassistant: 4\nassistant:"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert text_of({"prompt": turns}, "d", kind="classifier").startswith(
        "user: a\nassistant: b\nuser: c\nassistant: d\n"
    )
    assert text_of({"prompt": "2+2="}, "4", kind="classifier", format="raw") == "2+2=4"


def test_a_judge_gets_its_template_filled_with_the_columns():
    settings = {"kind": "generative", "system": "Be strict.", "template": "{prompt}|{completion}|{answer}|{high:g}"}
    assert (
        text_of({"prompt": "2+2?", "answer": "4"}, "5", **settings)
        == "system: Be strict.\nuser: 2+2?|5|4|10\nassistant:"
    )
    ready = text_of({"prompt": [{"role": "user", "content": "2+2?"}]}, "5", kind="generative", high=4.0)
    assert "from 0 to 4" in ready and "user: 2+2?" in ready and "\n5\n" in ready
    assert "Answer Yes or No." in text_of({"prompt": "p"}, "c", kind="generative", read="yes_no")
    with pytest.raises(DataError, match=r"reward_models.m.template=.*names the column 'answer'"):
        text_of({"prompt": "2+2?"}, "5", **settings)


def test_chat_format_requires_a_chat_template():
    with pytest.raises(ConfigError, match=r"key.format=chat.*set key.format=raw"):
        ModelPrompt("key", RewardModelConfig("m", kind="classifier"), byte_tokenizer(chat_template=None))


async def test_a_response_that_is_too_long_is_counted_and_not_scored():
    reward = reward_of(FakeServer("a", length), context_length=10)
    assert await reward(["bc", "b" * 100], prompt=["a", "a"]) == [3.0, None]
    assert reward.metrics()["too_long"] == 1.0


# Choosing servers


async def test_requests_are_bounded_and_go_to_the_least_busy_server():
    servers = [FakeServer(url, length) for url in "ab"]
    reward = reward_of(*servers, max_inflight=4)
    scores = await reward(["x" * n for n in range(40)], prompt=["p"] * 40)
    assert scores == [float(n + 1) for n in range(40)]
    assert [server.most_running for server in servers] == [2, 2]
    assert [server.asked for server in servers] == [20, 20]


@pytest.mark.parametrize("failure", [ServerError("connection reset"), HttpStatusError("overloaded", 503), ["a page"]])
async def test_a_failed_request_is_retried_on_another_server(failure):
    bad, good = FakeServer("bad", lambda *_: failure), FakeServer("good", length)
    reward = reward_of(bad, good)
    assert await reward(["x"] * 6, prompt=["p"] * 6) == [2.0] * 6
    metrics = reward.metrics()
    assert (metrics["requests"], metrics["retries"], metrics["inflight"]) == (6.0, float(bad.asked), 0.0)
    assert bad.asked > 0


async def test_requests_wait_for_a_server_and_move_from_a_removed_one():
    reward = reward_of()
    asking = asyncio.create_task(reward(["x"], prompt=["p"]))
    await asyncio.sleep(0.01)
    assert not asking.done()
    dead = FakeServer("dead", lambda *_: ServerError("gone"))
    reward.add_server(dead)
    while not dead.asked:
        await asyncio.sleep(0)
    reward.remove_server("dead")
    reward.add_server(FakeServer("new", length))
    assert await asking == [2.0]


async def test_a_refused_request_is_a_data_error_and_a_timeout_is_a_server_error():
    refusing = reward_of(FakeServer("a", lambda *_: HttpStatusError("too long", 400)))
    with pytest.raises(DataError, match="'grader' refused a request: too long") as refused:
        await refusing.ask("/classify", {}, dict)
    # A worker would repeat the request for ever.
    assert not is_infrastructure(refused.value)
    silent = reward_of(FakeServer("a", lambda *_: ServerError("reset")), timeout=0.05)
    with pytest.raises(ServerError, match=r"no answer within 0.05 s \(timeouts.request\).*1 of its servers.*reset"):
        await silent.ask("/classify", {}, dict)


async def test_the_runner_raises_a_server_error_of_a_reward_model_unchanged():
    """A ServerError does not count against the prompt. Otherwise scores of reward models are combined like others."""
    silent = reward_of(timeout=0.01)
    with pytest.raises(ServerError, match="gave no answer"):
        await RewardRunner([RewardFunction("grader", silent)]).score([trajectory()], {"prompt": "p"})
    reward = reward_of(FakeServer("a", length))
    functions = [RewardFunction("grader", reward, 0.5), RewardFunction("one", lambda completions, **_: [1.0])]
    (scored,) = await RewardRunner(functions).score([trajectory()], {"prompt": "p"})
    assert scored.reward == 1.0 + 0.5 * (1 + len(scored.text))
    assert scored.metrics["reward/grader"] == 1 + len(scored.text)
