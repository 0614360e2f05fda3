"""Mathematics is compared as mathematics; what cannot be judged is left unscored."""

import threading
import time

import pytest
from math_verify import grader

from megasync.errors import DataError
from megasync.rewards import math_reward as math_rewards
from megasync.rewards.math_reward import math_reward


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
def test_a_final_answer_counts_by_its_value(completion, reference, reward):
    assert math_reward([completion], solution=[reference], ability=["math"]) == [reward]


def test_the_answer_column_goes_before_the_solution():
    assert math_reward([r"\boxed{1}"], answer=["1"], solution=["a long derivation"]) == [1.0]


def test_a_reference_that_is_no_mathematics_leaves_the_response_unscored(caplog):
    assert math_reward([r"\boxed{1}"], answer=[""]) == [None]
    assert "cannot be parsed" in caplog.text


def test_rows_without_a_reference_are_an_error_that_names_their_columns():
    with pytest.raises(DataError, match="answer or a solution.*ability"):
        math_reward(["1"], ability=["math"])


def test_it_works_outside_the_main_thread():
    """Where signals, and so the package's own timeouts, do not exist."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(math_reward([r"\boxed{2}"], answer=["2"])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_an_answer_that_takes_for_ever_is_stopped_and_counts_as_wrong(monkeypatch):
    """The comparison hangs for real; the package's alarm reaches it here, on the main thread."""
    monkeypatch.setattr(math_rewards, "TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(grader, "sympy_expr_eq", lambda *arguments, **options: time.sleep(600))
    assert math_reward([r"\boxed{x+1}"], answer=["x+2"]) == [0.0]
