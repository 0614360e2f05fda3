"""Command line and environment of a server, by device; starts nothing."""

from __future__ import annotations

import json
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megasync.config.host import proxy_variables
from megasync.config.schema import FrozenModelConfig, RewardModelConfig, RolloutConfig, TeacherConfig
from megasync.errors import ServerError
from megasync.serving.cache_size import RESERVED_TOKENS
from megasync.serving.plugin_protocol import (
    ADAPTER_ROOT_VARIABLE,
    CLASSIFIER_VARIABLE,
    HOST_VARIABLE,
    KEYS_VARIABLE,
    RANKS_VARIABLE,
    STORAGE_VARIABLE,
)
from megasync.serving.router import Router
from megasync.serving.server import (
    MODEL_PACKAGE,
    EngineRole,
    ServedAdapters,
    ServerSpec,
    SGLangServer,
    frozen_server_spec,
    stand_ins_path,
)


def make(rollout: RolloutConfig | None = None, **changes) -> SGLangServer:
    host = changes.pop("host", "127.0.0.1")
    options = {name: changes.pop(name) for name in ("api_key", "generation_key", "role") if name in changes}
    spec = ServerSpec("/models/m", rollout or RolloutConfig(), **({"dtype": "bfloat16", "device": "cpu"} | changes))
    return SGLangServer(spec, host, 30001, "log", **options)


def value(server: SGLangServer, name: str) -> str:
    command = server.command()
    return command[command.index(name) + 1]


def frozen(model: FrozenModelConfig, device: str = "cpu", **options) -> SGLangServer:
    keys = {name: options.pop(name) for name in ("api_key", "generation_key") if name in options}
    spec = frozen_server_spec(model, "float32", device, mem_fraction=0.3, **options)
    return SGLangServer(spec, "127.0.0.1", 30001, "log", **keys)


def words(server: SGLangServer) -> list[str]:
    """What other users of the machine, and processes that it starts, can see."""
    return [*server.command(), *(f"{name}={value}" for name, value in server.environment().items())]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_each_device_gets(monkeypatch, device):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    server = make(device=device, seed=7)
    options = {"--model-path": "/models/m", "--host": "127.0.0.1", "--port": "30001", "--dtype": "bfloat16"}
    for name, expected in (options | {"--weight-version": "0", "--random-seed": "7"}).items():
        assert value(server, name) == expected
    # What is null is left to SGLang, and a key is on no command line.
    optional = {"--context-length", "--max-total-tokens", "--max-running-requests", "--admin-api-key"}
    assert not optional & set(server.command())
    of_cpus = {"--device", "--attention-backend", "--sleep-on-idle"}
    assert of_cpus & set(server.command()) == (of_cpus if device == "cpu" else set())
    env = server.environment()
    # A health probe that generates hangs while the server is paused.
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    if device == "cpu":
        assert value(server, "--attention-backend") == "torch_native"
        assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("1", "1")
    else:
        assert "SGLANG_USE_CPU_ENGINE" not in env and stand_ins_path() not in env.get("PYTHONPATH", "")
        # What it compiles outlives its temporary folder.
        assert env["TORCHINDUCTOR_CACHE_DIR"] == str(Path.home() / ".cache" / "torchinductor")


@pytest.mark.parametrize(
    ("stated", "storage"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "[128, 64]"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, '"mxfp4"'),
    ],
)
def test_a_quantized_policy_is_served_unquantized_and_a_frozen_model_as_it_is(tmp_path, stated, storage):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": stated}))
    overrides = {"--json-model-override-args": '{"rope_theta": 5}'}
    spec = ServerSpec(tmp_path, RolloutConfig(server_args=overrides), "bfloat16", "cpu")
    server = SGLangServer(spec, "127.0.0.1", 30001, "log")
    assert json.loads(value(server, "--json-model-override-args")) == {"rope_theta": 5, "quantization_config": None}
    assert value(server, "--quantization") == "unquant"
    assert server.environment()[STORAGE_VARIABLE] == storage
    server = frozen(RewardModelConfig(path=str(tmp_path), kind="judge"))
    assert not {"--json-model-override-args", "--quantization"}.intersection(server.command())
    assert STORAGE_VARIABLE not in server.environment()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["rollout", "classifier", "judge"])
def test_keys_are_passed_through_the_pipe_only(device, kind):
    keys = {"api_key": "admin-key", "generation_key": "generation-key"}
    model = RewardModelConfig(path="/models/m", kind=kind)
    server = make(device=device, **keys) if kind == "rollout" else frozen(model, device, **keys)
    assert json.loads(server.secrets()) == {"admin": "admin-key", "generation": "generation-key"}
    assert server.environment()[KEYS_VARIABLE] == "stdin"
    assert not any("admin-key" in word or "generation-key" in word for word in words(server))
    scores = ("--is-embedding" in server.command(), server.environment().get(CLASSIFIER_VARIABLE))
    assert scores == ((True, "1") if kind == "classifier" else (False, None))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_frozen_model_may_answer_alike_in_any_batch(deterministic):
    server = frozen(TeacherConfig(path="/models/m"), deterministic=deterministic)
    assert ("--enable-deterministic-inference" in server.command()) == deterministic


def test_a_server_without_keys_looks_for_none(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, "stdin")
    server = make()
    assert server.secrets() is None and KEYS_VARIABLE not in server.environment()


def test_the_environment_may_name_other_models(monkeypatch):
    assert make().environment()["SGLANG_EXTERNAL_MODEL_PACKAGE"] == MODEL_PACKAGE
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs.models")
    assert make().environment()["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "theirs.models"


def test_the_rollout_configuration_reaches_the_command_line():
    sizes = {"tensor_parallel": 2, "context_length": 4096, "max_total_tokens": 8192, "max_running_requests": 16}
    users = {"--chunked-prefill-size": 1024, "--mem-fraction-static": 0.6, "--enable-metrics": True}
    server = make(RolloutConfig(**sizes, mem_fraction=0.5, server_args=users), device="cuda")
    assert value(server, "--tp-size") == "2" and value(server, "--max-running-requests") == "16"
    assert value(server, "--context-length") == str(4096 + RESERVED_TOKENS)
    assert value(server, "--max-total-tokens") == str(8192 + RESERVED_TOKENS)
    assert value(server, "--chunked-prefill-size") == "1024"
    # The user's own argument wins.
    assert value(server, "--mem-fraction-static") == "0.6"
    assert server.command().count("--mem-fraction-static") == 1
    assert "--enable-metrics" in server.command()


# Engines of a server with several

HANDOVER = "handover-key"


def make_engine(kind: str, **changes) -> SGLangServer:
    """The engine with ranks 2 and 3 of 8."""
    rollout = RolloutConfig(tensor_parallel=2, prefill_engines=1, decode_engines=3)
    return make(rollout, api_key="admin-key", role=EngineRole(kind, 2, 8, HANDOVER), **changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_engine_does_its_part_of_each_request_and_knows_its_ranks(tmp_path, monkeypatch, device, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SGLANG_HOST_IP", "192.0.2.9")
    engine = make_engine(kind, device=device, generation_key="generation-key")
    # As what comes before a start, also in another process.
    engine = pickle.loads(pickle.dumps(engine))
    engine.prepare()
    assert value(engine, "--disaggregation-mode") == kind
    assert value(engine, "--disaggregation-transfer-backend") == "nixl"
    assert value(engine, "--tp-size") == "2"
    backup = "--disaggregation-decode-retraction-backup"
    assert (backup in engine.command()) == ((kind, device) == ("decode", "cpu"))
    if kind == "prefill":
        assert 1024 <= engine.handover_port() != engine.port
        assert value(engine, "--disaggregation-bootstrap-port") == str(engine.handover_port())
    else:
        assert "--disaggregation-bootstrap-port" not in engine.command() and engine.handover_port() == 0
    env = engine.environment()
    assert env[RANKS_VARIABLE] == "2/8"
    assert (env["SGLANG_HOST_IP"], env[HOST_VARIABLE]) == ("127.0.0.1", "127.0.0.1")
    # It would ask for a CUDA event.
    early = env.get("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX")
    cores = env.get("SGLANG_CPU_OMP_THREADS_BIND", "").split("|")
    assert (early, len(cores)) == (("0", 2) if device == "cpu" else (None, 1))
    keys = {"admin": "admin-key", "generation": "generation-key", "role": kind, "handover": HANDOVER}
    assert json.loads(engine.secrets()) == keys
    assert not any(HANDOVER in word for word in words(engine))


def test_a_server_of_one_engine_does_the_whole_of_each_request():
    server = make(api_key="admin-key")
    assert not [word for word in server.command() if word.startswith("--disaggregation")]
    assert not {RANKS_VARIABLE, HOST_VARIABLE, "SGLANG_HOST_IP", "UCX_NET_DEVICES"} & server.environment().keys()


@pytest.mark.parametrize(
    ("device", "host", "chosen", "interface"),
    [
        ("cpu", "127.0.0.1", "", "lo"),
        ("cuda", "127.0.0.1", "", "lo"),
        ("cpu", "localhost", "", "lo"),
        ("cpu", "10.1.2.3", "", "eth7"),
        # Fast networks between GPUs have names of their own.
        ("cuda", "10.1.2.3", "", None),
        ("cpu", "127.0.0.1", "mlx5_0:1", "mlx5_0:1"),
    ],
)
def test_a_cache_moves_over_the_interface_of_the_host(monkeypatch, device, host, chosen, interface):
    def addresses() -> dict:
        of = {"lo": ["127.0.0.1", "::1"], "eth7": ["fe80::1", "10.1.2.3"]}
        return {name: [SimpleNamespace(address=address) for address in each] for name, each in of.items()}

    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if host == "127.0.0.1":
        assert make_engine("decode").environment()["UCX_NET_DEVICES"] == "lo", "this machine has it"
    monkeypatch.setattr(psutil, "net_if_addrs", addresses)
    if chosen:
        monkeypatch.setenv("UCX_NET_DEVICES", chosen)
    assert make_engine("prefill", device=device, host=host).environment().get("UCX_NET_DEVICES") == interface


def test_a_role_is_logged_without_its_key_and_needs_an_admin_key():
    role = EngineRole("prefill", 0, 4, HANDOVER)
    assert "prefill" in repr(role) and HANDOVER not in repr(role)
    with pytest.raises(ServerError, match="needs an admin key"):
        make(role=role)


def test_servers_and_router_start_without_proxies(monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for service in (make(), make(device="cuda"), Router([], "random", "h", 1, "log")):
        assert proxy_variables(service.environment()) == []


def test_a_servers_temporary_folder_has_room_for_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    server = make()
    server.prepare()
    folder = Path(server.environment()["TMPDIR"])
    folder.rmdir()
    assert len(str(folder)) < 40


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize("kind", ["qwen3", "phi3"])
def test_a_server_on_a_cpu_has_a_cache_of_a_known_size(tmp_path, kind):
    """A gibibyte, or room for the longest sequence, instead of a share of whatever is free."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": kind}))
    model = TeacherConfig(path=str(tmp_path), max_inflight=7)
    token = 2 * 2 * 2 * 16 * 4
    for longest, tokens in ((100, 2**30 // token), (2**40, 2**40)):
        server = frozen(model, longest=longest)
        assert value(server, "--max-total-tokens") == str(tokens + RESERVED_TOKENS)
        assert value(server, "--max-running-requests") == "7"
    assert value(frozen(TeacherConfig(path=str(tmp_path), max_total_tokens=50)), "--max-total-tokens") == "56"
    assert "--max-total-tokens" not in frozen(model, "cuda").command()


def test_only_a_server_with_a_root_of_adapters_looks_adapters_up(monkeypatch, tmp_path):
    monkeypatch.setenv(ADAPTER_ROOT_VARIABLE, "/inherited")
    adapters = ServedAdapters(8, ("q_proj", "lm_head"), most=3)
    for without in (make(), make(adapters=adapters)):
        assert ADAPTER_ROOT_VARIABLE not in without.environment()
    server = make(adapters=replace(adapters, root=tmp_path, most_loaded=2))
    assert server.environment()[ADAPTER_ROOT_VARIABLE] == str(tmp_path)
    # Of a batch, one place is that of requests without an adapter; SGLang asks for as many in memory.
    assert (value(server, "--max-loras-per-batch"), value(server, "--max-loaded-loras")) == ("4", "4")
    assert float(value(server, "--lora-drain-wait-threshold")) > 0
