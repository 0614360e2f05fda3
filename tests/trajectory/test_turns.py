"""Notes of turns: small whatever they note, and cut where their response is."""

import json
from dataclasses import replace

import msgspec
import pytest

from megasync.trajectory import ANSWER, Call, Trajectory, Turn
from megasync.trajectory.trajectory import ARGUMENTS, CALLS, NAME

TURNS = (Turn(0, 3, ANSWER, calls=(Call("add", '{"a": 1}'),)), Turn(3, 5, "tool", "add"), Turn(5, 6, ANSWER))


def response(tokens, turns=TURNS):
    return Trajectory([1], [5] * tokens, [1] * tokens, [-0.5] * tokens, [0] * tokens, turns=turns)


def test_texts_and_calls_are_bounded():
    turn = Turn(0, 1, "r" * 999, "n" * 999, [Call("c" * 999, "a" * 9999)] * 99)
    assert (len(turn.role), len(turn.name), len(turn.calls)) == (NAME, NAME, CALLS)
    assert (len(turn.calls[0].name), len(turn.calls[0].arguments)) == (NAME, ARGUMENTS)
    assert turn.calls[0].arguments.endswith("a…")


def test_halves_of_surrogate_pairs_can_be_stored():
    turn = Turn(0, 1, "tool", "\ud83d", (Call("\udc00", "\ud83d"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn) == turn


def test_turns_end_where_their_response_ends():
    whole = response(6)
    assert whole.turns == TURNS
    short = replace(
        whole,
        response_ids=whole.response_ids[:4],
        loss_mask=whole.loss_mask.expand()[:4],
        logprobs=whole.logprobs[:4],
        versions=whole.versions.expand()[:4],
    )
    assert short.turns == (TURNS[0], Turn(3, 4, "tool", "add"))
    assert whole.masked(1).turns == TURNS


@pytest.mark.parametrize("turns", [[Turn(2, 2)], [Turn(-1, 1)], [Turn(0, 2), Turn(1, 3)], [Turn(3, 4), Turn(0, 1)]])
def test_turns_without_tokens_or_with_the_same_are_refused(turns):
    with pytest.raises(ValueError, match="turns: a turn from token"):
        response(6, turns)


def test_a_dump_of_a_trajectory_has_its_turns():
    plain = json.loads(json.dumps(response(6).plain()))
    assert plain["turns"][1] == {"start": 3, "end": 5, "role": "tool", "name": "add", "calls": []}
