"""The default reward, `math` and judges' scores agree with what people graded, with known exceptions.

The pairs are in `graded_answers.jsonl` and `graded_scores.jsonl`, one a line, each with the public thread or data set
that it follows. Of an answer, `right` is 1, 0, or null for a response that must not be scored; `symbolic` pairs need
more than numbers and words. Of a judgement, `score` is its position on the scale.
"""

import json
from pathlib import Path

import pytest

from megasync.config.schema import RewardModelConfig
from megasync.data.match import match_answer
from megasync.integrations.math_verify import math_reward
from megasync.rewards.model_reward import WrittenNumber

FOLDER = Path(__file__).parent
ANSWERS = [json.loads(line) for line in (FOLDER / "graded_answers.jsonl").read_text(encoding="utf-8").splitlines()]
SCORES = [json.loads(line) for line in (FOLDER / "graded_scores.jsonl").read_text(encoding="utf-8").splitlines()]
BOX = "The answer is \\boxed{%s}."

# Reference, response, and the score it gets instead of the right one.
NOT_BY_WORDS = {
    ("2 hours 30 minutes", "2 hours and 30 minutes", 0.0),
    ("7", "She has 8 apples and eats 1, leaving 7.", 0.0),
}
NOT_BY_MATH = {
    # Equal for positive n only, and as angles.
    ("\\sqrt{1/n}", BOX % "\\frac{1}{\\sqrt{n}}", 0.0),
    ("\\frac{\\pi}{3}", BOX % "60^\\circ", 0.0),
    ("i", BOX % "\\sqrt{-1}", 0.0),
    ("14 - i", BOX % "14.0 + -1.0i", 0.0),
    # A list for a tuple, and what is left to compute.
    ("(1,2)", BOX % "1, 2", 1.0),
    ("7", BOX % "3+4", 1.0),
    ("all real numbers", BOX % "\\mathbb{R}", 0.0),
    ("2 hours 30 minutes", "2 hours and 30 minutes", 0.0),
    # Of several numbers in a sentence without a formula, none is taken for the answer.
    ("7", "She has 8 apples and eats 1, leaving 7.", 0.0),
    # Numbers that are neither plain nor of ordinary size.
    ("\\frac{\\pi}{2^{99}}", BOX % "\\frac{\\pi}{2^{98}}", 1.0),
}


def disagreements(reward, pairs):
    found = set()
    for pair in pairs:
        reasons = [pair.get("finish", "stop")]
        (score,) = reward([pair["response"]], answer=[pair["reference"]], finish_reasons=reasons)
        if score != pair["right"]:
            found.add((pair["reference"], pair["response"], score))
    return found


def test_there_are_as_many_graded_pairs_as_the_documentation_says():
    assert (len(ANSWERS), len(SCORES)) == (1251, 232)
    assert all(pair["source"] for pair in ANSWERS + SCORES)


def test_the_default_reward_agrees_with_people():
    assert disagreements(match_answer, [pair for pair in ANSWERS if "symbolic" not in pair]) == NOT_BY_WORDS


def test_the_math_reward_agrees_with_people():
    pytest.importorskip("math_verify")
    assert disagreements(math_reward, ANSWERS) == NOT_BY_MATH


@pytest.mark.parametrize("pair", SCORES, ids=lambda pair: repr(pair["judge"][-40:]))
def test_a_judges_score_is_read_as_people_read_it(pair):
    config = RewardModelConfig("m", kind="generative", low=pair.get("low", 0.0), high=pair.get("high", 10.0))
    answer = {"text": pair["judge"], "meta_info": {"finish_reason": {"type": pair.get("finish", "stop")}}}
    score = WrittenNumber(config).read(answer)
    assert score == (None if pair["score"] is None else pytest.approx(pair["score"]))
