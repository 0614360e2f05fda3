"""Digit tasks: correct answers, partial credit, and splits that never share a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import DatasetConfig
from megasync.data.digits import CHARACTERS, TASKS, digit_reward, digit_rows
from megasync.errors import DataError


def rows(task="increment", split="train", size=50, seed=0, **options):
    return digit_rows(DatasetConfig(kind="digits", source=task, split=split, size=size, seed=seed, options=options))


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [("copy", ">1290=", "1290"), ("increment", "+1290=", "2301"), ("reverse", "<1290=", "0921")],
)
def test_each_digit_task_has_the_expected_answer(task, prompt, answer):
    found = {r["prompt"]: r["answer"] for split in ("train", "test") for r in rows(task, split, size=None)}
    assert found[prompt] == answer


@given(
    task=st.sampled_from(sorted(TASKS)),
    length=st.integers(3, 8),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    size=st.integers(1, 50),
)
def test_training_and_held_out_rows_are_disjoint_for_any_seeds(task, length, seeds, size):
    train = {r["prompt"] for r in rows(task, "train", size, seeds[0], length=length)}
    test = {r["prompt"] for r in rows(task, "test", size, seeds[1], length=length)}
    assert len(train) == len(test) == size
    assert not train & test


def test_the_two_splits_together_cover_every_number():
    every = [r["prompt"] for split in ("train", "test") for r in rows(split=split, size=None, length=3)]
    assert sorted(every) == [f"+{n:03d}=" for n in range(1000)]


def test_rows_are_determined_by_the_seed():
    assert rows(seed=1) == rows(seed=1) != rows(seed=2)


def test_every_character_of_a_row_has_a_token():
    assert all(set(r["prompt"] + r["answer"]) <= set(CHARACTERS) for task in TASKS for r in rows(task))


@pytest.mark.parametrize(
    ("completion", "finish", "reward"),
    [
        ("2301", "stop", 1.0),
        ("2301", "length", 0.8),  # correct digits, but no end token
        ("23015", "length", 0.8),
        ("230", "stop", 0.6),  # ended too early: three correct digits, and the end in the wrong position
        ("9301", "stop", 0.8),
        ("301", "stop", 0.0),
        ("", "stop", 0.0),
        ("?301", "stop", 0.8),  # non-digit tokens occupy a position
    ],
)
def test_the_reward_is_the_fraction_of_correct_positions(completion, finish, reward):
    assert digit_reward([completion], answer=["2301"], finish_reasons=[finish], prompt=["x"]) == [pytest.approx(reward)]


@given(st.text("0123456789=+?", max_size=8), st.text("0123456789", min_size=1, max_size=6), st.booleans())
def test_only_an_exact_match_with_a_stop_token_gets_the_full_reward(completion, answer, ended):
    (reward,) = digit_reward([completion], answer=[answer], finish_reasons=["stop" if ended else "length"])
    assert 0 <= reward <= 1
    assert (reward == 1.0) == (completion == answer and ended)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "sort"}, "unknown digit task 'sort'; the tasks are copy, increment, reverse"),
        ({"split": "dev"}, "splits train and test"),
        ({"digits": 4}, "no option 'digits'"),
        ({"length": 0}, "length must be a whole number from 1 to 12, got 0"),
        ({"length": "4"}, "length must be"),
        ({"length": 2, "size": 99}, "fewer than size=99"),
        ({"length": 5, "size": None}, "set size"),
        ({"length": 6, "size": 10**6}, "too large for 6 digits"),
    ],
)
def test_invalid_task_options_are_rejected(arguments, message):
    with pytest.raises(DataError, match=message):
        rows(**arguments)
