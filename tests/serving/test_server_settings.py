"""Command line and environment of a server, by device; starts nothing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from megasync.config.schema import RewardModelConfig, RolloutConfig, TeacherConfig
from megasync.serving.engine_protocol import STORAGE_VARIABLE
from megasync.serving.server import (
    MODEL_PACKAGE,
    FrozenModelServer,
    ServerSpec,
    SGLangServer,
    frozen_server_spec,
    stand_ins_path,
)
from megasync.serving.server_guard import KEYS_VARIABLE


def make(rollout: RolloutConfig | None = None, **changes) -> SGLangServer:
    keys = {name: changes.pop(name) for name in ("api_key", "generation_key") if name in changes}
    spec = ServerSpec("/models/m", rollout or RolloutConfig(), **({"dtype": "bfloat16", "device": "cpu"} | changes))
    return SGLangServer(spec, "127.0.0.1", 30001, "log", **keys)


def value(server: SGLangServer, name: str) -> str:
    command = server.command()
    return command[command.index(name) + 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_both_devices_share(device):
    server = make(device=device, seed=7)
    assert value(server, "--model-path") == "/models/m"
    assert (value(server, "--host"), value(server, "--port")) == ("127.0.0.1", "30001")
    assert value(server, "--dtype") == "bfloat16"
    assert value(server, "--weight-version") == "0"
    assert value(server, "--random-seed") == "7"
    # A health probe that generates hangs while the server is paused.
    assert server.environment()["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


@pytest.mark.parametrize(
    ("stated", "given"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "[128, 64]"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, '"mxfp4"'),
    ],
)
def test_a_quantized_policy_is_served_unquantized_and_a_frozen_model_as_it_is(tmp_path, stated, given):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": stated}))
    own = {"--json-model-override-args": '{"rope_theta": 5}'}
    spec = ServerSpec(tmp_path, RolloutConfig(server_args=own), "bfloat16", "cpu")
    server = SGLangServer(spec, "127.0.0.1", 30001, "log")
    overrides = json.loads(value(server, "--json-model-override-args"))
    assert overrides == {"rope_theta": 5, "quantization_config": None}
    assert value(server, "--quantization") == "unquant"
    assert server.environment()[STORAGE_VARIABLE] == given
    judge = RewardModelConfig(path=str(tmp_path), kind="judge")
    frozen = frozen_server_spec(judge, "bfloat16", "cpu", mem_fraction=0.3)
    server = FrozenModelServer(judge, frozen, "127.0.0.1", 30001, "log")
    assert not {"--json-model-override-args", "--quantization"}.intersection(server.command())
    assert STORAGE_VARIABLE not in server.environment()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["rollout", "classifier", "judge"])
def test_keys_are_passed_through_the_pipe_only(device, kind):
    keys = {"api_key": "admin-key", "generation_key": "generation-key"}
    if kind == "rollout":
        server = make(device=device, **keys)
    else:
        model = RewardModelConfig(path="/models/m", kind=kind)
        spec = frozen_server_spec(model, "float32", device, mem_fraction=0.3)
        server = FrozenModelServer(model, spec, "127.0.0.1", 30001, "log", **keys)
    assert json.loads(server.secrets()) == {"admin": "admin-key", "generation": "generation-key"}
    assert server.environment()[KEYS_VARIABLE] == "stdin"
    for place in (server.command(), [f"{name}={value}" for name, value in server.environment().items()]):
        assert not any("admin-key" in word or "generation-key" in word for word in place)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_frozen_model_may_answer_alike_in_any_batch(deterministic):
    model = TeacherConfig(path="/models/m")
    spec = frozen_server_spec(model, "float32", "cpu", mem_fraction=0.3, deterministic=deterministic)
    command = FrozenModelServer(model, spec, "127.0.0.1", 30001, "log").command()
    assert ("--enable-deterministic-inference" in command) == deterministic


def test_a_server_without_keys_looks_for_none(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, "stdin")
    server = make()
    assert server.secrets() is None and KEYS_VARIABLE not in server.environment()


def test_the_environment_may_name_other_models(monkeypatch):
    assert make().environment()["SGLANG_EXTERNAL_MODEL_PACKAGE"] == MODEL_PACKAGE
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs.models")
    assert make().environment()["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "theirs.models"


def test_a_cpu_server_runs_one_thread_and_sleeps_when_idle():
    server = make()
    assert "--sleep-on-idle" in server.command()
    assert value(server, "--attention-backend") == "torch_native"
    env = server.environment()
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("1", "1")


def test_a_cuda_server_gets_neither_cpu_settings_nor_stand_ins(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    server = make(device="cuda")
    assert not {"--device", "--attention-backend", "--sleep-on-idle"} & set(server.command())
    env = server.environment()
    assert "SGLANG_USE_CPU_ENGINE" not in env
    # What it compiles outlives its temporary folder.
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(Path.home() / ".cache" / "torchinductor")
    assert stand_ins_path() not in env.get("PYTHONPATH", "")


def test_the_rollout_configuration_reaches_the_command_line():
    rollout = RolloutConfig(
        tensor_parallel=2,
        context_length=4096,
        max_total_tokens=8192,
        max_running_requests=16,
        mem_fraction=0.5,
        server_args={"--chunked-prefill-size": 1024, "--mem-fraction-static": 0.6, "--enable-metrics": True},
    )
    server = make(rollout, device="cuda")
    assert value(server, "--tp-size") == "2"
    assert value(server, "--context-length") == "4096"
    assert value(server, "--max-total-tokens") == "8192"
    assert value(server, "--max-running-requests") == "16"
    assert value(server, "--chunked-prefill-size") == "1024"
    # The user's own argument wins.
    assert value(server, "--mem-fraction-static") == "0.6"
    assert server.command().count("--mem-fraction-static") == 1
    assert server.command()[-1] == "--enable-metrics"


def test_what_is_null_is_left_to_sglang():
    command = make().command()
    for name in ("--context-length", "--max-total-tokens", "--max-running-requests", "--admin-api-key"):
        assert name not in command


def test_a_server_that_was_not_started_can_be_pickled():
    server = pickle.loads(pickle.dumps(make()))
    assert server.url == "http://127.0.0.1:30001"
    assert not server.alive()
    assert server.tail() == ""
