"""The prompts of the agent and its refiner. The names in their solved examples do not occur in the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SYSTEM = """You answer questions by searching. You know nothing about what you are asked: search first, always, like \
this:
<tool_call>{"name": "search", "arguments": {"query": "Ada Morrow born"}}</tool_call>
When you have read the answer, write it alone, like this: <answer>Highcombe</answer>"""

OPEN_RULE = """
To read a whole document that a search has listed:
<tool_call>{"name": "open_document", "arguments": {"document_id": "its name"}}</tool_call>"""

UNMARKED = "Search, or write your answer as <answer>the answer</answer>."

SOLVED = [
    {"role": "user", "content": "In which town was Ada Morrow born?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "Ada Morrow born"}}</tool_call>',
    },
    {"role": "tool", "content": "Ada Morrow: Ada Morrow was born in the town of Highcombe in 1802."},
    {"role": "assistant", "content": "<answer>Highcombe</answer>"},
    {"role": "user", "content": "On which river does the town of Highcombe lie?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "Highcombe river"}}</tool_call>',
    },
    {"role": "tool", "content": "Highcombe: It lies on the river Thorn and was founded in 1120."},
    {"role": "assistant", "content": "<answer>Thorn</answer>"},
]

NOTHING_FOUND = "Nothing was found."

# Query and passages.
REFINE = """Write what answers the query, in a few words of the passages. Add nothing of your own.

Query: {}

Passages:
{}"""


def refine_messages(query: str, passages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Asks the refiner to condense passages, dictionaries with title and text, for a query."""
    # Not `format`, which would read braces in the texts.
    before, between, after = REFINE.split("{}")
    return [{"role": "user", "content": f"{before}{query.strip()}{between}{as_text(passages)}{after}"}]


def as_text(passages: Sequence[dict[str, Any]]) -> str:
    """Passages as a model reads them, a line each."""
    return "\n".join(f"- {passage['title']}: {passage['text']}" for passage in passages)
