"""A small model learns to do sums with two tools: `python examples/calculator/train.py [key=value ...]`, on a CPU.

A sum of three numbers takes two calls, of which the second needs the result of the first. The model is made here and
warmed up on a few solved sums, from which it learns the form of a call but copies numbers badly.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from warm_start import make_model  # noqa: E402

import megasync  # noqa: E402
from megasync.rollout.tool_agent import tool_agent  # noqa: E402

MODEL = Path("models/calculator")
CONFIG = ROOT / "configs" / "recipes" / "tool_agent.yaml"
SIGNS = {"+": "add", "-": "subtract"}
HELD_OUT = 128
# Tokens of several characters: what stands around the numbers of a call.
CALL = tuple(f'<tool_call>{{"name": "{name}", "arguments": {{"a": ' for name in SIGNS.values())
BETWEEN, END = ', "b": ', "}}</tool_call>"
PIECES = "|".join([*map(re.escape, (*CALL, BETWEEN, END)), "[A-Za-z]+", r"[\s\S]"])


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtracts the second whole number from the first.

    Args:
        a: the number to subtract from
        b: the number to subtract
    """
    return a - b


def sums() -> list[list[str]]:
    """Sums of two or three numbers with two digits, as ["37", "+", "45", "-", "12"]; each occurs once."""
    chance = random.Random(0)
    drawn: dict[tuple[str, ...], None] = {}
    while len(drawn) < 8000:
        terms = [str(chance.randint(10, 99))]
        for _ in range(chance.choice((1, 2))):
            terms += [chance.choice("+-"), str(chance.randint(10, 99))]
        drawn[tuple(terms)] = None
    return [*map(list, drawn)]


def solved(terms: list[str]) -> list[dict[str, str]]:
    """A conversation that computes the sum by one call after the other."""
    messages = [{"role": "user", "content": "".join(terms)}]
    total = int(terms[0])
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        call = f"{CALL[list(SIGNS).index(sign)]}{total}{BETWEEN}{term}{END}"
        total = (add if sign == "+" else subtract)(total, int(term))
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(total)}]
    return [*messages, {"role": "assistant", "content": str(total)}]


def row(terms: list[str]) -> dict[str, Any]:
    """The sum as a prompt, and its result."""
    messages = solved(terms)
    return {"prompt": messages[:1], "answer": messages[-1]["content"]}


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the number alone. `completions` are the last answers, tool calls and their results are not in them."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    known, unknown = sums()[:4000], sums()[4000:]
    if not MODEL.exists():
        make_model(MODEL, PIECES, [*map(solved, known)], shown=100, steps=100)
    rows = [*map(row, unknown)]
    megasync.AsyncTrainer(
        CONFIG,
        sys.argv[1:],
        rollout=tool_agent([add, subtract], max_turns=4),
        reward=reward,
        train_dataset=rows[HELD_OUT:],
        eval_dataset=rows[:HELD_OUT],
    ).train()
