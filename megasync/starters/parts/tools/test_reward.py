"""The reward and the tools on cases whose results are known: `pytest` in this folder."""

import json
from pathlib import Path

import pytest
from reward import reward
from tools import add, multiply, subtract

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("text", "expected"), [("77", 1.0), (" 77\n", 1.0), ("It is 77.", 0.0), ("7", 0.0), ("", 0.0)])
def test_only_the_number_alone_scores(text, expected):
    assert reward([text], answer=["77"]) == [expected]


def test_the_answer_of_each_row_scores_1():
    answers = [row["answer"] for row in ROWS]
    assert reward(answers, answer=answers) == [1.0] * len(ROWS)


def test_the_tools_compute_what_they_say():
    assert (add(31, 46), subtract(31, 46), multiply(3, 4)) == (77, -15, 12)
