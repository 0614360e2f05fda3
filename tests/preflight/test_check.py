"""A configuration that contradicts itself, its model or its machine is refused with all keys and the fix."""

import json
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from fp8_folders import write_fp8
from header_files import write_headers
from random_models import write_model

from megasync.base import missing
from megasync.config.rules import check_rules
from megasync.config.schema import Config, RewardModelConfig
from megasync.config.server_args import OF_FROZEN_MODELS, OF_ROLLOUT, RESERVED
from megasync.errors import ConfigError
from megasync.layout.model_files import FETCHABLE
from megasync.preflight.check import check_config, check_supervised, model_layout
from megasync.tenants.checks import check_service

MCP = ["rollout.tools.mcp.shop.command=[python,shop.py]", "rollout.chat.tool_format=qwen", "data.prompt.format=chat"]
HARD = "eval.sets.hard={data: {kind: digits, source: copy, split: test}}"
GAE = ["algorithm.advantage=gae", "critic.enabled=true"]
COMMANDS = {"train": check_config, "sft": check_supervised, "serve": check_service}
SERVED = ["serve={port: 0}", "trainer.lora.rank=8", "cluster.device=cpu", "model.dtype=float32"]
# Each line has the command that is refused, its overrides, and keys that the message names.
REFUSED = [json.loads(line) for line in (Path(__file__).parent / "refused.jsonl").read_text().splitlines()]


def refused(config: Config, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config, **kwargs)
    return str(caught.value)


def test_a_sound_configuration_passes(make):
    assert check_config(make()) is None


@pytest.mark.every(4)
@pytest.mark.parametrize(("command", "overrides", "keys"), REFUSED, ids=[" ".join(row[1]) for row in REFUSED])
def test_a_contradiction_names_all_sides(make, command, overrides, keys):
    with pytest.raises(ConfigError) as caught:
        COMMANDS[command](make(*(SERVED if command == "serve" else ()), *overrides))
    assert all(key in str(caught.value) for key in keys), caught.value


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.eval=null"],
        ["schedule.max_inflight_groups=32"],
        ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"],
        ["trainer.tensor_parallel=4"],  # twice the KV heads
        ["trainer.pipeline_parallel=3", "trainer.first_stage_layers=1", "trainer.last_stage_layers=1"],
        ["trainer.data_parallel=8", "cluster.address=auto", "cluster.host=auto"],
        ["algorithm.ratio=behaviour", "algorithm.correction=none"],
        [*GAE, "schedule.samples_per_group=1"],
        ["schedule.stop_at_score=0.9"],
        ["schedule.max_staleness=0"],
        ["algorithm.dual_clip=null"],
        ["rollout.agent=json:dumps", "rollout.gateway.port=8000", "rollout.gateway.host=auto", "timeouts.agent=700"],
        ["rollout.tools.functions=[json:dumps]", "rollout.chat.tool_format=qwen", "data.prompt.format=chat"],
        [*MCP, "rollout.tools.max_turns=3", "rollout.tools.mcp.shop.shared=true"],
        [HARD, "schedule.stop_at_score=0.9"],
        [HARD, "schedule.stop_at_score=0.9", "data.eval=null"],
        [HARD, "eval.temperatures=[0.0,0.8]", "eval.repeats=8"],
        ["eval.exact=true", "rollout.servers=1"],
        ["eval.exact=true", "rollout.servers=4", "eval.servers=3"],
        ["eval.exact=true", "rollout.servers=1", "cluster.colocate=true", "schedule.max_staleness=0"],
    ],
)
def test_an_unusual_but_valid_configuration_is_accepted(make, overrides):
    check_config(make(*overrides))


def test_a_sound_supervised_run_is_accepted(make):
    check_supervised(make("sft.train={kind: digits, source: copy}", "sft.answer_template=' {answer}'"))


def test_rows_from_python_replace_datasets(make):
    config = make("data.train=null", "data.eval=null", "schedule.stop_at_score=0.9")
    check_config(config, own_rows=True, own_eval_rows=True)


def test_an_agent_from_python_replaces_the_configured_one(make):
    from megasync import AsyncTrainer

    AsyncTrainer(make("rollout.gateway.port=8000"), agent=print)
    AsyncTrainer(make("rollout.workflow=json:dumps"), agent=print)
    with pytest.raises(ConfigError, match="rollout= and agent="):
        AsyncTrainer(make(), agent=print, rollout=print)


def test_servers_alone_do_not_evaluate(make):
    idle = make("eval.servers=2", "rollout.servers=1")
    check_rules(idle, within=("eval",), training=False)
    with pytest.raises(ConfigError, match=r"eval.servers=2 .*\n.*rollout.servers=1"):
        check_rules(idle, within=("eval",))


def test_reserved_server_arguments_point_to_keys_that_exist():
    from megasync.config.load import schema_keys

    keys = {key for key, _ in schema_keys()}
    assert {f"rollout{key}" if key[0] == "." else key for key in (RESERVED | OF_ROLLOUT).values() if key} <= keys
    own = {f".{item.name}" for item in fields(RewardModelConfig)}
    assert {key for key in (RESERVED | OF_FROZEN_MODELS).values() if key and key[0] == "."} <= own


# The model


def test_the_error_of_a_missing_model_folder_says_how_to_create_it(make, tmp_path):
    assert "megasync fetch digits" in refused(make(f"model.path={tmp_path}/digits"))
    assert "model.path='/no/such'" in refused(make("model.path=/no/such"))


def test_the_error_names_the_models_that_can_be_fetched():
    from megasync.starters.fetch import MODELS

    assert set(FETCHABLE) == set(MODELS)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.tools.mcp.shop.url=http://a/mcp"],
            r"rollout\.tools\.mcp\.shop\.command.*rollout\.tools\.mcp\.shop\.url",
        ),
        (
            ["rollout.tools.mcp.shop.headers={A: b}"],
            r"rollout\.tools\.mcp\.shop\.headers.*rollout\.tools\.mcp\.shop\.url",
        ),
        (["data.prompt.format=raw"], r"rollout\.tools\.mcp.*data\.prompt\.format"),
        (["rollout.workflow=json:dumps"], r"rollout\.tools\.mcp.*rollout\.workflow"),
        (["rollout.agent=json:dumps"], r"rollout\.agent.*rollout\.tools\.mcp"),
        (["rollout.at_deadline=score"], r"rollout\.at_deadline.*rollout\.agent"),
    ],
)
def test_mcp_servers_beside_what_they_do_not_fit_are_refused(make, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(make(*MCP, *overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dtype=float32"], ["rollout.fp8=true needs model.dtype=bfloat16", "model.dtype=float32"]),
        (
            ["sync.transport=adapters", "trainer.lora.rank=4", "trainer.lora.targets=[q_proj, k_proj, v_proj]"],
            ["rollout.fp8=true and sync.transport=adapters", "sync.transport=auto"],
        ),
        (
            ["rollout.tensor_parallel=4", "rollout.servers=1"],
            ["16 rows of 'model.layers.0.self_attn.q_proj.weight'", "its blocks' 32"],
        ),
    ],
)
def test_servers_that_cannot_keep_block_fp8_are_refused(make, model, tmp_path, overrides, words):
    fp8 = ["rollout.fp8=true", "model.dtype=bfloat16"]
    source = write_model(tmp_path / "source", json.loads((model / "config.json").read_text()))
    folder, _ = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", (32, 32))
    (folder / "tokenizer.json").touch()
    check_config(make(*fp8, f"model.path={folder}"))
    with pytest.raises(ConfigError) as refused:
        check_config(make(*fp8, f"model.path={folder}", *overrides))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("planning", [False, True])
def test_a_folder_in_block_fp8_is_checked_with_its_scales(make, model, tmp_path, planning):
    config = make()
    plain = model_layout(config)[0]
    values = json.loads((model / "config.json").read_text())
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(values | {"quantization_config": stated}))
    assert model_layout(config)[0].hf_config == plain.hf_config
    source = write_model(tmp_path / "source", values)
    fp8, _ = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", (20, 28))
    (fp8 / "tokenizer.json").write_text("{}")
    config.model.path = str(fp8)
    check_config(config, planning=planning)
    (fp8 / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        check_config(config, planning=planning)


def test_model_config_is_sufficient_for_a_plan_only(make, model):
    config = make("model.path=elsewhere", f"model.config={model / 'config.json'}")
    check_config(config, planning=True)
    assert "megasync plan" in refused(config)
    assert "model.config" in refused(make("model.path=elsewhere", "model.config=gone.json"), planning=True)


def test_missing_files_of_a_model_folder_are_named(make, model):
    for name, part in (
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "safetensors"),
        ("config.json", "config.json"),
    ):
        (model / name).unlink()
        assert part in refused(make())


def test_models_that_sglang_has_no_pipeline_for_are_refused(make, model):
    values = json.loads((model / "config.json").read_text())
    check_config(make("rollout.pipeline_parallel=2"))
    (model / "config.json").write_text(json.dumps(values | {"model_type": "llama", "tie_word_embeddings": True}))
    assert "rollout.pipeline_parallel=2 needs pipeline in SGLang" in refused(make("rollout.pipeline_parallel=2"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["trainer.tensor_parallel=2"], ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"]),
        (["trainer.data_parallel=3", "trainer.expert_parallel=3"], ["4 experts", "trainer.expert_parallel=3"]),
        (["rollout.tensor_parallel=4", "rollout.servers=1"], ["rollout.tensor_parallel=4", "moe_intermediate_size=6"]),
        (["sync.transport=adapters", "trainer.lora.rank=4"], ["adapters of experts", "projections of attention"]),
        (
            ["trainer.fp8=tensorwise", "cluster.device=cuda", "model.dtype=bfloat16"],
            ["experts.linear_fc1.weight0 is 12 x 64", "trainer.expert_tensor_parallel=1"],
        ),
    ],
)
def test_invalid_options_of_experts_are_refused(make, model, overrides, parts):
    values = json.loads((model / "config.json").read_text())
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    (model / "config.json").write_text(json.dumps(values | experts))
    message = refused(make(*overrides))
    assert all(part in message for part in parts), message


def test_adapters_of_the_output_layer_are_not_merged(make):
    lora = ["trainer.lora.rank=4", "trainer.lora.targets=[o_proj, lm_head]"]
    assert "lm_head, whose adapters are not merged" in refused(make(*lora), planning=True)


def test_a_plan_reads_the_adapter_that_is_there(make, tmp_path):
    lora = ["trainer.lora.rank=4", f"trainer.lora.path={tmp_path}"]
    assert "adapter_config.json" in refused(make(*lora), planning=True)
    gone = make(*lora[:1], f"trainer.lora.path={tmp_path / 'gone'}")
    check_config(gone, planning=True)
    assert "gone" in refused(gone)


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (None, ["is not a PEFT folder"]),
        ({"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}, ["has rank 8", "trainer.lora.rank=4"]),
        ({"peft_type": "LORA", "r": 4, "target_modules": ["lm_head"]}, ["adapts lm_head", "trainer.lora.targets"]),
        ({"peft_type": "IA3", "target_modules": ["q_proj"]}, ["peft_type='IA3'"]),
    ],
)
def test_adapters_of_held_out_sets_must_fit_those_of_the_policy(make, tmp_path, found, parts):
    folder = tmp_path / "old"
    folder.mkdir()
    if found is not None:
        (folder / "adapter_config.json").write_text(json.dumps(found))
    held_out = f"eval.sets.old={{data: {{kind: digits, source: copy}}, adapter: {folder}}}"
    message = refused(make("sync.transport=adapters", "trainer.lora.rank=4", held_out))
    assert all(part in message for part in ["eval.sets.old.adapter", *parts]), message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["context_length=None allows 2048 tokens", "attention_chunk_size=1536", "at most 1536"]),
        (["rollout.context_length=1537"], ["context_length=1537", "attention_chunk_size=1536"]),
        (["rollout.external=[http://127.0.0.1:9]", "rollout.servers=1"], ["rollout.external", "attention in chunks"]),
        (
            ["rollout.context_length=1536", "sync.transport=adapters", "trainer.lora.rank=4"],
            ["sync.transport=adapters does not support attention in chunks", "transport=auto"],
        ),
    ],
)
def test_what_servers_do_not_compute_of_llama_4_is_refused(make, model, overrides, parts):
    values = json.loads((model / "config.json").read_text()) | {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 1536,
        "rope_theta": 1e4,
    }
    (model / "config.json").write_text(json.dumps(values))
    write_headers(model)
    check_config(make("rollout.context_length=1536"))
    message = refused(make(*overrides))
    assert all(part in message for part in parts), message


def test_adapters_that_servers_on_a_cpu_would_pad_are_refused(make, model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"intermediate_size": 48}))
    adapters = ["sync.transport=adapters", "trainer.lora.rank=4", "rollout.tensor_parallel=2", "cluster.device=cpu"]
    message = refused(make(*adapters))
    assert "intermediate_size to be a multiple of 64" in message and "it is 48" in message
    make(*adapters, "trainer.lora.targets=[q_proj, k_proj, v_proj]")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "gpt_neox"}, ["gpt_neox", "qwen3"]),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ["quant_method='awq'", "block FP8"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["weight_block_size=None", "[128, 128]"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["'dynamic'"]),
        ({"hidden_size": "64"}, ["hidden_size='64'", "whole number"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "whole number"]),
        ({"num_attention_heads": 10**18}, [f"num_attention_heads={10**18}", "whole number"]),
        ({"rope_parameters": [1]}, ["rope_parameters=[1]", "object"]),
        ({"model_type": ["qwen3"]}, ["model_type=['qwen3']", "text"]),
    ],
)
def test_an_unsupported_model_is_refused_with_its_file(make, model, change, parts):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refused(make())
    assert str(path) in message
    for part in parts:
        assert part in message


def test_a_config_that_is_not_json_is_refused_with_its_file(make, model):
    (model / "config.json").write_text("{")
    assert str(model / "config.json") in refused(make())


def test_a_run_root_below_a_file_is_refused(make, tmp_path):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(make(f"run_root={tmp_path}/file/runs"))


@pytest.mark.processes
def test_checking_loads_neither_torch_nor_ray():
    code = "import sys, megasync.config; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_service_is_refused_without_the_protocols_package_and_at_a_port_that_is_taken(make, monkeypatch):
    monkeypatch.setattr(missing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package tinker, which is not installed.*megasync install serve"):
        check_service(make(*SERVED))
    check_service(make(*SERVED), planning=True)
    monkeypatch.setattr(missing, "find_spec", lambda name: name)
    check_service(make(*SERVED))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"serve cannot listen at host=127\.0\.0\.1, port=\d+: .*in use"):
            check_service(make(*SERVED, f"serve.port={taken.getsockname()[1]}"))
