"""Auxiliary models: what their servers are asked, and how a workflow reaches them by name. No server."""

from __future__ import annotations

import pytest
from tiny_models import byte_tokenizer, make_tiny_model

from megasync.config import Config
from megasync.config.schema import AuxiliaryModelConfig
from megasync.errors import ConfigError, DataError, ServerError
from megasync.rollout.auxiliary import AuxiliaryModel, load_auxiliary_models
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "Which river?"}]


class FakeServer:
    """Answers every request with `answer`, and keeps the requests."""

    def __init__(self, answer, url="http://a"):
        self.url, self.answer, self.bodies = url, answer, []

    async def post(self, path, body, timeout):
        assert path == "/generate"
        self.bodies.append(body)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def model_of(server, context_length=1000, timeout=5.0, **settings):
    model = AuxiliaryModel("refiner", AuxiliaryModelConfig("m", **settings), TOKENIZER, context_length, timeout)
    if server is not None:
        model.add_server(server)
    return model


async def test_messages_go_through_the_models_own_chat_template():
    server = FakeServer({"text": "the Ossa", "meta_info": {}})
    model = model_of(server, max_new_tokens=9)
    assert await model.chat(QUESTION) == "the Ossa"
    assert await model.chat(QUESTION, temperature=0.5, stop=["."]) == "the Ossa"
    first, second = server.bodies
    expected = TOKENIZER.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(first["input_ids"]) == expected
    assert first["sampling_params"] == {"max_new_tokens": 9, "temperature": 0.0}
    assert second["sampling_params"] == {"max_new_tokens": 9, "temperature": 0.5, "stop": ["."]}
    assert model.metrics()["requests"] == 2.0


async def test_a_text_beyond_the_context_is_refused_before_it_is_sent():
    server = FakeServer({"text": ""})
    with pytest.raises(DataError, match=r"auxiliary_models.refiner: \d+ tokens and an answer of up to 90 exceed.* 100"):
        await model_of(server, context_length=100, max_new_tokens=90).chat(QUESTION)
    assert server.bodies == []


async def test_names_of_special_tokens_and_halves_of_characters_in_messages_are_text():
    server = FakeServer({"text": "x"})
    await model_of(server).chat([{"role": "user", "content": [{"type": "text", "text": "<eos>\ud800"}]}])
    ids = server.bodies[0]["input_ids"]
    assert TOKENIZER.eos_token_id not in ids
    assert "<eos>\ufffd" in TOKENIZER.decode(ids)


@pytest.mark.parametrize("answer", [{"output": "x"}, ServerError("gone")])
async def test_a_server_without_an_answer_is_an_outage(answer, endless_pause):
    with pytest.raises(ServerError, match="auxiliary model 'refiner' gave no answer within 5 s"):
        await model_of(FakeServer(answer)).chat(QUESTION)


async def test_a_workflow_asks_by_name_and_its_trajectory_stays_empty():
    served = ServedModel(256, 1000, TOKENIZER)
    models = {"refiner": model_of(FakeServer({"text": "the Ossa"}))}
    client = RolloutClient("http://router", [], served, RequestSettings.of(Config()), auxiliary=models)
    sample = SampleClient(client, RequestGate(), routing_key="0:0")
    assert await sample.ask("refiner", QUESTION) == "the Ossa"
    assert sample.conversation.generations == []
    with pytest.raises(DataError, match="no auxiliary model 'refner'; auxiliary_models has refiner"):
        await sample.ask("refner", QUESTION)


def test_models_are_loaded_by_their_names(tmp_path):
    config = Config()
    config.auxiliary_models = {"refiner": AuxiliaryModelConfig(str(make_tiny_model(tmp_path / "m", "qwen3")))}
    assert list(load_auxiliary_models(config)) == ["refiner"]
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"auxiliary_models.refiner cannot answer chat messages: .*no chat template"):
        load_auxiliary_models(config)
