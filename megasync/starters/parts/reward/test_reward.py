"""The reward on responses whose scores are known: `pytest` in this folder."""

import json
from pathlib import Path

import pytest
from reward import reward

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2301", 1.0), (" 2301\n", 1.0), ("2300", 0.75), ("1290", 0.0), ("23", 0.5), ("23012301", 0.5), ("", 0.0)],
)
def test_a_response_scores_by_its_right_digits(text, expected):
    assert reward([text], answer=["2301"]) == [expected]


def test_the_answer_of_each_row_scores_1_and_its_prompt_does_not():
    answers = [row["answer"] for row in ROWS]
    assert reward(answers, answer=answers) == [1.0] * len(ROWS)
    assert max(reward([row["prompt"] for row in ROWS], answer=answers)) < 1.0
