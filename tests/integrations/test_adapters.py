"""The adapters, with the real libraries."""

import pytest

from megasync.config.schema import DatasetConfig
from megasync.data import load_dataset
from megasync.errors import DataError
from megasync.integrations.gymnasium_text import ACTIONS, GymnasiumText
from megasync.integrations.reasoning_gym import ReasoningGymTask


def test_a_reasoning_gym_task_asks_its_question_and_judges_the_answer():
    rows, _ = load_dataset(DatasetConfig(kind="reasoning_gym", source="chain_sum", size=3))
    task = ReasoningGymTask("chain_sum")
    for row in rows:
        assert task.reset(row) == row["prompt"]
        assert task.step(f"Let me see. <answer>{row['answer']}</answer>") == ("", 1.0, True)
        assert task.step("<answer>no</answer>") == ("", 0.0, True)
    with pytest.raises(DataError, match="no answer, metadata"):
        task.reset({"prompt": "1 + 1"})


def test_gymnasium_actions_are_parsed_from_text():
    lake = GymnasiumText("FrozenLake-v1", is_slippery=False)
    assert lake.reset({"seed": 1}) == "[S]FFF\nFHFH\nFFFH\nHFFG\n\nActions: left, down, right, up."
    assert lake.step("swim") == ("That names no action. Actions: left, down, right, up.", 0.0, False)
    walk = ["down", "Down!", "not left, but RIGHT", "right", "down", "right"]
    steps = [lake.step(action) for action in walk]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * 5 + [(1.0, True)]
    assert steps[-1].observation.endswith("HFF[G]")
    lake.reset({"seed": 1})
    assert [lake.step(action).done for action in ("right", "down")] == [False, True]
    lake.close()


def test_a_seed_or_else_the_prompt_decides_how_an_episode_begins():
    table = GymnasiumText("Blackjack-v1")
    begin = {prompt: table.reset({"prompt": prompt}) for prompt in "abcdefgh"}
    assert all(table.reset({"prompt": prompt}) == begin[prompt] for prompt in begin)
    assert len(set(begin.values())) > 1
    assert table.reset({"seed": 7, "prompt": "a"}) == table.reset({"seed": 7, "prompt": "b"})
    assert begin["a"].startswith("(") and begin["a"].endswith("Actions: stick, hit.")


@pytest.mark.parametrize("name", ACTIONS)
def test_the_action_names_fit_the_environments(name):
    version = {"Taxi": "v4", "CliffWalking": "v1"}.get(name, "v1")
    environment = GymnasiumText(f"{name}-{version}")
    assert ACTIONS[name][-1] in environment.reset({"seed": 1})
    environment.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenPond-v1"}, "gymnasium rejects the environment 'FrozenPond-v1'"),
        ({"id": "FrozenLake-v1", "depth": 3}, "gymnasium rejects.*depth"),
        ({"id": "Pendulum-v1"}, "only a discrete choice"),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, "has 4 actions, but actions=.* names 1"),
    ],
)
def test_invalid_environment_options_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        GymnasiumText(**options)
