"""The link between a check and the program that it tests, which run in two processes.

    check side      sends operations (call, getattr, add, ...); runs the asserts and decides
    program side    performs them; answers with plain data, or with the number of an object that stays there

Standard library only; both sides run this file without the package. As a script it is the program side: it runs
`program.py` and then serves operations. Frames are JSON, preceded by their length. Both sides share one file because it
is the protocol: each sandbox receives only this text, and one side unpacks every kind of value that the other packs.

Invariant: the program never decides a comparison with a value of the check. Plain data is rebuilt on the check side as
Python's own exact types. A program object that is compared with such a value is unequal to it; the program is asked for
nothing but the value of the object's built-in base (an enum's number, a named tuple's items). `ProgramObject`
guarantees it.

A check can call functions, create and use instances of the program's classes, iterate, catch exceptions, pass functions
and iterators of its own (the program calls them back), and see arguments changed in place and what is printed. It
cannot change the program's own lists and dictionaries through a returned copy, pass instances of its own classes, await
coroutines, or see a global that changes after the program was loaded.
"""

# Unpacked values come from the other process, so their types are unknown here.
# pyright: reportCallIssue=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

import builtins
import io
import json
import operator
import os
import socket
import sys

FRAME_BYTES = 16 * 2**20
PRINTED_CHARACTERS = 2**20
CONTAINERS = (list, dict, set, bytearray)
WHOLE = slice(None)
# Built-in bases, and how to read the value of a subclass instance without calling code of the subclass.
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
}
# Exact types of the standard library that are sent as the arguments that construct them.
MADE = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.datetime": lambda value: [
        *(value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    ],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "builtins.slice": lambda value: [value.start, value.stop, value.step],
}
# Modules that a check may use if the program imported them. The check gets the real modules.
SHARED_MODULES = frozenset(
    {
        "bisect",
        "cmath",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "textwrap",
        "time",
        "typing",
    }
)
OPERATIONS = {
    **{
        name: getattr(operator, name)
        for name in dir(operator)
        if not name.startswith("_") and name not in ("attrgetter", "itemgetter", "methodcaller")
    },
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "format": format,
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "hash": hash,
    "abs": abs,
    "round": round,
    "reversed": reversed,
    "divmod": divmod,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "call": lambda function, positional, named: function(*positional, **named),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}


class LinkBroken(BaseException):
    """The other side ended or violated the protocol. A BaseException, so that a check cannot catch it as Exception."""


class Link:
    """Frames over a socket and their values. Each side defines `give` and `take` for objects that are not data."""

    # Built-in objects are sent by name. A check may send built-in functions, but accepts types only, because it would
    # call a function on its own side.
    by_name = taken_by_name = (type,)

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
        if len(size) < 4:
            self.fail("the other side has ended")
        length = int.from_bytes(size, "big")
        if length > FRAME_BYTES:
            self.fail(f"a frame has {length} bytes")
        data = self.file.read(length)
        if len(data) < length:
            self.fail("the other side has ended")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            self.fail("a frame is not JSON")
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            self.fail("a frame is not a message")
        return message

    def give(self, value):
        """The message for a value that is not data."""
        raise NotImplementedError

    def take(self, kind, data):
        """The object for a message that the other side made with `give`."""
        raise NotImplementedError

    def fail(self, problem):
        self.broken = True
        raise LinkBroken(problem)

    def pack(self, value, seen=None):
        """The message for a value. `seen` maps ids of this call's containers to (number, container)."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -(2**63) < value < 2**63):
            return value
        if kind is ProgramObject:
            return self.give(value)
        if seen is not None and kind in CONTAINERS:
            if id(value) in seen:
                return ["same", seen[id(value)][0]]
            seen[id(value)] = len(seen), value
        if kind is int:
            return ["int", hex(value)]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self.pack(item, seen) for item in value]]
        if kind is dict:
            return ["dict", [[self.pack(key, seen), self.pack(item, seen)] for key, item in value.items()]]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in MADE and getattr(value, "tzinfo", None) is None:
            return ["made", [name, self.pack(MADE[name](value))]]
        if kind in self.by_name and getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        return self.give(value)

    def unpack(self, packed, seen=None):
        """The value of a message. `seen` lists this call's containers by number; None where they are not numbered."""
        if packed is None or isinstance(packed, bool | int | float | str):
            return packed
        kind, data = packed
        if kind == "same" and seen is not None:
            return seen[data]
        if kind == "int":
            return int(data, 16)
        if kind in ("list", "dict", "set", "bytearray"):
            container = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}[kind]()
            if seen is not None:
                # Before its items, which may refer to it.
                seen.append(container)
            if kind == "list":
                container.extend(self.unpack(item, seen) for item in data)
            elif kind == "dict":
                container.update((self.unpack(key, seen), self.unpack(item, seen)) for key, item in data)
            elif kind == "set":
                container.update(self.unpack(item, seen) for item in data)
            else:
                container.extend(bytes.fromhex(data))
            return container
        if kind in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[kind](self.unpack(item, seen) for item in data)
        if kind == "bytes":
            return bytes.fromhex(data)
        if kind == "complex":
            return complex(*data)
        if kind == "constant":
            return {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}[data]
        if kind == "made":
            name, arguments = data
            if name not in MADE:
                raise ValueError(f"{name} is not data")
            module, _, class_name = name.rpartition(".")
            return getattr(__import__(module), class_name)(*self.unpack(arguments))
        if kind == "builtin":
            value = getattr(builtins, data)
            if type(value) not in self.taken_by_name:
                raise ValueError(f"the built-in {data} is not accepted from the program")
            return value
        return self.take(kind, data)

    def raised(self, error):
        """The message for an exception: its class, its built-in bases, and its arguments."""
        kind = type(error)
        return ["raised", self.pack_plain(kind), builtin_bases(kind), [self.pack_plain(part) for part in error.args]]

    def pack_plain(self, value):
        try:
            return self.pack(value)
        except Exception:  # noqa: BLE001 - whatever an object's own code raises
            return repr(value)[:200]


def builtin_bases(kind):
    """Names of a class's built-in bases, the most specific first."""
    return [base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]


# The check side


def remote(operation, position=0):
    """A method that sends an operation to the program. `position` is the index of `self` among the operands."""

    def method(self, *operands):
        operands = list(operands)
        operands.insert(position, self)
        return self._remote_wire.ask(operation, operands)

    return method


def converted(operation, kind):
    """Like `remote`, for methods whose result must have exactly the type `kind`."""
    ask = remote(operation)

    def method(self, *operands):
        result = ask(self, *operands)
        if type(result) is not kind:
            raise TypeError(f"{operation}() of the program returned a {type(result).__name__}")
        return result

    return method


def plain(value):
    """A program object as a value of its built-in base; the object itself if it has none."""
    if isinstance(value, ProgramObject):
        return value._remote_wire.ask("plain", [value])
    return value


def compared(operation, otherwise):
    """A comparison, which the program decides only between two of its own objects."""

    def method(self, other):
        if isinstance(other, ProgramObject):
            result = self._remote_wire.ask(operation, [self, other])
            if type(result) is not bool:
                raise TypeError(f"{operation} of the program returned a {type(result).__name__}")
            return result
        own = plain(self)
        return otherwise if isinstance(own, ProgramObject) else getattr(operator, operation)(own, other)

    return method


class ProgramObject:
    """An object that lives in the program; operations on it are sent there."""

    __slots__ = ("_remote_number", "_remote_wire")

    def __init__(self, wire, number):
        object.__setattr__(self, "_remote_wire", wire)
        object.__setattr__(self, "_remote_number", number)

    def __getattr__(self, name):
        return self._remote_wire.ask("getattr", [self, name])

    def __setattr__(self, name, value):
        self._remote_wire.ask("setattr", [self, name, value])

    def __delattr__(self, name):
        self._remote_wire.ask("delattr", [self, name])

    def __call__(self, *positional, **named):
        return self._remote_wire.ask("call", [self, list(positional), named])

    def __instancecheck__(self, value):
        return isinstance(value, ProgramObject) and self._remote_wire.ask("isinstance", [value, self]) is True

    def __subclasscheck__(self, value):
        return isinstance(value, ProgramObject) and self._remote_wire.ask("issubclass", [value, self]) is True

    def __iter__(self):
        iterator = self._remote_wire.ask("iter", [self])
        return iterator if isinstance(iterator, ProgramObject) else iter(iterator)

    def __contains__(self, value):
        # Iterates, so that the items are compared on this side.
        return any(item is value or item == value for item in self)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        own = plain(self)
        return hash(self._remote_number) if isinstance(own, ProgramObject) else hash(own)

    def __exit__(self, *error):
        self._remote_wire.ask("exit", [self])

    __eq__ = compared("eq", otherwise=False)
    __lt__, __le__ = compared("lt", NotImplemented), compared("le", NotImplemented)
    __gt__, __ge__ = compared("gt", NotImplemented), compared("ge", NotImplemented)
    __next__, __enter__, __reversed__ = remote("next"), remote("enter"), remote("reversed")
    __getitem__, __setitem__, __delitem__ = remote("getitem"), remote("setitem"), remote("delitem")
    __abs__, __round__, __neg__, __pos__, __invert__ = map(remote, ("abs", "round", "neg", "pos", "invert"))
    __divmod__, __rdivmod__ = remote("divmod"), remote("divmod", 1)
    __len__, __int__, __index__ = converted("len", int), converted("int", int), converted("index", int)
    __float__, __complex__, __bool__ = converted("float", float), converted("complex", complex), converted("bool", bool)
    __str__, __repr__, __format__ = converted("str", str), converted("repr", str), converted("format", str)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "xor",
    "and_",
    "or_",
):
    setattr(ProgramObject, f"__{_name.strip('_')}__", remote(_name))
    setattr(ProgramObject, f"__r{_name.strip('_')}__", remote(_name, 1))


class CheckSide(Link):
    """Sends operations, and runs its own functions when the program calls them back."""

    by_name = (type, type(len))

    def __init__(self, descriptor):
        super().__init__(descriptor)
        self.lent = []
        self.errors = {}

    def give(self, value):
        if isinstance(value, ProgramObject):
            return ["own", value._remote_number]
        for number, error in self.errors.items():
            if error is value:
                return ["own", number]
        if hasattr(type(value), "__next__"):
            self.lent.append(value.__next__)
            return ["iterator", len(self.lent) - 1]
        if callable(value):
            self.lent.append(value)
            return ["function", len(self.lent) - 1]
        raise TypeError(f"a test can pass data and functions to a program, not a {type(value).__name__}")

    def take(self, kind, data):
        if kind == "object":
            return ProgramObject(self, int(data))
        if kind == "error":
            number, name, base = data
            if number not in self.errors:
                self.errors[number] = type(str(name), (self.builtin_error(base),), {})
            return self.errors[number]
        raise ValueError(f"unknown kind of value {kind!r}")

    @staticmethod
    def builtin_error(name):
        kind = getattr(builtins, str(name), None)
        return kind if isinstance(kind, type) and issubclass(kind, BaseException) else Exception

    def ask(self, operation, operands):
        """The result of an operation. Raises what the program raises, and applies its changes to the arguments."""
        if self.broken:
            self.fail("the other side has ended")
        seen = {}
        self.send(["ask", operation, [self.pack(operand, seen) for operand in operands]])
        passed = [container for _, container in seen.values()]
        while (message := self.receive())[0] == "back":
            self.send(self.called_back(message))
        try:
            kind, *content, changes, printed = message
            sys.stdout.write(printed)
            for number, packed in changes:
                replace(passed[number], self.unpack(packed, list(passed)))
            if kind == "value":
                return self.unpack(content[0], list(passed))
            error = self.error(*content)
        except Exception as problem:  # noqa: BLE001 - malformed content can raise anything
            self.fail(f"{type(problem).__name__}: {problem}")
        raise error

    def error(self, packed_kind, bases, arguments):
        """The exception that the program raised, of the same class if the check knows that class."""
        kind, arguments = self.unpack(packed_kind), [self.unpack(part) for part in arguments]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = self.builtin_error(bases[0])
        try:
            return kind(*arguments)
        except TypeError:
            return Exception(kind.__name__, *arguments)

    def called_back(self, message):
        try:
            _, number, positional, named = message
            return ["value", self.pack(self.lent[number](*self.unpack(positional), **self.unpack(named)))]
        except Exception as error:  # noqa: BLE001 - passed to the program
            return self.raised(error)

    def names(self):
        """The program's names that the check may use. Built-in names are never replaced."""
        names = {}
        for name, value in self.ask("names", []):
            if type(name) is str and name.isidentifier() and not hasattr(builtins, name) and not name.startswith("__"):
                names[name] = value  # noqa: PERF403 - the condition is clearer as a statement
        for name, module in self.ask("modules", []):
            if type(name) is str and name.isidentifier() and module in SHARED_MODULES:
                names[name] = __import__(module)
        return names


def replace(container, value):
    if type(container) is not type(value):
        raise TypeError("a changed argument is of another type")
    if isinstance(container, list | bytearray):
        container[:] = value
    else:
        container.clear()
        container.update(value)


def passes(descriptor, check):
    """Whether the check runs to its end and the program is still alive then."""
    wire = CheckSide(descriptor)
    try:
        exec(compile(check, "<tests>", "exec"), {"__name__": "__main__", **wire.names()})
        wire.ask("bool", [True])
    except BaseException as error:  # noqa: BLE001 - any exception fails the check
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False
    return not wire.broken


# The program side


class ProgramSide(Link):
    """Performs operations in the program's process. If the program tampers with it, it can still send only data."""

    taken_by_name = (type, type(len))

    def __init__(self, descriptor):
        super().__init__(descriptor)
        self.objects = []
        self.numbers = {}
        self.printed = io.StringIO()

    def number_of(self, value):
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def give(self, value):
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", [self.number_of(value), value.__name__, builtin_bases(value)[0]]]
        return ["object", self.number_of(value)]

    def take(self, kind, data):
        if kind == "own":
            return self.objects[data]
        lent = CheckFunction(self, data)
        return lent if kind == "function" else CheckIterator(lent)

    def serve(self, space):
        while True:
            self.send(self.answer(self.receive(), space))

    def answer(self, message, space):
        _, operation, packed = message
        passed, before = [], []
        try:
            operands = [self.unpack(each, passed) for each in packed]
            before = [self.pack(each) for each in passed]
            value = self.result(operation, operands, space)
            answer = ["value", self.pack(value, self.known(passed))]
        except LinkBroken:
            raise
        except BaseException as error:  # noqa: BLE001 - passed to the check
            answer = self.raised(error)
        changes = []
        for number, (each, was) in enumerate(zip(passed, before, strict=False)):
            if self.pack(each) != was:
                known = self.known(passed)
                # The container itself is sent in full; containers inside it are sent by number.
                known[0] = known.pop(id(each))
                changes.append([number, self.pack(each, known)])
        text = self.printed.getvalue()[:PRINTED_CHARACTERS]
        self.printed.seek(0)
        self.printed.truncate()
        return [*answer, changes, text]

    @staticmethod
    def known(containers):
        return {id(each): (number, each) for number, each in enumerate(containers)}

    def result(self, operation, operands, space):
        # A snapshot: threads of the program may add names meanwhile.
        variables, module = list(space.items()), type(sys)
        if operation == "names":
            return [[name, value] for name, value in variables if type(value) is not module and name[:2] != "__"]
        if operation == "modules":
            return [[name, value.__name__] for name, value in variables if type(value) is module]
        if operation == "plain":
            (value,) = operands
            base = next((base for base in BASES if base in type(value).__mro__), None)
            return value if base is None else BASES[base](value)
        return OPERATIONS[operation](*operands)

    def call_back(self, number, positional, named):
        self.send(["back", number, self.pack(list(positional)), self.pack(named)])
        while (message := self.receive())[0] == "ask":
            self.send(self.answer(message, {}))
        if message[0] == "value":
            return self.unpack(message[1])
        _, _, bases, arguments = message
        raise getattr(builtins, bases[0])(*map(self.unpack, arguments))


class CheckFunction:
    """A function of the check that the program can call."""

    def __init__(self, side, number):
        self.side, self.number = side, number

    def __call__(self, *positional, **named):
        return self.side.call_back(self.number, positional, named)


class CheckIterator:
    """An iterator of the check that the program can advance."""

    def __init__(self, ask):
        self.ask = ask

    def __iter__(self):
        return self

    def __next__(self):
        return self.ask()


def main():
    side = ProgramSide(3)
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "program.py")
    with open(path, encoding="utf-8") as file:
        source = file.read()
    program = type(sys)("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    sys.stdout = side.printed
    exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)
    side.serve(program.__dict__)


if __name__ == "__main__":
    main()
