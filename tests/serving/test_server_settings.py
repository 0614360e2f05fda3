"""Command line and environment of a server, by device; starts nothing."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megasync.config.host import proxy_variables
from megasync.config.schema import RewardModelConfig, RolloutConfig, TeacherConfig
from megasync.errors import ServerError
from megasync.serving.engine_protocol import HOST_VARIABLE, KEYS_VARIABLE, RANKS_VARIABLE, STORAGE_VARIABLE
from megasync.serving.router import Router
from megasync.serving.server import (
    MODEL_PACKAGE,
    EngineRole,
    FrozenModelServer,
    ServerSpec,
    SGLangServer,
    frozen_server_spec,
    stand_ins_path,
)


def make(rollout: RolloutConfig | None = None, **changes) -> SGLangServer:
    host = changes.pop("host", "127.0.0.1")
    own = {name: changes.pop(name) for name in ("api_key", "generation_key", "role") if name in changes}
    spec = ServerSpec("/models/m", rollout or RolloutConfig(), **({"dtype": "bfloat16", "device": "cpu"} | changes))
    return SGLangServer(spec, host, 30001, "log", **own)


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


# Engines of a server with several

HANDOVER = "handover-key"


def make_engine(kind: str, **changes) -> SGLangServer:
    """The engine with ranks 2 and 3 of 8."""
    rollout = RolloutConfig(tensor_parallel=2, prefill_engines=1, decode_engines=3)
    return make(rollout, api_key="admin-key", role=EngineRole(kind, 2, 8, HANDOVER), **changes)


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Does what comes before the start of a server, whose folder is that of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def before(server: SGLangServer) -> SGLangServer:
        server.prepare()
        return server

    return before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_engine_does_its_part_of_each_request(prepare, device, kind):
    engine = prepare(make_engine(kind, device=device))
    assert value(engine, "--disaggregation-mode") == kind
    assert value(engine, "--disaggregation-transfer-backend") == "nixl"
    assert value(engine, "--tp-size") == "2"
    backup = "--disaggregation-decode-retraction-backup"
    assert (backup in engine.command()) == ((kind, device) == ("decode", "cpu"))


def test_only_a_prefill_engine_has_a_port_for_handovers(prepare):
    engine = prepare(make_engine("prefill"))
    assert 1024 <= engine.handover_port() != engine.port
    assert value(engine, "--disaggregation-bootstrap-port") == str(engine.handover_port())
    engine = prepare(make_engine("decode"))
    assert "--disaggregation-bootstrap-port" not in engine.command() and engine.handover_port() == 0


def test_a_server_of_one_engine_does_the_whole_of_each_request(prepare):
    server = prepare(make(api_key="admin-key"))
    assert not [word for word in server.command() if word.startswith("--disaggregation")]
    env = server.environment()
    assert RANKS_VARIABLE not in env and HOST_VARIABLE not in env and "SGLANG_HOST_IP" not in env
    assert server.handover_port() == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_engine_knows_its_ranks_and_where_it_listens(monkeypatch, device, kind):
    monkeypatch.setenv("SGLANG_HOST_IP", "192.0.2.9")
    env = make_engine(kind, device=device, host="127.0.0.1").environment()
    assert env[RANKS_VARIABLE] == "2/8"
    assert (env["SGLANG_HOST_IP"], env[HOST_VARIABLE]) == ("127.0.0.1", "127.0.0.1")


def test_an_engine_on_a_cpu_has_a_core_for_each_of_its_own_ranks():
    env = make_engine("decode").environment()
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    # It would ask for a CUDA event.
    assert env["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] == "0"
    assert "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX" not in make_engine("decode", device="cuda").environment()


@pytest.fixture
def interfaces(monkeypatch):
    """A machine with the interfaces `lo` and `eth7` of 10.1.2.3, whose environment chooses none for UCX."""

    def addresses() -> dict:
        of = {"lo": ["127.0.0.1", "::1"], "eth7": ["fe80::1", "10.1.2.3"]}
        return {name: [SimpleNamespace(address=address) for address in each] for name, each in of.items()}

    monkeypatch.setattr(psutil, "net_if_addrs", addresses)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("device", "host", "interface"),
    [
        ("cpu", "127.0.0.1", "lo"),
        ("cuda", "127.0.0.1", "lo"),
        ("cpu", "localhost", "lo"),
        ("cpu", "10.1.2.3", "eth7"),
        # Fast networks between GPUs have names of their own.
        ("cuda", "10.1.2.3", None),
    ],
)
def test_a_cache_moves_over_the_interface_of_the_host(interfaces, device, host, interface):
    assert make_engine("prefill", device=device, host=host).environment().get("UCX_NET_DEVICES") == interface


def test_this_machine_has_the_loopback_interface(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert make_engine("decode").environment()["UCX_NET_DEVICES"] == "lo"


def test_the_environment_may_name_the_interface(interfaces, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert make_engine("prefill").environment()["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_a_server_of_one_engine_moves_no_cache(interfaces):
    assert "UCX_NET_DEVICES" not in make(api_key="admin-key").environment()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_handover_key_is_passed_through_the_pipe_only(prepare, kind):
    engine = prepare(make_engine(kind, generation_key="generation-key"))
    assert json.loads(engine.secrets()) == {
        "admin": "admin-key",
        "generation": "generation-key",
        "role": kind,
        "handover": HANDOVER,
    }
    for place in (engine.command(), [f"{name}={value}" for name, value in engine.environment().items()]):
        assert not any(HANDOVER in word for word in place)


def test_a_role_is_logged_without_its_key():
    role = EngineRole("prefill", 0, 4, HANDOVER)
    assert "prefill" in repr(role) and HANDOVER not in repr(role)


def test_an_engine_needs_an_admin_key():
    with pytest.raises(ServerError, match="needs an admin key"):
        make(role=EngineRole("decode", 0, 2, HANDOVER))


def test_an_engine_that_was_not_started_can_be_pickled():
    engine = pickle.loads(pickle.dumps(make_engine("prefill")))
    assert json.loads(engine.secrets())["handover"] == HANDOVER
    assert engine.environment()[RANKS_VARIABLE] == "2/8"


def test_servers_and_router_start_without_proxies(monkeypatch):
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for env in (
        make().environment(),
        make(device="cuda").environment(),
        Router([], "random", "h", 1, "log").environment(),
    ):
        assert proxy_variables(env) == []


def test_a_servers_temporary_folder_has_room_for_sockets(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    server = make()
    server.prepare()
    folder = Path(server.environment()["TMPDIR"])
    folder.rmdir()
    assert len(str(folder)) < 40


SIZES = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(("kind", "layers"), [("qwen3", 2), ("phi3", 2)])
def test_a_server_on_a_cpu_has_a_cache_of_a_known_size(tmp_path, kind, layers):
    """A gibibyte, or room for the longest sequence, instead of a share of whatever is free."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": kind}))
    model = TeacherConfig(path=str(tmp_path), max_inflight=7)
    token = layers * 2 * 2 * 16 * 4
    for longest, tokens in ((100, 2**30 // token), (2**40, 2**40)):
        spec = frozen_server_spec(model, "float32", "cpu", 0.8, longest=longest)
        server = FrozenModelServer(model, spec, "127.0.0.1", 1, "log")
        assert value(server, "--max-total-tokens") == str(tokens)
        assert value(server, "--max-running-requests") == "7"
    chosen = frozen_server_spec(TeacherConfig(path=str(tmp_path), max_total_tokens=50), "float32", "cpu", 0.8)
    assert value(FrozenModelServer(model, chosen, "127.0.0.1", 1, "log"), "--max-total-tokens") == "50"
    on_gpu = frozen_server_spec(model, "float32", "cuda", 0.8)
    assert "--max-total-tokens" not in FrozenModelServer(model, on_gpu, "127.0.0.1", 1, "log").command()
