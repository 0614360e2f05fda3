"""The answer of a response is behind its reasoning, marked or last, and complete."""

import decimal

import numpy as np
import pytest

from megasync.data.final_answer import Answer, final_answer, outside_reasoning, references
from megasync.errors import DataError


@pytest.mark.parametrize(
    ("response", "text", "marked"),
    [
        ("thus\n42", "42", False),
        ("\\boxed{a{b{c}}d} {x}", "a{b{c}}d", True),
        ("\\boxed{\\left\\{1\\right.}", "\\left\\{1\\right.", True),
        ("\\boxed{1}, no, \\boxed{2}", "2", True),
        ("x=\\boxed{1} or x=\\boxed{2}", "1, 2", True),
        ("#### Step 1\nAdd.\n#### 7", "7", True),
        ("**Answer:** B\n\nIt is B because of A.", "B", True),
        ("The answer is 3.5. I am sure of it.", "3.5.", True),
        ("<answer>x</answer> and so on", "x", True),
    ],
)
def test_the_last_mark_or_the_last_line_is_the_answer(response, text, marked):
    assert final_answer(response) == Answer(text, marked)


@pytest.mark.parametrize(
    "response", ["", " \n", "\\boxed{4", "\\boxed{}", "\\boxed{3}, or \\boxed{4", "<think>4", "<answer></answer>"]
)
def test_a_response_may_have_no_answer(response):
    assert final_answer(response) is None


@pytest.mark.parametrize(
    ("response", "outside"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("b<think>a</think>c", "b\nc"),
        ("<THINK>a</THINK>b", "b"),
        ("<think>a<think>b</think>c", "c"),
        ("analysisWe add.assistantfinal4", "4"),
        ("analysisWe add", None),
        ("a</think>b<think>c", None),
        ("no marks", "no marks"),
    ],
)
def test_reasoning_is_taken_out_and_must_have_an_end(response, outside):
    assert (outside if outside is None else outside.strip()) == (
        text.strip() if (text := outside_reasoning(response)) else text
    )


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("so 4 + 3 = 7", None),
        ("The answer is 7", None),
        ("<answer>7", None),
        ("#### 7", None),
        ("\\boxed{7}", None),
        ("The answer is \\boxed{7}, since 4 + 3", "7"),
        ("Perhaps \\boxed{7}, since 4 + 3", None),
        ("The answer is \\boxed{7}. Wait, 4 + 3", None),
        ("<answer>7</answer> since 4", "7"),
    ],
)
def test_of_a_response_that_was_cut_off_only_a_complete_statement_counts(response, text):
    answer = final_answer(response, "length")
    assert (answer and answer.text) == text


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        *((None, []), (float("nan"), []), ("", []), (" \n", []), ([], []), ([None, ""], []), (np.float64("nan"), [])),
        (decimal.Decimal("NaN"), []),
        *((7, ["7"]), (7.5, ["7.5"]), (True, ["True"]), (np.int64(7), ["7"]), (decimal.Decimal("1.50"), ["1.50"])),
        *((" x ", ["x"]), ("None", ["None"]), (["a", None, "b"], ["a", "b"]), ([1, 2], ["1, 2"])),
        *(("6 * 7 = 42\n#### 42", ["42"]), ("Hence $\\boxed{42}$.", ["42"])),
    ],
    ids=repr,
)
def test_a_reference_is_missing_or_has_texts(value, texts):
    assert references(value) == texts


@pytest.mark.parametrize("value", [{"ground_truth": "1"}, b"1", object(), [{"a": 1}]])
def test_other_values_are_no_references(value):
    with pytest.raises(DataError, match="must be text, a number, or a list of texts"):
        references(value)
