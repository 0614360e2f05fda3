"""Tests of all known forms are read, others are refused, and outputs are compared as judges do."""

import base64
import contextlib
import json
import pickle
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.coding.sandbox import Check
from megasync.coding.tests import Run, read_tests
from megasync.errors import DataError

RUNS = [Run("1 2\n", "3\n"), Run("5 6\n", "11\n")]
CASES = [{"input": run.stdin, "output": run.output} for run in RUNS]
COLUMNS = {"inputs": [run.stdin for run in RUNS], "outputs": [run.output for run in RUNS]}


def packed(pickled: bytes) -> str:
    """As LiveCodeBench keeps its private tests."""
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize(
    "tests",
    [
        CASES,
        tuple(CASES),
        [[run.stdin, run.output] for run in RUNS],
        COLUMNS,
        [COLUMNS],
        {"input": COLUMNS["inputs"], "output": COLUMNS["outputs"]},
        {"inputs": [["1 2", ""], ["5 6", ""]], "outputs": [["3", ""], ["11", ""]]},
        [{"stdin": case["input"], "expected_output": case["output"], "explanation": None} for case in CASES],
        [case | {"type": "stdin_stdout", "fn_name": None} for case in CASES],
        [case | {"testtype": "stdin"} for case in CASES],
        {"language": "python", "test_cases": CASES},
        {"public_test_cases": json.dumps(CASES[:1]), "private_test_cases": json.dumps(CASES[1:])},
        repr(CASES),
        packed(pickle.dumps(json.dumps(CASES))),
        {"public_test_cases": json.dumps(CASES[:1]), "private_test_cases": packed(pickle.dumps(json.dumps(CASES[1:])))},
        {"unit_tests": COLUMNS},
        {"examples": CASES},
        [json.dumps(case) for case in CASES],
        json.dumps(json.dumps(CASES)),
    ],
)
def test_inputs_and_outputs(tests):
    assert read_tests(tests, {}) == RUNS
    assert read_tests(json.dumps(tests), {}) == RUNS


@pytest.mark.parametrize("tests", [None, "", " \n", [], {}, "[]", {"inputs": [], "outputs": []}])
def test_a_row_without_tests(tests):
    assert read_tests(tests, {}) == []


@pytest.mark.parametrize(
    ("tests", "columns", "count"),
    [
        (["assert f(1) == 1", "assert f(2) == 4"], {}, 2),
        (["import math", "assert math.isclose(f(1), 1)", "assert f(2) == 4"], {}, 2),
        ({"test_list": ["assert f(1) == 1"], "test_imports": ["import re"], "test_setup_code": "x = 1"}, {}, 1),
        ({"fn_name": "f", "assert_case": ["assert f(1) == 1", "assert f(2) == 4"]}, {}, 2),
        ({"test_code": "def check(candidate):\n    assert candidate(1) == 1", "entry_point": "f"}, {}, 1),
        ("def check(candidate):\n    assert candidate(1) == 1", {"entry_point": "f"}, 1),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [4]]}, {}, 2),
        ({"inputs": [[1], [2]], "outputs": [1, 4]}, {"fn_name": "f"}, 2),
        ([{"input": "[1, 2]\n3", "output": "4", "testtype": "functional", "metadata": {"func_name": "f"}}], {}, 1),
        ([{"input": "1", "output": "4", "testtype": "functional"}], {"metadata": '{"func_name": "f"}'}, 1),
        ([{"input": "1", "output": "4", "testtype": "functional"}], {"starter_code": "class S:\n  def f(self, x):"}, 1),
    ],
)
def test_functions_and_test_code(tests, columns, count):
    for form in (tests, json.dumps(tests) if not isinstance(tests, str) else tests):
        read = read_tests(form, columns)
        assert [("f" in check.names) for check in read] == [True] * count


@pytest.mark.parametrize(
    ("tests", "columns", "message"),
    [
        (7, {}, "int is not a form"),
        ("7", {}, "no assertion"),
        ("null", {}, "no assertion"),
        ([7], {}, "7 is not a form"),
        ([{"input": "1"}], {}, r"keys \['input'\] are not a form"),
        ({"question": "1"}, {}, r"keys \['question'\] are not a form"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, {}, "2 inputs and 1 outputs"),
        ({"inputs": ["1", "2"], "outputs": ["", " \n"]}, {}, "every expected output is empty"),
        ([{"input": "1", "output": {"a": 1}}], {}, "is not text"),
        ([{"input": "1", "output": "4", "testtype": "functional"}], {}, "without its name"),
        ([{"input": "f(1)", "output": "4", "testtype": "functional"}], {"fn_name": "f"}, "is not JSON"),
        ({"inputs": [[1]], "outputs": [[1]], "fn_name": "f g"}, {}, "not the name|neither JSON nor Python"),
        ("def check(candidate):\n    assert candidate(1)", {"entry_point": "1 +"}, "not the name of a function"),
        (["import math"], {}, "no assertion"),
        (["# comment"], {}, "no assertion"),
        ("eJxtkMEKwjAMhl8l5DzYqugYvomXMbqjh6QubcW", {}, "no assertion"),
        # A pickle that would run a command.
        (packed(b"cos\nsystem\n(S'false'\ntR."), {}, "compressed, but hold no text.*os.system is no plain data"),
        (packed(pickle.dumps([1])), {}, "compressed, but hold no text.*got a list"),
        (packed(b"no pickle"), {}, "compressed, but hold no text"),
        ("[" * 100_000, {}, "neither JSON nor Python"),
        ({"fn_name": "f", "inputs": [[10**5000]], "outputs": [1]}, {}, "<dict> cannot be used"),
        ({"inputs": [10**5000], "outputs": [1]}, {}, "<dict> cannot be used"),
        ({"fn_name": "f", "inputs": [[b"1"]], "outputs": [1]}, {}, "bytes is not JSON"),
    ],
)
def test_other_forms_are_refused(tests, columns, message):
    with pytest.raises(DataError, match=message) as raised:
        read_tests(tests, columns)
    assert str(raised.value).startswith("tests=")


KEYS = st.sampled_from(
    ["input", "outputs", "inputs", "output", "tests", "test", "fn_name", "type", "metadata", "setup"]
)
TEXTS = st.sampled_from(
    ["assert f(2) == 4", "[1]", "{", '{"input": "1", "output": "2"}', "functional", "\ud800", "\0", "#"]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4), st.tuples(inner, inner)
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None)
@given(VALUES, st.dictionaries(KEYS, VALUES, max_size=2))
def test_any_other_value_is_read_or_refused(tests, columns):
    with contextlib.suppress(DataError):
        assert all(isinstance(test, Run | Check) for test in read_tests(tests, columns))


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n", True),
        ("1 2\n3", "1 2  \r\n3\n", True),
        ("1 2", " 1   2", True),
        ("1\n2", "1 2", False),
        ("1 2", "1\n2", False),
        ("1 2", "1 2 3", False),
        ("1\n2", "1", False),
        ("", "x", False),
        ("YES", "Yes", False),
        ("0.333333", "0.3333333333", True),
        ("0.333333", "0.3333", False),
        ("1e-9", "0", True),
        ("3.0", "3", True),
        ("3", "3.0", False),
        ("10000000", "10000001", False),
        ("1e400", "1e401", False),
        ("0.5", "nan", False),
        ("nan", "nan", True),
        ("1.5", "1_5", False),
        ("Case 1: 0.50", "Case 1: 0.5000000001", True),
    ],
)
def test_outputs_are_compared_as_judges_do(expected, printed, same):
    assert Run("", expected).agrees(printed) is same
