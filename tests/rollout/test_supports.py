"""Supports on their way into a trajectory: when they are asked for, which token has which, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from fake_sglang import DROP, Break, finish
from trajectories import trajectory

from megasync.buffer.payload import decode, encode
from megasync.config.schema import SamplingConfig
from megasync.errors import DataError, InvalidAnswer, ServerError
from megasync.rollout.inflight import RequestGate
from megasync.rollout.partials import PartialResponses
from megasync.rollout.workflow import SampleClient, TrajectoryCheck, single_turn
from megasync.serving.answers import AnswerLimits, read_generated
from megasync.serving.plugin_protocol import WITH_SUPPORT
from megasync.trajectory import SUPPORT, SUPPORT_SIZES, Group, Support


@pytest.fixture
def client_options():
    return {"sampling": SamplingConfig(max_new_tokens=8, top_k=5, top_p=0.9)}


def supports_of(trajectory):
    """The ids of each response token."""
    support = trajectory.support
    return [ids.tolist() for ids in np.split(support.ids, np.cumsum(support.sizes)[:-1])]


def of(tokens):
    """What the fake reports."""
    return [[token, token + 1] for token in tokens]


async def test_a_trained_response_has_the_support_of_each_token_and_the_log_probs_over_it(fake, client):
    got = await client.generate([1], trained=True)
    assert fake.requests[0]["custom_labels"] == {WITH_SUPPORT: "1"}
    assert supports_of(got.trajectory()) == of(range(2, 10))
    assert got.logprobs == [-i / 256 for i in range(2, 10)]


@pytest.mark.parametrize("trained", [True, False])
async def test_neither_full_sampling_nor_an_evaluation_asks_for_supports(fake, make_client, trained):
    client = make_client(**({"sampling": SamplingConfig(max_new_tokens=8)} if trained else {}))
    got = await client.generate([1], trained=trained)
    assert "custom_labels" not in fake.requests[0] and got.trajectory().arrays == {}
    assert got.logprobs == [-i / 128 for i in range(2, 10)]


async def test_a_response_in_parts_has_the_supports_of_all_parts(fake, client):
    fake.script += [finish(3, "abort"), DROP, finish(2, "abort"), *([Break(((2, 0),))] if client._interval else [])]
    got = (await client.generate([1], trained=True)).trajectory()
    assert supports_of(got) == of(range(2, 10))


async def test_a_discarded_answer_leaves_no_support_behind(fake, client):
    async def without_version(fake, body):
        return fake.answer(body, 3, "length", versions=[(7, 2)])

    fake.script += [finish(2, "abort"), without_version]
    got = (await client.generate([1], trained=True)).trajectory()
    assert supports_of(got) == of(range(2, 10)) and client.metrics()["rollout/invalid_answers"] == 1


async def test_a_response_of_an_earlier_life_brings_its_supports(fake, client):
    fake.script += [finish(3, "abort")]
    earlier = PartialResponses()
    await client.generate([1], trained=True, keep=partial(earlier.sample("0:0", 0).begin, 0))
    (saved,) = earlier.unsaved()
    resumed = PartialResponses()
    resumed.restore("0:0", {(0, 0): saved["0:0", 0, 0]})
    asked = len(fake.requests)
    got = await client.generate([1], trained=True, keep=partial(resumed.sample("0:0", 0).begin, 0))
    assert len(fake.requests) == asked and supports_of(got.trajectory()) == of(range(2, 10))


async def test_tokens_between_turns_have_none(client):
    sample = SampleClient(client, RequestGate(), routing_key="k", batch=0)
    first = await sample.generate([1, 2], max_new_tokens=2)
    second = await sample.generate(first.tokens + [50, 51], max_new_tokens=2)
    got = second.trajectory(1.0)
    assert supports_of(got) == [*of([3, 4]), [], [], *of([52, 53])]
    assert TrajectoryCheck(single_turn, truncated=True).check(got) == [got]
    encoded = encode(group := Group("0:0", [dataclasses.replace(got, text="")]))
    assert decode(encoded.header, encoded.body) == group


async def test_a_server_without_supports_is_named_with_both_remedies(fake, make_client, endless_pause):
    fake.support = None
    with pytest.raises(ServerError, match=r"megasync's plugin, or sample from the full distribution .*top_k=-1"):
        await make_client().generate([1], trained=True)


@pytest.mark.parametrize(
    ("masks", "logprobs", "problem"),
    [
        ([[3, 9], [4]], [-0.1, 0.0], None),
        ([[9], [4]], [-0.1, 0.0], "of token 3 lacks it"),
        ([[3, 3], [4]], [-0.1, 0.0], "names one twice"),
        ([[3, 10], [4]], [-0.1, 0.0], r"outside the vocabulary \[0, 10\)"),
        ([[3]], [-0.1, 0.0], "masks of 1 tokens and log-probs within them of 2, not of 2"),
        ([[3], [4]], [-0.1], "of 2 tokens and log-probs within them of 1, not of 2"),
        ([[3], [4]], [-0.1, 0.5], "the log-prob 0.5"),
    ],
)
def test_supports_that_cannot_be_are_refused(masks, logprobs, problem):
    meta = {
        "finish_reason": None,
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, 3, None], [-0.7, 4, None]],
        "output_token_sampling_mask": masks,
        "output_token_sampling_logprobs": logprobs,
    }
    raw = json.dumps({"meta_info": meta}).encode()
    limits = AnswerLimits(10, 2, support=4)
    if problem is None:
        piece = read_generated(raw, limits)
        assert piece.support == Support.of(masks) and list(piece.logprobs) == pytest.approx(logprobs)
        return
    with pytest.raises(InvalidAnswer, match=problem):
        read_generated(raw, limits)


def test_a_trajectory_needs_both_arrays_and_sizes_that_match():
    support = {SUPPORT_SIZES: np.array([2, 1], np.int32), SUPPORT: np.array([4, 5, 6], np.int32)}
    answer = dataclasses.replace(trajectory(), arrays=support)
    assert supports_of(answer) == [[4, 5], [6]]
    with pytest.raises(ValueError, match="needs both or none"):
        dataclasses.replace(answer, arrays={SUPPORT: support[SUPPORT]})
    with pytest.raises(ValueError, match="add up to 3 tokens, and there are 2 ids"):
        dataclasses.replace(answer, arrays=support | {SUPPORT: support[SUPPORT][:2]})
    with pytest.raises(DataError, match="1 trained tokens without a support"):
        untold = {SUPPORT_SIZES: np.array([2, 0], np.int32), SUPPORT: support[SUPPORT][:2]}
        TrajectoryCheck(single_turn, truncated=True).check(dataclasses.replace(answer, arrays=untold))
