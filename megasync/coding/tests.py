"""The forms of tests that public sets of programming tasks have, as tests that can be run.

| form | sets |
|---|---|
| {"input", "output"}: text that the program reads and prints; a list of them, or of [input, output] | CodeContests |
| {"inputs": [...], "outputs": [...]}, with "fn_name" if a function is called | APPS, TACO, PrimeIntellect |
| {"input", "output", "testtype": "stdin" or "functional"} | LiveCodeBench |
| test code, or a list of it (`checks`): asserts, `check(candidate)`, unittest, pytest | MBPP, HumanEval, KodCode |

Each may also be JSON text, or be under a key such as "test_cases". Invariant: `read_tests` returns tests that a program
can fail, or raises DataError. Pure.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from megasync.coding.checks import UNREADABLE, check_of
from megasync.coding.sandbox import Check
from megasync.coding.sandbox_check import TOLERANCE
from megasync.errors import DataError, raised_as

# The keys of one test, of several, and of test code, as sets name them.
_INPUTS, _OUTPUTS = ("input", "inputs", "stdin"), ("output", "outputs", "expected_output", "stdout", "expected")
_LISTS = ("test_cases", "tests", "test_list", "assert_case", "cases", "official_tests", "public_tests")
_LISTS += ("public_test_cases", "private_tests", "private_test_cases", "generated_tests")
_LISTS += ("unit_tests", "examples")
_CODE = ("test", "test_code", "functional", "unit_test")
_FUNCTIONS = ("entry_point", "fn_name", "func_name", "function_name")
_SETUP = ("test_imports", "test_setup_code", "import_prefix", "setup")
# The columns of a row that are read.
COLUMNS = frozenset({"tests", "metadata", "starter_code", *_FUNCTIONS, *_SETUP})
_CALLS = ("functional", "function_call", "call", "call_based")
# How zlib's header begins in base64, and the most bytes that a text is unpacked to.
_COMPRESSED, LARGEST = "eJ", 2**29
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Run:
    """A program that reads `stdin` must print `output`."""

    stdin: str
    output: str

    def agrees(self, printed: str) -> bool:
        """Whether an output is the expected one: line by line, and in a line word by word.

        White space at the ends of lines and empty lines at the end do not count, nor how many spaces are between the
        words of a line. A word that is expected to be a number with a fraction or an exponent may differ by 1e-6,
        absolute or relative.
        """
        lines = zip_longest(_lines(printed), _lines(self.output))
        return all(line is not None and expected is not None and _same_line(line, expected) for line, expected in lines)


@dataclass(frozen=True, slots=True)
class _Context:
    """What a test inherits from the row around it."""

    function: str | None = None
    setup: str = ""

    def within(self, fields: Mapping[str, Any]) -> _Context:
        metadata = _data(fields.get("metadata"))
        named = [source.get(key) for source in (fields, metadata) if isinstance(source, Mapping) for key in _FUNCTIONS]
        named = [name for name in named if isinstance(name, str) and name.strip()]
        if not named and isinstance(starter := fields.get("starter_code"), str):
            named = re.findall(r"def\s+(\w+)", starter)[-1:]
        parts = [part for key in _SETUP for part in _strings(fields.get(key))]
        return replace(
            self, function=named[0].strip() if named else self.function, setup="\n".join([self.setup, *parts])
        )


def read_tests(tests: Any, columns: Mapping[str, Any]) -> list[Run | Check]:
    """The tests of a row, which may be of any form above; empty if it has none. Raises DataError for any other form.

    Of the row's other columns, "entry_point" (or "fn_name", "starter_code") names the function that is called, and
    "test_setup_code" and "test_imports" come before test code.
    """
    try:
        read = list(_read(tests, _Context().within(columns)))
        if read and all(isinstance(test, Run) and not test.output.strip() for test in read):
            raise DataError("every expected output is empty, so a program that does nothing would pass")
    except (DataError, *UNREADABLE) as error:
        raise DataError(f"tests={_excerpt(tests)} cannot be used: {error}") from None
    return read


def _excerpt(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError, MemoryError):
        # An integer of thousands of digits, or deep nesting.
        return f"<{type(value).__name__}>"


def _read(tests: Any, context: _Context) -> Iterator[Run | Check]:
    tests = _data(tests)
    if isinstance(tests, str):
        if tests.strip():
            yield _check(tests, context)
    elif isinstance(tests, Mapping):
        yield from _read_fields({key: value for key, value in tests.items() if value is not None}, context)
    elif isinstance(tests, Sequence):
        yield from _read_list(tests, context)
    elif tests is not None:
        raise DataError(f"{type(tests).__name__} is not a form of tests that is known ({_KNOWN})")


_KNOWN = 'test code, or {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or a list of them'


def _read_list(tests: Sequence, context: _Context) -> Iterator[Run | Check]:
    any_test = False
    for test in map(_data, tests):
        if isinstance(test, str):
            if _only_prepares(test):
                context = replace(context, setup=f"{context.setup}\n{test}")
                continue
            yield _check(test, context)
        elif isinstance(test, Sequence) and len(test) == 2 and all(isinstance(part, str) for part in test):
            yield Run(*test)
        elif isinstance(test, Mapping):
            yield from _read_fields({key: value for key, value in test.items() if value is not None}, context, one=True)
        else:
            raise DataError(f"{test!r:.100} is not a form of tests that is known ({_KNOWN})")
        any_test = True
    if not any_test and context.setup.strip():
        raise DataError("no assertion in them runs; they only import and define")


def _read_fields(fields: Mapping[str, Any], context: _Context, *, one: bool = False) -> Iterator[Run | Check]:
    """The tests of an object; `one` if it stands in a list, so that a list under "input" is that of one test."""
    context = context.within(fields)
    inputs, outputs = (next((key for key in keys if key in fields), None) for keys in (_INPUTS, _OUTPUTS))
    nested = [key for key in _LISTS if fields.get(key)]
    code = [key for key in _CODE if isinstance(fields.get(key), str)]
    kind = str(fields.get("testtype", fields.get("type", "")))
    if inputs and outputs:
        # A text under a singular key is what one program reads, whatever it looks like.
        pairs = [_data(fields[key]) if key[-1] == "s" else fields[key] for key in (inputs, outputs)]
        if (one and inputs[-1] != "s") or not all(isinstance(part, list | tuple) for part in pairs):
            yield _case(fields[inputs], fields[outputs], kind, context, wrapped=kind == "function_call")
            return
        if len(pairs[0]) != len(pairs[1]):
            raise DataError(f"they have {len(pairs[0])} inputs and {len(pairs[1])} outputs")
        for each, expected in zip(pairs[0], pairs[1], strict=True):
            yield _case(each, expected, kind, context, wrapped=True)
    elif nested:
        for key in nested:
            yield from _read(fields[key], context)
    elif code:
        yield _check(fields[code[0]], context)
    elif fields:
        raise DataError(f"the keys {sorted(map(str, fields))} are not a form of tests that is known ({_KNOWN})")


def _case(inputs: Any, expected: Any, kind: str, context: _Context, *, wrapped: bool) -> Run | Check:
    """One input and output. `wrapped`: APPS, and sets made of it, put the value of a function into a list."""
    # Other kinds are "stdin", "stdin_stdout", "standard_input".
    if kind in _CALLS or (context.function and not kind.startswith("st")):
        return _call(inputs, expected, context, wrapped=wrapped)
    return Run(_printed(inputs), _printed(expected))


def _call(inputs: Any, expected: Any, context: _Context, *, wrapped: bool) -> Check:
    """A function that is called with values of JSON must return one."""
    if not context.function:
        raise DataError("they call a function without its name; add a column fn_name or entry_point")
    if isinstance(inputs, str):
        inputs, expected = [_value(line) for line in inputs.splitlines() if line.strip()], _value(expected)
    named = inputs if isinstance(inputs, Mapping) else {}
    arguments = [] if named else list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    expects = [expected, *(expected if wrapped and isinstance(expected, list) and len(expected) == 1 else [])]
    name = context.function
    if name.isidentifier():
        # LeetCode's tasks ask for a method of a class.
        name = f"{name} if {name!r} in globals() else Solution().{name}"
    text = (
        f"import json\narguments, named, expects = json.loads({json.dumps([arguments, named, expects])!r})\n"
        f"result = ({name})(*arguments, **named)\nassert any(__agrees__(result, expected) for expected in expects)"
    )
    return check_of(text, takes={context.function})


def _check(text: str, context: _Context) -> Check:
    return check_of(f"{context.setup}\n{text}" if context.setup.strip() else text, context.function)


def _only_prepares(text: str) -> bool:
    """Whether test code only imports and defines, for the tests after it."""
    try:
        body = ast.parse(text).body
    except UNREADABLE:
        return False
    return all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body)


def _data(value: Any) -> Any:
    """A value whose JSON text, or text of a Python literal, is read."""
    for _ in range(3):
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(value, str):
            value = _unpacked(value)
        if not isinstance(value, str) or value.strip()[:1] not in ("{", "[", "(", '"'):
            break
        parsed = next((each for each in _parsed(value) if isinstance(each, str | list | tuple | dict)), None)
        if parsed is None:
            break
        value = parsed
    return value


class _PlainPickle(pickle.Unpickler):
    """Reads built-in values. Whatever else a pickle may hold needs a class, or a function, and is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise ValueError(f"{module_name}.{global_name} is no plain data")


def _unpacked(text: str) -> str:
    """The text of LiveCodeBench's private tests, which are compressed. A text of another form is returned as it is."""
    if not text.startswith(_COMPRESSED):
        return text
    try:
        pickled = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LARGEST)
    except (ValueError, zlib.error):
        return text
    with raised_as(DataError, "they are compressed, but hold no text", of=Exception):
        value = _PlainPickle(io.BytesIO(pickled)).load()
        if not isinstance(value, str):
            raise TypeError(f"got a {type(value).__name__}")
    return value


def _value(text: Any) -> Any:
    """The value of a JSON text, or of a Python literal."""
    if not isinstance(text, str):
        return text
    for value in _parsed(text):
        return value
    raise DataError(f"{text!r:.100} is not JSON; the arguments of a function are one JSON value a line")


def _parsed(text: str) -> Iterator[Any]:
    """The value of a text as JSON, then as a Python literal, without what it is not."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except UNREADABLE:
            continue
        yield value


def _strings(value: Any) -> list[str]:
    value = _data(value)
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, str) and part.strip()]


def _printed(value: Any) -> str:
    """Text of an input or output, which some sets have as a list of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_printed, value))
    if value is None or isinstance(value, Mapping):
        raise DataError(f"the input or output {value!r:.100} is not text")
    return str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(line: str, expected: str) -> bool:
    return line == expected or all(
        word is not None and right is not None and _same_word(word, right)
        for word, right in zip_longest(line.split(), expected.split())
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if expected.lstrip("+-").isdigit() or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    value, right = float(word), float(expected)
    return math.isfinite(value) and math.isclose(value, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
