"""Rows: every form of dataset becomes a list of validated dicts, and the caller's data is not modified."""

import copy

import pytest

from megasync.data import as_rows
from megasync.errors import DataError

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


@pytest.mark.parametrize(
    "data",
    [ROWS, tuple(ROWS), iter(ROWS), (row for row in ROWS), {"prompt": ["a", "b"], "answer": ["1", "2"]}],
    ids=["list", "tuple", "iterator", "generator", "columns"],
)
def test_every_input_form_gives_the_same_rows(data):
    assert as_rows(data, "mine") == ROWS


def test_as_rows_does_not_modify_the_callers_data():
    mine = copy.deepcopy(ROWS)
    as_rows(mine, "mine")[0]["prompt"] = "changed"
    assert mine == ROWS


def test_a_prompt_may_be_a_list_of_chat_messages():
    messages = [{"role": "user", "content": "hello"}]
    assert as_rows([{"prompt": messages}], "mine")[0]["prompt"] == messages


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "mine is empty"),
        ({}, "mine is empty"),
        ({"prompt": []}, "mine is empty"),
        ([{"prompt": "a"}, {"question": "b"}], r'mine, row 1 has no "prompt" column; its columns are \[.question.\]'),
        ([{"prompt": 3}], "row 0: the prompt must be text or a list of chat messages, got 3"),
        ([{"prompt": []}], "row 0: the prompt must be"),
        ([{"prompt": [{"content": "a"}]}], "row 0: the prompt must be"),
        (["text"], "row 0 is a str"),
        ([{"prompt": "a", "completions": 1}], "completions.*rename"),
        ({"prompt": ["a"], "answer": ["1", "2"]}, "different lengths"),
    ],
)
def test_invalid_rows_are_rejected_with_their_position(data, message):
    with pytest.raises(DataError, match=message):
        as_rows(data, "mine")
