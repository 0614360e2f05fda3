"""How recorded responses are shown: texts of tokens, turns, colours; and the view that searches and pages them."""

import numpy as np

from megasync.observe.rollouts import IndexRow, Response
from megasync.trajectory import ANSWER, Line, Turn
from megasync.trajectory.runs import Runs
from megasync.watch.responses import (
    SHADINGS,
    Decoder,
    by_gap,
    by_logprob,
    by_mask,
    by_version,
    tree,
    turns,
    visible,
    writer_of,
)
from megasync.watch.views.rollouts import colour


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return bytes(ids).decode(errors="replace")


def response(mask, versions=None, **fields):
    tokens = len(mask)
    return Response(
        np.zeros(1, np.int32),
        np.arange(tokens, dtype=np.int32),
        np.linspace(0, -10, tokens, dtype=np.float32),
        Runs.of(mask),
        Runs.of(versions or [1] * tokens),
        **fields,
    )


def test_pieces_of_tokens_join_to_the_text():
    decoder, text = Decoder(Bytes()), "1 + 1 = 2, 日本\n"
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    pieces = decoder.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decoder.text(ids) == text


def test_a_character_that_is_cut_off_is_shown_as_broken():
    ids = np.frombuffer("ab日".encode()[:-1], np.uint8).astype(np.int32)
    assert Decoder(Bytes()).pieces(ids) == ["a", "b", "", "\ufffd"]


def test_without_a_tokenizer_ids_are_shown():
    assert Decoder().text([3, 14]) == "3 14"
    assert Decoder().pieces(np.array([3, 14])) == ["3 ", "14 "]


def test_line_breaks_are_visible_and_control_characters_are_not():
    assert visible("a\r\nb\x1b[31m\u202e") == "a↵\nb\ufffd[31m\ufffd"


def test_lines_stand_below_those_that_they_came_from():
    def row(number, parent, first):
        return IndexRow("0:1", number, 1, 1, 0.0, 1, 1, line=Line("side", "branch", number, parent, first, first))

    def drawn(*lines):
        return [(depth, line.number) for depth, _, line in tree([row(*line) for line in lines])]

    assert drawn((0, 2, 3), (1, 2, 1), (2, None, 0), (3, None, 5), (4, 1, 2)) == [
        (0, 2), (1, 1), (2, 4), (1, 0), (0, 3),
    ]  # fmt: skip
    # One whose origin was left out, and lines that no recording of ours has.
    assert drawn((5, 9, 1), (6, None, 0)) == [(0, 6), (0, 5)]
    assert sorted(drawn((0, 1, 0), (1, 0, 1))) == [(0, 0), (1, 1)]
    assert drawn((0, 0, 0), (0, 0, 1)) == [(0, 0), (0, 0)]
    assert tree([IndexRow("0:1", 0, 1, 1, 0.0, 1, 1)]) == []


def test_without_notes_masked_tokens_are_turns_that_were_not_generated():
    found = turns(response([1, 1, 0, 0, 0, 1]))
    assert found == [Turn(0, 2, ANSWER), Turn(2, 5), Turn(5, 6, ANSWER)]
    assert [writer_of(turn) for turn in found] == ["answer", "not generated", "answer"]


def test_notes_tell_of_turns_and_the_mask_of_the_rest():
    noted = (Turn(1, 4, ANSWER), Turn(4, 5, "tool", "a\u202e\nb"))
    # An old token of an answer, and tokens that nobody noted.
    found = turns(response([0, 1, 0, 1, 0, 0, 1], turns=noted))
    assert found == [Turn(0, 1), *noted, Turn(5, 6), Turn(6, 7, ANSWER)]
    assert writer_of(found[2]) == "tool a\ufffd↵ b"


def test_shades_of_logprobs_gaps_versions_and_masks():
    one = response([1, 1, 0], [7, 8, 8], trainer_logprobs=np.array([-0.5, -5.0, np.nan], np.float32))
    assert by_logprob(one).shades.tolist() == [0.0, 1.0, 1.0]
    gap = by_gap(one)
    assert gap.shades[:2].tolist() == [-1.0, 0.0] and np.isnan(gap.shades[2])
    assert by_version(one).shades.tolist() == [1, 0, 0]
    assert by_version(one).steps == ["version 8", "version 7"]
    assert by_mask(one).shades.tolist() == [0, 0, 1]
    assert [colour(gap, at) == "transparent" for at in range(3)] == [False, True, True]
    assert SHADINGS["advantage of the token"](one) is None
