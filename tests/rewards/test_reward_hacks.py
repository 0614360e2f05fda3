"""Programs that try to get a reward without solving the task, or to do harm, score 0 and leave nothing behind.

They run with the strongest isolation that works on this machine; those that depend on it run with every kind.
"""

import asyncio
import tempfile

import pytest
from processes import gone
from sandboxes import of_sandboxes

from megasync.rewards import sandbox
from megasync.rewards.code_reward import CodeReward

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
        "        for _ in range(100): p.send(['value', True, [], ''])\n"
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
        "        p.send(['value', ['builtin', 'exit'], [], ''])\n"
        "        p.send(['back', 0, ['list', []], ['dict', []]])\n"
        "    return 4",
        SQUARE,
    ),
    "has the other side run a built-in function": (
        MACHINERY + "for p in sides(): type(p).by_name = (type, type(len))\n"
        "decode = eval\n"
        "def encode(text): return '__import__(\"os\")._exit(42)'",
        "assert decode(encode('text')) == 'text'",
    ),
    "names itself a module of the other side": (
        MACHINERY + "import types\nm = types.ModuleType('os')\nos = m\ndef solve(x): return 1",
        "assert os.path.exists('/') and solve(2) == 4",
    ),
    "swallows the test's own assert": (
        "def solve(check):\n    try: check(1)\n    except BaseException: pass\n    return 5",
        "def check(x):\n    assert x == 4\nassert solve(check) is None",
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
STRONGEST, *WEAKER = KINDS = [kind for kind in sandbox._kinds() if not sandbox._probe(kind)]
# Programs whose effect depends on the kind of isolation: what they leave behind, and what they find around them.
KIND_DEPENDENT = (
    *("leaves children", "makes 1,500 nested folders", "makes 20,000 files", "makes files nobody may remove"),
    *("removes its own files", "prints a result", "ignores signals", "looks for the test in its own process"),
)
CASES = [(STRONGEST, name, *case) for name, case in PORTABLE.items()]
CASES += [(kind, name, *PORTABLE[name]) for kind in WEAKER for name in KIND_DEPENDENT]
CASES += [(kind, name, *case) for kind in KINDS if kind.namespaces for name, case in ISOLATED.items()]
CASES += [(kind, name, *case) for kind in KINDS if kind.own_user for name, case in FORKS.items()]


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
        reward = CodeReward(cpu_seconds=20, wall_seconds=1.5 if never_ends else 60, memory_mb=256)
        assert await reward([f"```python\n{program}\n```"], tests=[tests]) == [0.0]
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert gone(lambda: of_sandboxes(tmp_path))


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_a_program_that_solves_the_task_scores_one(monkeypatch, kind):
    monkeypatch.setattr(sandbox, "isolation", lambda: kind)
    reward = CodeReward(wall_seconds=60, cpu_seconds=30)
    completion = "```python\ndef solve(x): return x * x\nif __name__ == '__main__': import sys; print(solve(int(sys.stdin.read() or 0)))\n```"
    assert await reward([completion] * 2, tests=[SQUARE, PRINTS]) == [1.0, 1.0]
