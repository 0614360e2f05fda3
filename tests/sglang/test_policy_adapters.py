"""Which adapter a request gets, what its answer says, and which bytes a server refuses. No server."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from megasync.serving.plugin_protocol import MANIFEST
from megasync.sglang.adapters import PolicyAdapters, damage, policy_adapter, set_version

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
        (True, False, None, None),
        (False, True, None, None),
    ],
)
def test_requests_that_name_none_get_the_policys(enabled, single, given, chosen):
    registry = SimpleNamespace(get_all_adapters=lambda: LOADED)
    manager = SimpleNamespace(enable_lora=enabled, lora_registry=registry, config_value=lambda key: "9")
    request = SimpleNamespace(is_single=single, lora_path=given)
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


def test_files_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    (tmp_path / "weights").write_bytes(b"right")
    assert damage(tmp_path) == ""
    written = {"bytes": 5, "sha256": hashlib.sha256(b"right").hexdigest()}
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {"weights": written}}))
    assert damage(tmp_path) == ""
    (tmp_path / "weights").write_bytes(b"wrong")
    assert "has other bytes here" in damage(tmp_path)
