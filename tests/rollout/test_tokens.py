"""Token ids that are shared: whatever grows out of them, each sequence keeps its own ids."""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.errors import DataError
from megasync.rollout.client import RequestBody
from megasync.rollout.conversation import Conversation, Generation
from megasync.rollout.tokens import Tokens


def test_what_is_appended_is_shared_and_a_branch_is_a_copy():
    prompt = Tokens.of([1, 2, 3])
    whole = prompt + [7, 8]
    other = prompt + [9]
    again = prompt + [7, 8, 5]
    assert (prompt, whole, other, again) == ([1, 2, 3], [1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 7, 8, 5])
    assert np.shares_memory(again.array, (prompt + [7]).array)
    assert not np.shares_memory(other.array, prompt.array)
    assert again.begins_with(whole) and not again.begins_with(other) and not whole.begins_with(again)


def test_the_ids_of_a_view_do_not_change_when_its_array_grows():
    tokens = Tokens.of([1, 2])
    view = tokens.array
    for number in range(1000):
        tokens = tokens + [number]
    assert view.tolist() == [1, 2]
    assert tokens[2:] == list(range(1000))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5


@pytest.mark.parametrize(("ids", "problem"), [([1.0], "not a sequence of integers"), ([1, 2**31], "at position 1")])
def test_other_values_than_integers_of_32_bits_are_refused(ids, problem):
    assert Tokens.of([2]) + torch.tensor([3, 4]) == [2, 3, 4]
    for take in (Tokens.of, Tokens.of([2]).__add__):
        with pytest.raises(DataError, match=f"must be integers of 32 bits: .*{problem}"):
            take(ids)


def test_only_ids_that_are_not_known_are_checked_and_every_bad_one_is_found():
    tokens = Tokens.of([1, 2])
    tokens.check(5)
    longer = tokens + [3, 7]
    with pytest.raises(DataError, match=r"token id 7 at position 3 .*\[0, 5\)"):
        longer.check(5)
    with pytest.raises(DataError, match="token id 7 at position 3"):
        longer.check(5)
    with pytest.raises(DataError, match="token id 2 at position 1"):
        tokens.check(2)
    longer.check(8)


IDS = st.lists(st.integers(0, 2), max_size=5)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), IDS, st.booleans()), max_size=12))
def test_sequences_that_grow_out_of_each_other_are_as_lists_are(steps):
    known: list[tuple[Tokens, list[int]]] = [(Tokens.of([1]), [1])]
    for which, cut, added, hashed in steps:
        tokens, ids = known[which % len(known)]
        cut = min(cut, len(ids))
        known.append((tokens.first(cut) + added, ids[:cut] + added))
        if hashed:
            known[-1][0].digest()
    for tokens, ids in known:
        assert (tokens[:], len(tokens), list(tokens)) == (ids, len(ids), ids)
        assert tokens.digest(b"x") == hashlib.sha256(np.array(ids, np.int32).tobytes() + b"x").hexdigest()
        for other, theirs in known:
            assert tokens.begins_with(other) == (ids[: len(theirs)] == theirs)
            assert (tokens == other) == (ids == theirs)


def test_a_conversation_of_lists_holds_its_tokens_once():
    conversation = Conversation()
    ids = list(range(100))
    for turn in range(20):
        generation = conversation.record(
            Generation.of(conversation.tokens(ids), [turn] * 10, [0.0] * 10, [turn] * 10, "stop")
        )
        ids = [*generation.prompt_ids, *generation.token_ids, *range(turn, turn + 10)]
    *_, before, last = conversation.generations
    assert np.shares_memory(before.tokens.array, last.tokens.array)
    assert [g.prompt_ids + g.token_ids for g in conversation.generations[:2]] == [
        [*range(100), *[0] * 10],
        [*range(100), *[0] * 10, *range(10), *[1] * 10],
    ]


def test_tokens_travel_to_another_process_without_what_follows_them():
    first = Tokens.of([1, 2, 3])
    first.digest()
    whole = first + list(range(10_000))
    data = pickle.dumps(first)
    assert len(data) < 1000
    assert pickle.loads(data) == first
    assert pickle.loads(pickle.dumps(whole)) + [7] == whole + [7]


@given(st.lists(st.integers(0, 151_935), min_size=1, max_size=40), st.text(max_size=8))
def test_the_body_of_a_request_is_json_of_its_ids_and_the_rest(ids, text):
    sent = RequestBody(Tokens.of(ids), 151_936, {"text": text, "rate": 0.5}).text()
    assert json.loads(sent) == {"input_ids": ids, "text": text, "rate": 0.5}


@pytest.mark.parametrize("ids", [[-1], [1, 100], [2**31 - 1]])
def test_no_body_has_an_id_outside_the_vocabulary(ids):
    with pytest.raises(DataError, match=r"is outside the vocabulary \[0, 100\)"):
        RequestBody(Tokens.of(ids), 100, {})
