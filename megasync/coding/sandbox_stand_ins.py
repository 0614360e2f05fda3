"""Stand-ins for what tests of public sets import or expect: of pytest and NumPy what those sets use; LeetCode's nodes.

Standard library only. `checks` refuses tests that use more.
"""

# A test may compare anything.
# pyright: reportAttributeAccessIssue=false

import inspect
import io
import math
import re
import sys
import types

from megasync.coding.sandbox_link import ListNode, TreeNode


class Approximately:
    """Stands for `pytest.approx`."""

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.options = expected, (rel, abs, nan_ok)

    def __eq__(self, actual):
        expected, (relative, absolute, nan_ok) = self.expected, self.options
        part = [Approximately(item, *self.options) for item in _items(expected)]
        if isinstance(expected, dict):
            return isinstance(actual, dict) and actual.keys() == expected.keys() and _items(actual) == part
        if isinstance(expected, list | tuple):
            return isinstance(actual, list | tuple) and list(actual) == part
        if not all(isinstance(value, int | float) and type(value) is not bool for value in (actual, expected)):
            return type(actual) is type(expected) and actual == expected
        if math.isnan(expected):
            return nan_ok and math.isnan(actual)
        least = 1e-12 if absolute is None else absolute
        rel = (1e-6 if absolute is None else 0.0) if relative is None else relative
        return actual == expected or abs(actual - expected) <= max(least, rel * abs(expected)) < math.inf

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _items(value):
    return list(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ())


class Raises:
    """Stands for `pytest.raises` as a context manager; afterwards it has the exception as `value`."""

    def __init__(self, verdict, kind, match):
        self.verdict, self.kind, self.pattern, self.value = verdict, kind, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if not self.verdict.checked(kind is not None and (not isinstance(error, Exception) or self.expects(error))):
            raise AssertionError(f"expected {self.kind}, got {error!r}") from None
        self.value, self.type = error, kind
        return isinstance(error, Exception)

    def expects(self, error):
        return isinstance(error, self.kind) and (not self.pattern or re.search(self.pattern, str(error)) is not None)

    def match(self, pattern):
        return self.verdict.checked(re.search(pattern, str(self.value)))


class Marks:
    """Stands for `pytest.mark`: parameters are kept; a test that its author skips or expects to fail does not run."""

    @staticmethod
    def parametrize(names, values, **_):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [value if len(names) > 1 or isinstance(value, Parameters) else (value,) for value in values]

        def decorate(function):
            function.parameters = [*getattr(function, "parameters", []), [dict(zip(names, row)) for row in rows]]  # noqa: B905
            return function

        return decorate

    def __getattr__(self, name):
        def mark(*given, **_):
            if len(given) == 1 and (inspect.isfunction(given[0]) or inspect.isclass(given[0])):
                setattr(given[0], "skipped", name in ("skip", "xfail"))  # noqa: B010 - of a function of the test
                return given[0]
            condition = not given or isinstance(given[0], str) or bool(given[0])

            def decorate(function):
                function.skipped = name in ("skip", "xfail", "skipif") and condition
                return function

            return decorate

        return mark


class Parameters(tuple):
    """The arguments of one `pytest.param`."""

    __slots__ = ()


class Captured:
    """Stands for pytest's `capsys`."""

    def __init__(self):
        sys.stdout = io.StringIO()

    def readouterr(self):
        text = sys.stdout.getvalue()
        sys.stdout = io.StringIO()
        return types.SimpleNamespace(out=text, err="")


def stand_in_pytest(verdict):
    def raises(kind, *call, match=None, **named):
        context = Raises(verdict, kind, match)
        if not call:
            return context
        with context:
            call[0](*call[1:], **named)
        return context

    def fixture(*function, **_):
        def decorate(function):
            function.is_fixture = True
            return function

        return decorate(*function) if function else decorate

    def fail(reason="", **_):
        verdict.failed = True
        raise AssertionError(reason)

    module = types.ModuleType("pytest")
    module.__dict__.update(raises=raises, fixture=fixture, fail=fail, approx=Approximately, mark=Marks())
    module.__dict__.update(param=lambda *values, **_: Parameters(values), main=lambda *_, **__: 0)
    return module


def stand_in_numpy(verdict):
    """Stands for the part of NumPy that the tests of HumanEval+ and MBPP+ use."""

    def allclose(actual, desired, rtol=1e-05, atol=1e-08):
        if isinstance(desired, list | tuple):
            same = isinstance(actual, list | tuple) and len(actual) == len(desired)
            return same and all(allclose(a, d, rtol, atol) for a, d in zip(actual, desired, strict=True))
        numbers = all(isinstance(value, int | float | complex) for value in (actual, desired))
        return numbers and (actual == desired or abs(actual - desired) <= atol + rtol * abs(desired) < math.inf)

    def assert_allclose(actual, desired, rtol=1e-07, atol=0.0):
        assert verdict.checked(allclose(actual, desired, rtol, atol)), f"{actual} is not close to {desired}"

    array = type("ndarray", (), {})
    testing = types.SimpleNamespace(assert_allclose=assert_allclose)
    module = types.ModuleType("numpy")
    module.__dict__.update(allclose=allclose, isclose=allclose, testing=testing, ndarray=array)
    module.__dict__.update({name: type(name, (float,), {}) for name in ("float32", "float64")})
    return module


def list_node(values):
    """A linked list, as the tests of LeetCodeDataset write it."""
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def tree_node(values):
    """A binary tree from its values by levels, with None for a missing child."""
    if not values:
        return None
    root, rest = TreeNode(values[0]), iter(values[1:])
    parents = [root]
    for parent in parents:  # which grows meanwhile
        for side in ("left", "right"):
            if (value := next(rest, None)) is not None:
                setattr(parent, side, TreeNode(value))
                parents.append(getattr(parent, side))
    return root


def is_same_list(one, other):
    """Whether two linked lists, one of which may be the program's, have the same values."""
    while one is not None and other is not None:
        if one.val != other.val:
            return False
        one, other = one.next, other.next
    return one is None and other is None


def is_same_tree(one, other):
    """Whether two binary trees, one of which may be the program's, have the same values at the same places."""
    pairs = [(one, other)]
    for left, right in pairs:  # which grows meanwhile
        if left is None or right is None:
            if left is not right:
                return False
        elif left.val != right.val:
            return False
        else:
            pairs += [(left.left, right.left), (left.right, right.right)]
    return True
