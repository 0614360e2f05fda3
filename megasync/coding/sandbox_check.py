"""The test side of the link: runs Python text, such as asserts, against a program in another process.

Standard library only. A text passes if it runs to its end, at least one of its assertions was evaluated, and none was
false. Collected like unittest and pytest do, its test functions and classes run after it.

Invariant: the program never decides a comparison with a value of the test. What it returns is plain data or a
`ProgramObject`, which is told a value of the test only if the test names its class. Operators of two operands are the
program's between two such objects; with data, such an object is compared as the value of its built-in base.
"""

# What comes from the other process has no known type, and a test may contain anything.
# pyright: reportCallIssue=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import ast
import contextlib
import importlib
import inspect
import itertools
import math
import sys
import types

from megasync.coding.sandbox_link import (
    BINARY,
    ERROR_MODULES,
    NODES,
    OPERATIONS,
    TYPES,
    UNARY,
    Side,
    Values,
    builtin_base,
)
from megasync.coding.sandbox_stand_ins import Captured, stand_in_numpy, stand_in_pytest

# Operations on an object of any class, because they compare nothing.
FREE = ("bool", "str", "repr")
# What the program may return to be called. The names are the program's: whoever takes one can only be called.
FUNCTIONS = frozenset({"function", "method", "builtin_function_or_method", "partial", "_lru_cache_wrapper"})
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Methods of text and sets that say whether they agree with their argument.
PREDICATES = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint"})
# Equal numbers of results: absolute, and relative to the expected one.
TOLERANCE = 1e-6


class ProgramObject:
    """An object that lives in the program.

    Its attributes can be read, and its methods called without arguments. All else belongs to tests of classes: it needs
    a class that the test names, in upper case as classes are. So an object in place of data learns no expected value.
    """

    __slots__ = ("_link_called", "_link_class", "_link_iterates", "_link_number", "_link_side")

    def __init__(self, side, number, class_name, iterates):
        called = class_name in FUNCTIONS
        state = {"side": side, "number": number, "class": class_name, "iterates": iterates, "called": called}
        for name, value in state.items():
            object.__setattr__(self, f"_link_{name}", value)

    def _link_known(self):
        return self._link_class in self._link_side.names and self._link_class[0].isupper()

    def _link_ask(self, operation, *operands):
        if not (self._link_known() or operation in FREE or (self._link_iterates and operation == "next")):
            raise TypeError(f"{operation} needs data, but this is a ProgramObject of the class {self._link_class}")
        return self._link_side.ask(operation, self, *operands)

    def __getattr__(self, name):
        if name in PREDICATES:
            raise TypeError(f"{name} needs data, but this is a ProgramObject of the class {self._link_class}")
        value = self._link_side.ask("getattr", self, name)
        if isinstance(value, ProgramObject):
            object.__setattr__(value, "_link_called", self._link_known())
        return value

    def __call__(self, *positional, **named):
        if (positional or named) and not (self._link_called or self._link_known()):
            raise TypeError(f"the test names no class {self._link_class}, so this ProgramObject gets no arguments")
        return self._link_side.ask("call", self, list(positional), named)

    def __setattr__(self, name, value):
        self._link_side.ask("setattr", self, name, value)

    def __delattr__(self, name):
        self._link_side.ask("delattr", self, name)

    def __await__(self):
        return self._link_side.ask("await", self)
        yield

    def __enter__(self):
        return self._link_side.ask("enter", self)

    def __exit__(self, *error):
        self._link_side.ask("exit", self)

    def __instancecheck__(self, value):
        return isinstance(value, ProgramObject) and self._link_side.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value):
        return isinstance(value, ProgramObject) and self._link_side.ask("issubclass", value, self) is True

    def __iter__(self):
        return self if self._link_iterates else iter(self._link_ask("iter"))

    def __contains__(self, value):
        # Iterates, so that the items are compared on this side.
        return any(item is value or item == value for item in self)

    def __hash__(self):
        return self._link_ask("hash") if self._link_known() else object.__hash__(self)

    def __next__(self):
        return self._link_ask("next")

    def __reversed__(self):
        return self._link_ask("reversed")

    def __getitem__(self, key):
        return self._link_ask("getitem", key)

    def __setitem__(self, key, value):
        self._link_ask("setitem", key, value)

    def __delitem__(self, key):
        self._link_ask("delitem", key)

    def __round__(self, *digits):
        return self._link_ask("round", *digits)


def unary(operation):
    return lambda self: self._link_ask(operation)


def binary(operation):
    def method(self, other):
        if isinstance(other, ProgramObject):
            return self._link_ask(operation, other) if self._link_known() and other._link_known() else NotImplemented
        if operation not in COMPARISONS or not self._link_known():
            return NotImplemented
        try:
            # The value of its built-in base, such as the items of a class that derives from list.
            plain = self._link_ask("plain")
        except TypeError:
            return NotImplemented
        return NotImplemented if isinstance(plain, ProgramObject) else OPERATIONS[operation](plain, other)

    return method


for _name in set(UNARY) - {"hash"}:
    setattr(ProgramObject, f"__{_name}__", unary(_name))
for _name in BINARY:
    setattr(ProgramObject, f"__{_name}__", binary(_name))


class CheckSide(Side):
    """Asks the program for operations, and runs functions of the test when the program calls them back.

    `names` are those that the test takes from the program, so also the classes whose objects it knows.
    """

    def __init__(self, descriptor, names):
        super().__init__(descriptor)
        self.names = frozenset(names)
        self.lent = []
        self.objects = {}

    def give(self, value):
        if isinstance(value, ProgramObject):
            return ["own", value._link_number]
        for number, error in self.objects.items():
            if error is value:
                return ["own", number]
        iterates = hasattr(type(value), "__next__")
        if not (iterates or callable(value)):
            raise TypeError(f"a test passes data, functions and ProgramObjects, not a {type(value).__name__}")
        self.lent.append(getattr(value, "__next__") if iterates else value)  # noqa: B009 - of any iterator
        return ["iterator" if iterates else "function", len(self.lent) - 1]

    def sends_state(self, value) -> bool:
        kind = type(value)
        test_class = kind.__module__ in ("tests", "__main__") or kind in NODES.values()
        return test_class and hasattr(value, "__dict__") and not (callable(value) or hasattr(kind, "__next__"))

    def restore(self, made, state):
        if any(callable(getattr(type(made), name, None)) for name in state):
            raise ValueError("a method of the test would be replaced")
        super().restore(made, state)

    def take(self, kind, data):
        if kind == "library":
            module, name = data
            value = getattr(importlib.import_module(module), name) if module in ERROR_MODULES else None
            if value is not None and value is error_kind(value):
                return value
        if kind in ("object", "error"):
            number, name, detail = data
            if number not in self.objects:
                made = ProgramObject(self, int(number), name, detail is True)
                self.objects[number] = made if kind == "object" else type(str(name), (error_kind(detail),), {})
            return self.objects[number]
        raise ValueError(f"{kind} {data!r:.100} is not accepted from a program")

    def ask(self, operation, *operands):
        """The result of an operation. Raises what the program raises, and applies its changes to the arguments."""
        if self.broken:
            self.fail("the other side has ended")
        values = Values(self)
        self.send(["ask", operation, *values.write(operands)])
        sent = len(values.containers)
        while (message := self.receive())[0] == "back":
            self.send(self.called_back(message))
        try:
            outcome, packed, contents, changes, printed = message
            if any(number >= sent for number, _ in changes):
                raise IndexError("a change of what was not sent")
            answer = values.read(packed, contents, changes)
            sys.stdout.write(printed)
            if outcome == "value":
                return answer[0]
            error = self.error(operation, *answer)
        except Exception as problem:  # noqa: BLE001 - malformed content can raise anything
            self.fail(f"{type(problem).__name__}: {problem}")
        raise error

    def error(self, operation, kind, base, attributes, *arguments):
        """The exception that the program raised, of the same class if the test can know that class."""
        if kind is StopIteration and operation == "next":
            return StopIteration()
        if kind is not error_kind(kind):
            return RuntimeError(f"the program raised {base}")
        error = kind.__new__(kind, *arguments)
        vars(error).update(attributes)
        return error

    def called_back(self, message):
        values = Values(self)
        try:
            _, number, *content = message
            positional, named = values.read(*content)
            return ["value", *values.write([self.lent[number](*positional, **named)], content[1])]
        except Exception as error:  # noqa: BLE001 - passed to the program
            return ["raised", [None, builtin_base(type(error)), None, str(error)], []]

    def variables(self, names):
        """The variables of the program that have these names, which can be called."""
        values = self.ask("names", list(names))
        for value in values.values():  # pyright: ignore[reportOptionalMemberAccess]
            if isinstance(value, ProgramObject):
                object.__setattr__(value, "_link_called", True)
        return values


def error_kind(kind):
    """A class of exceptions, or its built-in name, if a program may raise it. Otherwise Exception.

    What ends a process or an iteration would end the test without a failure.
    """
    kind = TYPES.get(kind) if isinstance(kind, str) else kind
    accepted = isinstance(kind, type) and issubclass(kind, Exception)
    return kind if accepted and not issubclass(kind, (StopIteration, StopAsyncIteration)) else Exception


class Solution(types.ModuleType):
    """The program as a module, for tests that import it."""

    def __init__(self, name, side):
        super().__init__(name)
        self.__dict__.update({"_side": side, "__all__": sorted(side.names)})

    def __getattr__(self, name):
        values = {} if name.startswith("__") else self._side.variables([name])
        if name not in values:
            raise AttributeError(f"the program does not define {name}")
        return values[name]


# What a test evaluates


def cannot_fail(test):
    """Whether the condition of an assert is true whatever the program does."""
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.Or) else all)(map(cannot_fail, test.values))
    if isinstance(test, ast.Lambda | ast.GeneratorExp | ast.JoinedStr):
        return True
    if isinstance(test, ast.Tuple | ast.List | ast.Set | ast.Dict):
        return bool(getattr(test, "elts", None) or getattr(test, "keys", None))
    return not any(isinstance(node, ast.Name | ast.Attribute) for node in ast.walk(test))


def is_comparison(node):
    """Whether a statement is a comparison without `assert`, which is read as one."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Compare) and not cannot_fail(value)


def may_raise(node):
    """Whether a statement decides if the test raises, so that to reach it is a test."""
    return isinstance(node, ast.If | ast.Try) and raises_within(node)


def raises_within(node):
    """Whether a statement raises in a branch that is not that of a loop or a function."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Raise) or (isinstance(inner, ast.Assert) and cannot_fail(inner.test)):
            return True
        skipped = ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if not isinstance(inner, skipped) and raises_within(inner):
            return True
    return False


def evaluates(node):
    """Whether a node of a text can fail the test."""
    if isinstance(node, ast.Assert):
        return not cannot_fail(node.test)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name.startswith(("assert", "raises", "fail"))
    return is_comparison(node) or may_raise(node)


class Recorder(ast.NodeTransformer):
    """Makes a text report its assertions to a `Verdict`, which it knows as `__verdict__`."""

    def visit(self, node):
        node = self.generic_visit(node)
        if isinstance(node, ast.Assert) and evaluates(node):
            node.test = self.reported("checked", node, node.test)
        elif is_comparison(node):
            return ast.copy_location(ast.Assert(self.reported("checked", node, node.value), None), node)
        elif isinstance(node, ast.ExceptHandler) and any(isinstance(i, ast.Assert | ast.Raise) for i in ast.walk(node)):
            node.body.insert(0, ast.copy_location(ast.Expr(self.reported("decided_later", node)), node))
        elif may_raise(node):
            return [ast.copy_location(ast.Expr(self.reported("reached", node)), node), node]
        return node

    @staticmethod
    def reported(method, node, *arguments):
        function = ast.Attribute(ast.Name("__verdict__", ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(function, list(arguments), []), node)


class Verdict:
    """Counts the assertions that were evaluated, and remembers a failure that the test catches itself."""

    def __init__(self):
        self.count = 0
        self.failed = False

    def reached(self):
        self.count += 1

    def decided_later(self):
        """After a failure that the test catches to make another assertion, such as one of a second right answer."""
        self.failed = False

    def checked(self, value):
        self.count += 1
        true = bool(value)
        self.failed = self.failed or not true
        return true

    def recorded(self, assertion):
        """A method of unittest.TestCase whose calls count."""

        def method(case, *positional, **named):
            self.count += 1
            try:
                return assertion(case, *positional, **named)
            except case.failureException:
                self.failed = True
                raise

        return method

    @property
    def passed(self):
        return self.count > 0 and not self.failed


def agrees(result, expected):
    """Whether a result is the expected value of JSON, which has no tuples and only text as keys of objects."""
    if isinstance(expected, dict):
        result = {str(key): item for key, item in result.items()} if isinstance(result, dict) else {}
        return result.keys() == expected.keys() and all(agrees(result[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        same = isinstance(result, list | tuple) and len(result) == len(expected)
        return same and all(map(agrees, result, expected))
    if isinstance(expected, float) or isinstance(result, float):
        both = [type(value) in (int, float) for value in (result, expected)]
        return all(both) and (
            result == expected or math.isclose(result, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        )
    return result == expected


# What runs


def run_function(function, fixtures, owner=()):
    """Runs a test function once for each of its parameters."""
    if getattr(function, "skipped", False):
        return
    for chosen in itertools.product(*getattr(function, "parameters", [])):
        arguments = {name: value for row in chosen for name, value in row.items()}
        with contextlib.ExitStack() as stack:
            names = list(inspect.signature(function).parameters)[len(owner) :]
            for name in names:
                if name not in arguments:
                    arguments[name] = prepared(name, fixtures, stack)
            outcome = function(*owner, **arguments)
            if inspect.iscoroutine(outcome):
                import asyncio

                asyncio.run(outcome)


def prepared(name, fixtures, stack):
    """The value of a fixture, which is cleaned up when `stack` ends."""
    if name == "capsys":
        stack.enter_context(contextlib.redirect_stdout(sys.stdout))
        return Captured()
    function = fixtures[name]
    value = function(**{inner: prepared(inner, fixtures, stack) for inner in inspect.signature(function).parameters})
    if not inspect.isgenerator(value):
        return value
    stack.callback(next, value, None)
    return next(value)


def run_class(kind, fixtures):
    """Runs the test methods of a class in the way of pytest."""
    for name, method in list(vars(kind).items()):
        if name.startswith("test") and inspect.isfunction(method):
            case = kind()
            class_fixtures = {n: m.__get__(case) for n, m in vars(kind).items() if getattr(m, "is_fixture", False)}
            for prepare in ("setup_class", "setup_method", "setup"):
                getattr(case, prepare, lambda: None)()
            run_function(method, fixtures | class_fixtures, (case,))


def run_cases(kind, verdict):
    """Runs the test methods of a unittest.TestCase."""
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    verdict.failed = verdict.failed or not result.wasSuccessful()
    for _, trace in [*result.errors, *result.failures]:
        print(trace, file=sys.stderr)


def prepare_unittest(verdict):
    """Makes unittest report to a verdict, and leave the run of the tests to `run_cases`."""
    import unittest

    for name in dir(unittest.TestCase):
        if name.startswith("assert"):
            setattr(unittest.TestCase, name, verdict.recorded(getattr(unittest.TestCase, name)))
    unittest.main = lambda *_, **__: None


def is_test(node):
    """Whether a statement at the top of a text defines tests that are collected."""
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
        return False
    # HumanEval's function of the candidate is called with it.
    return [argument.arg for argument in node.args.args] != ["candidate"]


def run_text(text, space, verdict):
    tree = ast.parse(text)
    collected = [node.name for node in tree.body if is_test(node)]
    # As with pytest, what a file does when it is run as a script is left out if its tests are found.
    space["__name__"] = "tests" if collected else "__main__"
    try:
        exec(compile(ast.fix_missing_locations(Recorder().visit(tree)), "<tests>", "exec"), space)
    except SystemExit as error:
        if error.code:
            raise
    fixtures = {
        name: value for name, value in space.items() if inspect.isfunction(value) and hasattr(value, "is_fixture")
    }
    for name in dict.fromkeys(collected):
        test = space[name]
        if not inspect.isclass(test):
            run_function(test, fixtures)
        elif hasattr(test, "assertEqual"):
            run_cases(test, verdict)
        elif not getattr(test, "skipped", False):
            run_class(test, fixtures)


def passes(descriptor, check):
    """Whether a check passes: {"text", "prelude" (what is imported for it), "names" and "modules" of the program}."""
    side, verdict = CheckSide(descriptor, check["names"]), Verdict()
    # Imports that take longer than most tests are left to the tests that need them.
    if "unittest" in check["prelude"] + check["text"]:
        prepare_unittest(verdict)
    sys.modules["pytest"], sys.modules["numpy"] = stand_in_pytest(verdict), stand_in_numpy(verdict)
    try:
        sys.modules.update({name: Solution(name, side) for name in check["modules"]})
        space = {"__verdict__": verdict, "__agrees__": agrees, "__file__": "tests.py"}
        exec(check["prelude"], space)
        space.update(side.variables(check["names"]))
        run_text(check["text"], space, verdict)
    except BaseException as error:  # noqa: BLE001 - any exception fails the check
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False
    if not verdict.count:
        print("no assertion was evaluated", file=sys.stderr)
    return verdict.passed and not side.broken
