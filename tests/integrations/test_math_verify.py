"""Answers are compared as mathematics; a response whose reference cannot be parsed is not scored."""

import threading
import time

import pytest
from math_verify import grader

from megasync.errors import DataError
from megasync.integrations import math_verify as math_rewards
from megasync.integrations.math_verify import math_reward


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        (r"So the answer is \boxed{34}.", "34", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The total is 3 + 4 = 7, so the answer is $7$.", "7", 1.0),
        (r"\boxed{35}", "34", 0.0),
        ("no idea", "34", 0.0),
        ("", "34", 0.0),
    ],
)
def test_a_final_answer_is_compared_by_value(completion, reference, reward):
    assert math_reward([completion], solution=[reference], ability=["math"]) == [reward]


def test_the_answer_column_takes_precedence_over_the_solution():
    assert math_reward([r"\boxed{1}"], answer=["1"], solution=["a long derivation"]) == [1.0]


def test_a_response_with_an_unparsable_reference_is_not_scored(caplog):
    assert math_reward([r"\boxed{1}"], answer=[r"\text{}"]) == [None]
    assert "cannot be parsed" in caplog.text


def test_rows_without_a_reference_are_an_error_that_names_their_columns():
    with pytest.raises(DataError, match="answer or a solution.*ability"):
        math_reward(["1"], ability=["math"])


def test_it_works_outside_the_main_thread():
    """Signals, which the package's own timeouts use, do not work there."""
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(math_reward([r"\boxed{2}"], answer=["2"])))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_an_endless_comparison_is_stopped_and_the_answer_counts_as_wrong(monkeypatch):
    """The comparison really hangs; the package's alarm interrupts it, because this is the main thread."""
    monkeypatch.setattr(math_rewards, "TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(grader, "sympy_expr_eq", lambda *arguments, **options: time.sleep(600))
    assert math_reward([r"\boxed{x+1}"], answer=["x+2"]) == [0.0]


def test_a_missing_reference_is_not_scored_and_a_cut_off_guess_is_wrong():
    assert math_reward([r"\boxed{1}"] * 3, answer=[None, float("nan"), ""]) == [None] * 3
    assert math_reward(["so it may be 1"], answer=["1"], finish_reasons=["length"]) == [0.0]
