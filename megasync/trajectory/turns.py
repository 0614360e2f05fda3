"""Who wrote which tokens of a response: the notes of its turns, for people who read it. Nothing is trained on them.

Invariant: a note is small whatever a model, a tool or a user wrote; `__post_init__` cuts its texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# The role of what the policy sampled. Other turns have the role of their message, or none if it is unknown.
ANSWER = "answer"
# The most characters of a role or name, and of a call's arguments, and the most calls of an answer.
NAME, ARGUMENTS, CALLS = 80, 400, 16


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an answer, with its arguments as the model wrote them."""

    name: str
    arguments: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _cut(self.name, NAME))
        object.__setattr__(self, "arguments", _cut(self.arguments, ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of a response that one author wrote."""

    # First and past-the-last token, counted from the first token of the response.
    start: int
    end: int
    role: str = ""
    # The tool whose result this is.
    name: str = ""
    # Only an answer has any.
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", _cut(self.role, NAME))
        object.__setattr__(self, "name", _cut(self.name, NAME))
        object.__setattr__(self, "calls", tuple(self.calls[:CALLS]))

    def moved(self, tokens: int) -> Turn:
        """The turn, that many tokens later."""
        return replace(self, start=self.start + tokens, end=self.end + tokens)


def within(turns: Iterable[Turn], tokens: int) -> tuple[Turn, ...]:
    """The parts of the turns in the first ``tokens``. Raises ValueError for turns that overlap or hold nothing."""
    kept, at = [], 0
    for turn in turns:
        if not at <= turn.start < turn.end:
            raise ValueError(f"a turn from token {turn.start} to {turn.end} follows one that ends at {at}")
        at = turn.end
        if turn.start < tokens:
            kept.append(turn if turn.end <= tokens else replace(turn, end=tokens))
    return tuple(kept)


def _cut(text: str, most: int) -> str:
    """Its first characters, without halves of surrogate pairs, which no file can store."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode("utf-8", "replace").decode()
