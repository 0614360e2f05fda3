"""SQuAD's exact match and F1, and the mark of a final answer."""

import pytest
from deepresearch.scoring import exact_match, f1, marked_answer, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown fox!", "quick brown fox"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("  \n", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "truths", "em", "score"),
    [
        ("The Torilaholm.", ["Torilaholm"], 1.0, 1.0),
        ("in Torilaholm", ["Torilaholm"], 0.0, 2 / 3),
        ("Ada Lee", ["Ada Morrow", "Lee Ada"], 0.0, 1.0),
        ("1590", ["1591"], 0.0, 0.0),
        ("no no", ["no"], 0.0, 2 / 3),
        ("the", ["a"], 1.0, 1.0),
        ("the", ["x"], 0.0, 0.0),
    ],
)
def test_the_best_of_the_right_answers_counts(answer, truths, em, score):
    assert exact_match(answer, truths) == em
    assert f1(answer, truths) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So <answer> Brendal\n</answer>.", "Brendal"),
        ("<answer>a</answer> no, <answer>b</answer>", "b"),
        ("<answer></answer>", None),
        ("<answer>open", None),
        ("Brendal", None),
    ],
)
def test_only_a_marked_answer_is_one(text, answer):
    assert marked_answer(text) == answer
