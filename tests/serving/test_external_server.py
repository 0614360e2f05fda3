"""What is refused of a server that somebody else has started; its answers are written by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version

import pytest
from aiohttp import web

from megasync.config import Config
from megasync.serving import external_server
from megasync.serving.external_server import ExternalServer, misfits
from megasync.starters.fetch import fetch

INFO = {
    "version": version("sglang"),
    "dtype": "float32",
    "tp_size": 1,
    "ep_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "disaggregation_mode": "null",
    "incremental_streaming_output": True,
    "enable_deterministic_inference": False,
    "context_length": None,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = Config()
    config.model.path = str(fetch("digits", tmp_path_factory.mktemp("model") / "digits"))
    config.model.dtype = "float32"
    return config


@pytest.fixture(scope="module")
def model(config: Config) -> dict[str, str]:
    return {"model_type": "qwen3", "model_path": config.model.path}


def test_a_server_that_was_started_for_the_run_fits(config: Config, model: dict) -> None:
    assert [*misfits(INFO, model, config)] == []
    assert [*misfits(INFO | {"dtype": "auto", "context_length": 10**6}, model, config)] == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": "0.1.0"}, "runs SGLang 0.1.0, but this run needs"),
        ({"dtype": "bfloat16"}, "start it with --dtype float32"),
        ({"tp_size": 2}, "has 2 tensor-parallel ranks, but rollout.tensor_parallel=1"),
        ({"ep_size": 2}, "has 2 expert-parallel ranks, but rollout.expert_parallel=1"),
        ({"pp_size": 2}, "start it with --pp-size 1"),
        ({"dp_size": 4}, "start it with --dp-size 1"),
        ({"attn_dp_size": 2}, "start it with --attn-dp-size 1"),
        ({"disaggregation_mode": "decode"}, "runs with --disaggregation-mode decode"),
        ({"incremental_streaming_output": False}, "--incremental-streaming-output --stream-interval 16"),
        ({"context_length": 10}, "accepts 10 tokens"),
        ({}, ""),
    ],
)
def test_each_misfit_is_named_with_its_fix(config: Config, model: dict, changed: dict, words: str) -> None:
    found = [*misfits(INFO | changed, model, config)]
    assert len(found) == len(changed) and all(words in problem for problem in found)


def test_a_server_that_reports_no_routes_is_refused_where_they_are_replayed(config: Config, model: dict) -> None:
    config = replace(config, rollout=replace(config.rollout, routing_replay=True))
    (problem,) = misfits(INFO, model, config)
    assert "--enable-return-routed-experts" in problem and "rollout.routing_replay=false" in problem
    assert [*misfits(INFO | {"enable_return_routed_experts": True}, model, config)] == []


@pytest.mark.parametrize("in_float32", [True, False])
def test_both_sides_compute_logits_in_the_same_dtype(config: Config, model: dict, in_float32: bool) -> None:
    config = replace(config, trainer=replace(config.trainer, float32_head=in_float32))
    assert [*misfits(INFO, model, config)] == [], "in a model in float32 they do"
    config.model = replace(config.model, dtype="bfloat16")
    info = INFO | {"dtype": "bfloat16", "enable_fp32_lm_head": not in_float32}
    (problem,) = misfits(info, model, config)
    assert f"{'with' if in_float32 else 'without'} --enable-fp32-lm-head" in problem
    assert [*misfits(info | {"enable_fp32_lm_head": in_float32}, model, config)] == []


def test_another_model_is_named_with_both_folders(config: Config, model: dict) -> None:
    (problem,) = misfits(INFO, {"model_type": "llama", "model_path": "/elsewhere"}, config)
    assert "a model of type llama (/elsewhere)" in problem and f"model.path={config.model.path} is of type" in problem


STARTUP = {"total": 12.25}


class Behind:
    """A URL behind which whoever started the server may put another process."""

    def __init__(self, model: dict) -> None:
        self.info, self.model = INFO | {"startup_time": STARTUP}, model | {"weight_version": "0"}
        self.refuses = False
        self.asked = 0

    async def looked_at(self) -> None:
        """Returns after some looks at it, each of which asks twice."""
        asked = self.asked
        while self.asked < asked + 6:
            await asyncio.sleep(0)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.refuses:
            return web.Response(status=503)
        return web.json_response(self.info if request.path == "/server_info" else self.model)


@pytest.fixture
async def behind(config: Config, model: dict, monkeypatch: pytest.MonkeyPatch):
    """(what answers at a URL, the run's view of it)"""
    monkeypatch.setattr(external_server, "POLL_SECONDS", 0.001)
    there = Behind(model)
    app = web.Application()
    app.router.add_get("/{name}", there.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = ExternalServer(f"http://127.0.0.1:{runner.addresses[0][1]}", config, "key")
    await server.start(10)
    yield there, server
    await runner.cleanup()


@pytest.mark.parametrize(
    ("info", "version"),
    [
        pytest.param({}, "0", id="the version of a start"),
        pytest.param({}, "default", id="a version that no sync has set"),
        pytest.param({"startup_time": {"total": 11.5}}, "57", id="another start"),
    ],
)
async def test_another_process_behind_the_url_is_noticed_also_between_two_probes(
    behind: tuple[Behind, ExternalServer], info: dict, version: str
) -> None:
    there, server = behind
    ended = asyncio.create_task(server.ended())
    # What it held for another run, and what this one brings it.
    for held in ("120", "1", "57"):
        there.model["weight_version"] = held
        there.refuses = held == "57"
        await there.looked_at()
        assert not ended.done()
    there.refuses = False
    await there.looked_at()
    there.info |= info
    there.model["weight_version"] = version
    await ended
    assert "another process answers" in await server.tail(30)
    # It is what the next start finds.
    await server.start(10)
    assert "another process answers" not in await server.tail(30)
    again = asyncio.create_task(server.ended())
    await there.looked_at()
    assert not again.done()
    again.cancel()
