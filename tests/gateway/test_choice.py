"""How a run selects its agent, and what that requires."""

import pytest
from tiny_models import byte_tokenizer

from megasync.app.workload import PythonArguments, load_workflow
from megasync.config import Config
from megasync.errors import ConfigError
from megasync.gateway import AgentWorkflow


@pytest.fixture
def config():
    config = Config()
    config.model.path = "models/tiny"
    return config


def own(base_url, api_key, sample, model):
    return 1.0


async def rollout(client, sample):
    return []


def test_an_agent_passed_by_the_caller_overrides_the_configured_agent(config):
    config.rollout.agent = "openai_agent:play"
    configured = load_workflow(config, PythonArguments(), byte_tokenizer())
    callers = load_workflow(config, PythonArguments(agent=own), byte_tokenizer())
    assert isinstance(configured, AgentWorkflow) and isinstance(callers, AgentWorkflow)
    assert (configured.__name__, callers.__name__) == ("play", "own")


def test_a_rollout_function_passed_by_the_caller_overrides_the_configured_agent(config):
    config.rollout.agent = "openai_agent:play"
    assert load_workflow(config, PythonArguments(rollout=rollout), byte_tokenizer()) is rollout


def test_an_agent_requires_a_model_with_a_chat_template(config):
    with pytest.raises(ConfigError, match=r"model\.path='models/tiny' has no chat template"):
        load_workflow(config, PythonArguments(agent=own), byte_tokenizer(chat_template=None))
