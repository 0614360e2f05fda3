"""The form of chat messages: what each common way to write a message becomes, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.data.messages import as_messages, as_tools, parse_arguments, valid_text
from megasync.errors import DataError

DEEP = json.loads("[" * 200 + "]" * 200)
# Values that JSON can hold, and a few that only Python can.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", b"x", DEEP]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *("role", "content", "tool_calls", "function_call", "tool_call_id", "name", "refusal", "reasoning", "thinking"),
    *("id", "type", "text", "function", "arguments", "images", "index"),
)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "developer", "function"])
PARTS = st.lists(
    st.dictionaries(
        st.sampled_from(("type", "text", "refusal", "thinking")),
        st.sampled_from(["text", "refusal", "thinking", 3, [3], [{"type": "text", "text": "x"}]]),
    )
)
CALLS = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(), "arguments": VALUES})}))
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(KEYS), VALUES | PARTS | CALLS, max_size=5)
    | st.fixed_dictionaries({"role": ROLES, "content": st.text() | st.none() | PARTS}, optional={"tool_calls": CALLS})
    | VALUES,
    max_size=4,
)


def thoughts(depth):
    """A part of reasoning within parts of reasoning."""
    part = "hm"
    for _ in range(depth):
        part = [{"type": "thinking", "thinking": part}]
    return part


def one(**message):
    return as_messages([{"role": "assistant"} | message])[0]


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "function", "name": "f", "content": "x"}, {"role": "tool", "tool_call_id": "call_0"}),
        ({"content": None}, {"content": ""}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "", "refusal": None, "name": None, "audio": None}, {"content": ""}),
        ({"content": [{"type": "text", "text": "a"}, "b", {"text": "c"}]}, {"content": "abc"}),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
         {"content": "a", "reasoning_content": "hm"}),
        ({"content": "a", "reasoning": "hm", "reasoning_content": ""}, {"reasoning_content": "hm"}),
        ({"content": "a", "thinking": "hm"}, {"reasoning_content": "hm"}),
        ({"role": "tool", "tool_call_id": 7, "content": {"t": 3}}, {"tool_call_id": "7", "content": '{"t": 3}'}),
        ({"role": "tool", "content": None}, {"content": "", "tool_call_id": "call_0"}),
        ({"content": "\ud83d\ude00 \ud83d"}, {"content": "\U0001f600 \ufffd"}),
        ({"content": "a", "tool_plan": "p"}, {"tool_plan": "p"}),
        ({"content": "a", "reasoning": ["h", {"type": "text", "text": "m"}]}, {"reasoning_content": "hm"}),
        ({"content": [{"type": "text", "content": "a"}]}, {"content": "a"}),
        # Roles of other libraries, and ShareGPT's keys.
        *(({"role": role, "content": "x"}, {"role": "assistant"}) for role in ("model", "gpt", "ai", "Assistant")),
        *(({"role": role, "content": "x"}, {"role": "user"}) for role in ("human", "USER")),
        *(({"role": role, "content": "x"}, {"role": "tool", "tool_call_id": "call_0"})
          for role in ("ipython", "observation")),
    ],
)  # fmt: skip
def test_a_message_has_one_form(given, changed):
    found = one(**given)
    assert changed.items() <= found.items()
    assert found.keys() <= {"role", "content", "name", *changed}
    assert as_messages([found]) == [found]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": [1, null]}', {"x": [1, None]}),
        ({"x": None}, {"x": None}),
        (None, {}),
        ("", {}),
        ("[1]", "[1]"),
        ('{"x": ', '{"x": '),
        ('{"x": NaN}', '{"x": NaN}'),
        ('{"x": 1e999}', '{"x": 1e999}'),
        ('{"x": %s}' % ("9" * 5000), '{"x": %s}' % ("9" * 5000)),
        ("[" * 100_000, "[" * 100_000),
        ('{"x": %s}' % ("[" * 90 + "]" * 90), '{"x": %s}' % ("[" * 90 + "]" * 90)),
        ('{"x": "\\ud800"}', {"x": "\ufffd"}),
        ('"{\\"x\\": 1}"', {"x": 1}),
        ('"x"', '"x"'),
    ],
    ids=range(14),
)
def test_arguments_are_an_object_or_the_text_that_was_written(arguments, expected):
    message = one(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": arguments}}])
    (found,) = message["tool_calls"]
    assert found == {"id": "a", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert as_messages([message]) == [message]


def test_messages_of_sharegpt_have_the_same_form():
    conversation = [("system", "s"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}')]
    conversation += [("observation", "r"), ("gpt", "a")]
    assert as_messages([{"from": role, "value": value} for role, value in conversation]) == as_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": {"name": "f", "input": {"x": 1}}},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
        ]
    )


def test_an_empty_id_is_none():
    calls = [{"id": "", "function": {"name": name}} for name in ("f", "g")]
    messages = as_messages([one(tool_calls=calls), *[{"role": "tool", "content": "x", "tool_call_id": ""}] * 2])
    assert [message["tool_call_id"] for message in messages[1:]] == ["call_0_0", "call_0_1"]


@pytest.mark.parametrize("key", ["input_schema", "inputSchema", "parameters"])
def test_parameters_of_tools_have_several_names(key):
    schema = {"type": "object", "properties": {}}
    expected = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert as_tools([{"name": "f", key: schema}]) == as_tools({"name": "f", key: schema}) == expected


def test_arrays_are_lists():
    rows = [{"role": "user", "content": "a"}], [{"name": "f"}]
    assert as_messages(np.array(rows[0], dtype=object)) == as_messages(rows[0])
    assert as_tools(np.array(rows[1], dtype=object)) == as_tools(rows[1])


def test_null_that_arrow_adds_is_left_out_and_null_that_somebody_wrote_is_kept():
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": {"x": None, "y": {"z": None, "q": 1}}},
    }
    written = as_messages([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
    keys = {"role": "user", "content": None, "tool_calls": None}
    stored = as_messages([keys | {"content": "a"}, keys | {"role": "assistant", "tool_calls": [call]}])
    arguments = [found[1]["tool_calls"][0]["function"]["arguments"] for found in (written, stored)]
    assert arguments == [{"x": None, "y": {"z": None, "q": 1}}, {"y": {"q": 1}}]


def test_results_without_ids_belong_to_the_calls_before_them_in_their_order():
    calls = [{"function": {"name": name}} for name in ("f", "g")]
    messages = as_messages([{"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "content": "x"}] * 3])
    ids = [call["id"] for call in messages[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[1:]] == [*ids, "call_3"]
    assert len({*ids, "call_3"}) == 3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("text", "must be a list"),
        ([3], "message 0: must have a role"),
        ([{"content": "a"}], "message 0: has the role None"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1: has no content"),
        ([{"role": "user", "content": 3}], "neither text nor a list of parts: 3"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part without a text"),
        ([{"role": "assistant", "content": "a", "thinking": {"text": "hm"}}], "neither text nor a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of the type 'image_url', but only text"),
        ([{"role": "user", "content": "a", "images": ["x.png"]}], "has images, but only text"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], r"tool_calls\[0\] must have a function"),
        ([{"role": "assistant", "tool_calls": "[{"}], "tool_calls that are text, but not JSON"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}], r"arguments must be an object"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": DEEP}}]}], "nested more than 64"),
        ([{"role": "user", "content": "a", "extra": DEEP}], "'extra' is nested more than 64"),
        ([{"role": "user", "content": thoughts(1000)}], "message 0 is nested too deep"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": 3}]}], "neither text nor a list of parts: 3"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place(given, problem):
    with pytest.raises(DataError, match=problem):
        as_messages(given)


@settings(max_examples=60)
@given(MESSAGES, VALUES)
def test_whatever_a_row_holds_becomes_valid_messages_or_a_data_error(messages, tools):
    check(messages, tools)


@pytest.mark.matrix
@settings(max_examples=5000, deadline=None)
@given(MESSAGES, VALUES | CALLS)
def test_many_rows_become_valid_messages_or_data_errors(messages, tools):
    check(messages, tools)


def check(messages, tools):
    before = repr(messages)
    try:
        found = as_messages(messages)
    except DataError as error:
        assert str(error)
    else:
        assert as_messages(found) == found
        json.dumps(found, ensure_ascii=False, default=str).encode()
    assert repr(messages) == before
    try:
        json.dumps(as_tools(tools), ensure_ascii=False).encode()
    except DataError as error:
        assert "tools" in str(error)


@given(st.text() | st.text(alphabet='[]{}":,0123456789\\ud8nulltruefalse. '))
def test_arguments_that_are_parsed_are_their_own_json(text):
    found = parse_arguments(text)
    assert found == valid_text(text) if isinstance(found, str) else parse_arguments(json.dumps(found)) == found
