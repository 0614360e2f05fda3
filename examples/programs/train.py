"""A small model learns to write functions by tests: `python examples/programs/train.py [key=value ...]`, on a CPU.

A row asks in words for a function of two operations, and has tests, which run in a sandbox. No row has a solution. The
model is made here and warmed up on a few solved rows, from which it learns the form of a program; that an operation
comes first, and needs brackets, is left to the tests.
"""

from __future__ import annotations

import random
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from warm_start import make_model  # noqa: E402

import megasync  # noqa: E402

MODEL = Path("models/code")
CONFIG = ROOT / "configs" / "recipes" / "code.yaml"
HEAD = "def f(x):\n    return "
# What an operation does, in words, and in Python.
OPERATIONS = {
    "add {n}": "({x} + {n})",
    "subtract {n}": "({x} - {n})",
    "subtract it from {n}": "({n} - {x})",
    "multiply by {n}": "({x} * {n})",
    "take the remainder by {n}": "({x} % {n})",
    "take the larger of it and {n}": "max({x}, {n})",
    "take the smaller of it and {n}": "min({x}, {n})",
}
NUMBERS = range(2, 10)
INPUTS = (-7, 0, 3, 8, 25)
HELD_OUT = 128
PIECES = "|".join([re.escape(HEAD), "[a-z]+", "[0-9]", r"[\s\S]"])


def tasks() -> list[tuple[str, str]]:
    """Functions of x in words, and a program for each, in a mixed order."""
    made = [
        (
            f"Take x, {first.format(n=a)}, then {second.format(n=b)}.",
            second_code.format(x=first_code.format(x="x", n=a), n=b),
        )
        for (first, first_code), (second, second_code) in product(OPERATIONS.items(), repeat=2)
        for a, b in product(NUMBERS, repeat=2)
    ]
    random.Random(0).shuffle(made)
    return made


def solved(task: tuple[str, str]) -> list[dict[str, str]]:
    """The task and its program as a conversation."""
    text, code = task
    return [{"role": "user", "content": text}, {"role": "assistant", "content": HEAD + code}]


def row(task: tuple[str, str]) -> dict[str, Any]:
    """The task with its tests: an assertion for each input, as in MBPP."""
    text, code = task
    tests = [f"assert f({x}) == {eval(code, {'x': x, 'max': max, 'min': min})}" for x in INPUTS]
    return {"prompt": [{"role": "user", "content": text}], "tests": "\n".join(tests)}


if __name__ == "__main__":
    known, unknown = tasks()[:2000], tasks()[2000:3000]
    if not MODEL.exists():
        make_model(MODEL, PIECES, [*map(solved, known)], shown=300, steps=160)
    rows = [*map(row, unknown)]
    megasync.AsyncTrainer(CONFIG, sys.argv[1:], train_dataset=rows[HELD_OUT:], eval_dataset=rows[:HELD_OUT]).train()
