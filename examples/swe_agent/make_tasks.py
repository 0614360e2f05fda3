"""Makes small repositories with a planted bug each, as Harbor task folders: `python make_tasks.py OUT [--count 64]`.

A task is a module of one to three short functions, one of which has a bug of one of six kinds. The issue says what the
function returns and what it should. The hidden tests call every function with values that the issue does not show. The
same seed always gives the same folders; OUT/train and OUT/test share no task.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A function with a bug: `{a}` and `{b}` are its arguments, `{name}` its name, `{n}` a number from 2 to 9."""

    names: tuple[str, ...]
    right: str
    wrong: str
    # Arguments of the calls that tests make; one that shows the bug comes first.
    calls: tuple[tuple[Any, ...], ...]
    # Names of the arguments.
    arguments: tuple[str, ...]


KINDS = {
    "operator": Kind(
        ("total", "combined", "both"),
        "return {a} + {b} * {n}",
        "return {a} - {b} * {n}",
        ((3, 4), (10, 5), (0, 1), (-2, 6)),
        ("first second", "left right", "price tax"),
    ),
    "comparison": Kind(
        ("larger", "most", "winner"),
        "return {a} if {a} > {b} + {n} else {b}",
        "return {a} if {a} < {b} + {n} else {b}",
        ((30, 4), (1, 50), (5, 5), (99, 3)),
        ("x y", "old new", "mine yours"),
    ),
    "range": Kind(
        ("count_up", "ladder", "steps"),
        "return [{a} * i for i in range({b} + {n})]",
        "return [{a} * i for i in range({b} - {n})]",
        ((2, 3), (1, 9), (5, 0), (3, 12)),
        ("size limit", "width stop", "step end"),
    ),
    "index": Kind(
        ("last_of", "tail", "final_item"),
        "return ({a} + {b})[-1]",
        "return ({a} + {b})[0]",
        (([1, 2], [3]), ([5], []), ([], [8, 9]), ([4, 4], [7])),
        ("items more", "head rest", "known added"),
    ),
    "negation": Kind(
        ("allowed", "is_free", "ready"),
        "return {a} not in {b}[:{n}]",
        "return {a} in {b}[:{n}]",
        ((1, [1, 2]), (3, [1, 2]), (0, []), (7, [7])),
        ("user blocked", "seat taken", "job waiting"),
    ),
    "variable": Kind(
        ("scaled", "stretched", "repeated"),
        "return [{n} * each for each in {b} if each > {a}]",
        "return [{n} * each for each in {b} if each > {n}]",
        ((0, [1, 2, 30]), (20, [15, 25]), (-9, [-5, 4]), (50, [60])),
        ("least values", "floor numbers", "minimum scores"),
    ),
}
# Names of functions end with one of these; the modules' names.
NOUNS = ("price", "stock", "score", "order", "page", "room", "ticket", "route", "batch", "meal", "team", "plan")
MODULES = ("tools", "shop", "report", "office", "garden", "library", "station", "kitchen")
_GRADE = '''"""Calls the functions in a process of their own and compares what they return. Writes the reward."""

import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CALL = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = []
for name, arguments in json.load(sys.stdin):
    try:
        found.append(getattr(module, name)(*arguments))
    except Exception:
        found.append("an error")
print(json.dumps(found))
"""
path = os.path.join(HERE, "cases.json")
with open(path) as file:
    module, cases = json.load(file)
# What is tested could read it.
os.unlink(path)
command = [sys.executable, "-I", "-B", "-c", CALL, module]
told = json.dumps([case[:2] for case in cases])
try:
    run = subprocess.run(command, input=told, capture_output=True, text=True, timeout=60, cwd="/tmp")
    found = json.loads(run.stdout)
    passed = sum(value == case[2] for value, case in zip(found, cases, strict=True))
except (ValueError, TypeError, subprocess.TimeoutExpired):
    passed = 0
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": float(passed == len(cases)), "cases": passed / len(cases)}, file)
'''


def function(kind: Kind, name: str, number: int, arguments: str, *, bug: bool) -> str:
    """The text of a function, with the bug or without."""
    a, b = arguments.split()
    body = (kind.wrong if bug else kind.right).format(a=a, b=b, n=number)
    return f"def {name}({a}, {b}):\n    {body}\n"


def result(text: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """The value that a function of this generator's own text returns."""
    space: dict[str, Any] = {}
    exec(text, space)
    return space[name](*arguments)


def make_task(folder: Path, rng: random.Random, kind_name: str) -> str:
    """Writes one task folder. Returns its instruction."""
    others = rng.sample([other for other in KINDS if other != kind_name], rng.randint(0, 2))
    parts = []
    for each in (kind_name, *others):
        of = KINDS[each]
        name = f"{rng.choice(of.names)}_{rng.choice(NOUNS)}"
        parts.append((of, name, rng.randint(2, 9), rng.choice(of.arguments)))
    broken, name, number, arguments = parts[0]
    wrong, right = (function(broken, name, number, arguments, bug=bug) for bug in (True, False))
    sound = [function(*part, bug=False) for part in parts[1:]]
    order = rng.sample(range(len(parts)), len(parts))
    module = f"{rng.choice(MODULES)}.py"
    text = "\n\n".join([wrong, *sound][at] for at in order)
    fixed = "\n\n".join([right, *sound][at] for at in order)
    shown = broken.calls[0]
    said, wanted = (result(part, name, shown) for part in (wrong, right))
    call = f"{name}({', '.join(map(repr, shown))})"
    files = {
        "instruction.md": f"{call} in {module} returns {said!r}, but should return {wanted!r}.\nFix {module}.\n",
        "task.toml": "[agent]\ntimeout_sec = 300.0\n\n[verifier]\ntimeout_sec = 120.0\n\n[metadata]\n"
        f'kind = "{kind_name}"\n',
        f"environment/{module}": text,
        "tests/test.sh": "#!/bin/bash\npython3 -I -B /tests/grade.py\n",
        "tests/grade.py": _GRADE,
        "tests/cases.json": json.dumps(
            [
                f"/work/{module}",
                [[p[1], args, result(fixed, p[1], args)] for p in parts for args in p[0].calls],
            ]
        ),
        "solution/solve.sh": f"#!/bin/bash\ncat > /work/{module} <<'END'\n{fixed}END\n",
    }
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        if content.startswith("#!"):
            target.chmod(0o755)
    return files["instruction.md"]


def make_tasks(out: Path, count: int, held_out: int, seed: int = 0) -> None:
    """Writes `count` training tasks and `held_out` test tasks, all different."""
    rng = random.Random(seed)
    known: set[str] = set()
    for number in range(count + held_out):
        kind = [*KINDS][number % len(KINDS)]
        split = "test" if number < held_out else "train"
        folder = out / split / f"{number:04d}-{kind}"
        for _ in range(1000):
            task = make_task(folder, rng, kind)
            if task not in known:
                break
            for path in sorted(folder.glob("environment/*")):
                path.unlink()
        else:
            raise SystemExit(f"there are no more than {number} different tasks; ask for fewer")
        known.add(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the tasks; it must not exist")
    parser.add_argument("--count", type=int, default=64, help="training tasks")
    parser.add_argument("--held-out", type=int, default=24, help="test tasks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        raise SystemExit(f"{options.out} exists; remove it, or choose another folder")
    make_tasks(options.out, options.count, options.held_out, options.seed)


if __name__ == "__main__":
    main()
