"""Commands from the driver to the plugin and back, with the plugin's own code behind a small HTTP server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from torch import nn

from megasync.errors import ServerError
from megasync.layout.load_trace import trace_load
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.serving.plugin_protocol import decode, encode
from megasync.sglang import updates
from megasync.sglang.updates import Plugin, ServingRank

SPECS = [("w", (4, 3))]


class Model(nn.Module):
    """Keeps the rows of its rank; loads as often as it is traced."""

    def __init__(self, rank: int, factor: int = 1) -> None:
        super().__init__()
        self.rank, self.factor, self.loads = rank, factor, 0
        self.w = nn.Parameter(torch.zeros(2, 3))

    def load_weights(self, weights) -> None:
        self.loads += 1
        for _, weight in weights:
            shard = weight.chunk(2)[self.rank]
            self.w.data.copy_(shard if self.factor == 1 else shard * self.factor)


class Receiver:
    def __init__(self, rank: ServingRank) -> None:
        self.rank = rank

    def handle(self, command, payload):
        if command == "break":
            raise ValueError("it is broken")
        return {"command": command, "payload": payload, "rank": self.rank.rank}


def stock(checker, action, allow_quant_error, skip_tensor_list, *, role):
    """What SGLang does itself."""
    if action != "checksum":
        raise ValueError(f"Unsupported {action=}")
    return {"checksums": {"w": "0f"}, "asked": [allow_quant_error, skip_tensor_list, role]}


def checker(rank: int, model: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(
        _placement={"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1},
        _get_model=lambda: model,
        _parallelism_info=lambda role: SimpleNamespace(model_dump=lambda: {"role": role}),
    )


@pytest.fixture
async def engine_of():
    """Makes an PluginControl of a server whose ranks have these models; None is a server without the plugin."""
    runners, controls = [], []

    async def make(models, groups=1) -> PluginControl:
        # Each rank is a process with a plugin of its own.
        plugins = [Plugin(Receiver) for _ in models or ()]

        def rank_answer(rank: int, asked: tuple) -> dict:
            if models is None:
                return stock(None, *asked, role="target")
            return plugins[rank].around_check(stock, checker(rank, models[rank]), *asked, role="target")

        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            assert body.pop("selector") == "target"
            try:
                ranks = [
                    rank_answer(rank, (body["action"], False, body["skip_tensor_list"]))
                    for rank in reversed(range(len(models or [None])))
                ] * groups
            except ValueError as error:
                return web.json_response({"success": False, "message": str(error)}, status=400)
            return web.json_response({"success": True, "ranks": ranks})

        app = web.Application()
        app.router.add_post("/weights_checker", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        controls.append(ServerControl(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        return PluginControl(controls[-1])

    yield make
    for control in controls:
        await control.close()
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("groups", [1, 2])
async def test_each_rank_says_once_who_it_is(engine_of, groups):
    # Each attention group answers for all ranks.
    engine = await engine_of([Model(0), Model(1).to(torch.bfloat16)], groups)
    ranks = await engine.hello()
    assert [(rank.rank, rank.ranks, rank.dtype) for rank in ranks] == [
        (0, 2, "float32"),
        (1, 2, "bfloat16"),
    ]


async def test_a_trace_comes_back_whole_and_is_made_once(engine_of):
    models = [Model(0), Model(1)]
    engine = await engine_of(models)
    assert await engine.trace(SPECS) == await engine.trace(SPECS) == [trace_load(Model(r), SPECS) for r in (0, 1)]
    assert [model.loads for model in models] == [1, 1]


async def test_a_failed_rank_is_named_with_its_error(engine_of):
    engine = await engine_of([Model(0), Model(1, factor=2)])
    with pytest.raises(ServerError, match=r"trace failed: rank 1: TraceError: .*aten\.mul") as raised:
        await engine.trace(SPECS)
    assert "rank 0" not in str(raised.value)


async def test_a_server_without_the_plugin_is_recognised(engine_of):
    engine = await engine_of(None)
    with pytest.raises(ServerError, match="runs without megasync's plugin.*SGLANG_PLUGINS"):
        await engine.hello()


async def test_a_plugin_of_another_protocol_is_refused(engine_of, monkeypatch):
    engine = await engine_of([Model(0), Model(1)])
    monkeypatch.setattr(updates, "PROTOCOL", 0)
    with pytest.raises(ServerError, match=r"speaks protocol \[0\], this driver 5"):
        await engine.hello()


async def test_other_commands_are_the_receivers(engine_of):
    engine = await engine_of([Model(0), Model(1)])
    payload = {"names": ["tensor"] * 5000}
    assert await engine.call("stage", payload, dict) == [
        {"command": "stage", "payload": payload, "rank": r} for r in (0, 1)
    ]
    with pytest.raises(ServerError, match="rank 0: ValueError: it is broken"):
        await engine.call("break", payload, dict)


def test_calls_that_are_not_for_megasync_pass_through():
    plugin = Plugin(Receiver)
    found = plugin.around_check(stock, checker(0, Model(0)), "checksum", True, ["w"], role="draft")
    assert found["asked"] == [True, ["w"], "draft"]
    loaded = plugin.around_load(lambda updater, weights: (False, weights), None, ["tensor"])
    assert loaded == (False, ["tensor"])
    received = plugin.around_receive(
        lambda updater, **all_of_it: all_of_it, None, names=["w"], dtypes=["float32"], shapes=[[1]], group_name="g"
    )
    assert received == {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g", "load_format": None}


def test_long_messages_shrink_and_others_stay_readable():
    assert encode({"a": 1}) == '{"a":1}'
    message = {"slots": [["model.layers.0.mlp.experts.7.gate_proj.weight", [0, 4, 0, 8], i] for i in range(2000)]}
    assert len(encode(message)) < 20_000 and decode(encode(message)) == message
    with pytest.raises(ValueError, match="not a compressed message"):
        decode("zlib:AAAA")
