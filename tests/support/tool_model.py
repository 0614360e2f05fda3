"""A tiny model trained on one dialogue, so that a test can rely on it to call tools.

Whatever the prompt, it looks up an item, adds the result, and then writes letters in random order until it is stopped.
There are two versions. Both call the same tools, but write the letters with different probabilities.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tiny_models import byte_tokenizer, make_tiny_model

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
QUESTION = {"role": "user", "content": "how many?"}
LOOK = '<tool_call>{"name": "look", "arguments": {"item": "nut"}}</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 3}}</tool_call>'
# The largest allowed loss of a token in a call, in nats, and the minimum and maximum number of training steps.
_TAUGHT, _LEAST_STEPS, _MOST_STEPS = 0.03, 50, 1500
LETTERS = "abcdefgh"
_TAIL = 40


def look(item: str) -> int:
    """Counts an item.

    Args:
        item: its name
    """
    return {"nut": 4}[item]


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


def make_tool_models(folder: Path, versions: int = 2) -> list[Path]:
    """Writes the first `versions` versions and returns their folders."""
    from transformers import AutoModelForCausalLM

    first = make_tiny_model(folder / "v0", chat_template=TEMPLATE, initializer_range=0.05)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        for version, letters in enumerate((LETTERS, LETTERS[:3])[:versions]):
            torch.manual_seed(version)
            _teach(model, letters, random.Random(version))
            out = folder / f"v{version}"
            model.save_pretrained(out)
            byte_tokenizer(TEMPLATE).save_pretrained(out)
    return [folder / f"v{version}" for version in range(versions)]


def _teach(model, letters: str, chance: random.Random) -> None:
    """Trains until the calls are almost deterministic, with new letters in each step."""
    tokenizer = byte_tokenizer(TEMPLATE)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(_MOST_STEPS):
        ids, called = _dialogue(tokenizer, "".join(chance.choices(letters, k=_TAIL)))
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        calls = torch.tensor(called[1:])
        if losses[calls].max() < _TAUGHT and step >= _LEAST_STEPS:
            return
        optimizer.zero_grad()
        (losses[calls].mean() + losses.mean()).backward()
        optimizer.step()
    raise AssertionError(f"the model could not be taught its calls: {losses[calls].max():.3f} nats off")


def _dialogue(tokenizer, tail: str) -> tuple[list[int], list[bool]]:
    """The token ids of the dialogue, and whether each belongs to a tool call."""
    parts = (
        ("<bos>user: how many?<eos><bos>assistant: ", False),
        (f"{LOOK}<eos>", True),
        ("<bos>tool: 4<eos><bos>assistant: ", False),
        (f"{ADD}<eos>", True),
        ("<bos>tool: 7<eos><bos>assistant: ", False),
        (tail, False),
    )
    ids, called = [], []
    for text, is_call in parts:
        found = tokenizer.encode(text, add_special_tokens=False)
        ids += found
        called += [is_call] * len(found)
    return ids, called
