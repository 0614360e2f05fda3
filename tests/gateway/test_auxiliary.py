"""Requests to an auxiliary model through the gateway: answered by its servers, and never trained."""

import pytest
from gateway_rig import HI, openai
from openai import BadRequestError

from megasync.config.schema import AuxiliaryModelConfig
from megasync.errors import ServerError
from megasync.rollout.auxiliary import AuxiliaryModel
from megasync.serving.frozen_client import FrozenModelClient


class FakeServer:
    url = "http://refiner"

    def __init__(self, answer):
        self.answer, self.bodies = answer, []

    async def post(self, path, body, timeout):
        self.bodies.append(body)
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"text": self.answer}


@pytest.fixture
def refiner(rig):
    """Adds the model `refiner` to the rig's client; the server that answers for it."""
    server, client = FakeServer("the Ossa"), FrozenModelClient("auxiliary model 'refiner'", 8, 0.3)
    client.add_server(server)
    config = AuxiliaryModelConfig("m", max_new_tokens=9)
    rig.client.auxiliary["refiner"] = AuxiliaryModel("auxiliary_models.refiner", config, rig.tokenizer, client, 1000)
    return server


def asking(**request):
    """An agent that asks the refiner and shows its answer to the model in training."""

    async def agent(base_url, api_key, sample, model):
        async with openai(base_url, api_key) as client:
            notes = await client.chat.completions.create(model="refiner", messages=HI, **request)
            text = notes.choices[0].message.content
            await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
            return {"reward": 1.0, "models": len((await client.models.list()).data)}

    return agent


async def test_its_answer_is_an_observation_and_its_sampling_is_the_requests_own(rig, refiner):
    rig.write("yes")
    (trajectory,) = await rig.play(asking(temperature=0.5, max_tokens=4, stop="."))
    assert "user: the Ossa" in rig.sent()
    assert trajectory.text == "yes"
    assert trajectory.metrics["models"] == 2.0
    assert len(rig.fake.requests) == 1
    (body,) = refiner.bodies
    assert body["sampling_params"] == {"max_new_tokens": 4, "temperature": 0.5, "stop": ["."]}
    assert rig.tokenizer.decode(body["input_ids"]).endswith("user: hi<eos><bos>assistant: ")


@pytest.mark.parametrize("unsupported", [{"stream": True}, {"logprobs": True}])
async def test_what_only_the_model_in_training_supports_is_refused(rig, refiner, unsupported):
    with pytest.raises(BadRequestError, match=f"auxiliary model 'refiner' does not support {next(iter(unsupported))}"):
        await rig.play(asking(**unsupported))
    assert refiner.bodies == []


async def test_an_outage_of_its_servers_repeats_the_sample(rig, refiner):
    refiner.answer = ServerError("gone")
    with pytest.raises(ServerError, match="refiner' gave no answer within 0.3 s"):
        await rig.play(asking())
