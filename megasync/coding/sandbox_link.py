"""The link between tests and the program that they test, which run in two processes.

    test side       (`sandbox_check`) asks for a call, an attribute, an item; compares, and decides
    program side    performs it; answers with plain data, or with the number of an object that stays there

Standard library only; both sides have this file without the package. As a script it is the program side: it loads
`program.py` and then answers. Frames are JSON, preceded by their length.

Invariant: data crosses by value. `Values.read` rebuilds Python's own exact types, whatever the program defined or
patched, so nothing that a test computes with data can reach code of the program. An instance of a subclass of a
built-in type arrives as a value of that type, unless the test names its class.
"""

# Unpacked values come from the other process, so their types are unknown here.
# pyright: reportCallIssue=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false

import builtins
import contextlib
import datetime
import decimal
import fractions
import io
import json
import operator
import os
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache

FRAME_BYTES = 16 * 2**20
PRINTED_CHARACTERS = 2**20
# Mutable values: they are sent by number, so that shared ones stay shared and changes in place are seen.
CONTAINERS = {kind.__name__: kind for kind in (list, dict, set, bytearray, deque, OrderedDict, Counter, defaultdict)}
WHOLE = slice(None)
# Built-in bases, and how to read the value of an instance of a subclass without code of the subclass.
BASES = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, WHOLE),
    bytearray: lambda value: bytearray.__getitem__(value, WHOLE),
    list: lambda value: list.__getitem__(value, WHOLE),
    tuple: lambda value: tuple.__getitem__(value, WHOLE),
    dict: dict.copy,
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset([*frozenset.__iter__(value)]),
    deque: lambda value: deque(deque.__iter__(value)),
    decimal.Decimal: lambda value: decimal.Decimal(decimal.Decimal.as_tuple(value)),
    fractions.Fraction: lambda value: fractions.Fraction(value._numerator, value._denominator),
}


def tuple_of(*items):
    return items


# Immutable types: the arguments that make a value again, and what takes them.
MADE = {
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    tuple: (list, tuple_of),
    frozenset: (list, lambda *items: frozenset(items)),
    decimal.Decimal: (lambda value: [str(value)], decimal.Decimal),
    fractions.Fraction: (lambda value: [value.numerator, value.denominator], fractions.Fraction),
    datetime.date: (lambda value: [value.isoformat()], datetime.date.fromisoformat),
    datetime.time: (lambda value: [value.isoformat()], datetime.time.fromisoformat),
    datetime.datetime: (lambda value: [value.isoformat()], datetime.datetime.fromisoformat),
    datetime.timedelta: (lambda value: [value.days, value.seconds, value.microseconds], datetime.timedelta),
    range: (lambda value: [value.start, value.stop, value.step], range),
    slice: (lambda value: [value.start, value.stop, value.step], slice),
    type(...): (lambda value: [], lambda: ...),
    type({}.keys()): (list, lambda *items: dict.fromkeys(items).keys()),
    type({}.values()): (list, lambda *items: dict(enumerate(items)).values()),
    type({}.items()): (list, lambda *items: dict(items).items()),
}
MAKERS = {kind.__name__: make for kind, (_, make) in MADE.items()}
# The built-in types, before a program or `common_names` changes anything.
TYPES = {name: value for name, value in vars(builtins).items() if type(value) is type}
# Modules of the standard library whose exceptions arrive as themselves.
ERROR_MODULES = frozenset(
    {"asyncio", "binascii", "decimal", "json.decoder", "queue", "re", "statistics", "struct", "zlib"}
)
# Of these, programs may use the public names without an import.
COMMON_MODULES = (
    *("string", "re", "random", "operator", "math", "bisect", "heapq", "itertools", "functools", "collections"),
    "typing",
)
UNARY = ("abs", "neg", "pos", "invert", "len", "int", "float", "complex", "index", "bool", "str", "repr", "hash")
BINARY = (
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor", "divmod"),
)
OPERATIONS = {
    **{name: getattr(builtins, name, None) or getattr(operator, name) for name in UNARY},
    **{name: getattr(operator, f"__{name}__", divmod) for name in (*BINARY, "getitem", "setitem", "delitem")},
    **{f.__name__: f for f in (iter, reversed, next, getattr, setattr, delattr, isinstance, issubclass, round)},
    "call": lambda function, positional, named: function(*positional, **named),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}


class LinkBroken(BaseException):
    """The other side ended or violated the protocol. A BaseException, so that a test cannot catch it as Exception."""


class Side:
    """Frames over a socket. Each side defines `give` and `take` for what is not data."""

    def __init__(self, descriptor):
        self.socket = socket.socket(fileno=descriptor)
        self.file = self.socket.makefile("rb")
        self.broken = False

    def send(self, message):
        data = json.dumps(message).encode()
        if len(data) > FRAME_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too large; at most {FRAME_BYTES} are allowed")
        try:
            self.socket.sendall(len(data).to_bytes(4, "big") + data)
        except OSError:
            self.fail("the other side has ended")

    def receive(self):
        size = self.file.read(4)
        length = int.from_bytes(size, "big")
        if length > FRAME_BYTES:
            self.fail(f"a frame has {length} bytes")
        data = self.file.read(length)
        if len(size) < 4 or len(data) < length:
            self.fail("the other side has ended")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            self.fail("a frame is not JSON")
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            self.fail("a frame is not a message")
        return message

    def give(self, value):
        """The packed form of a value that is not data."""
        raise NotImplementedError

    def keeps(self, kind):
        """Whether an instance of a class stays on this side although the class derives from a built-in one."""
        return False

    def sends_state(self, value) -> bool:
        """Whether an object is sent as its attributes, like a container."""
        return False

    def make(self, class_name):
        """A new object for the attributes that the other side sends of one of its own."""
        raise NotImplementedError

    def restore(self, made, state):
        """Gives an object its attributes."""
        vars(made).clear()
        vars(made).update(state)

    def take(self, kind, data):
        """The object for a packed form that the other side made with `give`."""
        raise NotImplementedError

    def fail(self, problem):
        self.broken = True
        raise LinkBroken(problem)


class Values:
    """The values of a request and of its answer. Both sides number the containers in them alike, in order of sending.

    A packed value is a scalar of JSON or [kind, data], where data of the kind "at" is a container's number. Objects of
    the test's own classes count as containers, of their attributes.
    """

    def __init__(self, link):
        self.link = link
        self.containers = []
        self.numbers = {}

    def write(self, values, received=()):
        """The packed values, the contents of containers that are new, and those of `received` ones that changed."""
        packed, contents = [self.pack(value) for value in values], []
        for container in self.containers:  # which grows meanwhile
            contents.append(self.contents(container))  # noqa: PERF401
        changes = [[n, now] for n, (now, was) in enumerate(zip(contents, received, strict=False)) if now != was]
        return [packed, contents[len(received) :], changes]

    def read(self, packed, contents, changes=()):
        first = len(self.containers)
        for kind, _, detail in contents:
            if kind == "state":
                self.add(self.link.make(detail))
            else:
                self.add(deque(maxlen=detail) if kind == "deque" else CONTAINERS[kind]())
        for number, content in [*enumerate(contents, first), *changes]:
            self.fill(self.containers[number], *content)
        return [self.unpack(value) for value in packed]

    def add(self, container):
        self.numbers[id(container)] = len(self.containers)
        self.containers.append(container)

    def forget(self, count):
        """Forgets the containers beyond the first `count`, after a failed `write`."""
        for container in self.containers[count:]:
            del self.numbers[id(container)]
        del self.containers[count:]

    def pack(self, value):
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -(2**63) < value < 2**63):
            return value
        if CONTAINERS.get(kind.__name__) is kind or id(value) in self.numbers or self.link.sends_state(value):
            if id(value) not in self.numbers:
                self.add(value)
            return ["at", self.numbers[id(value)]]
        if kind in MADE:
            return [kind.__name__, [self.pack(part) for part in MADE[kind][0](value)]]
        if kind is type and TYPES.get(value.__name__) is value:
            return ["type", value.__name__]
        bases = () if kind is type or self.link.keeps(kind) else [base for base in BASES if base in kind.__mro__]
        if bases and bases[0] is tuple and type(fields := getattr(kind, "_fields", None)) is tuple:
            return ["named", [kind.__name__, list(map(str, fields)), [self.pack(item) for item in value]]]
        return self.pack(BASES[bases[0]](value)) if bases else self.link.give(value)

    def contents(self, container):
        kind = type(container)
        if CONTAINERS.get(kind.__name__) is not kind:
            return ["state", [[name, self.pack(value)] for name, value in vars(container).items()], kind.__name__]
        if kind is bytearray:
            items = container.hex()
        elif isinstance(container, dict):
            items = [[self.pack(key), self.pack(item)] for key, item in dict.items(container)]
        else:
            items = [self.pack(item) for item in container]
        return [kind.__name__, items, container.maxlen if kind is deque else None]

    def fill(self, container, kind, items, _):
        if kind == "state":
            self.link.restore(container, {name: self.unpack(value) for name, value in items})
            return
        if type(container) is not CONTAINERS[kind]:
            raise TypeError("a container changed its type")
        container.clear()
        if kind == "bytearray":
            container.extend(bytes.fromhex(items))
        elif isinstance(container, dict):
            for key, item in items:
                container[self.unpack(key)] = self.unpack(item)
        elif kind == "set":
            container.update(map(self.unpack, items))
        else:
            container.extend(map(self.unpack, items))

    def unpack(self, packed):
        if packed is None or isinstance(packed, bool | int | float | str):
            return packed
        kind, data = packed
        if kind == "at":
            return self.containers[data]
        if kind in MAKERS:
            return MAKERS[kind](*map(self.unpack, data))
        if kind == "named":
            name, fields, items = data
            # A field that is no data would be a method of what a test takes for data.
            plain = all(not isinstance(item, list) or item[0] in MAKERS or item[0] == "at" for item in items)
            return (named_tuple(name, tuple(fields)) if plain else tuple_of)(*map(self.unpack, items))
        if kind == "type":
            return TYPES[data]
        return self.link.take(kind, data)


@cache
def named_tuple(name, fields):
    return namedtuple(name, fields)


def builtin_base(kind):
    """The name of the most specific built-in class that a class of exceptions derives from."""
    return next(base.__name__ for base in kind.__mro__ if TYPES.get(base.__name__) is base)


class ListNode:
    """A node of a list, as LeetCode defines it for programs."""

    def __init__(self, val=0, next=None):
        self.val, self.next = val, next


class TreeNode:
    """A node of a binary tree, as LeetCode defines it for programs."""

    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right


NODES = {"ListNode": ListNode, "TreeNode": TreeNode}


def common_names():
    """The names that a program whose functions are called may use without an import, as judges of public sets allow."""
    modules = [__import__(name) for name in COMMON_MODULES]
    public = [(name, vars(module)[name]) for module in modules for name in dir(module) if not name.startswith("_")]
    return dict(public) | {module.__name__: module for module in modules} | NODES


class ProgramSide(Side):
    """Performs operations in the program's process. If the program tampers with it, it can still send only data."""

    def __init__(self, descriptor):
        super().__init__(descriptor)
        self.objects = []
        self.numbers = {}
        self.printed = io.StringIO()
        self.space = {}
        # The names under which the test knows classes of the program.
        self.labels = {}

    def give(self, value):
        kind = type(value)
        fails = isinstance(value, type) and issubclass(value, BaseException)
        if fails and value.__module__ in ERROR_MODULES:
            return ["library", [value.__module__, value.__name__]]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        number = self.numbers[id(value)]
        if fails:
            return ["error", [number, value.__name__, builtin_base(value)]]
        named = value if isinstance(value, type) else kind
        return ["object", [number, self.labels.get(id(named), named.__name__), hasattr(kind, "__next__")]]

    def take(self, kind, data):
        if kind == "own":
            return self.objects[data]
        function = CheckFunction(self, data)
        return function if kind == "function" else iterated(function)

    def keeps(self, kind):
        return self.labels.get(id(kind), "")[:1].isupper()

    def make(self, class_name):
        kind = self.space.get(class_name, NODES.get(class_name))
        return object.__new__(kind if isinstance(kind, type) else type(class_name, (), {}))

    def serve(self):
        while True:
            self.send(self.answer(self.receive()))

    def answer(self, message):
        _, operation, packed, contents, _ = message
        values = Values(self)
        try:
            operands = values.read(packed, contents)
            answer = ["value", *values.write([self.perform(operation, *operands)], contents)]
        except LinkBroken:
            raise
        except BaseException as error:  # noqa: BLE001 - passed to the test
            values.forget(len(contents))
            answer = self.raised(error, values, contents)
        text = self.printed.getvalue()[:PRINTED_CHARACTERS]
        self.printed.seek(0)
        self.printed.truncate()
        return [*answer, text]

    def perform(self, operation, *operands):
        if operation == "names":
            # A snapshot: threads of the program may add names meanwhile.
            variables = dict(self.space)
            members = {name: variables[name] for name in operands[0] if name in variables}
            self.labels.update({id(value): name for name, value in members.items() if isinstance(value, type)})
            return members
        if operation == "plain":
            (value,) = operands
            base = next((base for base in BASES if base in type(value).__mro__), None)
            if base is None:
                raise TypeError("an object of no built-in type")
            return BASES[base](value)
        if operation == "await":
            # Here, because the import takes longer than most programs.
            import asyncio

            async def wait():
                return await operands[0]

            return asyncio.run(wait())
        return OPERATIONS[operation](*operands)

    def raised(self, error, values, contents=()):
        """The message for an exception: its class, its built-in base, its attributes and its arguments."""
        kind = type(error)
        for attributes, arguments in ((vars(error), error.args), ({}, map(shown, error.args)), ({}, ())):
            try:
                return ["raised", *values.write([kind, builtin_base(kind), {**attributes}, *arguments], contents)]
            except Exception:  # noqa: BLE001 - whatever reading an object raises
                values.forget(len(contents))
        raise error

    def call_back(self, number, positional, named):
        values = Values(self)
        self.send(["back", number, *values.write([list(positional), named])])
        while (message := self.receive())[0] == "ask":
            self.send(self.answer(message))
        outcome, *content = message
        result = values.read(*content)
        if outcome == "value":
            return result[0]
        _, base, _, *arguments = result
        raise TYPES[base](*arguments)


class CheckFunction:
    """A function of the test that the program can call."""

    def __init__(self, side, number):
        self.side, self.number = side, number

    def __call__(self, *positional, **named):
        return self.side.call_back(self.number, positional, named)


def iterated(function):
    """An iterator of the test, which the program advances by calling `function`."""
    while True:
        try:
            item = function()
        except StopIteration:
            return
        yield item


def shown(value):
    try:
        return repr(value)[:200]
    except Exception:  # noqa: BLE001 - the object's own code
        return "?"


def main():
    side = ProgramSide(3)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program.py")
    with open(path, encoding="utf-8") as file:
        source = file.read()
    # Not "__main__": what a program does when it is run as a script is not what the tests call.
    program = type(sys)("solution")
    program.__file__ = path
    sys.modules["solution"] = program
    sys.stdout = side.printed
    side.space = program.__dict__
    # Found after the program's own names, and never among them.
    for name, value in common_names().items():
        vars(builtins).setdefault(name, value)
    # An example of use may leave, or read an input that is not there.
    with contextlib.suppress(SystemExit, EOFError):
        exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)
    side.serve()


if __name__ == "__main__":
    main()
