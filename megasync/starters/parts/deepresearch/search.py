"""The search engine of the agent, and the two tools by which the model uses it.

It ranks the pages of data/corpus.jsonl by the words that they share with the query, rare words first. Put your own
engine in its place: what `search` and `read` return is all that the model sees of it. Both may be async.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

CORPUS = Path(__file__).parent / "data" / "corpus.jsonl"
FOUND = 3


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


PAGES = {page["title"]: page["text"] for page in map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())}
_WORDS = {title: {*words(title), *words(text)} for title, text in PAGES.items()}
_COUNTS = Counter(word for each in _WORDS.values() for word in each)


def search(query: str) -> str:
    """Searches all pages.

    Args:
        query: what to look for, in a few words
    """
    asked = {word for word in words(query) if word in _COUNTS}
    scores = {
        title: sum(math.log(1 + len(PAGES) / _COUNTS[word]) for word in asked & found)
        for title, found in _WORDS.items()
    }
    best = sorted((title for title in scores if scores[title]), key=lambda title: -scores[title])[:FOUND]
    return "\n".join(f"- {title}: {PAGES[title].split('. ')[0].rstrip('.')}." for title in best) or "Nothing was found."


def read(title: str) -> str:
    """Shows a whole page.

    Args:
        title: the title of a page, as a search has shown it
    """
    return PAGES.get(title.strip()) or f"There is no page {title!r}; search for it."
