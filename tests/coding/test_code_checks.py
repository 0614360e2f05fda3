"""Test code is read: what it takes from the program, and that it can fail."""

import pytest

from megasync.coding.checks import check_of
from megasync.errors import DataError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("assert f(2) == 4", {"f"}),
        ("f(2) == 4", {"f"}),
        ("assert len(f(2)) == max(3, 4)", {"f"}),
        ("assert sum(1, 2) == 3", {"sum"}),
        ("c = Counter()\nassert c.add(1) == 1", {"Counter"}),
        ("assert Counter(f('a')) == Counter('a') and isclose(g(), math.pi)", {"f", "g"}),
        ("from solution import f as g\nassert g(2) == 4", {"f"}),
        ("import solution as s\nassert s.f(2) == 4 and hasattr(s, 'h')", {"f"}),
        ("x = f(2)\nfor y in [1]:\n    assert x == y", {"f"}),
        ("def one():\n    assert f(2) == 4\ndef two():\n    one()\ntwo()", {"f"}),
        ("def same(a, b):\n    assert a == b\nsame(f(2), 4)", {"f", }),
        ("if f(2) != 4:\n    raise ValueError", {"f"}),
        ("try:\n    f(2)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError", {"f"}),
        ("class T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)", {"f"}),
        ("solution = Solution()\nsolution.x = 2\nassert solution.y == 2", {"Solution"}),
        ("assert all(Point(x).x == x for x in range(3))", {"Point"}),
    ],
)  # fmt: skip
def test_the_names_that_come_from_the_program(text, names):
    assert set(check_of(text).names) == names


def test_an_entry_point_is_what_the_tests_call():
    check = check_of("def check(candidate):\n    assert candidate(1) == 1", "Solution().f")
    assert (check.names, check.text.endswith("\ncheck(Solution().f)\n")) == (("Solution",), True)
    assert check_of("def check(candidate):\n    assert all(candidate([x]) == x for x in range(3))", "sum").names == (
        "sum",
    )
    assert check_of("assert candidate(1) == 1", "f").text == "candidate = f\nassert candidate(1) == 1"
    assert check_of("def check(candidate):\n    assert candidate(1) == 1\ncheck(f)", "f").text.count("check(") == 2


def test_with_an_entry_point_nothing_else_comes_from_the_program():
    """Otherwise a program could define what compares its results."""
    text = "def check(candidate):\n    assert same(candidate(1), 1)"
    with pytest.raises(DataError, match="they use same without a definition, and only the entry point f"):
        check_of(text, "f")
    assert check_of(f"def same(a, b): return a == b\n{text}", "f").names == ("f",)
    assert check_of(text.replace("same", "is_same_list"), "f").names == ("f",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# hidden tests", "no assertion"),
        ("f(2)", "no assertion"),
        ("import sys; sys.exit()", "no assertion"),
        ("raise SystemExit(0)", "no assertion"),
        ("assert True", "no assertion"),
        ("assert (f(2) == 4, 'wrong')", "no assertion"),
        ("assert (f(x) == y for x, y in [(1, 2)])", "no assertion"),
        ("assert f(2) == 4 or True", "no assertion"),
        ("assert lambda: f(2) == 4", "no assertion"),
        ("def helper():\n    assert f(2) == 4", "no assertion"),
        ("def helper(x):\n    assert f(x) == 4\ndef run():\n    helper(2)\n    run()", "no assertion"),
        ("class Helper:\n    def test(self):\n        assert f(2) == 4", "no assertion"),
        ("f(2)\nclass T(unittest.TestCase):\n    def test(self):\n        f(2)", "no assertion"),
        ("assert len([1]) == max(0, 1)", "no name of the program"),
        ("x = 4\nassert x == 4", "no name of the program"),
        ("def check(candidate):\n    assert candidate(1) == 1", "nothing calls check.*entry_point"),
        ("def test_it(candidate):\n    assert candidate(1) == 1", "nothing calls test_it.*entry_point"),
        ("def test_it(tmp_path):\n    assert f(tmp_path) == 1", "tmp_path, which is no fixture"),
        ("import pandas\nassert f(2) == 4", "import pandas, which the sandbox does not have"),
        (
            "from unittest.mock import patch\nwith patch('f'):\n    assert f(2) == 4",
            "unittest.mock, but the program runs",
        ),
        (
            "from unittest import mock\nwith mock.patch('f'):\n    assert f(2) == 4",
            "unittest.mock, but the program runs",
        ),
        ("import inspect\nassert list(inspect.signature(f).parameters) == ['x']", "they use inspect.signature"),
        ("import sys, io\nsys.stdin = io.StringIO('2')\nassert f() == 4", "they set sys.stdin"),
        ("import solution\nsolution.x = 2\nassert solution.f() == 4", "they set solution.x"),
        ("import numpy as np\nassert f(2) == np.array([4])", "numpy.array; of numpy the sandbox has"),
        ("import pytest\ndef test_it():\n    pytest.importorskip('x')\n    assert f(2)", "pytest.importorskip"),
        ("print f(2)", "neither JSON nor Python"),
        ("assert f(2) ==", "neither JSON nor Python"),
        (">>> f(2)\n4", "neither JSON nor Python"),
        ("assert f(2) == " + "(" * 500 + ")" * 500, "neither JSON nor Python"),
        ("assert f(\0)", "neither JSON nor Python"),
    ],
)
def test_a_text_that_cannot_fail_or_run_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        check_of(text)
