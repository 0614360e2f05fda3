"""The token-level route: a caller that renders prompts itself gets exactly what was sampled, and trains it."""

from __future__ import annotations

import json

import aiohttp
import pytest
from gateway_rig import HI

PATH = "/inference/v1/generate"


async def post(rig, *bodies, agent_id="{key}"):
    """(status, JSON) of each body, which may be a function of the answers before it; and the trajectories."""
    answers = []

    async def agent(base_url, api_key, sample, model):
        # As the clients of this route do with the address of a chat endpoint.
        url = base_url.removesuffix("/v1") + PATH
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            for body in bodies:
                body = body(answers) if callable(body) else body
                async with http.post(url, data=body if isinstance(body, bytes) else json.dumps(body)) as answer:
                    answers.append((answer.status, await answer.json()))
            if all(status != 200 for status, _ in answers):
                rig.write("x")
                async with http.post(f"{base_url}/chat/completions", json={"messages": HI}) as answer:
                    assert answer.status == 200

    return answers, await rig.play(agent)


def choice(answer):
    return answer[1]["choices"][0]


async def test_ids_of_two_turns_are_those_that_the_servers_sampled_and_one_trajectory(rig):
    rig.write("one", "two")
    first = rig.tokenizer.encode("hi there")
    # What the client of a widely used library sends.
    sampling = {"max_tokens": 50, "stop_token_ids": [7], "logprobs": 1, "skip_special_tokens": False}
    sampling |= {"temperature": 1.0, "routed_experts_prompt_start": 0}
    body = {"model": "tiny", "token_ids": first, "sampling_params": sampling, "cache_salt": "0"}
    asked = rig.tokenizer.encode(" and more")

    def second(answers):
        return body | {"token_ids": [*first, *choice(answers[0])["token_ids"], *asked]}

    answers, (trajectory,) = await post(rig, body, second)
    sampled = [[*rig.tokenizer.encode(text), rig.tokenizer.eos_token_id] for text in ("one", "two")]
    assert [choice(answer)["token_ids"] for answer in answers] == sampled
    assert trajectory.prompt_ids.tolist() == first
    assert trajectory.response_ids.tolist() == [*sampled[0], *asked, *sampled[1]]
    found = [entry for answer in answers for entry in choice(answer)["logprobs"]["content"]]
    mask = trajectory.loss_mask.expand() > 0
    assert [entry["logprob"] for entry in found] == trajectory.logprobs[mask].tolist()
    assert [entry["token"] for entry in found] == [f"token_id:{token}" for ids in sampled for token in ids]
    versions = [version for answer in answers for version in choice(answer)["weight_versions"]]
    assert versions == trajectory.versions.expand()[mask].tolist()
    assert [choice(answer)["finish_reason"] for answer in answers] == ["stop", "stop"]
    params = rig.fake.requests[0]["sampling_params"]
    assert (params["max_new_tokens"], 7 in params["stop_token_ids"]) == (50, True)


async def test_sampling_parameters_of_a_request_apply_where_the_configuration_says_so(rig):
    rig.gateway.sampling = "request"
    rig.write("x")
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 3, "stop": "END"}
    answers, _ = await post(rig, {"token_ids": [5], "sampling_params": sampling})
    assert answers[0][0] == 200
    params = rig.fake.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["sampling_seed"]) == (0.5, 0.9, 3)
    assert (params["top_k"], params["stop"]) == (-1, ["END"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [2**40]}, "token_ids[0]"),
        ({"token_ids": [5], "stream": True}, "stream"),
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [5], "lora": 1}, "lora"),
        ({"token_ids": [5], "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"token_ids": [5], "sampling_params": {"presence_penalty": 1.0}}, "sampling_params.presence_penalty"),
        ({"token_ids": [5], "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        (b'{"token_ids": [5], "sampling_params": {"temperature": 1e999}}', "sampling_params.temperature"),
        (b"\xff", None),
        ({"token_ids": [299] * 4001}, "messages"),
        ({"token_ids": [300]}, None),
    ],
    ids=range(14),
)
async def test_what_the_route_cannot_do_is_refused_by_name(rig, body, param):
    ((status, answer),), _ = await post(rig, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert len(rig.fake.requests) == 1, "only the request after it"
