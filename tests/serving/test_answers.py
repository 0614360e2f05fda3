"""Answers to /generate: taken as they are, or refused as a whole, whatever a server writes."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.errors import InvalidAnswer
from megasync.rollout.partials import PartialResponse
from megasync.serving.answers import AnswerLimits, StreamedError, read_generated, read_scored

VOCAB, ASKED = 50, AnswerLimits(vocab_size=50, tokens=6, stop=("END",), newest=lambda: 3)


def answer(count: int = 4, finish: str | None = "stop", version: object = "2", **meta) -> dict:
    ids = list(range(10, 10 + count))
    return {
        "text": "x" * count,
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": finish and {"type": finish, "matched": 2},
            "weight_version": version,
            "output_token_logprobs": [[-token / 10, token, None] for token in ids],
            "weight_versions": [{"version": version, "start": 0, "end": count}] if finish else None,
        }
        | meta,
    }


def raw(answer: object) -> bytes:
    return json.dumps(answer).encode()


def taken(answer: object) -> PartialResponse:
    """By a request that nothing has come of yet."""
    parts = PartialResponse()
    parts.begin_request(ASKED.tokens)
    parts.add(read_generated(answer if isinstance(answer, bytes) else raw(answer), ASKED))
    return parts


def tokens(parts: PartialResponse) -> tuple[list[int], list[float], list[int]]:
    return list(parts.token_ids), [round(value, 6) for value in parts.logprobs], list(parts.versions)


SPANS = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 4}]


@pytest.mark.parametrize("finish", ["stop", "length", "abort", None])
def test_an_answer_is_taken_as_it_is(finish):
    parts = taken(answer(finish=finish))
    assert tokens(parts) == ([10, 11, 12, 13], [-1.0, -1.1, -1.2, -1.3], [2] * 4)
    assert parts.finish_reason == (finish or "abort")
    assert parts.texts == ["xxxx"]


def test_a_refusal_in_a_stream_is_raised_whatever_token_comes_with_it():
    finish = {"type": "abort", "message": "Input length (34 tokens) exceeds", "status_code": 400}
    piece = {"output_ids": [7], "meta_info": {"finish_reason": finish, "output_token_logprobs": []}}
    with pytest.raises(StreamedError, match="Input length") as caught:
        read_generated(json.dumps(piece).encode(), ASKED)
    assert caught.value.status == 400


def test_an_abort_without_a_token_and_other_fields_of_the_server_are_no_mistake():
    assert taken({"meta_info": {"finish_reason": {"type": "abort", "message": "m", "err_type": None}}}).state == (
        0,
        "abort",
    )


def entries(*pairs: tuple) -> dict:
    """An answer with these (log-prob, id) pairs and nothing that contradicts them."""
    made = answer(len(pairs), output_token_logprobs=[[*pair, None] for pair in pairs])
    return made | {"output_ids": [pair[1] for pair in pairs]}


LIES = {
    "an empty body": b"",
    "no JSON": b"<html>bad gateway</html>",
    "half of it": raw(answer())[:-20],
    "two of them": raw(answer()) * 2,
    "no text": b"\xff\xfe\x00",
    "brackets": b"[" * 100_000,
    "a list": [answer()],
    "null": None,
    "an empty object": {},
    "meta_info of another kind": {"meta_info": []},
    "an id above the vocabulary": entries((-0.1, 10), (-0.1, VOCAB)),
    "an id of 19 digits": entries((-0.1, 10**18)),
    "an id of 40 digits": entries((-0.1, 10**39)),
    "a negative id": entries((-0.1, -1)),
    "an id that is a fraction": entries((-0.1, 1.5)),
    "an id that is true": entries((-0.1, True)),
    "an id that is a text": entries((-0.1, "7")),
    "no log-prob": entries((-0.1, 10), (None, 11)),
    "NaN": entries((math.nan, 10)),
    "minus infinity": entries((-math.inf, 10)),
    "a log-prob beyond a float": raw(entries((-7.25, 10))).replace(b"-7.25", b"-1e999"),
    "a log-prob that cannot have been sampled": entries((-3.4e38, 10)),
    "a positive log-prob": entries((0.5, 10)),
    "a log-prob that is a text": entries(("-0.1", 10)),
    "log-probs as an object": answer(output_token_logprobs={"0": -0.1}),
    "entries of one": answer(output_token_logprobs=[[-0.1]] * 4),
    "entries that are numbers": answer(output_token_logprobs=[-0.1] * 4),
    "no log-probs": answer(output_token_logprobs=None),
    "fewer log-probs than ids": answer(output_token_logprobs=answer(3)["meta_info"]["output_token_logprobs"]),
    "log-probs of other ids": answer() | {"output_ids": [10, 11, 12, 14]},
    "more tokens than were asked for": answer(ASKED.tokens + 1),
    "an end without a token": answer(0),
    "an end of an unknown kind": answer(finish="exhausted"),
    "an end that is a text": answer(finish_reason="stop"),
    "an end by a text that was not asked for": answer(finish_reason={"type": "stop", "matched": "NaN happened"}),
    "no word of an end": {"meta_info": {"output_token_logprobs": []}},
    "no versions": answer(weight_versions=None),
    "spans that are too short": answer(weight_versions=[{"version": "2", "start": 0, "end": 3}]),
    "spans that are too long": answer(weight_versions=[{"version": "2", "start": 0, "end": 10**12}]),
    "a span backwards": answer(weight_versions=[{"version": "2", "start": 0, "end": -1}]),
    "a span back from behind the end": answer(
        weight_versions=[{"version": "2", "start": 0, "end": 6}, {"version": "2", "start": 6, "end": 4}]
    ),
    "a gap": answer(weight_versions=[{"version": "2", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 4}]),
    "an overlap": answer(
        weight_versions=[{"version": "2", "start": 0, "end": 3}, {"version": "2", "start": 2, "end": 4}]
    ),
    "a span without an end": answer(weight_versions=[{"version": "2", "start": 0}]),
    "spans that are numbers": answer(weight_versions=[4]),
    "a version that is a word": answer(version="default"),
    "a version of other digits": answer(version="٢"),
    "a version with an underscore": answer(version="1_0"),
    "a negative version": answer(version="-1"),
    "a fraction of a version": answer(version=1.5),
    "a version that is true": answer(version=True),
    "a version of 5000 digits": answer(version="9" * 5000),
    "a version from the future": answer(version="4"),
    "a growing piece without a version": answer(finish=None, version=None),
    "a growing piece from the future": answer(finish=None, version=4),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_answer_that_makes_no_sense_is_refused_and_nothing_of_it_is_kept(lie):
    parts = PartialResponse()
    parts.begin_request(ASKED.tokens)
    with pytest.raises(InvalidAnswer):
        parts.add(read_generated(lie if isinstance(lie, bytes) else raw(lie), ASKED))
    assert (*tokens(parts), parts.texts) == ([], [], [], [""])
    assert not parts.finished


def test_pieces_count_together():
    parts = PartialResponse()
    parts.begin_request(ASKED.tokens)
    parts.add(read_generated(raw(answer(4, finish=None)), ASKED))
    with pytest.raises(InvalidAnswer, match="8 tokens, but at most 6"):
        parts.add(read_generated(raw(answer(4, finish=None)), ASKED))
    with pytest.raises(InvalidAnswer, match="do not cover 6 tokens"):
        parts.add(read_generated(raw(answer(2)), ASKED))
    assert len(parts.token_ids) == 4


def test_until_the_servers_own_account_a_token_is_as_old_as_what_it_was_sent_under():
    parts = PartialResponse()
    parts.begin_request(ASKED.tokens, published=1)
    # A version that came while a piece was sampled is on it, though some of its tokens are older.
    parts.add(read_generated(raw(answer(2, finish=None, version="2")), ASKED))
    assert parts.versions == [1, 1]
    parts.add(read_generated(raw(answer(2, finish=None, version="2")), ASKED))
    assert parts.versions == [1, 1, 2, 2]
    parts.add(read_generated(raw(answer(0, finish="abort", weight_versions=SPANS)), ASKED))
    assert parts.versions == [1, 2, 2, 2]


def test_a_request_that_is_discarded_leaves_the_parts_before_it():
    parts = PartialResponse([1], [-0.5], [0], ["a"])
    parts.begin_request(ASKED.tokens)
    parts.add(read_generated(raw(answer(4, finish="length")), ASKED))
    parts.discard_request()
    assert (*tokens(parts), parts.texts) == ([1], [-0.5], [0], ["a", ""])
    assert not parts.finished


@pytest.mark.parametrize(
    ("error", "status"), [({"code": 400, "message": "m"}, 400), ({"code": "busy"}, None), ({}, None)]
)
def test_an_error_event_is_an_error_with_the_status_it_has(error, status):
    with pytest.raises(StreamedError) as caught:
        read_generated(raw({"error": error}), ASKED)
    assert caught.value.status == status


VALUES = [
    *(
        None,
        True,
        0,
        1,
        -1,
        3,
        49,
        50,
        10**20,
        0.0,
        -0.5,
        0.5,
        1e300,
        -1e300,
        math.nan,
        math.inf,
        "",
        "2",
        "-1",
        "abort",
    ),
    *([], [[]], [None], [-0.1, 7, None], {}, {"type": "stop"}, {"version": "2", "start": 0, "end": 10**15}),
]


def places(value: object, path: tuple = ()) -> list[tuple]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@st.composite
def mutated(draw) -> bytes:
    """An answer with a few of its values replaced, left out, or doubled; or with bytes changed."""
    made = {"it": answer(draw(st.integers(0, 7)), draw(st.sampled_from(["stop", "length", "abort", None])))}
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(places(made)[1:]))
        at = made
        for key in path:
            at = at[key]
        match draw(st.sampled_from(["replace", "remove", "double"])):
            case "replace":
                at[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "remove" if last != "it":
                del at[last]
            case "double" if isinstance(at, list):
                at.append(copy.deepcopy(at[last]))
    written = bytearray(raw(made["it"]))
    for _ in range(draw(st.integers(0, 2))):
        if written:
            written[draw(st.integers(0, len(written) - 1))] = draw(st.integers(0, 255))
    return bytes(written)


@given(mutated())
def test_whatever_a_server_writes_is_taken_whole_or_refused_with_the_one_error_for_it(written):
    try:
        parts = taken(written)
    except (InvalidAnswer, StreamedError):
        return
    assert len(parts.token_ids) == len(parts.logprobs) == len(parts.versions) <= ASKED.tokens
    assert all(0 <= token < VOCAB for token in parts.token_ids)
    assert all(-1000 <= value <= np.float32(1e-3) for value in parts.logprobs)
    assert all(0 <= version <= 3 for version in parts.versions)
    assert parts.finish_reason in ("stop", "length", "abort")
    assert len(parts) or not parts.finished


# Scores


def scored(*rows: list) -> dict:
    return {"meta_info": {"input_token_logprobs": list(rows)}}


def test_scores_are_of_all_tokens_but_the_first():
    assert read_scored(scored([None, 1, None], [-0.5, 2, None], [-1, 3, None]), [1, 2, 3]) == [-0.5, -1.0]


def test_the_last_token_of_the_vocabulary_may_be_named_0():
    """As SGLang does, by an error; then it is the largest of all ids."""
    assert read_scored(scored([None, 1, None], [-0.5, 0, None], [-1, 2, None]), [1, 9, 2]) == [-0.5, -1.0]
    with pytest.raises(InvalidAnswer):
        read_scored(scored([None, 1, None], [-0.5, 9, None], [-1, 0, None]), [1, 9, 2])


@pytest.mark.parametrize(
    "lie",
    [
        *(None, "a page", [], {}, {"meta_info": None}, {"meta_info": {}}, scored(), scored([None, 1, None])),
        scored([None, 1, None], [None, 2, None], [-1.0, 3, None]),
        scored([None, 1, None], [-0.5, 2, None], [-1.0, 4, None]),
        scored([None, 1, None], [-0.5, 2, None], [0.7, 3, None]),
        scored([None, 1, None], [-0.5, 2, None], [-math.inf, 3, None]),
        scored([None, 1, None], [-0.5, 2, None], ["-1", 3, None]),
    ],
    ids=repr,
)
def test_scores_that_make_no_sense_are_refused(lie):
    with pytest.raises(InvalidAnswer):
        read_scored(lie, [1, 2, 3])


@pytest.mark.parametrize(
    "given",
    [
        answer(finish=None, version="0"),
        answer(finish=None, version="6"),
        answer(version="6"),
        answer(weight_versions=[{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]),
    ],
)
def test_tokens_older_than_what_every_server_held_at_the_request_are_refused(given):
    limits = ASKED._replace(newest=lambda: 8, oldest=7)
    with pytest.raises(InvalidAnswer, match=r"weight version [06] is older than 7, which every server holds"):
        read_generated(raw(given), limits)
    assert read_generated(raw(answer(version="7")), limits).spans == [(7, 4)]
