"""verl settings that megasync applies, and those it refuses by name."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")

from random_models import MORE_MODELS, write_model
from tiny_models import make_tiny_model
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.base import EngineRegistry

from megasync.errors import ConfigError
from megasync.integrations import verl_versions
from megasync.integrations.verl import MegasyncEngine, MegasyncEngineConfig, MegasyncValueEngine
from megasync.integrations.verl.config import check_contents, to_model, to_optimizer, to_trainer, verl_setting_names
from megasync.layout.topology import Topology


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False))


def hf_model(path, **options):
    return HFModelConfig(path=path, load_tokenizer=False, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_finds_the_engines_by_their_strategy(monkeypatch, device):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
    assert EngineRegistry.get_engine_cls("language_model", "megasync") is MegasyncEngine
    assert EngineRegistry.get_engine_cls("value_model", "megasync") is MegasyncValueEngine


def test_one_line_per_role_selects_megasync_in_verls_configuration(model):
    from hydra import compose, initialize_config_module

    sections = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    lines = [f"{section}.megatron._target_=megasync.integrations.verl.MegasyncEngineConfig" for section in sections]
    required = [f"{section}.ppo_micro_batch_size_per_gpu=2" for section in ("actor_rollout_ref.actor", "critic")]
    size = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_megatron_trainer", [*lines, *required, size, f"critic.model.path={model}"])
    actor = omega_conf_to_dataclass(composed.actor_rollout_ref.actor)
    reference = omega_conf_to_dataclass(composed.actor_rollout_ref.ref.megatron)
    critic = omega_conf_to_dataclass(composed.critic)
    assert type(actor.engine) is type(reference) is type(critic.engine) is MegasyncEngineConfig
    assert (actor.strategy, actor.engine.strategy, reference.forward_only) == ("megatron", "megasync", True)
    check_contents(critic.checkpoint)
    trainer = to_trainer(actor.engine, actor.optim, world=4)
    assert (trainer.tensor_parallel, trainer.data_parallel, trainer.optimizer.lr) == (2, 2, 1e-6)
    check_contents(actor.checkpoint)


def test_sizes_and_layers_are_converted():
    config = MegasyncEngineConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        override_transformer_config={"recompute_granularity": "full", "num_layers_in_first_pipeline_stage": 1},
    )
    trainer = to_trainer(config, None, world=8)
    assert (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.data_parallel) == (2, 2, 2)
    assert (trainer.recompute, trainer.first_stage_layers, trainer.sequence_parallel) == ("full", 1, True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("strategy", "megatron"),
        ("dtype", "float16"),
        ("tensor_model_parallel_size", 0),
        ("context_parallel_size", 2),
        ("use_megatron_fsdp", True),
        ("use_dist_checkpointing", True),
        ("override_ddp_config", {"overlap_grad_reduce": True}),
        ("override_transformer_config", {"recompute_granularity": "selective"}),
        ("override_transformer_config", {"moe_router_dtype": "fp32"}),
        ("router_replay", EngineRouterReplayConfig(mode="R2")),
    ],
)
def test_a_setting_that_megasync_lacks_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        MegasyncEngineConfig(**{name: value})


def test_verls_own_megatron_section_is_refused():
    with pytest.raises(ConfigError, match="_target_"):
        to_trainer(McoreEngineConfig(), None, world=1)


def test_ranks_that_the_sizes_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="does not divide the 3 ranks"):
        to_trainer(MegasyncEngineConfig(tensor_model_parallel_size=2), None, world=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"expert_model_parallel_size": 3}, "^expert_model_parallel_size=3 x expert_tensor_parallel_size=1 .* 4 ranks"),
        ({"virtual_pipeline_model_parallel_size": 2}, "raise pipeline_model_parallel_size or set virtual_pipeline_m"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_verl_setting_names(options, message):
    trainer = to_trainer(MegasyncEngineConfig(**options), None, world=4)
    with pytest.raises(ConfigError, match=message), verl_setting_names():
        Topology.from_config(trainer)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"lr": 2e-6, "lr_decay_style": "constant"}, ("constant", 0, 0)),
        ({"lr_decay_style": "cosine", "total_training_steps": 40, "lr_warmup_steps_ratio": 0.1}, ("cosine", 4, 40)),
        ({"lr_decay_style": "linear", "lr_decay_steps": 30, "lr_warmup_steps": 5}, ("linear", 5, 30)),
    ],
)
def test_the_schedule_is_converted(options, expected):
    config, total = to_optimizer(McoreOptimizerConfig(**options))
    assert (config.decay, config.warmup_steps, total) == expected
    assert config.lr == options.get("lr", 1e-3)


@pytest.mark.parametrize(
    "name, options",
    [
        ("optimizer", {"optimizer": "muon"}),
        ("use_layer_wise", {"use_layer_wise_distributed_optimizer": True}),
        ("lr_decay_style", {"lr_decay_style": "inverse_square_root"}),
        ("lr_decay_style", {"lr_decay_style": "cosine"}),
        ("override_optimizer_config", {"override_optimizer_config": {"optimizer_cpu_offload": True}}),
    ],
)
def test_an_optimizer_that_megasync_lacks_is_refused_by_name(name, options):
    with pytest.raises(ConfigError, match=name):
        to_optimizer(McoreOptimizerConfig(**{"lr_decay_style": "constant", **options}))


@pytest.mark.parametrize("options", [{"lora_rank": 8}, {"lora": {"rank": 8}}, {"lora_adapter_path": "adapter"}])
def test_adapters_are_refused(model, options):
    with pytest.raises(ConfigError, match="adapter"):
        to_model(hf_model(model, **options), MegasyncEngineConfig())


def test_a_changed_model_is_refused(model):
    engine = MegasyncEngineConfig(dtype="float32")
    assert to_model(hf_model(model), engine).dtype == "float32"
    with pytest.raises(ConfigError, match="override_config"):
        to_model(hf_model(model, override_config={"hidden_size": 8}), engine)


@pytest.mark.parametrize("contents", [["model"], ["model", "optimizer", "extra", "plans"]])
def test_partial_checkpoints_are_refused(contents):
    with pytest.raises(ConfigError, match="save_contents"):
        check_contents(CheckpointConfig(save_contents=contents))


def test_another_version_of_verl_is_refused(monkeypatch):
    monkeypatch.setattr(verl_versions, "version", lambda package: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0\.9\.1, but 0\.10\.0 is installed"):
        verl_versions.check_version()


def test_a_model_that_verls_servers_cannot_load_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]})
    )
    with pytest.raises(ConfigError, match="not supported under verl: .* leaves the experts of this model unloaded"):
        to_model(hf_model(str(tmp_path)), MegasyncEngineConfig())


def test_a_model_in_fp8_is_refused_because_verls_servers_would_keep_it_quantized(model, tmp_path):
    path = Path(shutil.copytree(model, tmp_path / "fp8")) / "config.json"
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    with pytest.raises(ConfigError, match=r"is stored quantized, and verl's servers would keep it quantized"):
        to_model(hf_model(str(path.parent)), MegasyncEngineConfig())


def test_a_model_with_a_vision_tower_is_refused(tmp_path):
    write_model(tmp_path / "vision", MORE_MODELS["gemma3"])
    with pytest.raises(ConfigError, match="has a vision tower"):
        to_model(hf_model(str(tmp_path / "vision")), MegasyncEngineConfig())
