"""The agent's reward in games against a model that says what the test tells it to: `pytest` in this folder."""

import asyncio

import agent
import pytest
from openai.types.chat import ChatCompletionMessage


class Model:
    """Stands in for the client of OpenAI's API: it answers with the given guesses, one after the other."""

    def __init__(self, guesses):
        self.guesses = list(guesses)
        self.asked = []
        self.chat = self.completions = self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def create(self, model, messages):
        self.asked.append(messages[-1]["content"])
        self.message = ChatCompletionMessage(role="assistant", content=self.guesses.pop(0))
        self.choices = [self]
        return self


@pytest.fixture
def play(monkeypatch):
    def game(*guesses):
        model = Model(guesses)
        monkeypatch.setattr(agent, "AsyncOpenAI", lambda **address: model)
        return asyncio.run(agent.agent("http://nowhere", "key", {"prompt": "Begin.", "number": 7}, "model")), model

    return game


@pytest.mark.parametrize(
    ("guesses", "reward"), [(["7"], 1.0), (["It is 5.", "7"], 0.75), (["1", "2", "3", "7"], 0.25), (["1"] * 4, 0.0)]
)
def test_the_reward_falls_with_each_guess(play, guesses, reward):
    result, _ = play(*guesses)
    assert result == {"reward": reward, "guesses": len(guesses)}


def test_the_model_is_told_where_the_number_lies(play):
    _, model = play("5", "9", "a number", "7")
    assert model.asked[1:] == ["higher", "lower", "That is no number."]
