"""Programs that try to get a reward without solving the task, or to do harm, score 0 and leave nothing behind.

They run with the strongest isolation that works on this machine; those that depend on it run with every kind.
"""

import asyncio
import tempfile

import pytest
from processes import gone
from sandboxes import of_sandboxes

from megasync.coding import sandbox
from megasync.coding.checks import check_of
from megasync.coding.reward import CodeReward
from megasync.coding.sandbox import run_check
from megasync.sandboxes import Limits, local

pytestmark = pytest.mark.processes

SQUARE = "assert solve(2) == 4\nassert solve(3) == 9"
CLOSE = "assert abs(solve(2) - 4) < 1e-9"
NEEDLE = "assert solve(2) == 'needle 0badcafe'"
PRINTS = [{"input": "2\n", "output": "4\n"}]
# Says "passed" in every way that a program can think of.
EQUALS_EVERYTHING = """
class Yes:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __abs__ = __sub__ = __rsub__ = __call__ = __iter__ = __getitem__ = lambda self, *others: self
    __bool__ = lambda self: True
    __hash__ = lambda self: hash(4)
    __getattr__ = lambda self, name: self
"""
# Everything that this process can get at of the machinery around it.
MACHINERY = """
import gc, json, os, socket, sys
def sides():
    return [o for o in gc.get_objects() if type(o).__name__ == "ProgramSide"]
"""

PORTABLE = {
    "reads its own file": ("import sys\nprint(open(sys.argv[0]).read())\nprint(open(__file__).read())", SQUARE),
    "leaves with status 0": ("import os\nos._exit(0)", SQUARE),
    "leaves with the status of success": ("import os\nos._exit(42)", SQUARE),
    "leaves in the function": ("import os\ndef solve(x): os._exit(42)", SQUARE),
    "raises SystemExit(0)": ("raise SystemExit(0)", SQUARE),
    "raises SystemExit(0) in the function": ("def solve(x): raise SystemExit(0)", SQUARE),
    "patches the ways out": (
        (
            "import builtins, os, sys\nsys.exit = os._exit = builtins.exit = builtins.quit = lambda *a: None\n"
            "builtins.AssertionError = builtins.Exception\nsys.excepthook = lambda *a: None\ndef solve(x): return 1"
        ),
        SQUARE,
    ),
    "patches comparison": (
        (
            "import builtins, operator, json\noperator.eq = builtins.isinstance = lambda *a: True\n"
            "json.dumps = lambda *a, **k: 'true'\ndef solve(x): return 1"
        ),
        SQUARE,
    ),
    "replaces what a test uses": (
        "def abs(x): return 0\ndef isinstance(*a): return True\ndef solve(x): return 5",
        CLOSE,
    ),
    "an object that equals everything": (EQUALS_EVERYTHING + "solve = lambda x: Yes()", SQUARE),
    "an object that is smaller than everything": (EQUALS_EVERYTHING + "solve = lambda x: Yes()", CLOSE),
    "an object that contains everything": (EQUALS_EVERYTHING + "solve = lambda x: Yes()", "assert 4 in solve(2)"),
    "equals everything inside data": (EQUALS_EVERYTHING + "solve = lambda x: [Yes()]", "assert solve(2) == [4]"),
    "a number that equals everything": (
        "class N(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\nsolve = lambda x: N(7)",
        SQUARE,
    ),
    "a class for a function": (EQUALS_EVERYTHING + "solve = Yes", SQUARE),
    "prints the marker": (
        "print('passed', True, 0, 42)\nimport os\nos.write(1, b'42')\ndef solve(x): return 1",
        SQUARE,
    ),
    "prints a result": (
        (
            'import os\nfor n in range(1, 64):\n    try: os.write(n, b\'{"code": 42, "stdout": "4", "stderr": ""}\')\n'
            "    except OSError: pass\nos._exit(0)"
        ),
        SQUARE,
    ),
    "prints a result for another": (
        (
            'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'{"code": 0, "stdout": "4", "stderr": ""}\')\n'
            "    except OSError: pass"
        ),
        PRINTS,
    ),
    "answers what nobody asked": (
        MACHINERY + "def solve(x):\n"
        "    for p in sides():\n"
        "        for _ in range(100): p.send(['value', [True], [], [], ''])\n"
        "    os._exit(0)",
        SQUARE,
    ),
    "sends a frame without an end": (
        MACHINERY + "def solve(x):\n    for p in sides(): p.socket.sendall(b'\\xff' * 9)\n    return 4",
        SQUARE,
    ),
    "sends no JSON": (
        MACHINERY + "def solve(x):\n    for p in sides(): p.socket.sendall(b'\\0\\0\\0\\4evil')\n    return 4",
        SQUARE,
    ),
    "sends deep JSON": (
        MACHINERY + "def solve(x):\n"
        "    for p in sides():\n"
        "        data = b'[' * 200000\n"
        "        p.socket.sendall(len(data).to_bytes(4, 'big') + data)\n"
        "    return 4",
        SQUARE,
    ),
    "asks for functions of the other side": (
        MACHINERY + "def solve(x):\n"
        "    for p in sides():\n"
        "        p.send(['value', [['type', 'exit']], [], [], ''])\n"
        "        p.send(['back', 0, [['at', 0], ['at', 1]], [['list', [], None], ['dict', [], None]], []])\n"
        "    return 4",
        SQUARE,
    ),
    "has the other side run a built-in function": (
        MACHINERY + "for p in sides(): type(p).give = lambda self, value: ['type', 'eval']\n"
        "def decode(text): pass\n"
        "def encode(text): return '__import__(\"os\")._exit(42)'",
        "assert decode(encode('text')) == 'text'",
    ),
    "changes what was not sent": (
        MACHINERY + "def solve(x):\n"
        "    for p in sides(): p.send(['value', [['at', 0]], [['list', [4], None]], [[0, ['list', [], None]]], ''])",
        "assert solve(2) == [4]",
    ),
    "names itself a module of the other side": (
        MACHINERY + "import types\nm = types.ModuleType('os')\nos = m\ndef solve(x): return 1",
        "assert os.path.exists('/') and solve(2) == 4",
    ),
    "swallows the test's own assert": (
        "def solve(check):\n    try: check(1)\n    except BaseException: pass\n    return 5",
        "def check(x):\n    assert x == 4\nassert solve(check) is None",
    ),
    "empties the argument that the test reads again": (
        "def solve(values): values[:] = [1]; return [1]",
        "values = [3, 1, 2]\nassert solve(values) == [1, 2, 3]",
    ),
    "ends the iteration of the test": (
        "def solve(x): raise StopIteration",
        "assert all(a == b for a, b in zip(map(solve, [2, 3]), [4, 9]))",
    ),
    "defines the functions of the test": (
        "def check(candidate): pass\ndef run_tests(*a): return True\nrun = run_tests\ndef solve(x): return 5",
        "def check(candidate):\n    assert candidate(2) == 4\ndef run_tests():\n    check(solve)\nrun_tests()",
    ),
    "skips the test": (
        "import unittest\ndef solve(x): raise unittest.SkipTest('no')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(solve(2), 4)",
    ),
    "patches unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef solve(x): return 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(solve(2), 4)",
    ),
    "raises in a pytest function": (
        "class Failed(BaseException): pass\ndef solve(x): raise Failed",
        "import pytest\ndef test():\n    with pytest.raises(ValueError):\n        solve(2)",
    ),
    "a loop over nothing": ("def solve(x): return []", "for a, b in zip(solve(3), [1, 4, 9]):\n    assert a == b"),
    "fails an assertion that the test swallows": (
        "def solve(x): return 5",
        "try:\n    assert solve(2) == 4\nexcept AssertionError:\n    print('failed')",
    ),
    "an answer after the end": (
        "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), os._exit(42))).start()\n"
        "def solve(x): return 5",
        SQUARE,
    ),
    "a child that answers": ("import os\nif os.fork(): os._exit(42)\ndef solve(x): return 5", SQUARE),
    "an answer at exit": ("import atexit, os\natexit.register(os._exit, 42)\ndef solve(x): return 5", SQUARE),
    "recurses without an end": ("def solve(x): return solve(x)", SQUARE),
    "a list that contains itself": ("def solve(x):\n    a = []\n    a.append(a)\n    return a", SQUARE),
    "no number": ("def solve(x): return float('nan')", CLOSE),
    "a helper of the test": (
        "def isclose(*a, **k): return True\nclass Counter(dict): __eq__ = lambda *a: True\ndef solve(x): return 5",
        "assert isclose(solve(2), 4) and Counter(str(solve(2))) == Counter('4')",
    ),
    "a named tuple with a method": (
        "from collections import namedtuple\nsolve = lambda x: namedtuple('T', 'startswith')(lambda text: True)",
        "assert solve('abc').startswith('ab')",
    ),
    "replaces a method of the test's object": (
        "def solve(p): p.same = lambda other: True",
        "class P:\n    x = 1\n    def same(self, other): return self.x == other\np = P()\nsolve(p)\nassert p.same(4)",
    ),
    "a number of a subclass that is near everything": (
        "from decimal import Decimal\nclass D(Decimal): __sub__ = lambda self, other: 0\nsolve = lambda x: D(7)",
        CLOSE,
    ),
    "an object that has everything in it": (
        "class Stack:\n    push = lambda self, x: None\n    __contains__ = lambda self, x: True\n    __iter__ = lambda self: iter(())",
        "s = Stack()\ns.push(1)\nassert 1 in s",
    ),
    "writes the reward": (
        "import os\nfor f in ('/logs/verifier', '/tmp', '.'):\n    try: os.makedirs(f, exist_ok=True); open(f + '/reward.txt', 'w').write('1.0')\n"
        "    except OSError: pass\nopen('conftest.py', 'w').write('import os; os._exit(0)')\ndef solve(x): return 5",
        SQUARE,
    ),
    "prints what a caller expects": ("print('4')\nimport sys\nsys.exit(1)", PRINTS),
    "prints every number": ("print('1 2 3 4')", PRINTS),
    "prints no number": ("print('nan')", [{"input": "2", "output": "4.0"}]),
    "a function that returns everything": (
        EQUALS_EVERYTHING + "solve = lambda x: Yes()",
        '{"fn_name": "solve", "inputs": [[2]], "outputs": [[4]]}',
    ),
    "a dictionary of everything": (
        EQUALS_EVERYTHING + "solve = lambda x: {'a': Yes()}",
        '{"fn_name": "solve", "inputs": [[2]], "outputs": [[{"a": 4.0}]]}',
    ),
    "looks for the test in its own process": (
        (
            "import gc, re, sys\n"
            "def solve(x):\n"
            "    texts = [repr(o) for o in gc.get_objects()]\n"
            "    f = sys._getframe()\n"
            "    while f:\n"
            "        texts += [repr(v) for v in [*f.f_locals.values(), *f.f_globals.values(), *f.f_code.co_consts]]\n"
            "        f = f.f_back\n"
            "    for name in ('maps', 'environ', 'cmdline'): texts.append(open('/proc/self/' + name).read())\n"
            "    return (re.findall('needle [0-9a-f]{8}', ' '.join(texts)) or [0])[0]"
        ),
        NEEDLE,
    ),
    "sleeps for ever": ("import time\ntime.sleep(600)", SQUARE),
    "sleeps in the function": ("import time\ndef solve(x): time.sleep(600)", SQUARE),
    "computes for ever": ("def solve(x):\n    while True: pass", SQUARE),
    "ignores signals": (
        (
            "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
            "time.sleep(600)"
        ),
        SQUARE,
    ),
    "an iterator without an end": ("def solve(x):\n    while True: yield 4", "assert list(solve(2)) == [4]"),
    "prints without an end": ("while True: print('x' * 10000)", PRINTS),
    "fills its memory": ("kept = [bytearray(10**7) for _ in range(1000)]\nprint(4)", PRINTS),
    "answers with too much": ("def solve(x): return 'x' * 10**8", SQUARE),
    "leaves children": (
        (
            "import os, time\n"
            "for _ in range(8):\n"
            "    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n"
            "os._exit(0)"
        ),
        SQUARE,
    ),
    "makes 1,500 nested folders": (
        "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nprint(5)",
        PRINTS,
    ),
    "makes 20,000 files": ("for i in range(20000):\n    open(str(i), 'w').close()\nprint(5)", PRINTS),
    "makes files nobody may remove": (
        "import os\nos.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a', 0)\nos.chmod('.', 0)",
        PRINTS,
    ),
    "removes its own files": ("import shutil\nshutil.rmtree('..', ignore_errors=True)\nprint(5)", PRINTS),
}
# The names of what is not there for the program: another process's memory, files, network.
ISOLATED = {
    "reads the memory of other processes": (
        (
            "import os, re\n"
            "def solve(x):\n"
            "    for pid in [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:\n"
            "        found = []\n"
            "        for name in ('environ', 'cmdline', 'fd/0', 'fd/1', 'fd/3', 'fd/4'):\n"
            "            try: found.append(open(f'/proc/{pid}/{name}', 'rb').read(10**6))\n"
            "            except (OSError, ValueError): pass\n"
            "        try:\n"
            "            memory = open(f'/proc/{pid}/mem', 'rb')\n"
            "            for a, b in re.findall('^([0-9a-f]+)-([0-9a-f]+) rw', open(f'/proc/{pid}/maps').read(), re.M):\n"
            "                memory.seek(int(a, 16))\n"
            "                found.append(memory.read(min(int(b, 16) - int(a, 16), 10**7)))\n"
            "        except (OSError, ValueError, OverflowError): pass\n"
            "        for text in re.findall(b'needle [0-9a-f]{8}', b' '.join(found)): return text.decode()"
        ),
        NEEDLE,
    ),
    "reads the data set": (
        "def solve(x): return open('{dataset}').read()",
        NEEDLE,
    ),
    "finds the data set": (
        (
            "import os\nfor top, _, names in os.walk('/'):\n    for name in names:\n"
            "        if name == 'tests.jsonl': print(4); raise SystemExit"
        ),
        PRINTS,
    ),
    "opens a socket": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint(4)",
        PRINTS,
    ),
    "kills who judges": (
        (
            "import os\nfor pid in range(2, 200000):\n"
            "    try:\n        if pid not in (os.getpid(), os.getppid()): os.kill(pid, 9); print(4)\n"
            "    except OSError: pass"
        ),
        PRINTS,
    ),
    "kills the first process": ("import os\nos.kill(1, 9)\nos.kill(os.getppid(), 9)\nos._exit(42)", SQUARE),
    "fills the disk": (
        "for i in range(100):\n    open(str(i), 'wb').write(b'x' * 10**7)\nprint(4)",
        PRINTS,
    ),
    "writes outside of its folder": ("open('/usr/lib/x', 'w')\nprint(4)", PRINTS),
    "mounts": (
        (
            "import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\n"
            "if l.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0 or l.umount2(b'/usr/lib', 2) == 0: print(4)\n"
            "if l.mount(None, b'/usr/lib', None, 32 | 4096, None) == 0: print(4)"
        ),
        PRINTS,
    ),
}
# Needs a limit that counts by user id.
FORKS = {
    "forks without an end": (
        "import os, time\nmade = 0\nwhile made < 1000:\n    if os.fork() == 0: time.sleep(600)\n    made += 1\nprint(4)",
        PRINTS,
    ),
}


# The kinds of isolation that work on this machine.
STRONGEST, *WEAKER = KINDS = [kind for kind in local._kinds() if not local.probe(kind)]
# Programs whose effect depends on the kind of isolation: what they leave behind, and what they find around them.
KIND_DEPENDENT = (
    *("leaves children", "makes 1,500 nested folders", "makes 20,000 files", "makes files nobody may remove"),
    *("removes its own files", "prints a result", "ignores signals", "looks for the test in its own process"),
)
CASES = [(STRONGEST, name, *case) for name, case in PORTABLE.items()]
CASES += [(kind, name, *PORTABLE[name]) for kind in WEAKER for name in KIND_DEPENDENT]
CASES += [(kind, name, *case) for kind in KINDS if kind.namespaces for name, case in ISOLATED.items()]
CASES += [(kind, name, *case) for kind in KINDS if kind.own_user for name, case in FORKS.items()]


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("kind", "name", "program", "tests"),
    [pytest.param(*case, id=f"{case[1]}, {case[0].namespaces or 'no'} namespaces") for case in CASES],
)
async def test_a_program_that_does_not_solve_the_task_scores_zero(monkeypatch, tmp_path, kind, name, program, tests):
    monkeypatch.setattr(sandbox, "isolation", lambda: kind)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "sandboxes"))
    (tmp_path / "sandboxes").mkdir()
    dataset = tmp_path / "tests.jsonl"
    dataset.write_text("needle 0badcafe")
    served = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with served:
        port = served.sockets[0].getsockname()[1]
        program = program.replace("{dataset}", str(dataset)).replace("{port}", str(port))
        never_ends = any(word in name for word in ("for ever", "without an end", "sleeps", "signals"))
        reward = CodeReward(cpu_seconds=20, wall_seconds=1.5 if never_ends else 600, memory_mb=256)
        assert await reward([f"```python\n{program}\n```"], tests=[tests]) == [0.0]
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert gone(lambda: of_sandboxes(tmp_path))


# Says yes to whatever is done with it, and answers every question with what it was told.
AGREES = """
class Liar(*{bases}):
    def __getattr__(self, name): return self if name == "self" else lambda *told: told[0] if told else True
    def __call__(self, *told): return told[0] if told else self
    __sub__ = __rsub__ = __mod__ = __rmod__ = __xor__ = __rxor__ = __abs__ = __int__ = __index__ = lambda self, *o: 0
    __float__ = lambda self: 0.0
    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = __round__ = lambda self, *o: o[0]
    __truediv__ = __rtruediv__ = __floordiv__ = __pow__ = lambda self, *o: 1
    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *o: True
    __ne__ = lambda *o: False
    __hash__ = lambda self: 4
    __len__ = lambda self: 1
    __iter__ = lambda self: iter(())
    __getitem__ = lambda self, key: key
    startswith = endswith = issubset = issuperset = isdisjoint = lambda self, *o: True
    union = intersection = difference = symmetric_difference = lambda self, *o: o[0]
"""
LIARS = {
    "an object": AGREES.format(bases="(object,)") + "f = g = lambda *a, **k: Liar()",
    "an iterator": AGREES.format(bases="(object,)")
    + "    __next__ = lambda self: next(iter(()))\nf = g = lambda *a, **k: Liar()",
    "a class": AGREES.format(bases="(object,)").replace("Liar", "f") + "g = f",
    "text": AGREES.format(bases="(str,)") + "f = g = lambda *a, **k: Liar('no')",
    "a list": AGREES.format(bases="(list,)") + "f = g = lambda *a, **k: Liar('no')",
    "a number": AGREES.format(bases="(int,)").replace("__index__ = ", "") + "f = g = lambda *a, **k: Liar(77)",
    "a dictionary": AGREES.format(bases="(dict,)") + "f = g = lambda *a, **k: Liar(no=1)",
    "a function": AGREES.format(bases="(object,)") + "f = g = lambda *a, **k: lambda *told: told[0] if told else True",
    "an error": "class E(Exception):\n    __eq__ = lambda *a: True\nf = g = lambda *a, **k: E()",
}
# Each is false for what the liars return.
IDIOMS = """
f(2) == 4; 4 == f(2); not f(2) != 4; f(2) is 4; f(2) in [4, 5]; 4 in f(2); f(2) in {4: 1}; {f(2)} == {4}
abs(f(2) - 4) < 1e-6; abs(4 - f(2)) < 1e-6; abs(f(2) / 4 - 1) < 1e-3; round(f(2), 2) == 4; f(2) * 4 == 16; f(2) % 5 == 4
f(2) < 5 and f(2) > 3; 3 < f(2) < 5; min(f(2), 4) == max(f(2), 4); divmod(f(2), 4) == (1, 0); f(2) - 4 == 0
not (f(2) ^ {1, 2}); f(2) & {1, 2} == {1, 2}; f(2) | {1} == {1}; f(2) + [1] == [1]; f(2) >= {1, 2}; {1, 2} <= f(2)
math.isclose(f(2), 4); math.fsum([f(2), -4]) == 0; float(f(2)) == 4; int(f(2)) == 4; complex(f(2)) == 4; str(f(2)) == '4'
sum((a - b) ** 2 for a, b in zip([f(1)], [4])) < 1e-6; max(abs(a - b) for a, b in [(f(1), 1.0), (f(2), 4.0)]) < 1e-9
all(a == b for a, b in zip([f(1), f(2)], [1, 4])); [f(2)] == [4]; (f(2),) == (4,); {'a': f(2)} == {'a': 4}; sorted([f(2), 4]) == [4, 4]
f('abc').startswith('ab'); f('abc').endswith('bc'); f(2).issubset({1, 2}); f(2).issuperset({4}); f(2).isdisjoint({5})
f(2).union({4}) == {4}; f(2).intersection({4}) == {4}; f(2).equals(4); f(2).__eq__(4) is True; f(2).get('a') == 4
f(2)['key'] == 'key'; f(2)[4] == 4; f(2)(4) == 4; f(2).self == 4; isinstance(f(2), float); type(f(2)) is float
list(f(2)) == [1, 4, 9]; set(f(2)) == {1, 4}; tuple(f(2)) == (1, 4); dict(f(2)) == {1: 4}; len(f(2)) == 9; bool(f(2)) is False
Decimal(f(2)) == 4; Fraction(f(2)) == 4; Counter(f(2)) == Counter([4]); np.allclose(f(2), 4); f(2) == pytest.approx(4)
"""


@pytest.mark.every(3)
@pytest.mark.parametrize("liar", LIARS)
async def test_no_idiom_of_a_test_passes_with(liar):
    """One test tries all idioms: it passes if each of them is false or raises."""
    idioms = [part.strip() for line in IDIOMS.splitlines() for part in line.split(";") if part.strip()]
    sure = "f(2)(4) == 4" if liar == "a function" else ""
    text = (
        "import math, pytest, numpy as np\nfrom collections import Counter\nfrom decimal import Decimal\n"
        f"from fractions import Fraction\ndef passes(idiom):\n    try:\n        return bool(eval(idiom))\n"
        f"    except Exception:\n        return False\nfor idiom in {[i for i in idioms if i != sure]!r}:\n"
        "    assert not passes(idiom), idiom\nassert callable(f)"
    )
    assert await run_check(LIARS[liar], check_of(text), Limits(cpu_seconds=30, wall_seconds=60))


# What solves the tests above that ask for more than the square of a number.
SOLVED = {
    "an object that contains everything": "solve = lambda x: [4]",
    "equals everything inside data": "solve = lambda x: [4]",
    "changes what was not sent": "solve = lambda x: [4]",
    "an iterator without an end": "solve = lambda x: [4]",
    "has the other side run a built-in function": "encode = decode = lambda text: text",
    "swallows the test's own assert": "def solve(check): check(4)",
    "looks for the test in its own process": "solve = lambda x: 'needle 0badcafe'",
    "empties the argument that the test reads again": "solve = sorted",
    "raises in a pytest function": "def solve(x): raise ValueError",
    "a named tuple with a method": "solve = lambda text: text",
    "replaces a method of the test's object": "def solve(p): p.x = 4",
    "an object that has everything in it": "class Stack(list): push = list.append",
    "a dictionary of everything": "solve = lambda x: {'a': 4.0}",
    "a loop over nothing": "solve = lambda x: [1, 4, 9]",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name, (_, tests) in PORTABLE.items() if tests not in (SQUARE, PRINTS)])
async def test_the_test_that_a_program_cannot_fool_can_be_passed(name):
    program = SOLVED.get(name, "import sys\ndef solve(x): return x * x\nprint(float(sys.stdin.read() or 2) ** 2)")
    reward = CodeReward(cpu_seconds=20, wall_seconds=60)
    assert await reward([f"```python\n{program}\n```"], tests=[PORTABLE[name][1]]) == [1.0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_a_program_that_solves_the_task_scores_one(monkeypatch, kind):
    monkeypatch.setattr(sandbox, "isolation", lambda: kind)
    reward = CodeReward(wall_seconds=60, cpu_seconds=30)
    completion = "```python\ndef solve(x): return x * x\nif __name__ == '__main__': import sys; print(solve(int(sys.stdin.read() or 0)))\n```"
    assert await reward([completion] * 2, tests=[SQUARE, PRINTS]) == [1.0, 1.0]
