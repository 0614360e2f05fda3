"""Which adapter a request gets, when a server loads it, what its answer says, and which bytes it refuses. No server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from megasync.serving.plugin_protocol import MANIFEST, SEEDS
from megasync.sglang.adapters import (
    AdapterUnavailable,
    NamedAdapters,
    PolicyAdapters,
    damage,
    policy_adapter,
    set_version,
)
from megasync.sglang.plugin import request_arrays

LOADED = {
    name: object() for name in ("policy-9", "policy-10", "policy-10.2", "policy-10.10", "kept-10", "eval-old", "own")
}


@pytest.mark.parametrize(
    ("version", "name"), [("9", "policy-9"), ("10", "policy-10.10"), ("1", None), ("0", None), ("old", None)]
)
def test_a_version_has_the_adapters_of_its_last_publish(version, name):
    assert policy_adapter(version, LOADED) == name


@pytest.mark.parametrize(
    ("enabled", "single", "given", "chosen"),
    [
        (True, True, None, "policy-9"),
        (True, True, "own", "own"),
        (True, False, None, ["policy-9"] * 3),
        (True, False, ["own", None], ["own", None]),
        (False, True, None, None),
    ],
)
def test_requests_that_name_none_get_the_policys(enabled, single, given, chosen):
    registry = SimpleNamespace(get_all_adapters=lambda: LOADED)
    manager = SimpleNamespace(enable_lora=enabled, lora_registry=registry, config_value=lambda key: "9")
    request = SimpleNamespace(is_single=single, batch_size=3, lora_path=given)
    PolicyAdapters().choose(manager, request)
    assert request.lora_path == chosen


def test_all_tokens_of_an_answer_carry_the_version_of_its_adapter():
    spans = [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 9}]
    meta = {"weight_version": "4", "weight_versions": spans, "id": "x"}
    set_version(meta, "3")
    assert meta == {
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 9}],
        "id": "x",
    }
    piece = {"weight_version": "4"}
    set_version(piece, "3")
    assert piece == {"weight_version": "3"}


async def test_an_answer_is_labelled_while_it_is_streamed_and_the_stream_is_closed():
    closed = []

    async def stock(manager, request):
        try:
            for end in (2, 5):
                yield {
                    "meta_info": {"weight_version": "8", "weight_versions": [{"version": "8", "start": 0, "end": end}]}
                }
        finally:
            closed.append(True)

    async def versions(name):
        request = SimpleNamespace(lora_path=name)
        return [a["meta_info"]["weight_version"] async for a in PolicyAdapters().around_generate(stock, None, request)]

    assert await versions("policy-7.1") == ["7", "7"]
    assert await versions("kept-6.2") == ["6", "6"]
    assert await versions("eval-old") == ["8", "8"]
    assert await versions(None) == ["8", "8"]
    answers = PolicyAdapters().around_generate(stock, None, SimpleNamespace(lora_path="policy-7"))
    await anext(answers)
    await answers.aclose()
    assert closed == [True] * 5


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_answer_of_several_is_labelled(streamed):
    def answer(index):
        return {"meta_info": {"weight_version": "8"}} | ({"index": index} if streamed else {})

    async def stock(manager, request):
        if streamed:
            for index in (1, 0, 1):
                yield answer(index)
        else:
            yield [answer(0), answer(1)]

    request = SimpleNamespace(lora_path=["own", "policy-7"])
    answers = [each async for each in PolicyAdapters().around_generate(stock, None, request)]
    labels = [
        (each["meta_info"]["adapter"], each["meta_info"]["weight_version"])
        for each in (answers if streamed else answers[0])
    ]
    first, second = ("own", "8"), ("policy-7", "7")
    assert labels == ([second, first, second] if streamed else [first, second])


@pytest.mark.parametrize("adapter", [None, "own"])
def test_a_request_with_several_seeds_is_one_for_as_many_responses(adapter):
    labels = {SEEDS: "7,8,9", "team": "a"}
    request = SimpleNamespace(
        input_ids=[1, 2], sampling_params={"temperature": 0.5}, lora_path=adapter, custom_labels=labels
    )
    request_arrays(None, request)
    assert request.input_ids == [[1, 2]] * 3 and request.custom_labels == {"team": "a"}
    assert request.sampling_params == [{"temperature": 0.5, "sampling_seed": seed} for seed in (7, 8, 9)]
    assert request.lora_path == (adapter and ["own"] * 3)


async def test_adapters_of_all_responses_are_loaded_before_they_are_resolved(tmp_path):
    loaded, resolved = {}, []

    async def load(request):
        loaded[request.lora_name] = object()
        return SimpleNamespace(success=True)

    async def resolve(manager, request):
        resolved.append(set(loaded))

    manager = SimpleNamespace(
        lora_registry=SimpleNamespace(get_all_adapters=lambda: loaded), load_lora_adapter=load, pending_lora_unloads=()
    )
    adapters = NamedAdapters(tmp_path)
    adapters._read = lambda manager, name: load(SimpleNamespace(lora_name=name))
    await adapters.around_resolve(resolve, manager, SimpleNamespace(lora_path=["a", "a", None, "b", "policy-3"]))
    assert resolved == [{"a", "b"}]


def test_files_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    (tmp_path / "weights").write_bytes(b"right")
    assert damage(tmp_path) == ""
    written = {"bytes": 5, "sha256": hashlib.sha256(b"right").hexdigest()}
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {"weights": written}}))
    assert damage(tmp_path) == ""
    (tmp_path / "weights").write_bytes(b"wrong")
    assert "has other bytes here" in damage(tmp_path)
    (tmp_path / "weights").unlink()
    assert "cannot be read here" in damage(tmp_path)


class Server:
    """The adapters that a server holds, as SGLang's manager has them. A load waits for `go`, an unload for users."""

    def __init__(self, most=None):
        self.most, self.held, self.users, self.calls = most, {}, {}, []
        self.go = asyncio.Event()
        self.go.set()
        self.damaged, self.pending_lora_unloads = "", {}
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: dict(self.held), _counters=self)

    def __getitem__(self, lora_id):
        return SimpleNamespace(value=lambda: self.users.get(lora_id, 0))

    async def load_lora_adapter(self, load):
        self.calls.append(("load", load.lora_name, load.lora_path))
        await self.go.wait()
        if not self.damaged:
            self.held[load.lora_name] = SimpleNamespace(lora_id=load.lora_name, pinned=False)
        return SimpleNamespace(success=not self.damaged, error_message=self.damaged)

    async def unload_lora_adapter(self, unload):
        self.calls.append(("unload", unload.lora_name))
        self.held.pop(unload.lora_name, None)
        return SimpleNamespace(success=True)

    async def resolve(self, manager, request):
        if request.lora_path not in self.held:
            raise ValueError("not loaded")
        self.held[request.lora_path] = self.held.pop(request.lora_path)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """Resolves a request of a server for an adapter. There are folders of a, b, c and d."""
    requests = SimpleNamespace(LoadLoRAAdapterReqInput=SimpleNamespace, UnloadLoRAAdapterReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)
    for name in "abcd":
        (tmp_path / name).mkdir()
    adapters = NamedAdapters(tmp_path)

    def ask(server, name):
        context = SimpleNamespace(get_lora=lambda: SimpleNamespace(max_loaded_loras=server.most))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
        return adapters.around_resolve(server.resolve, server, SimpleNamespace(lora_path=name))

    return ask


async def test_an_adapter_is_loaded_once_for_all_that_ask_for_it_even_if_the_first_gives_up(named, tmp_path):
    server = Server()
    server.go.clear()
    asking = [asyncio.create_task(named(server, "a")) for _ in range(3)]
    while not server.calls:
        await asyncio.sleep(0)
    asking[0].cancel()
    server.go.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, type(None), type(None)]
    await named(server, "a")
    assert server.calls == [("load", "a", str(tmp_path / "a"))]


async def test_what_was_used_longest_ago_and_is_idle_makes_room(named):
    server = Server(most=3)
    for name in "abca":
        await named(server, name)
    server.users["b"] = 1
    await named(server, "d")
    assert server.calls[3:] == [("unload", "c"), ("load", "d", ANY)] and list(server.held) == ["b", "a", "d"]
    # SGLang waits for users after a load, when all are in use.
    server.users |= {"a": 1, "d": 1}
    await named(server, "c")
    assert server.calls[5:] == [("load", "c", ANY)]


async def test_an_adapter_that_lost_its_place_before_it_was_used_is_loaded_again(named):
    server, lost = Server(), []

    async def resolve(manager, request):
        if not lost:
            lost.append(server.held.pop("a"))
        await Server.resolve(server, manager, request)

    server.resolve = resolve
    await named(server, "a")
    assert [call[:2] for call in server.calls] == [("load", "a")] * 2


async def test_adapters_that_cannot_be_loaded_are_said_to_be_unavailable(named):
    server = Server()
    with pytest.raises(AdapterUnavailable, match="no folder on this server"):
        await named(server, "unknown")
    server.damaged = "other bytes"
    with pytest.raises(AdapterUnavailable, match="adapter a: other bytes"):
        await named(server, "a")
    # One of two ranks has loaded it.
    server.pending_lora_unloads["a"] = "id"
    with pytest.raises(AdapterUnavailable, match="adapter a: other bytes"):
        await named(server, "a")
    assert server.calls.pop() == ("unload", "a")
    server.damaged = ""
    await named(server, "a")
    # Other names are SGLang's own business, and so are its other refusals.
    for name in ("policy-1", "../a", "a/../b"):
        with pytest.raises(ValueError, match="not loaded"):
            await named(server, name)
    assert [call[:2] for call in server.calls] == [("load", "a")] * 3


async def test_an_unavailable_adapter_ends_the_request_without_an_error_of_the_server():
    async def stock(manager, request):
        raise AdapterUnavailable("adapter a: no folder")
        yield

    request = SimpleNamespace(lora_path="a", rid="7")
    (answer,) = [each async for each in PolicyAdapters().around_generate(stock, None, request)]
    finish = {"type": "abort", "status_code": 503, "message": "adapter a: no folder"}
    assert answer["meta_info"] == {"id": "7", "finish_reason": finish}


def test_adapters_without_requests_are_forgotten_where_one_makes_room_for_another(tmp_path):
    stats = {
        name: SimpleNamespace(num_waiting_reqs=waiting, max_remaining_tokens=running, is_draining_for=drains)
        for name, waiting, running, drains in [
            ("a", 1, 0, None),
            ("b", 0, 5, None),
            ("c", 0, 0, "a"),
            ("d", 0, 0, None),
        ]
    }
    drainer = SimpleNamespace(adapter_to_stats=stats)
    NamedAdapters(tmp_path).around_drain(lambda *asked: None, drainer, [], [])
    assert list(stats) == ["a", "b", "c"]
