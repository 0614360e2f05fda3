"""Keys, tenants, refusals and long polls of the endpoint, over plain HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
import tarfile
import threading

import numpy as np
import pytest
import zstandard

pytest.importorskip("tinker")
pytestmark = pytest.mark.extra

from endpoint_rig import KEYS, serving  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from mutations import SEEDS, mutated  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_sample_response  # noqa: E402

from megasync.errors import ConfigError  # noqa: E402
from megasync.service import endpoint as module  # noqa: E402
from megasync.service.endpoint import VERSIONS_HEADER, Endpoint  # noqa: E402
from megasync.service.limits import Limits  # noqa: E402


@pytest.fixture
async def rig(tmp_path):
    async with serving(tmp_path) as rig:
        yield rig


def compute(model, seq, tokens=(1, 2, 3), change=lambda message: None):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs={"target_tokens": np.array(tokens)}
    )
    given = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=seq)
    message = forward_backward_request_to_proto(request)
    change(message)
    return message.SerializeToString()


def step(model, seq):
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1.0}}


def sample(sampler, seq, **fields):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 4},
    } | fields


async def session_of(rig, key=KEYS["ann"]):
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    return (await rig.ask("create_session", body, key=key))[1]["session_id"]


async def model_of(rig, session, number=0):
    body = {"session_id": session, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 4}}
    return (await rig.outcome("create_model", body))["model_id"]


async def sampler_of(rig, session, number=0):
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "tiny"}
    return (await rig.ask("create_sampling_session", body))[1]["sampling_session_id"]


# Keys and tenants


@pytest.mark.parametrize("key", [None, "", "tml-", "tml-ann-012345678", "tml-ann-01234567890", "tml-\udcff"])
async def test_without_a_key_only_the_health_is_answered(rig, key):
    assert await rig.ask("healthz", key=key) == (200, {"status": "ok"})
    patterns = [(method, pattern.pattern.replace("([^/]+)", "x")) for method, pattern, _ in rig.endpoint._patterns]
    for method, path in [*rig.endpoint._routes, *patterns, ("GET", "nothing"), ("POST", "copy_weights")]:
        status, answer = await rig.ask(path, b"not read", key=key, method=method)
        assert status == 401 and "X-API-Key" in answer["detail"], path


async def test_a_tenant_cannot_tell_what_is_anothers_from_what_is_not_there(rig):
    session = await session_of(rig)
    model = await model_of(rig, session)
    sampler = await sampler_of(rig, session)
    promise = f"{model}:0"
    path = (await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"}))["path"]
    run = f"training_runs/{model}"
    asked = [
        ("session_heartbeat", {"session_id": session}, "POST"),
        (f"sessions/{session}", None, "GET"),
        (f"sessions/{session}/finish", {"reason": {"type": "success"}}, "POST"),
        ("get_info", {"model_id": model}, "POST"),
        ("unload_model", {"model_id": model}, "POST"),
        ("optim_step", step(model, 2), "POST"),
        ("forward_backward", compute(model, 2), "POST"),
        (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}},
            "",
        ),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 5}, "POST"),
        ("join_sampling_session", {"sampling_session_id": sampler}, "POST"),
        (f"samplers/{sampler}", None, "GET"),
        ("asample", sample(sampler, 0), "POST"),
        ("asample", sample(None, None, model_path=path), "POST"),
        ("retrieve_future", {"request_id": promise}, "POST"),
        ("retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0}, "POST"),
        ("cancel_future", {"request_id": promise}, "POST"),
        ("weights_info", {"tinker_path": path}, "POST"),
        (run, None, "GET"),
        (f"{run}/checkpoints", None, "GET"),
        (f"{run}/checkpoints/weights/w/archive", None, "GET"),
        (f"{run}/checkpoints/weights/w", None, "DELETE"),
        (f"{run}/checkpoints/weights/w/ttl", {"ttl_seconds": 3600}, "PUT"),
        (f"{run}/checkpoints/weights/w/publish", None, "POST"),
    ]

    def other(value):
        text = value if isinstance(value, str) else json.dumps(value)
        return text.replace(session, "f" * len(session)).replace("weights/w", "weights/x")

    for where, body, method in asked:
        theirs = await rig.ask(where, body, key=KEYS["bob"], method=method)
        assert theirs[0] == 404, where
        if not isinstance(body, bytes):
            nothing = await rig.ask(other(where), body and json.loads(other(body)), key=KEYS["bob"], method=method)
            assert (nothing[0], other(nothing[1])) == (404, other(theirs[1])), where
    for listed, name in (("sessions", "sessions"), ("training_runs", "training_runs"), ("checkpoints", "checkpoints")):
        assert len((await rig.ask(listed))[1][name]) == 1
        assert (await rig.ask(listed, key=KEYS["bob"]))[1][name] == []
    # Nothing of it had an effect.
    assert (await rig.ask("get_info", {"model_id": model}))[0] == 200
    assert (await rig.outcome("optim_step", step(model, 2)))["type"] == "optim_step"


async def test_a_published_checkpoint_is_everyones_to_read_and_its_owners_to_change(rig):
    model = await model_of(rig, await session_of(rig))
    path = (await rig.outcome("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "s"}))["path"]
    checkpoint = f"training_runs/{model}/checkpoints/sampler_weights/s"
    assert (await rig.ask(f"{checkpoint}/publish", method="POST"))[0] == 204
    bob = {"key": KEYS["bob"]}
    assert (await rig.ask("weights_info", {"tinker_path": path}, **bob))[1]["lora_rank"] == 4
    assert (await rig.ask(checkpoint, method="DELETE", **bob))[0] == 404
    assert (await rig.ask(f"{checkpoint}/publish", method="DELETE"))[0] == 204
    assert (await rig.ask("weights_info", {"tinker_path": path}, **bob))[0] == 404


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("retrieve_future", b"{", 400, "not valid JSON"),
        ("telemetry", bytes(2**20 + 1), 413, "send fewer or smaller data"),
        ("retrieve_future", b"[1]", 400, "must be a JSON object"),
        ("retrieve_future", {}, 400, "FutureRetrieveRequest.request_id: Field required"),
        ("retrieve_future", {"request_id": "x", "other": 1}, 400, "other: Extra inputs are not permitted"),
        ("forward_backward", b"\xff\xff", 400, "not a ForwardBackwardRequest"),
        ("forward_backward", {"model_id": "m"}, 400, "not a ForwardBackwardRequest"),
        (
            "create_sampling_session",
            {"session_id": "x", "sampling_session_seq_id": "y"},
            400,
            "sampling_session_seq_id",
        ),
        ("sessions/x/finish", {"reason": {"type": "tired"}}, 400, "'tired' is none of success, errored, interrupted"),
        ("weights_info", {"tinker_path": 3}, 400, "tinker_path=3 is not text"),
        ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": -1}, 400, "is missing, negative"),
        ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 2**63}, 400, "or too large"),
        (
            "save_weights_for_sampler",
            {"model_id": "m", "seq_id": 1, "sampling_session_seq_id": -1},
            400,
            "sampling_session_seq_id is missing, negative",
        ),
        ("retrieve_futures", {"target": {"sampling_session_id": "x"}, "prev_cursor": 2**63}, 400, "prev_cursor"),
        ("sessions?limit=x", None, 400, "limit='x'"),
        ("sessions?offset=-1", None, 400, "offset='-1'"),
        ("copy_weights", {}, 404, "POST /api/v1/copy_weights is not supported: a tenant has no projects"),
        ("nothing", {}, 404, "POST /api/v1/nothing is not a route"),
        ("retrieve_future/", {}, 404, "is not a route"),
        ("%ff%00", {}, 404, "is not a route"),
        ("training_runs/%ff%22", None, 404, "there is no model"),
        ("sessions?limit=" + "9" * 5000, None, 400, "limit="),
        ("sessions?offset=%ff", None, 400, "offset="),
        ("asample", sample(None, None, sampling_params={"max_tokens": 1e20}), 400, "max_tokens"),
        ("asample", sample("s", 2**63), 400, "seq_id is missing, negative or too large"),
    ],
)
async def test_what_is_wrong_is_said(rig, path, body, status, words):
    answered, answer = await rig.ask(path, body)
    assert answered == status and words in answer["detail"]


LISTS = ("sessions", "training_runs", "checkpoints", "get_server_capabilities")


def sound_requests(session: str, model: str, sampler: str, path: str) -> list[tuple[str, str, object]]:
    """(method, path, JSON) of each route that reads a body."""
    checkpoint = f"training_runs/{model}/checkpoints/weights/{path.rpartition('/')[2]}"
    named = {"model_id": model, "seq_id": 3}
    dense = {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}
    extra = {"topk_sample_logprobs": 1, "prompt_logprobs": True, "target_prompt_logprobs": dense}
    params = {"max_tokens": 2, "seed": 1, "stop": ["a"], "temperature": 0.5, "top_k": 3, "top_p": 0.5}
    posts: dict[str, object] = {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0", "display_name": "n"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            **{"session_id": session, "model_seq_id": 1, "base_model": "tiny", "user_metadata": {"a": "b"}},
            "lora_config": {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True},
        },
        "get_info": {"model_id": model},
        "unload_model": named,
        "optim_step": named | {"adam_params": {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}},
        "save_weights": named | {"path": "p", "ttl_seconds": 9, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": named | {"path": "p", "ttl_seconds": 9},
        "load_weights": named | {"path": path, "optimizer": False},
        "create_sampling_session": {
            **{"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"},
        },
        "join_sampling_session": {"sampling_session_id": sampler},
        "asample": sample(sampler, 1, num_samples=2, sampling_params=params, **extra),
        "retrieve_future": {"request_id": "x"},
        "retrieve_futures": {"target": {"sampling_session_id": sampler}, "prev_cursor": 0, "timeout": 0.0},
        "cancel_future": {"request_id": "x"},
        "weights_info": {"tinker_path": path},
        f"sessions/{session}/finish": {"reason": {"type": "success"}, "detail": "d"},
        f"{checkpoint}/publish": {},
        "telemetry": {"events": [{"a": 1}]},
    }
    return [("POST", *pair) for pair in posts.items()] + [("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 60})]


@pytest.mark.parametrize("seeds", SEEDS)
async def test_no_change_of_a_body_is_an_internal_error_or_spoils_a_list(tmp_path, monkeypatch, seeds):
    """Of JSON and, as `forward_backward` takes it, of protobuf."""
    async with serving(tmp_path) as rig:
        session, statuses = await session_of(rig), set()
        model, sampler = await model_of(rig, session), await sampler_of(rig, session)
        path = (await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"}))["path"]
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.0)
        sound = sound_requests(session, model, sampler, path)
        message = type(pb := forward_backward_request_to_proto(request_of_pass(model)))
        data = json_format.MessageToDict(pb, preserving_proto_field_name=True)
        for seed in seeds:
            chance = random.Random(seed)
            for method, route, body in sound:
                if route.endswith("/finish"):
                    session = await session_of(rig)
                    route = f"sessions/{session}/finish"
                changed = mutated(body, chance) if body else {}
                sent = json.dumps(changed, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
                status, answer = await rig.ask(route, sent, method=method)
                assert status < 500, f"seed {seed}, {route} {changed}: {answer}"
                statuses.add(status)
            try:
                sent = json_format.ParseDict(mutated(data, chance), message()).SerializeToString()
            except (json_format.ParseError, ValueError, TypeError, AttributeError, SystemError):
                sent = mutated(pb.SerializeToString(), chance)
            status, answer = await rig.ask("forward_backward", sent)
            assert status < 500, f"seed {seed}, forward_backward {sent!r}: {answer}"
            for name in LISTS:
                status, answer = await rig.ask(name)
                assert status == 200, f"seed {seed}, {name}: {answer}"
        assert {200, 400} <= statuses


def request_of_pass(model):
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    given = types.ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config={"kl_coeff": 0.5})
    return types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=2)


async def test_a_body_is_bounded_before_and_after_its_decompression(tmp_path):
    async with serving(tmp_path, body_mb=1) as rig:
        model = await model_of(rig, await session_of(rig))
        status, answer = await rig.ask("forward_backward", bytes(2**20 + 1))
        assert status == 413 and "send fewer or smaller data" in answer["detail"]
        bomb = zstandard.ZstdCompressor().compress(bytes(2**30))
        assert len(bomb) < 2**17
        status, answer = await rig.ask("forward_backward", bomb, Content_Encoding="zstd")
        assert status == 400 and "1073741824 bytes large when decompressed" in answer["detail"]
        status, answer = await rig.ask("forward_backward", b"x", Content_Encoding="gzip")
        assert status == 400 and "Content-Encoding 'gzip' is not supported" in answer["detail"]
        zipped = zstandard.ZstdCompressor().compress(compute(model, 1))
        assert "metrics" in await rig.outcome("forward_backward", zipped, Content_Encoding="ZSTD")


@pytest.mark.parametrize("route", ["optim_step", "create_session", "retrieve_future", "telemetry", "sessions/x/finish"])
async def test_a_body_without_data_is_small_also_after_its_decompression(rig, route):
    body = zstandard.ZstdCompressor().compress(b'{"x": "' + bytes(2**21) + b'"}')
    status, answer = await rig.ask(route, body, Content_Encoding="zstd")
    assert status == 400 and "1048576 are allowed" in answer["detail"]


async def test_large_bodies_of_a_tenant_wait_unread_for_one_another(rig, monkeypatch):
    reading: list[str] = []
    go_on, read = asyncio.Event(), module.read_body

    async def slow(request):
        reading.append(request.headers["X-API-Key"])
        await go_on.wait()
        return await read(request)

    model = await model_of(rig, await session_of(rig))
    monkeypatch.setattr(module, "read_body", slow)

    async def chunks(data):
        yield data

    # Neither the length that is sent nor that of a compressed body says how large it becomes.
    zipped = zstandard.ZstdCompressor().compress(compute(model, 1))
    url, ann, bob = f"{rig.endpoint.url}/api/v1/forward_backward", KEYS["ann"], KEYS["bob"]
    asked = [
        asyncio.ensure_future(rig.http.post(url, data=data, headers={"X-API-Key": key} | more))
        for key, data, more in [
            *[(ann, zipped, {"Content-Encoding": "zstd"})] * 3,
            *[(ann, chunks(compute(model, 1)), {}) for _ in range(3)],
            (bob, bytes(2**21), {}),
        ]
    ]
    small = asyncio.ensure_future(rig.ask("forward_backward", compute(model, 1)))
    while len(reading) < 6:
        await asyncio.sleep(0.001)
    assert sorted(reading) == sorted([ann] * 5 + [bob])
    go_on.set()
    assert [(await answer).status for answer in asked] == [200] * 6 + [400]
    assert (await small)[0] == 200
    assert rig.trainer.calls.count(("compute", model)) == 1


async def test_bodies_and_outcomes_that_are_coded_in_a_thread_take_turns_between_tenants(rig, monkeypatch):
    monkeypatch.setattr(module, "_THREAD_NUMBERS", 2)
    model = await model_of(rig, await session_of(rig))
    promise = (await rig.ask("forward_backward", compute(model, 1)))[1]
    assert (await rig.ask("retrieve_future", promise))[0] == 200
    go_on, ended = threading.Event(), []
    held = asyncio.create_task(rig.endpoint._coding.run("ann", go_on.wait, 60))
    zipped = zstandard.compress(b"{}")

    async def ask(path, body, key, **headers):
        await rig.ask(path, body, key=KEYS[key], **headers)
        ended.append(key)

    many = [asyncio.create_task(ask("retrieve_future", promise, "ann")) for _ in range(20)]
    many += [asyncio.create_task(ask("telemetry", zipped, "ann", Content_Encoding="zstd")) for _ in range(20)]
    while sum(map(len, rig.endpoint._coding._waiting.values())) < 40:
        await asyncio.sleep(0.001)
    few = asyncio.create_task(ask("telemetry", zipped, "bob", Content_Encoding="zstd"))
    while "bob" not in rig.endpoint._coding._waiting:
        await asyncio.sleep(0.001)
    go_on.set()
    await asyncio.gather(held, few, *many)
    assert ended.index("bob") < 10


async def test_a_connection_without_a_request_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    async with serving(tmp_path) as rig:
        host, port = rig.endpoint.url.removeprefix("http://").split(":")
        for sent in (b"", b"POST /api/v1/optim_step HTT"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()


@pytest.mark.parametrize(
    "tokens_and_change",
    [
        ((1, 2, 100), lambda message: None),
        ((1, -1), lambda message: None),
        ((1,) * 65, lambda message: None),
        ((1, 2), lambda message: setattr(message, "loss_fn", "dpo")),
        ((1, 2), lambda message: setattr(message.data[0].model_input.add().image, "data", b"x")),
        ((1, 2), lambda message: setattr(message.data[0].loss_fn_inputs["target_tokens"], "dense", b"x")),
    ],
)
async def test_a_refused_request_uses_up_its_number_and_has_no_effect(rig, tokens_and_change):
    model = await model_of(rig, await session_of(rig))
    status, answer = await rig.ask("forward_backward", compute(model, 1, *tokens_and_change))
    assert status == 400 and answer["detail"]
    assert "metrics" in await rig.outcome("optim_step", step(model, 2))
    assert ("compute", model) not in rig.trainer.calls


async def test_a_repeated_request_is_the_same_promise_and_another_body_is_refused(rig):
    model = await model_of(rig, await session_of(rig))
    first = await rig.ask("forward_backward", compute(model, 1), X_Idempotency_Key="k1")
    assert first == await rig.ask("forward_backward", compute(model, 1), X_Idempotency_Key="k2")
    for number, key in ((1, "k3"), (2, "k1")):
        status, answer = await rig.ask("forward_backward", compute(model, number, (5,)), X_Idempotency_Key=key)
        assert status == 400 and "accepted with another body" in answer["detail"]
    for key in ("k" * 257, "\u00e9"):
        status, answer = await rig.ask("forward_backward", compute(model, 2), X_Idempotency_Key=key)
        assert status == 400 and "idempotency key" in answer["detail"]
    await rig.outcome("forward_backward", compute(model, 2))
    assert rig.trainer.calls.count(("compute", model)) == 2


async def test_a_tenant_above_a_limit_is_asked_to_wait_and_another_is_not(tmp_path):
    async with serving(tmp_path, limits=Limits(pending=1)) as rig:
        rig.servers.pause = asyncio.Event()
        sampler = await sampler_of(rig, await session_of(rig))
        first = (await rig.ask("asample", sample(sampler, 0)))[1]
        status, answer = await rig.ask("asample", sample(sampler, 1))
        assert status == 429 and "pending=1" in answer["detail"]
        bob = {"key": KEYS["bob"]}
        assert (await rig.ask("asample", sample(None, None, base_model="tiny"), **bob))[0] == 200
        rig.servers.pause.set()
        assert (await rig.ask("retrieve_future", {"request_id": first["request_id"]}))[0] == 200
        assert (await rig.ask("asample", sample(sampler, 1)))[0] == 200


async def test_a_finished_session_is_gone(rig):
    session = await session_of(rig)
    model = await model_of(rig, session)
    assert (await rig.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}))[0] == 204
    assert (await rig.ask("session_heartbeat", {"session_id": session}))[0] == 410
    assert (await rig.ask("optim_step", step(model, 1)))[0] == 410


async def test_an_error_of_the_service_is_logged_and_not_shown(rig, monkeypatch, caplog):
    monkeypatch.setattr(rig.service, "sessions", lambda tenant: 1 / 0)
    status, answer = await rig.ask("sessions")
    assert status == 500 and answer["detail"].startswith("internal error (ZeroDivisionError)")
    assert "division by zero" in caplog.text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"a": "sk-0123456789abcdef"}, "must be `tml-`"),
        ({"a": "tml-short"}, "at least 12 characters"),
        ({"a": "tml-0123456789abc d"}, "without spaces"),
        ({"a": KEYS["ann"], "b": KEYS["ann"]}, "two tenants have the same key"),
        ({}, "no tenant"),
    ],
)
def test_keys_that_clients_cannot_use_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        Endpoint(None, keys)


async def test_an_address_that_is_taken_is_refused(rig):
    port = int(rig.endpoint.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port={port}"):
        await Endpoint(rig.service, KEYS, port=port).start()


# Outcomes


async def test_a_promise_without_an_outcome_is_asked_for_again(rig, monkeypatch):
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    rig.servers.pause = asyncio.Event()
    sampler = await sampler_of(rig, await session_of(rig))
    promise = (await rig.ask("asample", sample(sampler, 0)))[1]["request_id"]
    status, answer = await rig.ask("retrieve_future", {"request_id": promise})
    assert (status, answer) == (408, {"type": "try_again", "request_id": promise, "queue_state": "active"})
    target = {"target": {"sampling_session_id": sampler}}
    assert await rig.ask("retrieve_futures", target) == (200, {"completions": [], "cursor": 0})


async def test_samples_are_protobuf_or_json_and_say_which_version_each_token_has(rig):
    model = await model_of(rig, await session_of(rig))
    saved = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    sampler = (await rig.outcome("save_weights_for_sampler", saved))["sampling_session_id"]
    _, promise = await rig.ask("asample", sample(sampler, 0, num_samples=2))
    assert promise["sample_sequence_ids"] == [f"{promise['request_id']}:{index}" for index in range(2)]
    body = {"request_id": promise["request_id"]}
    _, plain = await rig.ask("retrieve_future", body)
    headers = {"X-API-Key": KEYS["ann"], "Accept": "application/x-protobuf"}
    async with rig.http.post(f"{rig.endpoint.url}/api/v1/retrieve_future", json=body, headers=headers) as answer:
        decoded = deserialize_sample_response(await answer.read())
        versions = json.loads(answer.headers[VERSIONS_HEADER])
    (adapter,) = rig.servers.adapters
    assert versions == plain["weight_versions"] == [[[adapter, 0, 4]]] * 2
    assert [each.tokens for each in decoded.sequences] == [each["tokens"] for each in plain["sequences"]]


async def test_a_checkpoint_is_downloaded_as_an_archive(rig, monkeypatch):
    model = await model_of(rig, await session_of(rig))
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    for seq, size in enumerate((0, 1, 511, 512, 513, 1024), 1):
        content = bytes(range(256)) * 4 if size == 1024 else b"x" * size
        rig.trainer.beside = {"other": content}
        await rig.outcome("save_weights", {"model_id": model, "seq_id": seq, "path": f"w{seq}"})
        status, body = await rig.ask(f"training_runs/{model}/checkpoints/weights/w{seq}/archive")
        assert status == 200
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            assert archive.getnames() == ["other", "state.json"]
            assert archive.extractfile("other").read() == content
            assert json.load(archive.extractfile("state.json")).keys() == {"w", "m"}


async def test_each_piece_of_a_download_takes_a_turn_of_its_tenant(rig, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    rig.trainer.beside = {"other": bytes(1000)}
    model = await model_of(rig, await session_of(rig))
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    turns, turn = [], rig.endpoint._rounds.turn

    async def counted(name):
        turns.append(name)
        await turn(name)

    monkeypatch.setattr(rig.endpoint._rounds, "turn", counted)
    assert (await rig.ask(f"training_runs/{model}/checkpoints/weights/w/archive"))[0] == 200
    assert set(turns) == {"ann"} and len(turns) > 10


async def test_files_that_are_not_those_that_were_saved_are_not_downloaded(rig, tmp_path):
    model = await model_of(rig, await session_of(rig))
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    (file,) = (tmp_path / "checkpoints").glob("*/1/state.json")
    saved = file.read_bytes()
    file.write_bytes(saved.swapcase())
    checkpoint = f"training_runs/{model}/checkpoints/weights/w"
    (address,) = (await rig.ask(f"{checkpoint}/external_weights_urls"))[1]["urls"].values()
    for path in (f"{checkpoint}/archive", address.removeprefix(f"{rig.endpoint.url}/api/v1/")):
        status, answer = await rig.ask(path)
        assert status == 500 and "state.json is not the file that the service wrote there" in answer["detail"]
    file.write_bytes(saved)
    assert (await rig.ask(f"{checkpoint}/archive"))[0] == 200


async def test_a_download_is_sent_once_and_what_follows_it_is_the_next_answer(rig, caplog):
    model = await model_of(rig, await session_of(rig))
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    checkpoint = f"training_runs/{model}/checkpoints/weights/w"
    (address,) = (await rig.ask(f"{checkpoint}/external_weights_urls"))[1]["urls"].values()
    host, port = rig.endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for path in (address.removeprefix(rig.endpoint.url), f"/api/v1/{checkpoint}/archive", "/api/v1/healthz") * 2:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['ann']}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 200")
        size = int(head.partition("content-length: ")[2].split()[0])
        body = await reader.readexactly(size)
    assert json.loads(body) == {"status": "ok"}
    writer.close()
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("host", ["", "x:99999"])
async def test_addresses_of_files_need_that_of_the_service(rig, host):
    model = await model_of(rig, await session_of(rig))
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    urls = f"training_runs/{model}/checkpoints/weights/w/external_weights_urls"
    status, answer = await rig.ask(urls, Host=host)
    assert status == 400 and f"Host={host!r} is not an address" in answer["detail"]


async def test_a_client_that_takes_nothing_loses_its_download_and_the_folder_goes(rig, tmp_path, monkeypatch):
    model = await model_of(rig, await session_of(rig))
    rig.trainer.beside = {"large": bytes(2**25)}
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    (folder,) = (tmp_path / "checkpoints").glob("*/1")
    monkeypatch.setattr(module, "_STALL_SECONDS", 0.1)
    host, port = rig.endpoint.url.removeprefix("http://").split(":")
    path = f"training_runs/{model}/checkpoints/weights/w"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /api/v1/{path}/archive HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['ann']}\r\n\r\n".encode())
    writer.transport.pause_reading()
    assert (await rig.ask(path, method="DELETE"))[0] == 204
    while folder.exists():
        await asyncio.sleep(0.01)
    writer.transport.resume_reading()
    with pytest.raises(ConnectionError):
        assert len(await reader.read()) < 2**25
        raise ConnectionError("it ended")
    writer.close()
    assert (await rig.ask("healthz"))[0] == 200


async def test_downloads_of_a_tenant_wait_for_one_another(rig, monkeypatch):
    model = await model_of(rig, await session_of(rig))
    await rig.outcome("save_weights", {"model_id": model, "seq_id": 1, "path": "w"})
    path = f"training_runs/{model}/checkpoints/weights/w"
    await rig.ask(f"{path}/publish", {})
    running, most, taken = 0, 0, asyncio.Event()

    async def send(endpoint, tenant, request, parts, size):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if request.headers["X-API-Key"] == KEYS["ann"]:
            await taken.wait()
        running -= 1
        return module.web.Response(body=b"".join(parts))

    monkeypatch.setattr(module, "_DOWNLOADS", 2)
    monkeypatch.setattr(Endpoint, "_send", send)
    waiting = [asyncio.create_task(rig.ask(f"{path}/archive")) for _ in range(5)]
    while running < 2:
        await asyncio.sleep(0)
    # Another tenant's goes ahead.
    assert (await rig.ask(f"{path}/archive", key=KEYS["bob"]))[0] == 200
    assert running == 2
    taken.set()
    assert [(await each)[0] for each in waiting] == [200] * 5
    assert most == 3


async def test_lists_are_given_in_pages(rig, monkeypatch):
    session = await session_of(rig)
    models = [await model_of(rig, session, number) for number in range(3)]
    _, answer = await rig.ask("training_runs?limit=1&offset=1")
    assert answer["cursor"] == {"offset": 1, "limit": 1, "total_count": 3}
    assert [run["training_run_id"] for run in answer["training_runs"]] == [models[1]]
    monkeypatch.setattr(module, "_PAGE", 2)
    for asked in ("training_runs", "training_runs?limit=3"):
        _, answer = await rig.ask(asked)
        assert answer["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
        assert len(answer["training_runs"]) == 2


async def test_polls_end_when_the_service_closes(tmp_path):
    async with serving(tmp_path) as rig:
        rig.servers.pause = asyncio.Event()
        sampler = await sampler_of(rig, await session_of(rig))
        promise = {"request_id": (await rig.ask("asample", sample(sampler, 0)))[1]["request_id"]}
        poll = asyncio.create_task(rig.ask("retrieve_future", promise))
        # It waits in the service once this later request is answered.
        await rig.ask("healthz")
        rig.service._promises.close("the service is shutting down")
        status, answer = await poll
        assert status == 503 and "shutting down" in answer["detail"]


async def test_requests_of_a_tenant_that_arrive_together_hold_up_another_for_a_few_only(rig, monkeypatch):
    sessions = {tenant: await session_of(rig, key) for tenant, key in KEYS.items()}
    host, port = rig.endpoint.url.removeprefix("http://").split(":")
    answered: list[str] = []
    heartbeat = rig.service.heartbeat
    monkeypatch.setattr(rig.service, "heartbeat", lambda *names: (answered.append(names[0]), heartbeat(*names)))

    def ask(tenant):
        body = json.dumps({"session_id": sessions[tenant]}).encode()
        head = f"POST /api/v1/session_heartbeat HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS[tenant]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        return connection

    # All arrive before any is read.
    waiting = [ask(tenant) for tenant in (*["bob"] * 200, "ann")]
    loop = asyncio.get_running_loop()
    assert (await loop.sock_recv(waiting[-1], 1000)).startswith(b"HTTP/1.1 200")
    assert answered.index("ann") <= 32
    for connection in waiting:
        if connection is not waiting[-1]:
            assert (await loop.sock_recv(connection, 1000)).startswith(b"HTTP/1.1 200")
        connection.close()
