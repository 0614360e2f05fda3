"""What tests written as Python text can do with a program that runs in another process."""

import pytest

from megasync.coding import sandbox
from megasync.coding.checks import check_of
from megasync.coding.sandbox import run_check
from megasync.sandboxes import Limits

PROGRAM = """
import collections, enum, fractions, math
from dataclasses import dataclass
from typing import NamedTuple

LIMIT = 10

class Color(enum.IntEnum):
    RED = 1

class Kind(str, enum.Enum):
    GOOD = "good"

class Pair(NamedTuple):
    a: int
    b: int
    def total(self): return self.a + self.b

class Cache(collections.OrderedDict):
    def __init__(self, size): self.size = size
    def get(self, key): return self[key] if key in self else -1
    def put(self, key, value): self[key] = value

def cache(): return Cache(2)
def red(): return Color.RED
def pair(): return Pair(1, 2)

@dataclass
class Point:
    x: int
    y: int = 0
    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)
    def __lt__(self, other):
        return self.x < other.x

class Stack:
    made = 0
    def __init__(self, items=()):
        self.items = list(items)
        Stack.made += 1
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty("nothing left")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __getitem__(self, at):
        return self.items[at]
    def __iter__(self):
        return iter(self.items)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.items.clear()
    @classmethod
    def of(cls, *items):
        return cls(items)
    @property
    def top(self):
        return self.items[-1]

class Empty(Exception):
    pass

def square(x): return x * x
def same(x): return x
def halves(n):
    while n:
        yield n
        n //= 2
def sort_in_place(items): items.sort()
def put(table, key, value):
    table.setdefault(key, []).append(value)
    return table
def apply(function, *items, **named): return [function(item, **named) for item in items]
def total(items): return sum(items)
def adder(n): return lambda x: x + n
def shout(text): print(text.upper())
def fail(kind): raise kind("no")
def make(): return Stack([1, 2])
def nodes(): return _Node(1, _Node(2, None))
def counted(function):
    def call(*items):
        call.count += 1
        return function(*items)
    call.count = 0
    return call
async def later(x): return x + 1
def value_of(cell): return cell.value
def mark(cell): cell.next.value = "marked"
def reverse(node: Optional[ListNode]) -> Optional[ListNode]:
    before = None
    while node: node.next, before, node = before, node, node.next
    return before

class _Node:
    def __init__(self, value, after):
        self.value, self.after = value, after
    def double(self): return 2 * self.value
    def plus(self, x): return self.value + x

class _Queue(Stack):
    def pop(self): return self.items.pop(0)

Queue = _Queue

class Broke(Exception):
    def __init__(self, missing):
        super().__init__(f"{missing} missing")
        self.missing = missing

def buy(price): raise Broke(price)
"""


@pytest.mark.every(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    "check",
    [
        "assert square(3) == 9 and LIMIT == 10",
        "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(1.5) == 2.25\ncheck(square)",
        # Data of every kind comes back as what it was.
        (
            "import datetime, decimal, fractions, collections\n"
            "for value in (None, True, 10**100, -(2**63), 1.5, float('inf'), 2j, 'é\\ud800', b'x', bytearray(b'y'), ..., int,\n"
            "    [1, (2, {3: {4}})], frozenset('ab'), range(3), decimal.Decimal('1.10'), fractions.Fraction(1, 3),\n"
            "    datetime.datetime(2020, 1, 2, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), collections.deque([1], 2),\n"
            "    collections.Counter('aab'), collections.OrderedDict(a=1)):\n"
            "    assert same(value) == value and type(same(value)) is type(value), value\n"
            "assert same(float('nan')) != same(float('nan'))"
        ),
        # Objects stay over there.
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.top == 2 and s[0] == 1 and s.pop() == 2 and list(s) == [1]",
        "assert Stack.of(1, 2).items == [1, 2] and isinstance(make(), Stack) and not isinstance(3, Stack) and 2 in make()",
        "s = Stack()\ns.items = [4]\nassert s.pop() == 4 and Stack.made == 1 and s[-1:] == [] and bool(s) is False",
        "assert Point(1, 2) + Point(3, 4) == Point(4, 6) and Point(1) < Point(2) and Point(1) != Point(2)",
        "assert sorted([Point(2), Point(1)])[0].x == 1 and str(Point(1, 2)) == 'Point(x=1, y=2)'",
        "with Stack([1]) as s:\n    assert len(s) == 1\nassert len(s) == 0",
        # What has a built-in base is compared by it.
        "assert same(Color.RED) == 1 and Color.RED < 2 and Kind.GOOD == 'good' and Pair(1, 2) == (1, 2) and Pair(1, 2).b == 2",
        "assert list(halves(5)) == [5, 2, 1] and next(halves(3)) == 3 and sum(halves(4)) == 7",
        "assert [a for a in zip(halves(2), 'ab')] == [(2, 'a'), (1, 'b')]",
        # Arguments changed in place.
        "a = [3, 1, 2]\nb = a\nassert sort_in_place(a) is None and b == [1, 2, 3]",
        "d = {}\nassert put(d, 'k', 1) is d and d == {'k': [1]}\nput(d, 'k', 2)\nassert d['k'] == [1, 2]",
        "inner = [2, 1]\nouter = [inner, inner]\nsort_in_place(outer[0])\nassert outer == [[1, 2], [1, 2]]",
        "a = [[1]]\nassert same(a) is a and same(a)[0] is a[0]",
        # Functions and iterators of the test.
        "assert apply(lambda x: x + 1, 1, 2) == [2, 3] and apply(str, 1) == ['1'] and apply(int, 'ff', base=16) == [255]",
        "seen = []\napply(seen.append, 1, 2)\nassert seen == [1, 2]",
        "assert apply(lambda x: square(x) + 1, 2, 3) == [5, 10]",
        "assert total(x for x in range(4)) == 6 and total(iter([1, 2])) == 3",
        "assert adder(2)(3) == 5 and apply(adder(1), 1) == [2]",
        # Exceptions, of Python and of the program.
        (
            "for kind in (ValueError, KeyError, ZeroDivisionError):\n"
            "    try:\n        fail(kind)\n    except kind as error:\n        assert error.args == ('no',)\n"
            "    else:\n        assert False"
        ),
        "try:\n    Stack().pop()\nexcept Empty as error:\n    assert str(error) == 'nothing left'\nelse:\n    assert False",
        (
            "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    shout('hi')\n"
            "assert out.getvalue() == 'HI\\n'"
        ),
        "assert math.isclose(square(0.1), 0.01)",
        # A class that the test knows by another name, and objects of one that it does not name.
        "q = Queue([1, 2])\nassert q.pop() == 1 and len(q) == 1 and isinstance(q, Queue) and isinstance(q, Stack)",
        "c = Cache(2)\nc.put(1, 5)\nassert c.get(1) == 5 and c.get(2) == -1 and c == {1: 5} and {1: 5} == c and len(c) == 1 and 1 in c",
        "assert Color.RED.name == 'RED' and Pair(1, 2).total() == 3 and Pair(1, 2) in [(1, 2)] and same(Pair(1, 2)).a == 1",
        "assert cache() == {} and type(cache()) is dict and red() == 1 and type(red()) is int and pair().b == 2",
        "n = nodes()\nassert n.value == 1 and n.after.value == 2 and n.after.after is None and n.double() == 2 and n == n",
        "f = counted(lambda x: x)\nassert [f(1), f(2)] == [1, 2] and f.count == 2",
        "def fill(items): items.append(len(items))\na = []\napply(fill, a, a)\nassert a == [0, 1]",
        "try:\n    assert square(3) == 8\nexcept AssertionError:\n    assert square(3) == 9",
        # Objects of the test's own classes, and those that judges define.
        (
            "class Cell:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
            "a = Cell(1, Cell(2))\na.next.next = a\nassert same(a) is a and same([a.next])[0].next is a\n"
            "assert value_of(a) == 1 and mark(a) is None and a.next.value == 'marked' and a.next.next is a"
        ),
        "l = ListNode(1, ListNode(2))\nassert reverse(l).val == 2 and l.next is None and reverse(None) is None",
        "import asyncio\nasync def test_later():\n    assert await later(1) == 2",
        "try:\n    buy(3)\nexcept Broke as error:\n    assert error.missing == 3 and str(error) == '3 missing'\nelse:\n    assert False",
        "import json, pytest\ndef test_it():\n    with pytest.raises(KeyError):\n        {}[same(1)]\n    assert json.dumps(same({'a': (1,)})) == '{\"a\": [1]}'",
        (
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(square(2), 4)\n"
            "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()"
        ),
    ],
)
async def test_an_operation_that_checks_can_use_on_a_program(check):
    assert await run_check(PROGRAM, check_of(check), Limits(cpu_seconds=30, wall_seconds=60))


@pytest.mark.every(3)
@pytest.mark.processes
@pytest.mark.parametrize(
    "check",
    [
        "assert square(3) == 8",
        "assert square(3) != 9",
        "assert nothing_like_this() is None",
        "assert square(3) == 9\nraise SystemExit(1)",
        "for _ in halves(0):\n    assert square(3) == 9",
        "try:\n    assert square(3) == 8\nexcept AssertionError:\n    pass",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(square(2), 5)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        nothing_like_this()\nassert square(2) == 4",
        "def test_it():\n    assert square(2) == 5",
        "class TestIt:\n    def test_it(self):\n        assert square(2) == 5",
        "import pytest\ndef test_it():\n    with pytest.raises(ValueError):\n        square(2)",
        "import pytest\n@pytest.mark.parametrize('x', [3, 4])\ndef test_it(x):\n    assert square(x) == 9",
        "nodes().plus(1) == 2",
        "fail(SystemExit)",
        "assert Point(1) == 1",
        "assert make() == [1, 2]",
        "c = Cache(2)\nassert c == {1: 5}",
        "assert Pair(1, 2) + (3,) == (1, 2, 3)",
        "assert not (same(Color.RED) == 1)",
    ],
)
async def test_a_check_that_does_not_pass_is_a_failure(check):
    assert not await run_check(PROGRAM, check_of(check), Limits(cpu_seconds=30, wall_seconds=60))


@pytest.mark.processes
async def test_a_test_that_computes_with_an_object_is_reported_once(caplog, monkeypatch):
    monkeypatch.setattr(sandbox, "_warned", False)
    for _ in range(2):
        assert not await run_check(PROGRAM, check_of("assert Point(1) * 2 == Point(2)"), Limits(wall_seconds=60))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "'ProgramObject' and 'int'" in record.getMessage()
