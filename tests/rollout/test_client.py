"""The rollout client against a server that can be told to misbehave."""

from __future__ import annotations

import asyncio
import copy
import gzip
from functools import partial

import pytest
from aiohttp import web
from fake_sglang import DROP, Break, FakeSGLang, event, finish, hang, refuse
from passing_time import pass_time
from tiny_models import byte_tokenizer
from waits import until

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError, InvalidAnswer, ServerError
from megasync.rollout.partials import PartialResponse
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl, EngineScores
from megasync.serving.plugin_protocol import ROUTING_KEY_HEADER


async def test_a_generation_carries_tokens_logprobs_and_versions(fake, client):
    fake.version = 7
    got = await client.generate([1, 2, 3])
    assert got.prompt_ids == [1, 2, 3]
    assert got.token_ids == [4, 5, 6, 7, 8, 9, 10, 11]
    assert got.logprobs == [-i / 128 for i in got.token_ids]
    assert got.versions == [7] * 8
    assert (got.finish_reason, got.parts) == ("length", 1)


async def test_an_aborted_generation_continues_from_its_partial_tokens(fake, client):
    fake.script += [finish(3, "abort"), finish(2, "abort")]
    got = await client.generate([1])
    assert got.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert [r["input_ids"] for r in fake.requests] == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert [r["sampling_params"]["max_new_tokens"] for r in fake.requests] == [8, 5, 3]
    assert got.parts == 3
    assert got.finish_reason == "length"


async def test_parts_keep_the_versions_that_their_server_reported(fake, client):
    # The second part straddles an update by itself; the client's own clock says nothing.
    fake.script += [finish(3, "abort", [(4, 3)]), finish(5, "stop", [(4, 1), (6, 4)])]
    fake.version = 9
    got = await client.generate([1])
    assert got.versions == [4, 4, 4, 4, 6, 6, 6, 6]


async def test_all_sampling_parameters_are_always_sent(fake, client):
    await client.generate([1])
    sent = fake.requests[0]["sampling_params"]
    assert sent["temperature"] == 1.0
    assert (sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, -1, 0.0)
    assert (sent["repetition_penalty"], sent["frequency_penalty"], sent["presence_penalty"]) == (1.0, 0.0, 0.0)
    assert (sent["stop"], sent["stop_token_ids"], sent["ignore_eos"]) == ([], [], False)
    assert sent["skip_special_tokens"] is True
    assert fake.requests[0]["return_logprob"] is True


async def test_the_callers_arguments_are_never_changed(fake, make_client):
    sampling = SamplingConfig(max_new_tokens=8, stop=["END"])
    before = copy.deepcopy(sampling)
    client = make_client(sampling=sampling)
    prompt, stop = [1, 2], ["x"]
    fake.script += [finish(3, "abort")]
    got = await client.generate(prompt, stop=stop, max_new_tokens=5)
    got.token_ids.append(99)
    assert (prompt, stop, sampling) == ([1, 2], ["x"], before)
    await client.generate(prompt)
    assert fake.requests[-1]["sampling_params"]["stop"] == ["END"]
    assert fake.requests[-1]["sampling_params"]["max_new_tokens"] == 8


@pytest.mark.parametrize(
    ("bad", "message"),
    [([1, n], rf"token id {n} at position 1 .*\[0, 100\)") for n in (-1, 100, 10**9)]
    + [(ids, None) for ids in ([], [1.0], ["1"], [None])],
)
async def test_what_is_no_token_id_of_the_model_never_reaches_a_server(fake, client, bad, message):
    engines = Engines()
    for ask in (client.generate, partial(client.score, client.servers[0]), partial(client.engine_scores, engines)):
        with pytest.raises(DataError, match=message):
            await ask(bad)
    assert not fake.requests and not engines.sent


async def test_the_budget_is_cut_to_the_context_and_a_prompt_that_fills_it_is_refused(fake, client):
    got = await client.generate([1] * 60)
    assert fake.requests[0]["sampling_params"]["max_new_tokens"] == 4
    assert (len(got.token_ids), got.finish_reason) == (4, "length")
    with pytest.raises(DataError, match="64 tokens leaves no room .* context of 64"):
        await client.generate([1] * 64)
    assert len(fake.requests) == 1


async def test_min_new_tokens_counts_over_all_parts(fake, client):
    fake.script += [finish(3, "abort")]
    await client.generate([1], min_new_tokens=5)
    assert [r["sampling_params"]["min_new_tokens"] for r in fake.requests] == [5, 2]


@pytest.mark.parametrize("failure", [refuse(502), refuse(503), refuse(504), DROP])
async def test_transient_failures_are_retried_without_abort_requests(fake, client, failure):
    fake.script += [failure, failure]
    got = await client.generate([1])
    assert got.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert len(fake.requests) == 3
    assert fake.calls == ["/generate"] * 3


async def nothing(fake, body):
    return fake.answer(body, 0, "abort", [])


async def outlasts_the_deadline(fake, body):
    pass_time(1000.0)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("behave", "failure"),
    [
        (refuse(503, "all workers are gone"), "failed attempts: .*503: all workers are gone"),
        (lambda fake, body: says(b"{}")(fake, body), "failed attempts: invalid answer: no meta_info"),
        (None, "failed attempts: ClientConnectorError"),
        (outlasts_the_deadline, "after 0 tokens$"),
        (nothing, "after 0 tokens$"),
    ],
    ids=["refused", "invalid", "nobody listens", "no answer", "aborted"],
)
async def test_a_request_that_never_succeeds_ends_at_its_deadline_with_the_last_failure(
    fake, make_client, behave, failure, endless_pause
):
    # An attempt that got nothing is followed by a pause, not by the next attempt.
    client = make_client(**({"router_url": "http://127.0.0.1:9"} if behave is None else {}))
    fake.script += [behave] * 9
    with pytest.raises(ServerError, match=rf"within 600 s \(timeouts.request\).*{failure}"):
        await client.generate([1])
    assert len(fake.requests) == (behave is not None)


# Streams


async def test_tokens_streamed_before_a_server_died_are_kept(fake, make_client):
    client = make_client(stream_interval=3)
    fake.script += [Break(((1, 4), (2, 4))), Break(((2, 5),))]
    got = await client.generate([1])
    assert got.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert got.logprobs == [-i / 128 for i in got.token_ids]
    assert got.versions == [4, 4, 4, 5, 5, 0, 0, 0]
    assert [r["input_ids"] for r in fake.requests] == [[1], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert [r["sampling_params"]["max_new_tokens"] for r in fake.requests] == [8, 5, 3]
    assert (got.text, got.parts) == ("<2><3><4><5><6><7><8><9>", 3)


async def test_tokens_of_a_dead_server_are_never_labelled_with_a_too_new_version(fake, make_client):
    # The piece of three was sent after the update; which of its tokens came before it is not known.
    fake.script += [Break(((1, 4), (3, 5), (2, 5)))]
    got = await make_client(stream_interval=3).generate([1])
    assert got.versions == [4, 4, 4, 4, 5, 5, 0, 0]


async def test_a_request_for_a_server_goes_there_in_every_attempt_and_keeps_its_older_version(fake, make_client):
    async with FakeSGLang() as pinned:
        client = make_client(stream_interval=3)
        client.set_versions(5, 9)
        pinned.version = 3
        pinned.script += [Break(((2, 3),)), refuse(503)]
        got = await client.generate([1], server=pinned.url)
        assert got.versions == [3] * 8
        assert len(pinned.requests) == 3 and not fake.requests
        fake.version = 5
        assert (await client.generate([1])).versions == [5] * 8
        assert len(fake.requests) == 1


@pytest.mark.parametrize("interval", [0, 3])
async def test_tokens_of_a_server_that_no_sync_has_reached_are_not_taken(fake, interval, make_client):
    """Whoever runs an external server has replaced it: it has its initial weights, until a sync."""
    client = make_client(stream_interval=interval)
    client.set_versions(5, 9)

    def synced():
        fake.version = 6

    client._on_invalid_answer = synced
    got = await client.generate([1])
    assert got.versions == [6] * 8 and len(fake.requests) == 2
    assert client.metrics()["rollout/invalid_answers"] == 1


async def test_a_stream_that_closes_cleanly_before_completion_is_continued(fake, make_client):
    async def half(fake, body):
        piece = fake.piece(body, fake.continuation(body, 2), 0)
        return web.Response(text=event(piece) + "data: [DONE]\n\n", content_type="text/event-stream")

    client = make_client(stream_interval=3)
    fake.script += [half]
    got = await client.generate([1])
    assert (got.token_ids, got.parts) == ([2, 3, 4, 5, 6, 7, 8, 9], 2)


@pytest.mark.parametrize(("code", "error"), [(400, DataError), (401, ServerError)])
async def test_an_error_inside_a_stream_is_what_its_code_says(fake, code, error, make_client):
    async def refused(fake, body):
        text = event({"error": {"message": "the input is too long", "code": code}}) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    client = make_client(stream_interval=3)
    fake.script += [refused]
    with pytest.raises(error, match=f"status {code}: the input is too long"):
        await client.generate([1])
    assert len(fake.requests) == 1


async def test_consecutive_streams_reuse_one_connection(fake, make_client):
    client = make_client(stream_interval=3)
    for start in range(5):
        await client.generate([start])
    assert len(set(fake.peers)) == 1


# What is there already


async def test_a_generation_continues_from_a_kept_partial_response_and_updates_it(fake, client):
    kept = PartialResponse([2, 3], [-0.25, -0.5], [7, 7])
    fake.script += [finish(3, "abort")]
    got = await client.generate([1], keep=lambda prompt: kept)
    assert [r["input_ids"] for r in fake.requests] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert got.token_ids == list(kept.token_ids) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert got.versions == [7, 7, 0, 0, 0, 0, 0, 0]
    assert got.logprobs[:2] == [-0.25, -0.5]


async def moved(fake, body):
    return web.Response(status=302, headers={"Location": "/generate"})


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        (refuse(400, "bad sampling_params"), DataError, "bad sampling_params"),
        (refuse(401, "who are you"), ServerError, "who are you"),
        (moved, ServerError, "status 302"),
    ],
)
async def test_a_refused_or_redirected_request_is_not_sent_again(fake, client, refusal, error, message):
    fake.script += [refusal]
    with pytest.raises(error, match=message):
        await client.generate([1])
    assert len(fake.requests) == 1


async def test_many_cancelled_generations_close_their_connections_and_cost_no_further_request(fake, client):
    client.servers *= 40
    fake.script += [hang()] * 50
    tasks = [asyncio.create_task(client.generate([1])) for _ in range(50)]
    await until(lambda: len(fake.requests) == 50)
    for task in tasks:
        task.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
    # What a server ends a request by.
    await until(lambda: fake.disconnected == 50)
    assert fake.calls == ["/generate"] * 50


async def test_routing_key_and_seed_travel_with_every_part_and_without_a_seed_each_request_has_its_own(fake, client):
    fake.script += [finish(2, "abort")]
    await client.generate([1], routing_key="group-5", seed=11)
    assert [h[ROUTING_KEY_HEADER] for h in fake.headers] == ["group-5", "group-5"]
    assert [r["sampling_params"]["sampling_seed"] for r in fake.requests] == [11, 11]
    await asyncio.gather(*(client.generate([1]) for _ in range(20)))
    assert len({r["sampling_params"]["sampling_seed"] for r in fake.requests[2:]}) == 20


async def test_chat_without_template_or_tokenizer_says_so(client, make_client):
    with pytest.raises(DataError, match="needs a tokenizer"):
        await client.chat([{"role": "user", "content": "hi"}])
    without = make_client(tokenizer=byte_tokenizer(chat_template=None))
    with pytest.raises(DataError, match="no chat template"):
        await without.chat([{"role": "user", "content": "hi"}])


async def test_a_character_across_two_parts_is_decoded_whole(fake, make_client):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("é")
    assert len(ids) == 2

    def sampled(token, reason):
        async def behave(server, body):
            server.continuation = lambda body, count: [token]
            return server.answer(body, 1, reason)

        return behave

    fake.script += [sampled(ids[0], "abort"), sampled(ids[1], "stop")]
    client = make_client(tokenizer=tokenizer, vocab_size=300)
    got = await client.generate([1])
    assert got.text == "é"


# Answers that make no sense


def lie(**changes):
    """An answer in full whose last piece, or whole, has some of its meta_info changed."""

    async def behave(fake, body):
        ids = fake.continuation(body, 4)
        spans = [{"version": "0", "start": 0, "end": 4}]
        piece = fake.piece(body, ids, 0, {"finish_reason": {"type": "stop"}, "weight_versions": spans} | changes)
        return written(body, event(piece) if body["stream"] else piece)

    return behave


def written(body, content):
    if not body["stream"]:
        return web.json_response(content)
    return web.Response(text=content + "data: [DONE]\n\n", content_type="text/event-stream")


def says(text, content_type="application/json", **headers):
    async def behave(fake, body):
        return web.Response(body=text, content_type=content_type, headers=headers)

    return behave


async def compressed(fake, body):
    """Nobody asked for it, and what is small on the wire may be endless."""
    answer = fake.answer(body, 5, "length")
    headers = {"Content-Encoding": "gzip", "Content-Type": answer.headers["Content-Type"]}
    return web.Response(body=gzip.compress(answer.body), headers=headers)


async def goes_on_behind_its_end(fake, body):
    if not body["stream"]:
        return web.json_response([1, 2])
    text = fake.answer(body, 2, "stop").text.replace("data: [DONE]\n\n", "")
    return web.Response(text=text + event(fake.piece(body, [9], 0)), content_type="text/event-stream")


def never_ends(status):
    """Writes one line for ever, as a page or as an event."""

    async def behave(fake, body):
        kind = "text/event-stream" if body["stream"] else "text/html"
        response = web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(fake.http)
        while True:
            await response.write(b"data: " + b"x" * 500_000)

    return behave


async def half_true(fake, body):
    """In a stream, what came before the invalid piece is discarded too."""
    good = fake.piece(body, fake.continuation(body, 3), 0)
    bad = fake.piece(body, [7], 0, {"finish_reason": {"type": "stop"}, "weight_versions": []})
    return written(body, event(good) + event(bad) if body["stream"] else bad)


LIES = {
    "ids above the vocabulary": lie(output_token_logprobs=[[-0.1, 10**6, None]] * 4),
    "a version that does not exist yet": lie(weight_versions=[{"version": "9", "start": 0, "end": 4}]),
    "more tokens than asked for": finish(9, "length"),
    "no JSON": says(b"data: <html>\n\n", "text/event-stream"),
    "a page": says(b"<html>", "text/html"),
    "compressed bytes": compressed,
    "an end, and more": goes_on_behind_its_end,
    "a line without an end": never_ends(200),
    "an error without an end": never_ends(400),
    "a good piece and an invalid one": half_true,
}


@pytest.mark.parametrize("lying", LIES.values(), ids=LIES)
async def test_an_invalid_answer_is_counted_and_retried_on_another_server(fake, client, lying):
    client.set_versions(0, 0)
    fake.script += [finish(3, "abort"), lying]
    got = await client.generate([1], routing_key="group")
    assert got.token_ids == [2, 3, 4, 5, 6, 7, 8, 9]
    assert got.logprobs == [-i / 128 for i in got.token_ids]
    assert got.versions == [0] * 8
    assert got.text == "<2><3><4><5><6><7><8><9>"
    assert client.metrics() == {"rollout/invalid_answers": 1.0}
    assert [r["input_ids"] for r in fake.requests] == [[1], [1, 2, 3, 4], [1, 2, 3, 4]]
    # The key that sends a prompt to one server would send it to this one again.
    assert [h[ROUTING_KEY_HEADER] for h in fake.headers] == ["group", "group", "group#1"]


async def test_a_version_that_is_published_while_a_request_runs_is_known_at_its_end(fake, client):
    client.set_versions(0, 0)

    async def updated(fake, body):
        client.set_versions(0, 1)
        return fake.answer(body, 8, "length", [(0, 3), (1, 5)])

    fake.script += [updated]
    assert (await client.generate([1])).versions == [0] * 3 + [1] * 5
    assert client.metrics() == {"rollout/invalid_answers": 0.0}


@pytest.mark.parametrize("answer", ["{}", "[]", "a page", '{"meta_info": {"input_token_logprobs": [[null, 1]]}}'])
async def test_invalid_scores_raise_an_invalid_answer_error(fake, client, answer):
    for _ in range(2):
        fake.script += [says(answer.encode())]
        with pytest.raises(InvalidAnswer, match=f"{fake.url}/generate"):
            await client.score(client.servers[0], [1, 2])
    assert client.metrics() == {"rollout/invalid_answers": 2.0}
    assert len({body["extra_key"] for body in fake.requests}) == 2, "scores must not come from a server's cache"


# Engines of one server


class Engines(DisaggregatedControl):
    """A server of one prefill and two decode engines. The next token is always the last one plus one.

    A log-prob is -id/128. Decode engines, and the engines of the second pair, are off by numbers of their own.
    """

    def __init__(self, first_token: int | None = None, scored: int | None = None, answer: dict | None = None) -> None:
        super().__init__(
            "http://s", [ServerControl("http://p")], [ServerControl("http://d"), ServerControl("http://e")]
        )
        self.sent: list[tuple[int, dict, float]] = []
        self._first_token, self._scored, self._answer = first_token, scored, answer

    @staticmethod
    def prompt(pair: int, ids: list[int]) -> list[float]:
        return [-i / 128 - 1 - pair for i in ids]

    @staticmethod
    def response(pair: int, ids: list[int]) -> list[float]:
        return [-i / 128 - 4 - pair for i in ids]

    async def generate_on(self, pair, body, timeout):
        self.sent.append((pair, body, timeout))
        if self._answer is not None:
            return self._answer
        ids = body["input_ids"]
        first = ids[-1] + 1 if self._first_token is None else self._first_token
        sampled = [first + at for at in range(body["sampling_params"]["max_new_tokens"])]
        scores = [
            [None, ids[0], None],
            *([s, i, None] for s, i in zip(self.prompt(pair, ids[1:]), ids[1:], strict=True)),
        ]
        meta = {
            "input_token_logprobs": scores[: self._scored],
            "output_token_logprobs": [[s, i, None] for s, i in zip(self.response(pair, sampled), sampled, strict=True)],
            "finish_reason": {"type": "length"},
            "weight_versions": [{"version": "3", "start": 0, "end": len(sampled)}],
        }
        return {"text": "x", "output_ids": sampled, "meta_info": meta}


async def test_each_engine_of_a_server_is_compared_for_the_same_tokens(fake, client):
    assert await client.engine_scores(client.servers[0], [1, 2, 3]) == [] == fake.requests, "it has one engine"
    server = Engines()
    prompt, response = [5, 6, 7], list(range(8, 16))
    assert await client.engine_scores(server, prompt) == [
        EngineScores("decode engine of pair 0", server.prompt(0, response), server.response(0, response)),
        EngineScores("prefill engine of pair 0", server.prompt(0, [6, 7]), server.prompt(0, [6, 7])),
        EngineScores("decode engine of pair 1", server.prompt(1, response), server.response(1, response)),
        EngineScores("prefill engine of pair 1", server.prompt(0, [6, 7]), server.prompt(1, [6, 7])),
    ]
    asked = [(pair, body["input_ids"], body["sampling_params"]["max_new_tokens"]) for pair, body, _ in server.sent]
    assert asked == [(pair, ids, most) for pair in (0, 1) for ids, most in ((prompt, 8), ([*prompt, *response], 1))]


async def test_engines_are_compared_at_temperature_1_past_all_ends_within_the_context_and_without_caches(make_client):
    client = make_client(sampling=SamplingConfig(max_new_tokens=4, temperature=0.5, stop=["x"]))
    server = Engines()
    await client.engine_scores(server, [i % 50 for i in range(client.context_length - 2)])
    for _, body, timeout in server.sent:
        params = body["sampling_params"]
        assert (params["temperature"], params["stop"], params["stop_token_ids"], params["ignore_eos"]) == (
            1,
            [],
            [],
            True,
        )
        assert (body["return_logprob"], body["logprob_start_len"], timeout) == (True, 0, 600.0)
        assert len(body["input_ids"]) + params["max_new_tokens"] <= client.context_length
    assert len({body["extra_key"] for _, body, _ in server.sent}) == 4


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        *(
            (Engines(n), InvalidAnswer, r"token id (-1|100) is outside the vocabulary \[0, 100\)")
            for n in (-1, 93, 100)
        ),
        (Engines(scored=3), InvalidAnswer, "it scored 3 tokens, not the 10"),
        (
            Engines(answer={"meta_info": {"finish_reason": {"type": "abort"}, "weight_versions": []}}),
            ServerError,
            "aborted before the first token",
        ),
        (Engines(answer={"error": {"code": 500, "message": "it is gone"}}), ServerError, "it is gone"),
    ],
    ids=["-1", "93", "100", "few scores", "aborted", "gone"],
)
async def test_an_engine_that_gives_no_valid_answer_is_not_compared(client, server, error, message):
    with pytest.raises(error, match=f"http://s/generate: .*{message}"):
        await client.engine_scores(server, [1, 2])


async def test_another_adapter_may_answer_but_not_what_is_trained(client, fake):
    await client.generate([1, 2], adapter="eval-old")
    await client.generate([1, 2])
    assert [body.get("lora_path") for body in fake.requests] == ["eval-old", None]
    with pytest.raises(DataError, match="adapter='eval-old' is not the policy"):
        await client.generate([1, 2], adapter="eval-old", trained=True)
