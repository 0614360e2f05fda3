"""Both parts of the reward on responses whose scores are known: `pytest` in this folder."""

import json
from pathlib import Path

import pytest
from reward import boxed

from megasync.integrations.math_verify import math_reward

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "correct", "one_box"),
    [
        ("3 + 4 = 7, so the answer is \\boxed{7}.", 1.0, 1.0),
        ("The answer is 7.", 1.0, 0.0),
        ("So it is \\boxed{8}.", 0.0, 1.0),
        ("\\boxed{7} or \\boxed{8}", 0.0, 0.0),
        ("I do not know.", 0.0, 0.0),
    ],
)
def test_an_answer_scores_by_its_value_and_its_box(text, correct, one_box):
    assert math_reward([text], answer=["7"]) == [correct]
    assert boxed([text], answer=["7"]) == [one_box]


def test_the_answer_of_each_row_is_right_for_that_row():
    answers = [row["answer"] for row in ROWS]
    assert math_reward([f"\\boxed{{{answer}}}" for answer in answers], answer=answers) == [1.0] * len(ROWS)
