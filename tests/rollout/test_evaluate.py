"""Evaluation: bounded, in order, and not sunk by one bad prompt."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.buffer.trajectory import Prompt
from megasync.errors import DataError, ServerError
from megasync.rewards import RewardRunner
from megasync.rollout.evaluate import evaluate
from megasync.rollout.workflow import single_turn


def prompts(count):
    return [Prompt(str(n), [n], {"prompt": f"q{n}", "answer": str(n)}) for n in range(count)]


def exact(completions, *, answer, **columns):
    return [float(c == a) if c else 0.5 for c, a in zip(completions, answer, strict=True)]


async def score(
    client, count, *, temperature=0.0, samples=100, inflight=4, reward=exact, workflow=single_turn, seed=None
):
    return await evaluate(client, prompts(count), workflow, RewardRunner(reward), temperature, samples, inflight, seed)


async def test_the_score_is_the_share_of_full_rewards_and_answers_keep_their_order(fake_client):
    async def behave(ids, options):
        await asyncio.sleep(0.001 * (5 - ids[0]))  # the first prompts finish last
        return "" if ids[0] == 1 else str(ids[0])

    found = await score(fake_client(behave), 5)
    assert (found.score, found.n, found.failed) == (0.8, 5, 0)
    assert found.reward == pytest.approx(0.9)
    assert found.answers[:2] == [("q0", "0", 1.0), ("q1", "", 0.5)]
    assert [a.prompt for a in found.answers] == [f"q{n}" for n in range(5)]


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 30), samples=st.integers(1, 40), inflight=st.integers(1, 8))
async def test_every_chosen_prompt_is_asked_once_and_never_too_many_at_once(fake_client, count, samples, inflight):
    client = fake_client(lambda ids, options: str(ids[0]))
    found = await score(client, count, samples=samples, inflight=inflight)
    assert sorted(ids[0] for ids, _ in client.calls) == list(range(min(count, samples)))
    assert client.most_running <= inflight
    assert found.n == min(count, samples)


@pytest.mark.parametrize("error", [ServerError("server is gone"), ValueError("bad row"), DataError("too long")])
async def test_a_bad_prompt_costs_itself_only(fake_client, error, caplog):
    def behave(ids, options):
        if ids[0] == 2:
            raise error
        return str(ids[0])

    found = await score(fake_client(behave), 4)
    assert (found.score, found.reward, found.n, found.failed) == (0.75, 1.0, 4, 1)
    assert [a.prompt for a in found.answers] == ["q0", "q1", "q3"]
    assert f"1 of 4 evaluation prompts failed; the first: {type(error).__name__}: {error}" in caplog.text


async def test_a_reward_that_fails_or_declines_is_counted(fake_client):
    def picky(completions, *, answer, **columns):
        if answer[0] == "0":
            raise RuntimeError("no")
        return [None if answer[0] == "1" else 1.0]

    found = await score(fake_client(), 4, reward=picky)
    assert (found.score, found.failed) == (0.5, 2)


async def test_all_failing_is_a_score_of_zero_not_an_error(fake_client):
    def behave(ids, options):
        raise ServerError("gone")

    found = await score(fake_client(behave), 3)
    assert (found.score, found.reward, found.n, found.failed, found.answers) == (0.0, 0.0, 3, 3, [])


async def test_the_temperature_and_repeatable_seeds_reach_the_server(fake_client):
    first, second = fake_client(), fake_client()
    await score(first, 3, temperature=0.5, seed=1, inflight=1)
    await score(second, 3, temperature=0.5, seed=1, inflight=3)
    assert all(options["temperature"] == 0.5 for _, options in first.calls)
    assert sorted(o["seed"] for _, o in first.calls) == sorted(o["seed"] for _, o in second.calls)
    assert len({o["seed"] for _, o in first.calls}) == 3


async def test_cancelling_leaves_nothing_running(fake_client):
    client = fake_client(lambda ids, options: asyncio.sleep(600))
    task = asyncio.create_task(score(client, 8))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.running == 0


async def test_the_workflow_cannot_change_the_prompt(fake_client):
    async def careless(client, sample):
        sample["prompt_ids"].append(9)
        sample["answer"] = None
        return await single_turn(client, sample)

    held_out = prompts(2)
    client = fake_client(lambda ids, options: str(ids[0]))
    for _ in range(2):
        found = await evaluate(client, held_out, careless, RewardRunner(exact), 0.0, 2, 2)
        assert found.score == 1.0
    assert held_out == prompts(2)


async def test_no_prompt_is_refused(fake_client):
    with pytest.raises(DataError, match="at least one prompt"):
        await score(fake_client(), 0)
