"""The source: at any point of a run, restoring and requeueing unfinished prompts serves every prompt exactly once."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import PromptConfig
from megasync.data import PromptSource, Renderer, render_rows
from megasync.errors import DataError
from megasync.starters.digits import digits_tokenizer

RENDERER = Renderer(digits_tokenizer(), PromptConfig(), 16)


def source(rows, shuffle=True, seed=0):
    return PromptSource([{"prompt": str(n), "answer": n} for n in range(rows)], RENDERER, shuffle, seed)


def take(prompts, count):
    return [prompts.next().uid for _ in range(count)]


def epochs(rows, count):
    return {f"{epoch}:{row}" for epoch in range(count) for row in range(rows)}


@given(rows=st.integers(1, 12), count=st.integers(1, 4), shuffle=st.booleans(), seed=st.integers(0, 5))
def test_each_epoch_contains_each_row_once_under_a_unique_uid(rows, count, shuffle, seed):
    uids = take(source(rows, shuffle, seed), rows * count)
    for epoch in range(count):
        assert {uid for uid in uids[epoch * rows : (epoch + 1) * rows]} == {f"{epoch}:{row}" for row in range(rows)}


def test_prompts_follow_the_file_order_or_a_shuffle_determined_by_the_seed():
    assert take(source(4, shuffle=False), 5) == ["0:0", "0:1", "0:2", "0:3", "1:0"]
    assert take(source(50, seed=1), 50) == take(source(50, seed=1), 50) != take(source(50, seed=2), 50)
    shuffled = take(source(50), 100)
    assert [uid.split(":")[1] for uid in shuffled[:50]] != [uid.split(":")[1] for uid in shuffled[50:]]


@given(
    rows=st.integers(1, 7),
    actions=st.lists(st.sampled_from(["draw", "admit", "finish", "checkpoint"]), max_size=60),
    late=st.integers(0, 3),
)
def test_restore_and_requeue_serve_every_prompt_once_after_any_sequence_of_actions(rows, actions, late):
    """`late` prompts are drawn and admitted between the cursor's state and the list of live prompts."""
    prompts, drawn, live, trained = source(rows), [], [], []

    def step(action):
        if action == "draw":
            drawn.append(prompts.next().uid)
        elif action == "admit" and drawn:
            live.append(drawn.pop(0))
            prompts.admitted(live[-1])
        elif action == "finish" and live:
            trained.append(live.pop(len(live) // 2))

    for action in actions:
        if action != "checkpoint":
            step(action)
            continue
        state = json.loads(json.dumps(prompts.state()))
        for _ in range(late):
            step("draw")
            step("admit")
        prompts = source(rows)
        prompts.restore(state)
        prompts.requeue(live)
        drawn, live = [], []

    drawn_again = take(prompts, 5 * rows)
    served = Counter(trained + live + drawn + drawn_again)
    assert set(served.values()) <= {1}
    whole = max(1, len(served) // rows - 1)
    assert epochs(rows, whole - 1) <= set(served)


def test_requeued_prompts_are_served_first_in_order_and_only_once():
    prompts = source(5, shuffle=False)
    take(prompts, 3)
    for uid in ("0:0", "0:1", "0:2"):
        prompts.admitted(uid)
    prompts.requeue(["0:2", "0:0", "0:2"])
    prompts.requeue(["0:0"])
    assert take(prompts, 4) == ["0:2", "0:0", "0:3", "0:4"]


@given(rows=st.integers(1, 7), drawn=st.integers(0, 30), cursor=st.integers(0, 10), seed=st.integers(0, 3))
def test_skip_omits_exactly_the_admitted_prompts(rows, drawn, cursor, seed):
    """Restores any earlier cursor. Some of the prompts that it had drawn were admitted later, some were not."""
    prompts = source(rows, seed=seed)
    take(prompts, cursor)
    state = json.loads(json.dumps(prompts.state()))
    admitted = take(source(rows, seed=seed), drawn)
    again = source(rows, seed=seed)
    again.restore(state)
    again.skip(admitted)
    everything = take(source(rows, seed=seed), max(drawn, cursor) + 10)
    expected = [uid for uid in everything if uid not in admitted]
    assert take(again, len(expected)) == expected


def test_prompts_carry_ids_and_columns_and_can_be_fetched_again():
    prompts = source(3)
    prompt = prompts.next()
    row = int(prompt.uid.split(":")[1])
    assert (prompt.prompt_ids, prompt.columns) == ([row], {"prompt": str(row), "answer": row})
    prompt.prompt_ids.append(99)
    assert prompts.get(prompt.uid).prompt_ids == [row]


def test_evaluation_prompts_keep_the_order_of_the_rows():
    prompts = render_rows([{"prompt": "7"}, {"prompt": "3"}], RENDERER)
    assert [(p.uid, p.prompt_ids, p.columns) for p in prompts] == [
        ("0", [7], {"prompt": "7"}),
        ("1", [3], {"prompt": "3"}),
    ]


def test_an_empty_source_a_mismatched_state_and_invalid_uids_are_rejected():
    with pytest.raises(DataError, match="at least one row"):
        source(0)
    with pytest.raises(DataError, match="over 4 rows, the dataset has 3"):
        source(3).restore(source(4).state())
    for uid in ("0:3", "-1:0", "x", "0"):
        with pytest.raises(DataError, match="uid"):
            source(3).get(uid)
