"""Frozen models on real servers: a classifier in a pool of its own, a judge on the devices of the rollout pool, and an
auxiliary model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from tiny_models import make_tiny_classifier, make_tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from waits import PATIENCE

from megasync.cluster.frozen_servers import FrozenServers
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import pool_specs
from megasync.config.schema import AuxiliaryModelConfig, HealthConfig, PrometheusConfig, RewardModelConfig
from megasync.device import resolve_device
from megasync.observe.context import RunContext
from megasync.rewards.model_reward import ModelReward, load_model_reward
from megasync.rollout.auxiliary import AuxiliaryModel, load_auxiliary_models
from megasync.serving.control import ServerControl

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

# Seconds for a server to restart on a busy machine.
SMALL = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.3}
ROWS = {"prompt": ["What is 2 + 3?", "Name a colour.", "Name a colour."], "answer": ["5", "red", "red"]}
COMPLETIONS = ["It is 5.", "blue", "I would rather not say which one I like best."]


class Users:
    """The models' clients as those of a rollout worker."""

    def __init__(self, clients, keys):
        self._clients, self._keys = clients, keys

    def add_server(self, model: str, url: str) -> None:
        self._clients[model].add_server(ServerControl(url, self._keys.admin))

    def remove_server(self, model: str, url: str) -> None:
        self._clients[model].remove_server(url)


@dataclass
class Rig:
    config: Config
    servers: FrozenServers
    rewards: dict[str, ModelReward]
    refiner: AuxiliaryModel
    pools: Pools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("reward-models")
    config = Config()
    config.model.dtype = "float32"
    config.rollout.servers = 1
    config.rollout.mem_fraction = 0.3
    config.rollout.health = HealthConfig(
        probe_seconds=0.5, probe_timeout=3.0, request_seconds=1.0, request_timeout=10.0
    )
    config.observe.prometheus = PrometheusConfig()
    config.reward_models = {
        "grader": RewardModelConfig(
            kind="classifier", path=str(make_tiny_classifier(folder / "grader", labels=2)), label=1, **SMALL
        ),
        "judge": RewardModelConfig(
            kind="generative",
            path=str(make_tiny_model(folder / "judge", "qwen3", seed=5)),
            pool="rollout",
            read="yes_no",
            yes_token="Y",
            no_token="N",
            template="{prompt} {completion} {answer}?",
            **SMALL,
        ),
    }
    config.auxiliary_models = {
        "refiner": AuxiliaryModelConfig(str(make_tiny_model(folder / "refiner", "qwen3", seed=6)), **SMALL)
    }
    rewards = {name: load_model_reward(name, model, PATIENCE) for name, model in config.reward_models.items()}
    specs = pool_specs(config, training=False)
    assert set(specs) == {"rollout", "reward-grader", "auxiliary-refiner"}
    cluster = RayCluster(config, devices_needed=3)
    cluster.connect()
    pools = Pools(specs, "cpu")
    refiner = load_auxiliary_models(config)["refiner"]
    clients = {f"reward_models.{name}": reward for name, reward in rewards.items()}
    clients["auxiliary_models.refiner"] = refiner
    keys = Keys("admin-key-of-this-test", "router-key")
    servers = FrozenServers(config, folder, resolve_device("cpu"), pools, keys, Users(clients, keys), RunContext())
    try:
        await pools.create(60)

        async def no_gpus(index: int) -> str:
            raise AssertionError("GPUs requested on a CPU")

        await asyncio.gather(servers.start("own"), servers.start("rollout", no_gpus))
        yield Rig(config, servers, rewards, refiner, pools)
    finally:
        await servers.stop()
        pools.remove()
        cluster.close()
        assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def chat_ids(path: str, messages: list[dict], answering: bool) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


async def test_a_classifiers_score_is_that_of_hugging_face(rig):
    path = rig.config.reward_models["grader"].path
    model = AutoModelForSequenceClassification.from_pretrained(path)
    expected = []
    for prompt, completion in zip(ROWS["prompt"], COMPLETIONS, strict=True):
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        with torch.no_grad():
            expected.append(float(model(chat_ids(path, messages, False)).logits[0, 1]))
    assert await rig.rewards["grader"](COMPLETIONS, **ROWS) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 1e-2, "equal scores would prove nothing"


async def test_a_judges_yes_is_weighed_against_its_no_as_by_hugging_face(rig):
    path = rig.config.reward_models["judge"].path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    yes, no = (tokenizer(word)["input_ids"][0] for word in "YN")
    expected = []
    for prompt, completion, answer in zip(ROWS["prompt"], COMPLETIONS, ROWS["answer"], strict=True):
        ids = chat_ids(path, [{"role": "user", "content": f"{prompt} {completion} {answer}?"}], True)
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        expected.append(float(logits[[yes, no]].softmax(-1)[0]))
    assert await rig.rewards["judge"](COMPLETIONS, **ROWS) == pytest.approx(expected, abs=1e-4)


async def test_a_judge_that_writes_no_number_and_a_text_that_is_too_long_give_none_and_are_counted(rig):
    settings = RewardModelConfig(
        rig.config.reward_models["judge"].path,
        kind="generative",
        pattern="never written",
        max_new_tokens=4,
        context_length=400,
    )
    judge = load_model_reward("judge", settings, 60.0)
    for server in rig.rewards["judge"]._running:
        judge.add_server(server)
    assert await judge(["short", "long" * 100], prompt=["p", "p"]) == [None, None]
    assert (judge.metrics()["unread"], judge.metrics()["too_long"]) == (1.0, 1.0)


async def test_an_auxiliary_model_writes_what_hugging_face_writes(rig):
    path = rig.config.auxiliary_models["refiner"].path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "Which river?"}]
    ids = chat_ids(path, messages, True)
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(written, skip_special_tokens=True)
    assert await rig.refiner.chat(messages, max_new_tokens=8) == expected


async def test_each_server_shows_its_metrics_to_prometheus_without_a_key(rig):
    urls = rig.servers.metrics_urls()
    assert sorted(urls) == ["auxiliary-refiner-0", "reward-grader-0", "reward-judge-0"]
    async with httpx.AsyncClient() as client:
        for url in urls.values():
            answer = await client.get(url)
            assert answer.status_code == 200 and "sglang" in answer.text


async def test_requests_survive_killed_servers(rig):
    messages = [{"role": "user", "content": "Which river?"}]

    async def answers():
        return await asyncio.gather(
            rig.rewards["grader"](COMPLETIONS, **ROWS), rig.refiner.chat(messages, max_new_tokens=4)
        )

    scores, text = await answers()
    victim(rig, "reward_models.grader").kill()
    victim(rig, "auxiliary_models.refiner").kill()
    again = await asyncio.wait_for(answers(), PATIENCE)
    assert (again[0], again[1]) == (pytest.approx(scores, abs=1e-4), text)
    await rig.servers.watch()
    metrics = rig.servers.metrics()
    for model in ("reward_models/grader", "auxiliary_models/refiner"):
        assert (metrics[f"{model}/servers"], metrics[f"{model}/restarts"]) == (1.0, 1.0)
    assert metrics["reward_models/judge/restarts"] == 0.0


def victim(rig: Rig, key: str) -> psutil.Process:
    """The model's server itself: the supervisor's child."""
    (slot,) = rig.servers._slots[key]
    port = str(urlsplit(slot.url).port)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if port in words and any(word.endswith("supervisor.py") for word in words):
            return process.children()[0]
    raise AssertionError(f"no server of {key} at port {port}")
