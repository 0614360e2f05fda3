"""What is refused, and planned, for a policy from a folder with a vision tower."""

import json
from math import prod

import pytest
from random_models import MORE_MODELS, write_model
from safetensors.torch import load_file, save_file

from megasync.config.schema import ModelConfig
from megasync.errors import ConfigError
from megasync.planning.memory import host_memory, server_memory
from megasync.preflight.check import check_config, model_layout


@pytest.fixture(params=["gemma3", "qwen3_5", "qwen3_5_moe", "llama4"])
def vision(request, make, tmp_path):
    """Makes a configuration of a model with a vision tower."""
    values = MORE_MODELS[request.param]
    if request.param == "llama4":
        # Servers have no chunks, so contexts must fit into one.
        values = values | {"text_config": values["text_config"] | {"attention_chunk_size": 256}}
    folder = write_model(tmp_path / "vision", values)
    (folder / "tokenizer.json").touch()

    def load(*overrides):
        small = ("data.prompt.max_tokens=64", "rollout.sampling.max_new_tokens=64")
        return make(f"model.path={folder}", "model.dtype=float32", *small, *overrides)

    return load


def test_it_is_accepted(vision):
    check_config(vision())
    check_config(vision("trainer.lora.rank=4"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["critic.enabled=true", "algorithm.advantage=gae"], "critic.enabled=true does not support vision tower"),
        (
            ["trainer.lora.rank=4", "trainer.lora.targets=[o_proj]", "sync.transport=adapters"],
            "sync.transport=adapters does not support vision tower",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(vision, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_config(vision(*overrides))


def test_a_tensor_of_the_tower_that_is_missing_is_named_before_the_start(vision):
    config = vision()
    file = model_layout(config)[1].parent / "model.safetensors"
    tensors = load_file(file)
    victim = next(name for name in tensors if name in model_layout(config)[0].frozen_tensors)
    del tensors[victim]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=victim):
        check_config(config)
    # A plan needs only the config.json.
    file.unlink()
    check_config(config, planning=True)


def test_a_quantized_folder_is_refused(vision):
    config = vision()
    file = model_layout(config)[1]
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match="quantized model with a vision tower"):
        check_config(config)


def test_servers_have_memory_for_the_tower_which_is_not_staged(vision):
    config = vision("sync.arena=device", "rollout.tensor_parallel=2")
    layout, _ = model_layout(config)
    synced, frozen = (sum(map(prod, shapes.values())) for shapes in (layout.hf_tensors, layout.frozen_tensors))
    memory = server_memory(config, layout, 10**9)
    assert memory.weights == (synced + frozen) * 4 // 2
    assert memory.arena == synced * 4 // 2
    config.sync.arena = "host"
    assert host_memory(config, layout, 1, 1).staging == synced * 4 // 2


@pytest.mark.parametrize(("model", "count"), [("gemma_3_27b", 27_432_406_640), ("llama_4_scout", 108_641_793_536)])
def test_the_parameters_are_the_published_ones(make, model, count):
    config = make()
    config.model = ModelConfig(path="models/absent", config=f"configs/models/{model}.json")
    layout, _ = model_layout(config, planning=True)
    everything = layout.hf_tensors | layout.frozen_tensors
    assert sum(map(prod, everything.values())) == count
