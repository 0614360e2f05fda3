"""Adapters alone are published into real servers, which serve them beside their model."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from random_adapters import RANK, adapters_of, write_adapters
from real_servers import (
    PROMPTS,
    SIZES,
    check_serves,
    generate,
    make_server,
    reference,
    running,
    score,
    spans,
    until_generating,
)
from transformers import AutoModelForCausalLM

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.device import resolve_device
from megasync.errors import SyncError
from megasync.layout.adapter_files import read_adapter
from megasync.layout.shards import ADAPTER_WEIGHTS
from megasync.serving.server import ServedAdapters
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.disk.adapters import AdapterFolders, AdapterSync
from megasync.sync.disk.writer import DiskWriter
from megasync.sync.stream import Shards

pytestmark = pytest.mark.real


class OneRank:
    """The only trainer rank, in this process; `TrainerRanks`. Its adapters are those of a PEFT folder."""

    def __init__(self, plan) -> None:
        self.layout = plan.layout
        self._params = {name: torch.zeros(shape) for name, shape in self.layout.params(0).items()}
        self._writer = DiskWriter(plan, Shards(self.layout, "float32", 0, self._params), resolve_device("cpu"))

    def load(self, peft) -> None:
        for name, values in read_adapter(peft, self.layout, 0).items():
            self._params[name].copy_(values)

    async def on_all(self, timeout, method, *args):
        return [await asyncio.to_thread(getattr(self._writer, method.__name__.removeprefix("disk_")), *args)]


@pytest.fixture(scope="module")
def folder(make_model, save_model, tmp_path_factory):
    """A model whose MLPs need no padding on two ranks of a server."""
    path = tmp_path_factory.mktemp("model")
    save_model(make_model(0, **SIZES | {"intermediate_size": 64}), path)
    return path


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Two random adapters, each as (PEFT folder, the model with it merged)."""
    made = []
    for seed in (1, 2):
        peft, merged = write_adapters(str(folder), tmp_path_factory.mktemp("adapters") / str(seed), seed)
        made.append((peft, AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()))
    return made


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """url(parts): the address of the server with so many ranks, which starts when it is first asked for."""
    served = ServedAdapters(RANK, adapters_of(folder).shape.targets, most=2)
    with ExitStack() as started:

        @cache
        def start(parts):
            server = make_server(folder, tmp_path_factory.mktemp("logs") / "log", parts)
            server.spec = replace(server.spec, adapters=served)
            return started.enter_context(running([server]))[0]

        yield start


@pytest.fixture
def parts():
    """The ranks of each server; a test may have others."""
    return 2, 1


@pytest.fixture
def world(folder, url, parts, control, tmp_path):
    """Makes (sync, rank, servers); only the first ``known`` servers belong to the sync."""
    servers = [control(url(count)) for count in parts]

    def make(mode="retract", known=2):
        plan = plan_broadcast(adapters_of(folder), 4096, "float32")
        assert len(plan.buckets) > 1
        rank, folders = OneRank(plan), AdapterFolders(tmp_path / "sync", folder, plan, keep=2)
        config, timeouts = SyncConfig(transport="adapters", pause_mode=mode), TimeoutConfig(weight_sync=60.0)
        return AdapterSync(servers[:known], rank, plan, folders, config, timeouts), rank, servers

    return make


async def loaded(server):
    return {model["id"] for model in (await server.get("/v1/models"))["data"] if model["id"].startswith("policy-")}


@pytest.mark.parametrize(
    ("mode", "parts", "first"),
    [
        pytest.param("retract", (1,), 10, marks=pytest.mark.standard),
        ("retract", (2, 1), 13),
        ("abort", (2, 1), 20),
    ],
)
async def test_a_request_ends_with_the_adapters_it_began_with(world, adapters, mode, first):
    sync, rank, servers = world(mode)
    (peft, model), (next_peft, next_model) = adapters
    rank.load(peft)
    second = first + 1
    report = await sync.publish(first)
    assert report.bytes < sum(p.numel() for p in model.parameters())
    assert "pause" not in report.seconds
    await check_serves(servers, model, first)
    rank.load(next_peft)
    running = [asyncio.create_task(generate(server, 400)) for server in servers]
    await until_generating(servers)
    await sync.publish(second)
    await check_serves(servers, next_model, second)
    for answer in await asyncio.gather(*running):
        assert answer["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
        assert spans(answer) == [str(first)] and answer["weight_version"] == str(first)
        prompt = [3, 4, 5] + [token for _, token, _ in answer["output_token_logprobs"]]
        ours = reference(model, prompt)[2:]
        assert [value for value, *_ in answer["output_token_logprobs"]] == pytest.approx(ours, abs=1e-4)
    # The next switch unloads the adapters that no request uses any more, up to the last two.
    await sync.publish(second + 1)
    for server in servers:
        while await loaded(server) != {f"policy-{second}", f"policy-{second + 1}"}:
            await asyncio.sleep(0.05)


async def test_damaged_adapters_are_refused_and_the_others_go_on(world, adapters):
    sync, rank, servers = world()
    (peft, model), (next_peft, next_model) = adapters
    rank.load(peft)
    await sync.publish(30)
    rank.load(next_peft)
    seal = sync._folders.seal

    def damaged(*args):
        folder = seal(*args)
        with (folder / ADAPTER_WEIGHTS).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
        return folder

    sync._folders.seal = damaged
    with pytest.raises(SyncError, match=r"version 31 .*'load' failed: .*has other bytes here.*the previous version"):
        await sync.publish(31)
    assert sync.quarantined == {}
    await check_serves(servers, model, 30)
    del sync._folders.seal
    await sync.publish(31)
    await check_serves(servers, next_model, 31)


async def test_a_late_server_gets_the_version_that_the_others_have(world, adapters):
    sync, rank, servers = world(known=1)
    rank.load(adapters[0][0])
    await sync.publish(40)
    rank.load(adapters[1][0])
    sync.add(servers[1])
    await sync.publish(40, only=[servers[1].url])
    await check_serves(servers, adapters[0][1], 40)
    # A request may name another adapter that a server holds, and none is as the model is.
    body = {"input_ids": PROMPTS[0], "return_logprob": True, "logprob_start_len": 0, "lora_path": "policy-40"}
    answer = await servers[0].post("/generate", body | {"sampling_params": {"max_new_tokens": 1}}, timeout=300)
    theirs = [value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
    assert theirs == pytest.approx(await score(servers[0], PROMPTS[0]), abs=1e-5)
