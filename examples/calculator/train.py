"""SmolLM2 learns to do sums with two tools: `python examples/calculator/train.py [key=value ...]`, on a CPU.

The model was trained on no tool format, and its chat template shows no tools, so the system message describes them and
each prompt carries one solved sum. Any parser does for such a model; hermes is the simplest format to write.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import megasync
from megasync.rollout.tool_agent import tool_agent

SYSTEM = {
    "role": "system",
    "content": """You solve sums by calling tools: add(a, b), subtract(a, b). Call one like this:
<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>
When you have the result, answer with the number alone.""",
}
SOLVED = [
    {"role": "user", "content": "What is 31 + 46?"},
    {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {"a": 31, "b": 46}}</tool_call>'},
    {"role": "tool", "content": "77"},
    {"role": "assistant", "content": "77"},
]


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


def rows(count: int, seed: int) -> list[dict]:
    """Sums of two numbers with two digits each."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        a, b, sign = chance.randint(10, 99), chance.randint(10, 99), chance.choice("+-")
        question = {"role": "user", "content": f"What is {a} {sign} {b}?"}
        made.append({"prompt": [SYSTEM, *SOLVED, question], "answer": str(a + b if sign == "+" else a - b)})
    return made


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the number alone. `completions` are the last answers, tool calls and their results are not in them."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    megasync.AsyncTrainer(
        Path(__file__).parent / "calculator.yaml",
        sys.argv[1:],
        rollout=tool_agent([add, subtract], max_turns=3),
        reward=reward,
        train_dataset=rows(2000, seed=0),
        eval_dataset=rows(32, seed=1),
    ).train()
