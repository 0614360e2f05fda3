"""Several training sets: shares of draws, resumed cursors, and the reward of each row's own set."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import DatasetConfig, PromptConfig, TrainSetConfig
from megasync.data import PromptSource, Renderer, load_training_sets
from megasync.data.digits import digit_reward
from megasync.data.prompts import Mixture
from megasync.errors import DataError
from megasync.starters.digits import digits_tokenizer

RENDERER = Renderer(digits_tokenizer(), PromptConfig(), 16)
WEIGHTS = st.lists(st.integers(1, 9) | st.sampled_from([0.5, 0.25, 1.5]), min_size=1, max_size=8)


@given(weights=WEIGHTS, count=st.integers(0, 300))
def test_every_prefix_has_each_set_within_a_draw_of_its_share(weights, count):
    mixture, seen = Mixture(weights), Counter()
    for number in range(count):
        assert mixture.drawn(number) == [seen[each] for each in range(len(weights))]
        chosen, earlier = mixture.at(number)
        assert earlier == seen[chosen]
        seen[chosen] += 1
        for each, weight in enumerate(weights):
            assert abs(seen[each] - (number + 1) * weight / sum(weights)) < 1


@pytest.mark.parametrize("weights", [[1e-9, 1.0], [1.0, 1e9 + 0.5]])
def test_weights_that_are_too_far_apart_are_refused(weights):
    with pytest.raises(DataError, match="too far apart"):
        Mixture(weights)


def source(sizes, shuffle=True):
    rows = [{"prompt": str(n), "answer": n} for n in range(sum(size for size, _ in sizes))]
    return PromptSource(rows, RENDERER, shuffle, 0, sizes)


def test_each_set_has_epochs_of_its_own():
    prompts = source([(2, 1.0), (4, 2.0)], shuffle=False)
    uids = [prompts.next().uid for _ in range(9)]
    small = [uid for uid in uids if int(uid.split(":")[1]) < 2]
    assert small == ["0:0", "0:1", "1:0"]
    assert [uid for uid in uids if uid not in small] == ["0:2", "0:3", "0:4", "0:5", "1:2", "1:3"]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=2, max_size=3),
    first=st.integers(0, 30),
    admitted=st.lists(st.integers(0, 60), unique=True, max_size=12),
)
def test_a_resumed_source_serves_what_was_not_admitted_and_nothing_twice(sizes, first, admitted):
    """Of 90 draws, some of which were admitted after the state was taken."""
    whole = source(sizes)
    expected = [whole.next().uid for _ in range(90)]
    prompts = source(sizes)
    for _ in range(first):
        prompts.admitted(prompts.next().uid)
    state = json.loads(json.dumps(prompts.state()))
    done = {expected[number] for number in admitted if number >= first}
    resumed = source(sizes)
    resumed.restore(state)
    resumed.skip(done)
    rest = [resumed.next().uid for _ in range(90 - first - len(done))]
    assert rest == [uid for uid in expected[first:] if uid not in done]


def digits(task, size, weight=1.0):
    return TrainSetConfig(DatasetConfig("digits", task, size=size, options={"length": 2}), weight)


def of_file(path, **row):
    path.write_text(json.dumps(row))
    return TrainSetConfig(DatasetConfig("jsonl", str(path)))


def test_rows_know_their_set_and_share_a_reward():
    rows, reward, sizes = load_training_sets({"up": digits("increment", 3, 2.0), "same": digits("copy", 5)})
    assert [row["train_set"] for row in rows] == ["up"] * 3 + ["same"] * 5
    assert (sizes, reward) == ([(3, 2.0), (5, 1.0)], digit_reward)


async def test_each_set_has_its_own_reward(tmp_path):
    sums = of_file(tmp_path / "rows.jsonl", prompt="1+1", answer="2")
    rows, reward, _ = load_training_sets({"same": digits("copy", 2), "sums": sums})
    assert reward is not None
    columns = {name: [value] for name, value in rows[0].items()}
    assert await reward([rows[0]["answer"]], **columns, finish_reasons=["stop"]) == [1.0]
    assert await reward(["so it is\n2"], prompt=["1+1"], answer=["2"], train_set=["sums"]) == [1.0]


def test_a_set_without_a_verifier_needs_a_reward_and_the_column_must_be_free(tmp_path):
    unscored = of_file(tmp_path / "rows.jsonl", prompt="1+1")
    assert load_training_sets({"a": digits("copy", 2), "b": unscored})[1] is None
    taken = of_file(tmp_path / "rows.jsonl", prompt="1+1", train_set="x")
    with pytest.raises(DataError, match="data.sets.b has a column 'train_set'"):
        load_training_sets({"b": taken})
