"""reasoning-gym rows: the package's verifier decides, and the splits share no question."""

import pickle

import pytest

from megasync.config.schema import DatasetConfig
from megasync.data import load_dataset
from megasync.errors import DataError
from megasync.integrations.reasoning_gym import EXTRACTORS

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}


def load(task="chain_sum", split="train", size=40, seed=0, **options):
    options = (SUMS if task == "chain_sum" else {}) | options
    return load_dataset(DatasetConfig("reasoning_gym", task, split=split, size=size, seed=seed, options=options))


def score(rows, reward, texts):
    return reward(texts, **{name: [row[name] for row in rows] for name in rows[0]})


def test_rows_carry_the_columns_that_the_verifier_needs():
    rows, reward = load()
    assert len({r["prompt"] for r in rows}) == 40
    assert score(rows, reward, [r["answer"] for r in rows]) == [1.0] * 40
    assert score(rows, reward, ["no idea"] * 40) == [0.0] * 40


def test_splits_share_no_question_even_for_adjacent_seeds():
    train = {r["prompt"] for r in load(split="train", size=300, seed=0)[0]}
    test = {r["prompt"] for r in load(split="test", size=60, seed=1)[0]}
    assert not train & test


def test_rows_are_determined_by_the_seed():
    assert load(seed=5)[0] == load(seed=5)[0] != load(seed=6)[0]


def test_only_lenient_scoring_gives_partial_credit():
    rows, strict = load(size=1)
    _, lenient = load(size=1, strict=False)
    nearly = [f"it is {rows[0]['answer']}"]
    assert score(rows, strict, nearly) == [0.0]
    assert 0 < score(rows, lenient, nearly)[0] < 1


@pytest.mark.parametrize(
    ("extract", "completion", "answer"),
    [
        ("first_line", " 12\n\nNext question", "12"),
        ("first_line", "\n 12", "12"),
        ("first_line", "", ""),
        ("last_line", "thinking\n 12 \n", "12"),
        ("tag", "so <answer>3</answer> no, <answer> 12 </answer>.", "12"),
        ("tag", "12", ""),
        ("all", " 12\n13 ", "12\n13"),
    ],
)
def test_each_extractor_finds_the_answer_in_the_completion(extract, completion, answer):
    assert EXTRACTORS[extract](completion) == answer


def test_the_reward_function_can_be_pickled():
    rows, reward = load(size=3)
    answers = [r["answer"] for r in rows]
    score(rows, reward, answers)
    assert score(rows, pickle.loads(pickle.dumps(reward)), answers) == [1.0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "chain_sun"}, "no task 'chain_sun'; did you mean 'chain_sum'"),
        ({"min_terms": 5}, "rejects its options.*max_terms must be >= min_terms"),
        ({"terms": 5}, "rejects its options.*unexpected keyword argument 'terms'"),
        ({"extract": "middle"}, "extract must be one of first_line"),
        ({"strict": "yes"}, "strict must be true or false"),
        ({"size": None}, "set size"),
        ({"split": "validation"}, "splits train and test"),
        ({"min_digits": 1, "max_digits": 1, "size": 500}, r"only \d+ distinct train questions"),
    ],
)
def test_invalid_task_options_are_rejected(arguments, message):
    with pytest.raises(DataError, match=message):
        load(**arguments)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'megasync\[tasks\]'"):
        load()
