"""Routes on their way into a trajectory: which are asked for, from which request they are, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from fake_sglang import DROP, Break, finish
from trajectories import trajectory
from waits import until

from megasync.errors import DataError, InvalidAnswer, ServerError
from megasync.layout.routes import RouteFormat
from megasync.rollout.inflight import RequestGate
from megasync.rollout.partials import PartialResponses
from megasync.rollout.tokens import Tokens
from megasync.rollout.workflow import SampleClient, TrajectoryCheck, single_turn
from megasync.serving.answers import AnswerLimits, read_generated
from megasync.serving.plugin_protocol import ROUTES_FROM
from megasync.trajectory import ROUTES

FORMAT = RouteFormat(layers=3, sparse=(0, 2), per_token=2, experts=128)


@pytest.fixture
def client_options():
    return {"routes": FORMAT}


def asked(fake):
    """The first position of each request's routes."""
    return [int(body["custom_labels"][ROUTES_FROM]) for body in fake.requests]


def requests_of(routes):
    """By position the number of the request that its routes are from, after a check of the positions."""
    assert routes.shape[1:] == (2, 2) and routes.dtype == np.uint8
    assert (routes[:, :, 0] == np.arange(len(routes))[:, None]).all()
    assert (routes[:, :, 1] == routes[:, :1, 1]).all()
    return (routes[:, 0, 1] - 100).tolist()


async def test_a_trajectory_has_the_routes_of_all_positions_but_the_last(fake, client):
    got = (await client.generate([1, 2, 3], trained=True)).trajectory(1.0)
    assert requests_of(got.arrays[ROUTES]) == [1] * (3 + 8 - 1)
    assert asked(fake) == [0]


async def test_an_evaluation_asks_for_none(fake, client):
    got = (await client.generate([1])).trajectory()
    assert "custom_labels" not in fake.requests[0] and got.arrays == {}


async def test_a_response_in_parts_keeps_the_routes_of_the_part_that_sampled_each_token(fake, client):
    fake.script += [finish(3, "abort"), finish(2, "abort")]
    got = (await client.generate([1], trained=True)).trajectory()
    # The row of the last token comes with the request that is fed it.
    assert requests_of(got.arrays[ROUTES]) == [1] * 3 + [2] * 2 + [3] * 3
    assert asked(fake) == [0, 3, 5]


async def test_the_next_request_reports_what_a_lost_server_did_not(fake, make_client):
    fake.script += [Break(((3, 0), (2, 0)))]
    got = (await make_client(stream_interval=3).generate([1], trained=True)).trajectory()
    assert requests_of(got.arrays[ROUTES]) == [2] * 8 and asked(fake) == [0, 0]


async def test_a_further_turn_asks_for_its_own_positions_only(fake, client):
    sample = SampleClient(client, RequestGate(), routing_key="k", batch=0)
    first = await sample.generate([1, 2], max_new_tokens=3)
    second = await sample.generate(first.tokens + [50, 51], max_new_tokens=2)
    # The observation was never fed before the second turn; the last token of the first neither.
    assert asked(fake) == [0, 4]
    assert requests_of(second.trajectory().arrays[ROUTES]) == [1] * 4 + [2] * 4
    assert requests_of(first.trajectory().arrays[ROUTES]) == [1] * 4
    forked = await sample.generate([1, 2, 3, 9], max_new_tokens=2)
    assert asked(fake) == [0, 4, 0]
    assert requests_of(forked.trajectory().arrays[ROUTES]) == [3] * 5


async def test_a_finished_response_of_an_earlier_life_asks_for_its_routes_alone(fake, client):
    """Partial responses are recorded without routes, which one request brings back."""
    earlier = PartialResponses()
    await client.generate([1], trained=True, keep=partial(earlier.sample("0:0", 0).begin, 0))
    (saved,) = earlier.unsaved()
    resumed = PartialResponses()
    resumed.restore("0:0", {(0, 0): saved["0:0", 0, 0]})
    got = await client.generate([1], trained=True, keep=partial(resumed.sample("0:0", 0).begin, 0))
    assert got.token_ids == [2, 3, 4, 5, 6, 7, 8, 9] and got.finish_reason == "length"
    assert requests_of(got.trajectory().arrays[ROUTES]) == [2] * 8
    assert fake.requests[1]["input_ids"] == [1, *got.token_ids]
    assert fake.requests[1]["sampling_params"]["max_new_tokens"] == 1


async def test_failures_of_that_request_are_retried(fake, client):
    fake.script += [finish(8, "length")]
    fake.route_layers = 0
    asking = asyncio.create_task(client.generate([1], trained=True))
    await until(lambda: len(fake.requests) >= 3)
    fake.script += [DROP]
    fake.route_layers = 3
    got = await asking
    assert len(got.token_ids) == 8 and len(got.trajectory().arrays[ROUTES]) == 8


async def test_a_server_without_routes_is_named_with_both_remedies(fake, make_client, endless_pause):
    fake.route_layers = 0
    with pytest.raises(ServerError, match=r"--enable-return-routed-experts .*set rollout.routing_replay=false"):
        await make_client().generate([1], trained=True)
    assert len(fake.requests) == 2, "the response, and one request for its routes before a pause"


async def test_routes_of_another_model_are_discarded_and_requested_again(fake, client):
    async def right(fake, body):
        fake.route_layers = 3
        return fake.answer(body, 8, "length")

    # 8 positions of 4 layers are no whole number of positions of 3.
    fake.route_layers = 4
    fake.script += [finish(8, "length"), right]
    got = await client.generate([1], trained=True)
    assert requests_of(got.trajectory().arrays[ROUTES]) == [2] * 8
    assert client.metrics()["rollout/invalid_answers"] == 1


def encoded(rows):
    return base64.b64encode(np.array(rows, np.int32).tobytes()).decode()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[[0, 1]] * 3] * 2, None),
        ([[[0, 128]] * 3], r"experts 0 to 128 are outside \[0, 128\)"),
        ([[[-1, 1]] * 3], "outside"),
        ([[[5, 5]] * 3], "to one expert twice"),
        ([[[0, 1]] * 2], "16 bytes are no multiple of 24"),
        ([[[0, 1]] * 3] * 5, "routes of 5 positions, and at most 4 were requested"),
    ],
)
def test_routes_that_cannot_be_are_refused(rows, problem):
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, 3, None]],
        "weight_versions": [{"version": "0", "start": 0, "end": 1}],
        "routed_experts": encoded(rows),
    }
    raw = json.dumps({"meta_info": meta}).encode()
    limits = AnswerLimits(10, 1, routes=FORMAT, positions=4)
    if problem is None:
        assert read_generated(raw, limits).routes.tolist() == [[[0, 1]] * 2] * 2
        with pytest.raises(InvalidAnswer, match="not requested"):
            read_generated(raw, AnswerLimits(10, 1))
    else:
        with pytest.raises(InvalidAnswer, match=problem):
            read_generated(raw, limits)


def test_routes_of_common_tokens_are_common_and_a_branch_keeps_those_before_it():
    def rows(*values):
        return np.array(values, np.uint8)[:, None, None]

    prompt = Tokens.of([1, 2, 3])
    sequence = prompt + [7, 8]
    sequence.add_routes(0, rows(10, 11, 12, 13))
    assert (prompt.routed, sequence.routed) == (3, 4)
    assert prompt.routes.ravel().tolist() == [10, 11] and sequence.routes.ravel().tolist() == [10, 11, 12, 13]
    other = prompt + [9, 9]
    assert other.routed == 3 and other.routes is None
    # Known ones stay; a gap is not filled.
    other.add_routes(2, rows(99, 24))
    other.add_routes(6, rows(99))
    assert other.routes.ravel().tolist() == [10, 11, 12, 24]
    assert sequence.routes.ravel().tolist() == [10, 11, 12, 13]
    sequence.forget_routes(1)
    assert sequence.routed == 1 and sequence.routes is None


def test_trajectories_without_routes_are_refused_where_they_are_replayed():
    check = TrajectoryCheck(single_turn, routed=True)
    plain = trajectory()
    with pytest.raises(DataError, match=r"no routes, which rollout.routing_replay=true needs"):
        check.check(plain)
    fed = len(plain.prompt_ids) + len(plain.response_ids) - 1
    routed = dataclasses.replace(plain, arrays={ROUTES: np.zeros((fed, 2, 2), np.uint8)})
    assert check.check(routed) == [routed]
    with pytest.raises(ValueError, match=f"for {fed} positions"):
        dataclasses.replace(plain, arrays={ROUTES: np.zeros((fed + 1, 2, 2), np.uint8)})
