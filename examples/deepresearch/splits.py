"""Training and held-out questions that have nothing in common.

A row belongs to the held-out questions if it says so (`held_out: true`), and where no row says anything, by the hash of
what it asks about. Invariant: after `decontaminated` no training question

- is answered by a document that a held-out question needs (`evidence`, ids of documents),
- is worded like a held-out question, or shares 13 words in a row with one (Brown et al., "Language Models are Few-Shot
  Learners", 2020, appendix C; shorter questions are compared whole).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepresearch.scoring import normalise

# One subject in so many is held out.
HELD_OUT_EVERY = 5
SHARED_WORDS = 13


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of both sets, and how many training rows were left out, by reason."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    removed: Counter[str]


def decontaminated(rows: Sequence[dict[str, Any]], held_out_every: int = HELD_OUT_EVERY) -> Split:
    """Splits rows with `prompt` and, optionally, `evidence`, `subject` and `held_out`."""
    said = any("held_out" in row for row in rows)
    held_out = [row for row in rows if (row.get("held_out") if said else _drawn(row, held_out_every))]
    others = [row for row in rows if not (row.get("held_out") if said else _drawn(row, held_out_every))]
    documents = {document for row in held_out for document in row.get("evidence", ())}
    wordings = {wording for row in held_out for wording in _wordings(row["prompt"])}
    train, removed = [], Counter()
    for row in others:
        if not documents.isdisjoint(row.get("evidence", ())):
            removed["evidence"] += 1
        elif not wordings.isdisjoint(_wordings(row["prompt"])):
            removed["wording"] += 1
        else:
            train.append(row)
    return Split(train, held_out, removed)


def _drawn(row: dict[str, Any], every: int) -> bool:
    subject = str(row.get("subject") or row["prompt"])
    return hashlib.sha256(subject.encode()).digest()[0] % every == 0


def _wordings(prompt: str) -> Iterator[str]:
    words = normalise(prompt).split()
    for start in range(max(1, len(words) - SHARED_WORDS + 1)):
        yield " ".join(words[start : start + SHARED_WORDS])
