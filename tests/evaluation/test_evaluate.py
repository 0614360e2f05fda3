"""Evaluation: bounded over all sets, and not sunk by one bad prompt."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import DataError, SandboxError, ServerError, ServiceFailed
from megasync.evaluation.evaluate import Answerer, evaluate, pass_at_k, reported_ks
from megasync.evaluation.held_out import HeldOutSet
from megasync.evaluation.periodic import PeriodicEvaluation
from megasync.rewards import RewardRunner
from megasync.rollout.workflow import single_turn
from megasync.trajectory import Prompt


def prompts(count):
    return [Prompt(str(n), [n], {"prompt": f"q{n}", "answer": str(n)}) for n in range(count)]


def exact(completions, *, answer, **columns):
    return [float(c == a) if c else 0.5 for c, a in zip(completions, answer, strict=True)]


async def score(client, count, *, inflight=4, reward=exact, workflow=single_turn, seed=None, **settings):
    """The evaluation of one set without a name, and its answers in the order in which they ended."""
    answers = []
    held_out = HeldOutSet("", prompts(count), RewardRunner(reward), **settings)
    (result,) = await evaluate(Answerer(client, workflow, [held_out], seed), [held_out], inflight, answers.append)
    return result, answers


async def test_the_score_is_the_share_of_full_rewards_and_each_answer_is_told_as_it_ends(fake_client):
    async def behave(ids, options):
        await asyncio.sleep(0.001 * (5 - ids[0]))  # the first prompts finish last
        return "" if ids[0] == 1 else str(ids[0])

    result, answers = await score(fake_client(behave), 5)
    assert (result.score, result.n, result.failed, result.pass_at) == (0.8, 5, 0, {})
    assert result.reward == pytest.approx(0.9)
    assert {(a.number, a.prompt, a.text, a.reward) for a in answers[:5]} >= {(0, "q0", "0", 1.0), (1, "q1", "", 0.5)}


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=3), repeats=st.integers(1, 4), inflight=st.integers(1, 8)
)
async def test_every_answer_is_had_once_and_never_too_many_at_once_over_all_sets(
    fake_client, counts, repeats, inflight
):
    client = fake_client(lambda ids, options: str(ids[0]))
    sets = [
        HeldOutSet(f"set{n}", prompts(count), RewardRunner(exact), (0.0, 0.5), repeats)
        for n, count in enumerate(counts)
    ]
    answers = []
    results = await evaluate(Answerer(client, single_turn, sets), sets, inflight, answers.append)
    had = Counter((a.held_out, a.temperature, a.number, a.repeat) for a in answers)
    # Greedy answers are all the same, so each is had once.
    assert had == Counter(
        (s.name, t, number, repeat)
        for s in sets
        for t, times in ((0.0, 1), (0.5, repeats))
        for number in range(len(s.prompts))
        for repeat in range(times)
    )
    assert client.most_running <= inflight
    assert [(e.held_out, e.temperature, e.n) for e in results] == [
        each for s in sets for each in ((s.name, 0.0, len(s.prompts)), (s.name, 0.5, repeats * len(s.prompts)))
    ]


async def test_prompts_are_taken_only_when_there_is_room_for_them(fake_client):
    """A held-out set may be large: nothing is made for a prompt before its turn."""

    class FakeSet(list):
        taken = 0

        def __iter__(self):
            for prompt in super().__iter__():
                self.taken += 1
                yield prompt

    started = asyncio.Event()

    async def behave(ids, options):
        started.set()
        await asyncio.sleep(600)

    held_out = FakeSet(prompts(1000))
    sets = [HeldOutSet("", held_out, RewardRunner(exact))]
    task = asyncio.create_task(evaluate(Answerer(fake_client(behave), single_turn, sets), sets, 3))
    await started.wait()
    assert held_out.taken == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_pass_at_k_is_over_the_repeats_of_each_prompt(fake_client):
    """Prompt 0 is right once in four answers, prompt 1 always, prompt 2 never; an answer that fails is not right."""
    asked = Counter()

    def behave(ids, options):
        asked[ids[0]] += 1
        if ids[0] == 0 and asked[0] == 2:
            raise ServerError("gone")
        right = {0: asked[0] == 1, 1: True, 2: False}[ids[0]]
        return str(ids[0]) if right else "?"

    result, _ = await score(fake_client(behave), 3, temperatures=(1.0,), repeats=4)
    assert (result.n, result.failed) == (12, 1)
    assert result.score == pytest.approx(result.pass_at[1]) == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert result.pass_at == pytest.approx({1: (0.25 + 1) / 3, 2: (0.5 + 1) / 3, 4: (1 + 1) / 3})


@pytest.mark.parametrize("error", [ServerError("server is gone"), ValueError("bad row"), DataError("too long")])
async def test_a_failing_prompt_does_not_affect_the_others(fake_client, error, caplog):
    def behave(ids, options):
        if ids[0] == 2:
            raise error
        return str(ids[0])

    result, answers = await score(fake_client(behave), 4)
    assert (result.score, result.reward, result.n, result.failed) == (0.75, 1.0, 4, 1)
    (bad,) = [a for a in answers if a.reward is None]
    assert (bad.prompt, bad.text, bad.error) == ("q2", "", f"{type(error).__name__}: {error}")
    assert f"1 of 4 evaluation answers failed; first error: {type(error).__name__}: {error}" in caplog.text
    only_failures, _ = await score(fake_client(lambda ids, options: behave([2], options)), 3)
    assert (only_failures.score, only_failures.reward, only_failures.n, only_failures.failed) == (0.0, 0.0, 3, 3)


@pytest.mark.parametrize("failure", [ServiceFailed("it is down", "shop"), SandboxError("it has died")])
async def test_a_service_that_fails_at_a_prompt_is_tried_again(fake_client, failure, monkeypatch):
    monkeypatch.setattr("megasync.evaluation.evaluate.BACKOFF_SECONDS", (0.0, 0.0))
    calls = Counter()

    async def workflow(client, sample):
        calls[sample["prompt"]] += 1
        if calls[sample["prompt"]] < 3:
            raise failure
        return await single_turn(client, sample)

    result, _ = await score(fake_client(lambda ids, options: str(ids[0])), 4, workflow=workflow)
    assert (result.score, result.failed) == (1.0, 0)
    assert set(calls.values()) == {3}


async def test_a_reward_that_fails_or_declines_is_counted(fake_client):
    def picky(completions, *, answer, **columns):
        if answer[0] == "0":
            raise RuntimeError("no")
        return [None if answer[0] == "1" else 1.0]

    result, _ = await score(fake_client(), 4, reward=picky)
    assert (result.score, result.failed) == (0.5, 2)


async def test_sampling_and_repeatable_seeds_reach_the_server(fake_client):
    first, second = fake_client(), fake_client()
    for client, inflight in ((first, 1), (second, 3)):
        await score(
            client, 3, temperatures=(0.5,), seed=1, inflight=inflight, repeats=2, sampling={"max_new_tokens": 7}
        )
    for _, options in first.calls:
        assert (options["temperature"], options["max_new_tokens"]) == (0.5, 7)
    assert sorted(o["seed"] for _, o in first.calls) == sorted(o["seed"] for _, o in second.calls)
    assert len({o["seed"] for _, o in first.calls}) == 6


async def test_cancelling_leaves_nothing_running(fake_client):
    client = fake_client(lambda ids, options: asyncio.sleep(600))
    task = asyncio.create_task(score(client, 8))
    while not client.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.running == 0


async def test_the_workflow_cannot_change_the_prompt(fake_client):
    async def careless(client, sample):
        sample["prompt_ids"].append(9)
        sample["answer"] = None
        sample["about"]["level"] = 9
        return await single_turn(client, sample)

    def rows():
        return [replace(each, columns=each.columns | {"about": {"level": 1}}) for each in prompts(2)]

    held_out = rows()
    client = fake_client(lambda ids, options: str(ids[0]))
    for _ in range(2):
        sets = [HeldOutSet("", held_out, RewardRunner(exact))]
        (result,) = await evaluate(Answerer(client, careless, sets), sets, 2)
        assert result.score == 1.0
    assert held_out == rows()


async def test_an_empty_held_out_set_is_refused(fake_client):
    with pytest.raises(DataError, match="has no prompts"):
        await score(fake_client(), 0)


async def test_each_set_has_metrics_of_its_own_and_the_first_gives_the_score(fake_client):
    client = fake_client(lambda ids, options: str(ids[0]) if options["temperature"] == 0 else "?")
    sets = [
        HeldOutSet("", prompts(2), RewardRunner(exact)),
        HeldOutSet("hard", prompts(2), RewardRunner(lambda completions, **columns: [0.0]), (0.0, 1.0), 2),
    ]
    shown = []
    held_out = PeriodicEvaluation(
        Answerer(client, single_turn, sets), sets, 4, on_answers=lambda *call: shown.append(call), shown=1
    )
    metrics = await held_out(3, 5)
    assert metrics.pop("eval/seconds") >= 0
    assert metrics == {
        "eval/version": 5.0,
        # The client samples with version 0.
        "eval/exact_share": 0.0,
        "eval/score": 1.0,
        "eval/failed": 0.0,
        "eval/score@0": 1.0,
        "eval/reward@0": 1.0,
        "eval/hard/score": 0.0,
        "eval/hard/failed": 0.0,
        "eval/hard/score@0": 0.0,
        "eval/hard/reward@0": 0.0,
        "eval/hard/score@1": 0.0,
        "eval/hard/reward@1": 0.0,
        "eval/hard/pass1@1": 0.0,
        "eval/hard/pass2@1": 0.0,
    }
    assert shown == [(3, 5, [("q0", "0", 1.0)])]


@given(st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(data):
    n = data.draw(st.integers(1, 7))
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_refuses_what_cannot_be_told():
    for n, right, k in ((4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match=f"pass@{k}"):
            pass_at_k(n, right, k)


def test_powers_of_two_and_all_answers_are_reported():
    assert [reported_ks(n) for n in (1, 2, 6, 8)] == [[], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
