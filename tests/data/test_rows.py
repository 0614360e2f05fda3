"""Rows: every form of dataset becomes a list of validated dicts, and the caller's data is not modified."""

import copy
import pickle

import pytest

from megasync.config.schema import DataConfig, PromptConfig
from megasync.data import as_rows
from megasync.data.rows import DEEPEST, Row, as_conversations
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
        ([{"prompt": "a"}, None], "row 1 is a NoneType"),
        ("a path", "mine must be a sequence of rows.*not a str"),
        (5, "mine must be a sequence of rows.*not a int"),
        ({"prompt": "abc"}, "the column 'prompt' must be a list"),
        ({"prompt": 5}, "the column 'prompt' must be a list"),
        ([{"prompt": "a", 5: 1}], "row 0: the name of the column 5 is not text"),
        ([{"prompt": "a", "messages": []}], r"reserved for the rollout.*data.columns: \{prompt: prompt\}"),
        ([{"messages": [{"content": "a"}]}], "row 0: messages must be a list of chat messages"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "row 0: all messages are the assistant's"),
        ([{"prompt": "a", "completions": 1}], "completions.*rename"),
        ({"prompt": ["a"], "answer": ["1", "2"]}, "different lengths"),
    ],
)
def test_invalid_rows_are_rejected_with_their_position(data, message):
    with pytest.raises(DataError, match=message):
        as_rows(data, "mine")


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("caf\ud83d", "has half of a surrogate pair, '.ud83d', at character 3"),
        ({"a": ["\udc00"]}, "half of a surrogate pair"),
        ({"\udc00": 1}, "half of a surrogate pair"),
        (10**5000, "an integer of more than 4,000 digits"),
        (nested(DEEPEST + 1), f"nested deeper than {DEEPEST}"),
    ],
    ids=["text", "inside", "key", "integer", "deep"],
)
def test_values_that_nothing_can_use_are_refused_with_row_and_column(value, message):
    with pytest.raises(DataError, match=rf"mine, row 1: the column 'extra' .*{message}"):
        as_rows([{"prompt": "a"}, {"prompt": "a", "extra": value}], "mine")


def test_values_just_within_the_limits_are_accepted():
    row = {"prompt": "a", "deep": nested(DEEPEST), "long": 10**4000, "pair": "\U0001f600"}
    assert as_rows([row], "mine") == [row]


def test_an_iterator_that_raises_names_the_row():
    def rows():
        yield {"prompt": "a"}
        raise OSError("disk")

    with pytest.raises(DataError, match="mine, row 1 cannot be read: OSError: disk"):
        as_rows(rows(), "mine")


TURNS = [{"role": role, "content": str(at)} for at, role in enumerate(["system", "user", "assistant", "user"])]
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("messages", [TURNS, [*TURNS, ANSWER], [*TURNS, ANSWER, ANSWER]], ids=len)
def test_the_prompt_of_a_conversation_ends_before_its_last_answer(messages):
    assert as_rows([{"messages": messages, "answer": "4"}], "mine") == [{"prompt": TURNS, "answer": "4"}]
    assert as_conversations([{"messages": messages}], "mine") == [{"messages": messages}]


def test_a_template_makes_the_prompt_of_rows_that_have_none():
    config = DataConfig(prompt=PromptConfig(template="Q: {question}"))
    assert as_rows([{"question": "1+1?"}], "mine", config)[0]["prompt"] == "Q: 1+1?"
    with pytest.raises(DataError, match=r"mine, row 0: data.prompt.template=.*names the column 'question'"):
        as_rows([{"problem": "1+1?"}], "mine", config)


def test_columns_get_the_names_of_the_configuration_and_keep_their_own():
    config = DataConfig(columns={"prompt": "question", "answer": "solution"})
    row = {"question": "q", "solution": "s"}
    assert as_rows([row], "mine", config) == [{**row, "prompt": "q", "answer": "s"}]
    assert as_rows([{"prompt": "q", "answer": "s"}], "mine", config) == [{"prompt": "q", "answer": "s"}]
    assert as_rows([{"a": "1", "b": "2", "prompt": "q"}], "mine", DataConfig(columns={"a": "b", "b": "a"}))[0] == {
        "a": "2",
        "b": "1",
        "prompt": "q",
    }
    with pytest.raises(
        DataError, match=r"row 0 has neither the column 'solution' \(data.columns.answer\) nor 'answer'"
    ):
        as_rows([{"question": "q"}], "mine", config)
    chat = {"conversation": TURNS, "id": 1}
    assert as_conversations([chat], "mine", DataConfig(columns={"messages": "conversation"})) == [
        {**chat, "messages": TURNS}
    ]
    both = {"prompt": "q", "messages": TURNS}
    assert as_rows([both], "mine", DataConfig(columns={"prompt": "prompt"})) == [{"prompt": "q"}]


def test_a_row_keeps_its_place_when_it_is_sent_to_another_process():
    assert pickle.loads(pickle.dumps(Row({"a": 1}, "x.jsonl:3"))).where == "x.jsonl:3"
