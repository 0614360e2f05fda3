"""The greedy response to each prompt, whose reward is the baseline of the others; and rewards of tokens. No server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megasync.errors import DataError
from megasync.rollout.workflow import TrajectoryCheck, single_turn
from megasync.trajectory import BASELINE, TOKEN_REWARDS


def said(prompt_ids, options):
    return "greedy" if options.get("temperature") == 0.0 else "sampled"


def by_text(completions, **columns):
    return [0.75 if text == "greedy" else float(place % 2) for place, text in enumerate(completions)]


async def test_each_prompt_has_a_greedy_response_that_is_not_trained(make_bench):
    bench = make_bench(total=4, samples=3, behave=said, reward=by_text, baseline=True, seed=1)
    await bench.rollouter.run()
    assert len(bench.buffer.committed) == 4
    for group in bench.buffer.committed.values():
        assert sorted(t.reward for t in group.trajectories) == [0.0, 0.0, 1.0]
        assert all(t.metrics[BASELINE] == 0.75 for t in group.trajectories)
    greedy = [options for _, options in bench.client.calls if options.get("temperature") == 0.0]
    assert len(greedy) * 4 == len(bench.client.calls)
    # Only what is trained must be sampled as the trainer scores it.
    assert all(options.get("trained", False) == ("temperature" not in options) for _, options in bench.client.calls)


@pytest.mark.parametrize("fails", ["response", "reward"])
async def test_without_its_baseline_a_group_is_dropped(make_bench, fails):
    def behave(prompt_ids, options):
        if fails == "response" and options.get("temperature") == 0.0:
            raise ValueError("no greedy answer")
        return said(prompt_ids, options)

    def reward(completions, **columns):
        return [None if text == "greedy" else 1.0 for text in completions]

    bench = make_bench(total=4, behave=behave, reward=reward, baseline=True)
    with pytest.raises(DataError, match="no greedy answer" if fails == "response" else "greedy response has no reward"):
        await bench.rollouter.run()
    assert set(bench.buffer.dropped.values()) == {"no_baseline"}


@pytest.mark.parametrize("kept", [True, False])
async def test_rewards_of_tokens_are_kept_for_estimators_that_take_them(make_bench, kept):
    def reward(completions, **columns):
        return [[0.5, float(place)] for place, _ in enumerate(completions)]

    bench = make_bench(total=4, reward=reward, token_rewards=kept)
    await bench.rollouter.run()
    for group in bench.buffer.committed.values():
        assert [t.reward for t in group.trajectories] == [0.5, 1.5]
        if kept:
            assert [t.arrays[TOKEN_REWARDS].tolist() for t in group.trajectories] == [[0.5, 0.0], [0.5, 1.0]]
        else:
            assert all(TOKEN_REWARDS not in t.arrays for t in group.trajectories)


def test_only_rewards_of_tokens_may_be_missing(make_trajectory):
    check = TrajectoryCheck(single_turn)
    missing = {TOKEN_REWARDS: np.array([np.nan, 1.0], np.float32)}
    (kept,) = check.check(replace(make_trajectory("a"), arrays=missing))
    assert np.isnan(kept.arrays[TOKEN_REWARDS][0])
    for name, value in ((TOKEN_REWARDS, np.inf), ("other", np.nan)):
        with pytest.raises(DataError, match="not finite"):
            check.check(replace(make_trajectory("a"), arrays={name: np.array([value, 1.0])}))
