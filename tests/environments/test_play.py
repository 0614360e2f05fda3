"""Playing an environment turn by turn through the client's chat gives trajectories with the episode's reward."""

from types import SimpleNamespace

import pytest
from trajectories import trajectory

from megasync.config.schema import EnvironmentConfig
from megasync.environments import Play
from megasync.errors import ConfigError, ContextLengthExceeded, DataError
from megasync.rollout.workflow import AGENT_FAILURES


class FakeClient:
    """Also its own conversation, of which only the last answer counts."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.conversation = self

    async def chat(self, messages, **options):
        self.asked.append([message["content"] for message in messages])
        self.text = self.answers.pop(0)
        return SimpleNamespace(text=self.text, messages=[*messages, {"role": "assistant", "content": self.text}])

    def trajectories(self, reward, metrics, turn_rewards):
        self.turn_rewards = turn_rewards
        return [trajectory(self.text, reward, metrics=metrics)]


async def play(client, sample, **config):
    workflow = Play.of(EnvironmentConfig(**config), deadline=20.0)
    try:
        return await workflow(client, sample)
    finally:
        await workflow.close()


async def test_observations_and_answers_alternate_and_the_episode_has_the_whole_reward():
    client = FakeClient("up", "wait", "up")
    (episode,) = await play(client, {"goal": 2}, kind="envs:AsyncCounter", system="Count.")
    assert (episode.text, episode.reward) == ("up", 1.0)
    assert client.turn_rewards == [0.0, 0.0, 1.0]
    first = client.asked[0][1]
    assert first.startswith("0 of 2")
    assert client.asked[-1] == ["Count.", first, "up", "1 of 2", "wait", "1 of 2"]
    assert episode.metrics == {"environment/turns": 3.0, "environment/finished": 1.0} | dict.fromkeys(
        AGENT_FAILURES, 0.0
    )


async def test_an_episode_without_end_is_ended():
    (episode,) = await play(FakeClient("wait", "wait", "wait"), {"goal": 2}, kind="envs:Counter", max_turns=2)
    assert episode.reward == 0.0
    assert (episode.metrics["environment/turns"], episode.metrics["environment/finished"]) == (2.0, 0.0)
    assert [name for name in AGENT_FAILURES if episode.metrics[name]] == ["turn_limit"]


class FullClient(FakeClient):
    async def chat(self, messages, **options):
        if not self.answers:
            raise ContextLengthExceeded("full")
        return await super().chat(messages, **options)


async def test_an_episode_whose_context_is_full_keeps_its_rewards_and_one_that_never_began_fails():
    client = FullClient("up", "up")
    (episode,) = await play(client, {"goal": 3}, kind="envs:AsyncCounter")
    assert (episode.metrics["context_full"], client.turn_rewards) == (1.0, [0.0, 0.0])
    with pytest.raises(ContextLengthExceeded):
        await play(FullClient(), {"goal": 2}, kind="envs:AsyncCounter")


@pytest.mark.parametrize("score_late", [True, False])
async def test_a_step_without_an_answer_ends_the_episode_only_where_it_is_to_be_scored(score_late):
    client = FakeClient("up", "sleep")
    workflow = Play.of(EnvironmentConfig(kind="envs:AsyncCounter"), deadline=0.5, score_late=score_late)
    if not score_late:
        with pytest.raises(DataError, match=r"step did not answer within 0\.5 s"):
            await workflow(client, {"goal": 2})
        return
    (episode,) = await workflow(client, {"goal": 2})
    assert [name for name in AGENT_FAILURES if episode.metrics[name]] == ["deadline"]
    assert client.turn_rewards == [0.0, 0.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "envs:Halfway"}, "'envs:Halfway' has no step, close"),
        ({"kind": "envs:Counter", "options": {"speed": 2}}, "'envs:Counter' rejects its options.*speed"),
        ({"kind": "reasoning_gym"}, "'reasoning_gym' rejects its options.*task"),
        ({"kind": "gym"}, "'gym' does not name a function"),
    ],
)
def test_an_invalid_environment_configuration_is_refused_at_start(config, message):
    with pytest.raises(ConfigError, match=message):
        Play.of(EnvironmentConfig(**config), deadline=1.0)
