"""How a recorded response is shown: the text of each token, the turns it consists of, and what colours its tokens.

Pure functions over arrays; `views/rollouts.py` draws what they return. A text is what the tokenizer makes of tokens,
special ones included, or their ids where there is no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasync.errors import DataError
from megasync.observe.rollouts import IndexRow, Response
from megasync.trajectory import ANSWER, Line, Turn
from megasync.watch.recorded import RolloutIndex

Numbers = NDArray[np.floating[Any]]
# What a tokenizer decodes of a part of a character.
BROKEN = "\ufffd"
# The most tokens of one character.
LONGEST_CHARACTER = 8
# A line break that can be seen, and breaks the line.
BREAK = "↵\n"


class Decoder:
    """Texts of tokens. Without a tokenizer, the ids."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        if self._tokenizer is None:
            return " ".join(str(token) for token in ids)
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def pieces(self, ids: NDArray[np.int32]) -> list[str]:
        """The text of each token. Of a character that several tokens make up, the last has it, the others have none."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids.tolist()]
        pieces: list[str] = []
        begun: list[int] = []
        for token in ids.tolist():
            begun.append(token)
            text = self.text(begun)
            if BROKEN in text and len(begun) < LONGEST_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text)
            begun = []
        if begun:
            pieces[-1] = self.text(begun)
        return pieces


def read(index: RolloutIndex, row: IndexRow) -> Response | str:
    """The response, or why it cannot be read."""
    try:
        return index.read(row)
    except DataError as error:
        return str(error)


def visible(piece: str) -> str:
    """A piece with line breaks that can be seen, and without other control characters."""
    marked = piece.replace("\r\n", "\n").replace("\n", BREAK)
    return "".join(c if c.isprintable() or c in "\n\t" else BROKEN for c in marked)


def one_line(text: str) -> str:
    """A text with its line breaks as signs."""
    return visible(text).replace("\n", " ")


def turns(response: Response) -> list[Turn]:
    """The turns of a response, in order, with all of its tokens. Tokens without a note are divided by the loss mask.

    Masked tokens are those that the policy did not generate, or too old ones.
    """
    parts: list[Turn] = []
    at, tokens = 0, len(response.ids)
    for noted in (*response.turns, Turn(tokens, tokens)):
        for value, end in zip(response.mask.values.tolist(), response.mask.ends.tolist(), strict=True):
            if at < (end := min(end, noted.start)):
                parts.append(Turn(at, end, ANSWER if value else ""))
                at = end
        parts.append(noted)
        at = noted.end
    return parts[:-1]


def tree(rows: Sequence[IndexRow]) -> list[tuple[int, IndexRow, Line]]:
    """The lines of a sample below those that they came from: how deep each of them is, its row and its note.

    A line whose origin is not among the rows begins a tree, as do lines that name each other.
    """
    noted = sorted(((row.line, row) for row in rows if row.line is not None), key=lambda each: each[0].first)
    numbers = {line.number for line, _ in noted}
    below: dict[int | None, list[tuple[Line, IndexRow]]] = {}
    for line, row in noted:
        below.setdefault(line.parent if line.parent in numbers else None, []).append((line, row))
    found: list[tuple[int, IndexRow, Line]] = []
    waiting = [(0, *each) for each in reversed(below.pop(None, []))]
    while waiting or below:
        if not waiting:
            # Only a damaged recording has lines that came from each other.
            waiting = [(0, *each) for each in reversed(below.pop(next(iter(below))))]
        depth, line, row = waiting.pop()
        found.append((depth, row, line))
        waiting += [(depth + 1, *each) for each in reversed(below.pop(line.number, []))]
    return found


def writer_of(turn: Turn) -> str:
    """Who wrote a turn."""
    return one_line(f"{turn.role} {turn.name}".strip()) or "not generated"


# What tokens can be coloured by. Shades are from -1 to 1, 0 without a colour, NaN where nothing is known.


@dataclass(frozen=True, slots=True)
class Shading:
    """`shades` are [tokens]. Below 0 and above 0 are two colours, whose meaning `below` and `above` say.

    With `steps`, shades are the numbers of colours of a list in place of strengths.
    """

    shades: Numbers
    below: str = ""
    above: str = ""
    steps: Sequence[str] = ()


# A token of this many nats is fully coloured: a probability of under one percent.
FULL_LOGPROB = -5.0
# The least gap that is fully coloured, in nats. Larger ones set the scale of their response.
FULL_GAP = 0.05


def by_logprob(response: Response) -> Shading | None:
    """Unlikely tokens, by what the server reported."""
    return Shading(
        np.clip(response.logprobs / FULL_LOGPROB, 0.0, 1.0), above=f"unlikely: {FULL_LOGPROB:g} nats or less"
    )


def by_gap(response: Response) -> Shading | None:
    """The trainer's log-prob minus the server's."""
    if response.trainer_logprobs is None:
        return None
    gap = response.trainer_logprobs - response.logprobs
    largest = float(np.nanmax(np.abs(gap), initial=FULL_GAP))
    return Shading(gap / largest, "less likely to the trainer", f"more likely to the trainer, up to {largest:.2g} nats")


def by_version(response: Response) -> Shading | None:
    """Which version sampled each token, newest first."""
    versions = response.versions.expand()
    newest_first = np.unique(versions)[::-1]
    places = np.searchsorted(-newest_first, -versions).astype(np.float64)
    return Shading(places, steps=[f"version {version}" for version in newest_first.tolist()])


def by_mask(response: Response) -> Shading | None:
    """Which tokens are trained."""
    return Shading(1.0 - response.mask.expand().astype(np.float64), steps=["trained", "not trained"])


def by_advantage(response: Response) -> Shading | None:
    return _signed(response.advantages, "advantage below 0", "above 0")


def by_reward(response: Response) -> Shading | None:
    return _signed(response.rewards, "reward below 0", "above 0")


def _signed(values: Numbers | None, below: str, above: str) -> Shading | None:
    if values is None:
        return None
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    return Shading(values / largest if largest else values, below, f"{above}, up to {largest:.3g}")


SHADINGS: dict[str, Callable[[Response], Shading | None]] = {
    "log-prob": by_logprob,
    "trainer/server gap": by_gap,
    "version": by_version,
    "mask": by_mask,
    "advantage of the token": by_advantage,
    "reward of the token": by_reward,
}


def about(response: Response, at: int, token_versions: NDArray[np.int32]) -> str:
    """Everything known of one token, on a line."""
    facts = [f"token {at}", f"id {int(response.ids[at])}", f"log-prob {response.logprobs[at]:.4f}"]
    for name, values in (
        ("trainer", response.trainer_logprobs),
        ("advantage", response.advantages),
        ("reward", response.rewards),
    ):
        if values is not None and not np.isnan(values[at]):
            facts.append(f"{name} {values[at]:.4f}")
    return " · ".join([*facts, f"version {int(token_versions[at])}"])
