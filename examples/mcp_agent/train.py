"""A small model learns to use an MCP server: `python examples/mcp_agent/train.py [key=value ...]`, on a CPU.

It is asked for the shelf of an item, which takes one call, or for the number of pieces there, which takes a second call
with the result of the first. The model is made here and warmed up on a few solved questions, from which it learns the
form of a call but copies codes badly.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

from shop import COUNTS, SHELVES  # noqa: E402
from warm_start import make_model  # noqa: E402

import megasync  # noqa: E402

MODEL = Path("models/shop")
CONFIG = ROOT / "configs" / "recipes" / "mcp_agent.yaml"
HELD_OUT = 128
# Tokens of several characters: what stands around the argument of a call.
CALLS = {
    name: f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": "'
    for name, argument in (("shelf", "item"), ("count", "shelf"))
}
END = '"}}</tool_call>'
PIECES = "|".join([*map(re.escape, (*CALLS.values(), END)), "[A-Za-z]+", r"[\s\S]"])


def questions() -> list[tuple[str, str]]:
    """All questions: what is asked, and of which item."""
    return [(("shelf", "count")[number % 2], item) for number, item in enumerate(SHELVES)]


def solved(asked: str, item: str) -> list[dict[str, str]]:
    """A conversation that finds the answer by one call after the other."""
    answer = SHELVES[item]
    messages = [{"role": "user", "content": f"{asked} {item}"}]
    messages += [{"role": "assistant", "content": f"{CALLS['shelf']}{item}{END}"}, {"role": "tool", "content": answer}]
    if asked == "count":
        messages.append({"role": "assistant", "content": f"{CALLS['count']}{answer}{END}"})
        answer = COUNTS[answer]
        messages.append({"role": "tool", "content": answer})
    return [*messages, {"role": "assistant", "content": answer}]


def row(asked: str, item: str) -> dict[str, Any]:
    """The question as a prompt, and its answer."""
    messages = solved(asked, item)
    return {"prompt": messages[:1], "answer": messages[-1]["content"]}


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the number alone. `completions` are the last answers, tool calls and their results are not in them."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    known, unknown = questions()[:2000], questions()[2000:]
    if not MODEL.exists():
        make_model(MODEL, PIECES, [solved(*question) for question in known], shown=100, steps=100)
    rows = [row(*question) for question in unknown]
    command = [sys.executable, str(Path(__file__).with_name("shop.py"))]
    megasync.AsyncTrainer(
        CONFIG,
        [f"rollout.tools.mcp.shop.command={json.dumps(command)}", *sys.argv[1:]],
        reward=reward,
        train_dataset=rows[HELD_OUT:],
        eval_dataset=rows[:HELD_OUT],
    ).train()
