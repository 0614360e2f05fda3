"""What the sampler asks of servers, what it makes of their answers, and what it refuses before it asks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from clients import make_rollout_client
from fake_sglang import DROP, Break, FakeSGLang, event, finish
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError, ServerError
from megasync.rollout import client as client_module
from megasync.rollout.client import SharedPrompts
from megasync.rollout.workflow import request_seed
from megasync.service.interfaces import Sampling, ServedModel
from megasync.service.sampling import MOST_CELLS, FleetSampler, _Asked
from megasync.serving.answers import PromptScores, TopTokens
from megasync.serving.plugin_protocol import ROUTING_KEY_HEADER, SEEDS
from megasync.sglang.adapters import damage

PROMPT = np.array([5, 99, 7, 8])
CONTEXT = 64


@pytest.fixture
async def fake():
    async with FakeSGLang() as server:
        yield server


@pytest.fixture
def peft(tmp_path):
    folder = tmp_path / "peft"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(params=[0, 3], ids=["whole", "streamed"])
async def sampler(fake, peft, tmp_path, monkeypatch, request):
    monkeypatch.setattr(client_module, "_FAILURE_WAIT", (0.005, 0.02))
    client = make_rollout_client(
        fake.url,
        vocab_size=fake.vocab,
        context_length=CONTEXT,
        # Nothing of these reaches a request.
        sampling=SamplingConfig(temperature=0.3, top_p=0.5, top_k=3, max_new_tokens=1),
        timeout=10.0,
        stream_interval=request.param,
        stop_ids=[98],
    )
    made = FleetSampler(client, ServedModel("fake", CONTEXT, fake.vocab, 8), tmp_path / "root", samples=8)
    await made.offer("tuned", peft)
    yield made
    await client.close()


REFUSED = {
    "no adapter": (Sampling(PROMPT), "other", "there is no adapter 'other'"),
    "another folder": (Sampling(PROMPT), "../peft", "there is no adapter"),
    "no tokens": (Sampling(PROMPT[:0]), "", "no tokens"),
    "an id outside the vocabulary": (Sampling(np.array([1, 100])), "", "100"),
    "a full context": (Sampling(np.ones(64, int)), "", "exceed the context of 64"),
    "more than the context": (Sampling(PROMPT, max_tokens=61), "", "max_tokens to at most 60"),
    "fewer than no tokens": (Sampling(PROMPT, max_tokens=-1), "", "max_tokens must be 0 or more"),
    "scores without room": (Sampling(np.ones(64, int), 1, 0, prompt_logprobs=3), "", "exceed the context"),
    "no samples": (Sampling(PROMPT, 0), "", r"num_samples must be in \[1, 8\], not 0"),
    "many samples": (Sampling(PROMPT, 9), "", r"num_samples must be in \[1, 8\], not 9"),
    "a negative temperature": (Sampling(PROMPT, temperature=-1.0), "", "temperature must be"),
    "no temperature": (Sampling(PROMPT, temperature=float("nan")), "", "temperature must be"),
    "a large top_p": (Sampling(PROMPT, top_p=1.1), "", "top_p must be"),
    "a top_k of 0": (Sampling(PROMPT, top_k=0), "", "top_k must be"),
    "an empty stop": (Sampling(PROMPT, stop=["a", ""]), "", "empty text"),
    "a stop outside the vocabulary": (Sampling(PROMPT, stop=[100]), "", r"stop id 100 is outside"),
    "a stop that cannot be": (Sampling(PROMPT, stop=[3], stop_at_eos=False), "", "nothing may end"),
    "more positions than tokens": (Sampling(PROMPT, prompt_logprobs=5), "", "5 positions"),
    "a negative top": (Sampling(PROMPT, topk_prompt_logprobs=-1), "", "topk_prompt_logprobs must be"),
    "a large top": (Sampling(PROMPT, topk_sample_logprobs=129), "", "topk_sample_logprobs must be"),
    "one row too many": (Sampling(PROMPT, target_prompt_logprobs=np.zeros((4, 1), int)), "", r"\[3, ids\]"),
    "no integers": (Sampling(PROMPT, target_prompt_logprobs=np.zeros((3, 1))), "", "must be integers"),
    "a large target": (Sampling(PROMPT, target_prompt_logprobs=np.full((3, 1), 100)), "", "target id 100"),
    "a negative target": (Sampling(PROMPT, target_prompt_logprobs=np.full((3, 1), -2)), "", "target id -2"),
}


@pytest.mark.parametrize("asked", REFUSED.values(), ids=REFUSED.keys())
async def test_bad_requests_are_refused_before_anything_is_sent(fake, sampler, asked):
    sampling, adapter, message = asked
    with pytest.raises(DataError, match=message):
        await sampler.sample(sampling, adapter)
    assert not fake.requests


async def test_the_cost_of_log_probs_is_bounded(fake, sampler):
    prompt = np.resize(np.arange(100), 50)
    sampler._model = replace(sampler._model, context=2 * MOST_CELLS)
    sampler._client.context_length = 2 * MOST_CELLS
    too_many = (
        Sampling(prompt, 8, MOST_CELLS, topk_sample_logprobs=1),
        Sampling(np.resize(prompt, MOST_CELLS // 64), 1, 1, topk_prompt_logprobs=65),
        Sampling(np.resize(prompt, 20_001), 1, 1, target_prompt_logprobs=np.resize(np.arange(99), (20_000, 1))),
    )
    for sampling in too_many:
        with pytest.raises(DataError, match="log-probs"):
            await sampler.sample(sampling, "")
    assert not fake.requests


@pytest.mark.parametrize("adapter", ["", "tuned"])
async def test_each_request_has_all_parameters_a_seed_of_its_own_and_the_key_of_its_prompt(fake, sampler, adapter):
    asked = Sampling(PROMPT, 3, 5, 0.7, 0.9, 40, seed=11, stop=["x", "y"])
    got = await sampler.sample(asked, adapter)
    assert [sample.ids.tolist() for sample in got.samples] == [[9, 10, 11, 12, 13]] * 3
    assert all(sample.versions == [(adapter, 0, 5)] and not sample.stopped for sample in got.samples)
    np.testing.assert_array_equal(got.samples[0].logprobs, np.arange(9, 14) / np.float32(-128))
    (body,), (headers,) = fake.requests, fake.headers
    assert body.get("lora_path", "") == adapter and headers[ROUTING_KEY_HEADER]
    assert body["custom_labels"] == {SEEDS: ",".join(str(request_seed(11, number)) for number in range(3))}
    params = body["sampling_params"]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "stop": ["x", "y"], "max_new_tokens": 5}
    assert params | expected == params and params["stop_token_ids"] == [98]
    fake.requests.clear()
    await sampler.sample(replace(asked, samples=1, stop=[3], top_k=-1), adapter)
    await sampler.sample(replace(asked, samples=1, stop=(), stop_at_eos=False), adapter)
    stops = [
        (body["sampling_params"]["stop_token_ids"], body["sampling_params"]["ignore_eos"]) for body in fake.requests
    ]
    assert stops == [([3, 98], False), ([], True)]
    assert len({headers[ROUTING_KEY_HEADER] for headers in fake.headers}) == 1


async def test_samples_have_the_rest_of_the_context_or_no_token(fake, sampler):
    (sample,) = (await sampler.sample(Sampling(PROMPT), "")).samples
    assert len(sample.ids) == 60
    fake.requests.clear()
    got = await sampler.sample(Sampling(PROMPT, 2, 0), "tuned")
    assert [len(sample.ids) for sample in got.samples] == [0, 0] and not fake.requests
    got = await sampler.sample(Sampling(PROMPT, 2, 0, prompt_logprobs=1), "tuned")
    assert len(fake.requests) == 1 and [sample.versions for sample in got.samples] == [[], []]


async def test_log_probs_of_a_prompt_take_one_request_before_the_samples(fake, sampler):
    got = await sampler.sample(Sampling(PROMPT, 1, 1, prompt_logprobs=4), "tuned")
    np.testing.assert_array_equal(got.prompt_logprobs, np.array([np.nan, -99, -7, -8], np.float32) / 128)
    assert got.prompt_topk is None and got.target_logprobs is None and got.samples[0].ids.tolist() == [9]
    assert len(fake.requests) == 1 and not fake.requests[0]["stream"] and got.cached_prompt_tokens == 0
    got = await sampler.sample(Sampling(PROMPT, 2, 4, prompt_logprobs=2, topk_prompt_logprobs=3), "tuned")
    np.testing.assert_array_equal(got.prompt_logprobs, np.array([np.nan, np.nan, -7, -8], np.float32) / 128)
    np.testing.assert_array_equal(got.prompt_topk.ids[2:], [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(
        got.prompt_topk.logprobs, np.float32([[np.nan] * 3] * 2 + [[0, -1 / 32, -2 / 32]] * 2)
    )
    tokens = [body["sampling_params"]["max_new_tokens"] for body in fake.requests]
    assert tokens == [1, 1, 4] and got.cached_prompt_tokens == 1
    assert [len(sample.ids) for sample in got.samples] == [4, 4]


async def test_targets_are_scored_from_the_first_row_that_names_one(fake, sampler):
    targets = np.array([[-1, -1, -1], [6, -1, 50], [-1, 6, 2]])
    got = await sampler.sample(Sampling(PROMPT, 1, 1, target_prompt_logprobs=targets), "")
    np.testing.assert_array_equal(got.target_logprobs, np.where(targets < 0, np.nan, targets / np.float32(-128)))
    (body,) = fake.requests
    assert body["logprob_start_len"] == 1 and body["token_ids_logprob"] == [2, 6, 50]
    assert got.prompt_logprobs is None
    # Rows that name nothing, and a prompt of one token, ask for nothing.
    for prompt in (PROMPT, PROMPT[:1]):
        empty = np.full((len(prompt) - 1, 2), -1)
        got = await sampler.sample(Sampling(prompt, 1, 2, target_prompt_logprobs=empty), "")
        assert got.target_logprobs.shape == empty.shape and np.isnan(got.target_logprobs).all()
    got = await sampler.sample(Sampling(PROMPT[:1], 1, 2, prompt_logprobs=1, topk_prompt_logprobs=2), "")
    assert np.isnan(got.prompt_logprobs).all() and got.prompt_topk.ids.shape == (1, 2)
    assert all("logprob_start_len" not in body for body in fake.requests[1:])


async def test_the_likeliest_tokens_come_with_each_token_also_over_an_interruption(fake, sampler):
    fake.script += [finish(4, "abort"), DROP]
    (sample,) = (await sampler.sample(Sampling(PROMPT, 1, 9, topk_sample_logprobs=2), "tuned")).samples
    assert sample.ids.tolist() == list(range(9, 18)) and len(fake.requests) == 3
    np.testing.assert_array_equal(sample.topk.ids, [[0, 1]] * 9)
    np.testing.assert_array_equal(sample.topk.logprobs, np.float32([[0, -1 / 32]] * 9))


@pytest.mark.parametrize(("stop", "sent"), [([], [4, 7]), ([3], [4, 7]), (["x"], [4, 4])])
async def test_a_sample_that_a_text_may_end_begins_again_after_a_cut(fake, sampler, stop, sent):
    fake.script += [finish(3, "abort")]
    (sample,) = (await sampler.sample(Sampling(PROMPT, 1, 9, stop=stop), "")).samples
    assert sample.ids.tolist() == list(range(9, 18)) and len(sample.logprobs) == 9
    assert [len(body["input_ids"]) for body in fake.requests] == sent


def several(*counts, reasons=()):
    """Answers a request for several responses with as many tokens of each; they end for the reasons, or go on."""

    async def behave(fake, body):
        ids = [fake.continuation(body, count) for count in counts]
        ends = [
            {"finish_reason": {"type": reason}, "weight_versions": [{"version": "0", "start": 0, "end": count}]}
            for count, reason in zip(counts, [*reasons, *["length"] * len(counts)], strict=False)
        ]
        answers = [
            fake.piece(body, each, 0, end) | {"index": at} for at, (each, end) in enumerate(zip(ids, ends, strict=True))
        ]
        if not body["stream"]:
            return web.json_response(answers)
        text = "".join(map(event, reversed(answers))) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    return behave


async def test_samples_that_their_request_leaves_unfinished_go_on_by_themselves_from_their_tokens(fake, sampler):
    fake.script += [several(9, 4, 0, reasons=["length", "abort", "abort"])]
    got = await sampler.sample(Sampling(PROMPT, 3, 9, seed=5, topk_sample_logprobs=2), "tuned")
    assert [sample.ids.tolist() for sample in got.samples] == [list(range(9, 18))] * 3
    assert all(sample.versions == [("tuned", 0, 9)] and sample.topk.ids.shape == (9, 2) for sample in got.samples)
    rest = {body["sampling_params"]["sampling_seed"]: len(body["input_ids"]) for body in fake.requests[1:]}
    assert rest == {request_seed(5, 1): 8, request_seed(5, 2): 4}
    # A text might straddle the cut.
    fake.requests.clear()
    fake.script += [several(9, 4, reasons=["length", "abort"])]
    await sampler.sample(Sampling(PROMPT, 2, 9, stop=["x"]), "")
    assert [len(body["input_ids"]) for body in fake.requests] == [4, 4]


async def test_samples_that_follow_a_model_go_on_with_its_newest_adapter_after_each_cut(fake, sampler, peft):
    await sampler.offer("newer", peft)
    sampler._follow = 4
    names = iter(["tuned", "tuned", "newer", "newer"])

    async def newest():
        return next(names)

    fake.script += [several(4, 2, reasons=["length", "stop"])]
    got = await sampler.sample(Sampling(PROMPT, 2, 9, seed=5, topk_sample_logprobs=2), "tuned", newest)
    long, short = got.samples
    assert long.ids.tolist() == list(range(9, 18)) and long.topk.ids.shape == (9, 2) and not long.stopped
    assert short.ids.tolist() == [9, 10] and short.versions == [("tuned", 0, 2)] and short.stopped
    assert long.versions == [("tuned", 0, 9)]
    (long,) = (await sampler.sample(Sampling(PROMPT, 1, 9, seed=5), "tuned", newest)).samples
    assert long.ids.tolist() == list(range(9, 18)) and long.versions == [("tuned", 0, 4), ("newer", 4, 9)]
    sent = [(body["lora_path"], len(body["input_ids"])) for body in fake.requests]
    assert sent == [("tuned", 4), ("tuned", 8), ("tuned", 12), ("tuned", 4), ("newer", 8), ("newer", 12)]
    # A text might straddle the cut.
    fake.requests.clear()
    await sampler.sample(Sampling(PROMPT, 2, 9, stop=["x"]), "tuned", newest)
    assert len(fake.requests) == 1


@pytest.mark.parametrize("behave", [DROP, several(9, 9, 9, 9), several(10, 9, 9)], ids=["cut", "four", "too long"])
async def test_a_request_for_several_samples_that_fails_is_repeated_as_a_whole(fake, sampler, behave):
    fake.script += [behave]
    got = await sampler.sample(Sampling(PROMPT, 3, 9, seed=5), "")
    assert [sample.ids.tolist() for sample in got.samples] == [list(range(9, 18))] * 3
    first, second = fake.requests
    assert first == second


async def test_an_answer_of_one_for_several_is_no_answer_or_one_of_them(fake, sampler):
    async def alone(fake, body):
        return fake.answer(body | {"custom_labels": {}}, 9, "length")

    fake.script += [alone]
    got = await sampler.sample(Sampling(PROMPT, 3, 9, seed=5), "")
    assert [sample.ids.tolist() for sample in got.samples] == [list(range(9, 18))] * 3
    assert len(fake.requests) == (3 if sampler._client._interval else 2)


async def test_pieces_of_several_samples_that_arrived_before_a_cut_are_kept(fake, sampler):
    sampler._client._interval = 3
    fake.script += [Break(((2, 0), (3, 0)))]
    got = await sampler.sample(Sampling(PROMPT, 2, 9, seed=5), "")
    assert [sample.ids.tolist() for sample in got.samples] == [list(range(9, 18))] * 2
    assert sorted(len(body["input_ids"]) for body in fake.requests) == [4, 4, 9]


async def test_many_samples_are_spread_and_a_long_prompt_is_computed_once(fake, sampler, monkeypatch):
    sampler._together = 3
    await sampler.sample(Sampling(PROMPT, 8, 2), "")
    assert sorted(len(body["custom_labels"][SEEDS].split(",")) for body in fake.requests) == [2, 3, 3]
    fake.requests.clear()
    monkeypatch.setattr("megasync.service.sampling.LONG_PROMPT", len(PROMPT))
    sampler._client._shared = SharedPrompts()
    sampler._client._interval = 3
    got = await sampler.sample(Sampling(PROMPT, 3, 2), "")
    assert len(got.samples) == 3 and ["custom_labels" in body for body in fake.requests] == [False, True]


def changed(**fields):
    """Answers a request in full, with other metadata."""

    async def behave(fake, body):
        answer = json.loads(fake.answer(body | {"stream": False}, 1, "length").text)
        answer["meta_info"] |= fields
        return web.json_response(answer)

    return behave


INVALID = {
    "another adapter": changed(adapter="other"),
    "no adapter": changed(adapter=None),
    "a log-prob that is no number": changed(input_token_logprobs=[[None, 5, None], *[[None, 99, None]] * 3]),
    "a log-prob above 0": changed(input_token_logprobs=[[0.5, i, None] for i in PROMPT.tolist()]),
    "log-probs of other tokens": changed(input_token_logprobs=[[-1.0, 3, None]] * 4),
    "too few log-probs": changed(input_token_logprobs=[[-1.0, 5, None]]),
    "no log-probs": changed(input_token_logprobs=None),
    "likeliest ids outside the vocabulary": changed(input_top_logprobs_idx_flat_b64="ZAAAAGQAAABkAAAA"),
    "too few of the likeliest": changed(input_top_logprobs_idx_flat_b64=""),
    "no base64": changed(input_top_logprobs_val_flat_b64="?"),
    "log-probs of other targets": changed(input_token_ids_logprobs=[None, *[[[-1.0, 3, None]]] * 3]),
    "targets that are no numbers": changed(input_token_ids_logprobs=[None, *[[[None, 4, None]]] * 3]),
    "no targets": changed(input_token_ids_logprobs=None),
}


@pytest.mark.parametrize("behave", INVALID.values(), ids=INVALID.keys())
async def test_invalid_answers_about_a_prompt_are_discarded_and_asked_for_again(fake, sampler, behave):
    fake.script += [behave]
    targets = np.full((3, 1), 4)
    asked = Sampling(PROMPT, 1, 1, prompt_logprobs=4, topk_prompt_logprobs=1, target_prompt_logprobs=targets)
    got = await sampler.sample(asked, "tuned")
    assert len(fake.requests) == 2 and sampler._client.metrics()["rollout/invalid_answers"] == 1
    np.testing.assert_array_equal(got.prompt_logprobs, np.array([np.nan, -99, -7, -8], np.float32) / 128)
    np.testing.assert_array_equal(got.target_logprobs, np.full((3, 1), np.float32(-4 / 128)))


@pytest.mark.parametrize("samples", [1, 3])
async def test_an_adapter_with_which_all_servers_answer_wrongly_is_at_fault(fake, sampler, samples):
    async def overflowed(fake, body):
        # What a server says of NaN.
        meta = {"id": "0", "finish_reason": {"type": "length"}, "output_token_logprobs": [[None, 0, None]]}
        answer = {"text": "", "output_ids": [0], "meta_info": meta}
        if not body["stream"]:
            return web.json_response([answer] * samples if samples > 1 else answer)
        return web.Response(text=f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    fake.script += [overflowed] * 100
    with pytest.raises(DataError, match="answers with the adapter tuned were invalid"):
        await sampler.sample(Sampling(PROMPT, samples, 3), "tuned")
    assert len(fake.requests) <= 3 * samples


async def test_an_adapter_that_a_server_cannot_load_is_asked_for_until_the_deadline(fake, sampler):
    async def unavailable(fake, body):
        stop = {"type": "abort", "status_code": 503, "message": "adapter tuned: no folder"}
        answer = {"text": "", "output_ids": [], "meta_info": {"id": "0", "finish_reason": stop}}
        if not body["stream"]:
            return web.json_response(answer)
        return web.Response(text=f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    fake.script += [unavailable] * 2
    assert len((await sampler.sample(Sampling(PROMPT, 1, 3), "tuned")).samples[0].ids) == 3
    sampler._client._timeout = 0.2
    fake.script += [unavailable] * 1000
    with pytest.raises(ServerError, match="adapter tuned: no folder"):
        await sampler.sample(Sampling(PROMPT, 1, 3), "tuned")


async def test_a_name_is_that_of_one_folder_and_no_path(sampler, peft, tmp_path):
    for name in ("", ".", "..", "../peft", "a/b", "/peft", "policy-3", "kept-3", "eval-x", "a\n", "a" * 300, "é"):
        with pytest.raises(DataError, match="must match"):
            await sampler.offer(name, peft)
        await sampler.withdraw(name)
    with pytest.raises(DataError, match="not a PEFT folder: it has no adapter_config.json"):
        await sampler.offer("empty", tmp_path)
    other = shutil.copytree(peft, tmp_path / "other")
    with pytest.raises(DataError, match="adapter tuned is .*peft and cannot become .*other"):
        await sampler.offer("tuned", other)
    # After the driver has started again, it offers what it has.
    await sampler.offer("tuned", peft)
    entry = tmp_path / "root" / "tuned"
    assert damage(entry) == ""
    (peft / "adapter_model.safetensors").write_text("damaged")
    assert "adapter_model.safetensors has other bytes here" in damage(entry)
    await sampler.withdraw("tuned")
    await sampler.withdraw("tuned")
    assert (peft / "adapter_config.json").is_file() and not any((tmp_path / "root").iterdir())


@given(data=st.data())
def test_each_log_prob_of_a_prompt_is_where_it_was_asked_for(data):
    vocab = 7
    prompt = np.array(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9)))
    last, k = data.draw(st.integers(0, len(prompt))), data.draw(st.integers(0, 2 * vocab))
    columns = data.draw(st.integers(0, 3))
    cells = st.lists(st.integers(-1, vocab - 1), min_size=columns, max_size=columns)
    rows = data.draw(st.none() | st.lists(cells, min_size=len(prompt) - 1, max_size=len(prompt) - 1))
    targets = None if rows is None else np.array(rows, np.int64).reshape(len(prompt) - 1, columns)
    table = np.random.default_rng(1).normal(size=(len(prompt), vocab)).astype(np.float32)
    sampling = Sampling(prompt, prompt_logprobs=last, topk_prompt_logprobs=k, target_prompt_logprobs=targets)
    asked = _Asked(sampling, len(prompt), vocab)
    scores, question = None, asked.question
    if question is not None:
        at = np.arange(question.first, len(prompt))
        ids = np.argsort(-table[at], axis=1)[:, : question.top].astype(np.int32)
        top = TopTokens(ids, np.take_along_axis(table[at], ids, axis=1)) if question.top else None
        named = table[at][:, list(question.named)] if question.named else None
        scores = PromptScores(table[at, prompt[at]], top, named)
    answer = asked.answer(scores, [], 3)
    first = max(1, len(prompt) - (last or len(prompt)))
    assert (answer.prompt_logprobs is None, answer.prompt_topk is None) == (not last, not k)
    for position, token in enumerate(prompt):
        if last:
            expected = table[position, token] if position >= first else np.nan
            np.testing.assert_array_equal(answer.prompt_logprobs[position], np.float32(expected))
        if k:
            likeliest = -np.sort(-table[position])[:k] if position >= first else np.full(min(k, vocab), np.nan)
            np.testing.assert_array_equal(answer.prompt_topk.logprobs[position], likeliest)
        if targets is not None and position:
            wanted = [np.nan if target < 0 else table[position, target] for target in targets[position - 1]]
            np.testing.assert_array_equal(answer.target_logprobs[position - 1], np.float32(wanted))
