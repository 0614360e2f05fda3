"""The reward and the search on cases whose results are known: `pytest` in this folder."""

import json
from pathlib import Path

import pytest
from reward import reward
from search import PAGES, read, search

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Kelatha Gorund</answer>", 1.0),
        ("First <answer>no</answer>, then <answer>kelatha gorund.</answer>", 1.0),
        ("<answer>Gorund</answer>", 2 / 3),
        ("Kelatha Gorund", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_the_marked_answer_scores_by_its_words(text, expected):
    assert reward([text], answer=["Kelatha Gorund"]) == [pytest.approx(expected)]


@pytest.mark.parametrize("title", PAGES)
def test_a_search_for_a_title_finds_its_page_first(title):
    assert search(title).startswith(f"- {title}: ")
    assert read(title) == PAGES[title]


def test_the_answer_of_each_row_is_in_the_pages():
    assert [row["answer"] for row in ROWS if not any(row["answer"] in text for text in PAGES.values())] == []


def test_what_does_not_exist_is_said():
    assert search("xylophone") == "Nothing was found." and "no page" in read("Atlantis")
