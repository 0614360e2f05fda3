"""Reading config.json, and configurations that are refused before any process starts."""

import copy
import json
import re

import pytest
import torch
import torch.distributed as dist
from random_models import MORE_MODELS

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import Device, resolve_device
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology
from megasync.trainer.architecture import (
    check_architecture,
    check_trainer,
    chunks_of,
    rope_parameters,
    window_options,
)
from megasync.trainer.engine import MegatronEngine
from megasync.trainer.optimizer import learning_rate
from megasync.trainer.rotary import attention_factor, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3], ids=["default", "llama3"])
def test_frequencies_are_hugging_faces(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {**scaling, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(
        inverse_frequencies(rope_parameters({"model_type": "llama", "rope_parameters": rope}), 128), expected
    )


def test_old_and_new_spelling_of_rope_are_the_same():
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"model_type": "llama", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert torch.equal(inverse_frequencies(rope_parameters(old), 64), inverse_frequencies(rope_parameters(new), 64))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'.*default, llama3"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({}, "neither rope_parameters.rope_theta nor rope_theta"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_other_kinds_of_rope_are_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        rope_parameters({"model_type": "llama", **config})


# Without one of these, SGLang computes another model than Hugging Face does.
SWITCHES = ("use_qk_norm", "use_routing_bias", "scoring_func")


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_servers_need_must_be_stated(switch):
    config = {key: value for key, value in MORE_MODELS["minimax_m2"].items() if key != switch}
    with pytest.raises(ConfigError, match=f"{switch}=.* is not supported for minimax_m2"):
        rope_parameters(config)


def test_norms_over_all_heads_need_whole_groups_on_each_tensor_rank():
    with pytest.raises(ConfigError, match="tensor_parallel=4 is not a divisor of num_key_value_heads=2"):
        Layout(MORE_MODELS["minimax_m2"], Topology(tensor=4))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types in config.json must have .* for each of .*=4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types in config.json .* chunked_attention"),
        ({"sliding_window": None}, "sliding_window=None in config.json must be a whole number"),
        ({"swiglu_limit": None}, "swiglu_limit=None in config.json must be a number above 0"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 .* is not supported for gpt_oss"),
        ({"rope_scaling": None}, "rope_type 'default' .* supported for gpt_oss are yarn"),
    ],
)
def test_what_gpt_oss_cannot_have_is_refused(stated, words):
    check_architecture(MORE_MODELS["gpt_oss"])
    with pytest.raises(ConfigError, match=words):
        check_architecture({**MORE_MODELS["gpt_oss"], **stated})


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (None, {"window_size": (4, 0), "window_attn_skip_freq": [1, 0, 1, 0]}),
        (["full_attention"] * 4, {}),
        (
            ["full_attention"] * 3 + ["sliding_attention"],
            {"window_size": (4, 0), "window_attn_skip_freq": [0, 0, 0, 1]},
        ),
    ],
)
def test_layers_have_the_windows_that_config_json_states(kinds, options):
    """Without a list, as in Hugging Face, every other layer from the first on."""
    assert window_options({**MORE_MODELS["gpt_oss"], "layer_types": kinds}) == options


LLAMA4 = MORE_MODELS["llama4_text"]


@pytest.mark.parametrize(
    "stated",
    [
        {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
        {"no_rope_layers": [], "layer_types": None, "moe_layers": [1, 3]},
    ],
)
def test_every_fourth_layer_of_llama_4_attends_to_all_tokens(stated):
    """In either form of config.json, as Hugging Face reads it."""
    from transformers import Llama4TextConfig

    config = {**LLAMA4, **stated}
    check_architecture(config)
    theirs = Llama4TextConfig(**{key: value for key, value in config.items() if key != "model_type"})
    chunks = chunks_of(config)
    assert chunks == (6, {3}, True, (0.3, 5))
    assert theirs.no_rope_layers == [int(layer not in chunks.full) for layer in range(4)]
    assert [kind == "full_attention" for kind in theirs.layer_types] == [layer in chunks.full for layer in range(4)]
    assert set(theirs.moe_layers) == Layout(config, Topology()).sizes.sparse_layers
    assert chunks_of({**config, "attn_temperature_tuning": False}).temperature is None


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, "no_rope_layers=.* is not supported: SGLang rotates nothing"),
        ({"no_rope_layer_interval": 2}, "no_rope_layer_interval=2 .* SGLang assumes 4"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported"),
        ({"attention_chunk_size": None}, "attention_chunk_size=None in config.json must be a whole number"),
        ({"floor_scale": 0}, "floor_scale=0 in config.json must be a whole number"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 .* is not supported for llama4_text; only 1 is"),
        ({"attention_bias": True}, "attention_bias=True .* is not supported for llama4_text"),
        ({"moe_layers": [0]}, r"moe_layers=\[0\] .* contradicts interleave_moe_layer_step=2"),
        ({"interleave_moe_layer_step": 0}, "is 0; it must be at least 1"),
    ],
)
def test_what_llama_4_cannot_have_is_refused(stated, words):
    with pytest.raises(ConfigError, match=words):
        check_architecture({**LLAMA4, **stated})
        Layout({**LLAMA4, **stated}, Topology())


GEMMA = MORE_MODELS["gemma3_text"]


def test_gemma_has_five_layers_with_a_window_before_each_full_one():
    config = {key: value for key, value in GEMMA.items() if key != "sliding_window_pattern"} | {"num_hidden_layers": 8}
    assert window_options(config)["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert window_options(GEMMA) == {"window_size": (4, 0), "window_attn_skip_freq": [1, 1, 0, 1]}


def test_kinds_of_layers_have_the_angles_that_either_form_of_config_json_states():
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, Gemma3TextConfig

    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": GEMMA["rope_local_base_freq"]},
        "full_attention": {**GEMMA["rope_scaling"], "rope_theta": GEMMA["rope_theta"]},
    }
    flat = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    new = {key: value for key, value in GEMMA.items() if key not in flat} | {"rope_parameters": nested}
    # Transformers writes into the nested values that it is given.
    stated = copy.deepcopy({key: value for key, value in new.items() if key != "model_type"})
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**stated))
    for config in (GEMMA, new):
        for windowed, kind in ((False, "full_attention"), (True, "sliding_attention")):
            found = inverse_frequencies(rope_parameters(config, windowed=windowed), GEMMA["head_dim"])
            torch.testing.assert_close(found, getattr(theirs, f"{kind}_inv_freq"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type 'linear'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ],
)
def test_what_is_not_implemented_of_gemma_is_refused(stated, named):
    check_architecture(GEMMA)
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_architecture({**GEMMA, **stated})


@pytest.mark.parametrize(("family", "named"), [("deepseek_v3", "latent attention"), ("qwen3_next", "gated delta nets")])
def test_exchanges_without_buffers_are_not_overlapped(family, named):
    overlap = {"tensor_parallel": 2, "sequence_parallel": True, "pad_microbatches": True, "tp_comm_overlap": True}
    trainer = TrainerConfig(**overlap, expert_tensor_parallel=1)
    layout = Layout(MORE_MODELS[family], Topology.from_config(trainer), "te")
    with pytest.raises(ConfigError, match=f"trainer.tp_comm_overlap=true does not support {named}"):
        check_trainer(layout, trainer, ModelConfig(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("qwen3_moe", ["experts"]),
        ("deepseek_v3", ["experts", "latent attention"]),
        ("qwen3_5_text", ["gated delta nets"]),
        ("llama4_text_plain", ["experts", "attention in chunks"]),
        ("glm4", ["rotated pairs of adjacent channels"]),
    ],
)
def test_layers_that_cannot_be_captured(family, named):
    trainer = TrainerConfig(pad_microbatches=True, cuda_graphs=True)
    layout = Layout(MORE_MODELS[family], Topology.from_config(trainer), "te")
    with pytest.raises(
        ConfigError, match="\n".join(f"trainer.cuda_graphs=true does not support {each}.*" for each in named)
    ):
        check_trainer(layout, trainer, ModelConfig(dtype="bfloat16"))


def test_experts_with_biases_are_not_split():
    with pytest.raises(ConfigError, match=r"set trainer.expert_tensor_parallel=1, not 2 \(as trainer.tensor"):
        Layout(MORE_MODELS["gpt_oss"], Topology(tensor=2))


@pytest.mark.parametrize(
    ("stated", "share"),
    [
        ({}, 1.0),
        ({"rotary_dim": 8}, 0.5),
        ({"rotary_dim": 8, "partial_rotary_factor": 0.5}, 0.5),
        ({"rotary_dim": 8, "partial_rotary_factor": 0.25}, None),
        ({"partial_rotary_factor": 0.5}, None),
    ],
)
def test_a_number_of_rotated_channels_must_agree_with_a_share(stated, share):
    config = {key: MORE_MODELS["minimax_m2"][key] for key in ("model_type", "rope_theta", *SWITCHES)}
    config |= {"head_dim": 16, **stated}
    if share is None:
        with pytest.raises(ConfigError, match="contradicts rotary_dim"):
            rope_parameters(config)
    else:
        assert rope_parameters(config)["partial_rotary_factor"] == share


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16},
        {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 3},
        {"attention_factor": 1.25, "truncate": False},
        {"factor": 1.0},
    ],
)
def test_yarn_is_hugging_faces(options):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        **options,
    }
    theirs = DeepseekV3RotaryEmbedding(DeepseekV3Config(rope_parameters=dict(rope), max_position_embeddings=163840))
    found = rope_parameters({"model_type": "deepseek_v3", "rope_parameters": rope})
    torch.testing.assert_close(inverse_frequencies(found, 64), theirs.inv_freq)
    assert attention_factor(found) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("stated", [{}, {"partial_rotary_factor": 0.25}])
def test_partial_frequencies_are_hugging_faces(stated):
    from transformers import Glm4Config
    from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 10000.0, **stated}
    expected = Glm4RotaryEmbedding(Glm4Config(head_dim=64, rope_parameters=dict(rope))).inv_freq
    found = inverse_frequencies(rope_parameters({"model_type": "glm4", "rope_parameters": rope}), 64)
    torch.testing.assert_close(found, expected)


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.*is not a folder on this machine"):
        read_hf_config(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_hf_config(str(tmp_path))


def test_wrong_worlds_and_dtypes_are_refused(models, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match="the trainer has 3 ranks"):
        MegatronEngine(ModelConfig(path=models["llama"]), TrainerConfig(), Device("cpu"), 0).initialize()
    with pytest.raises(ConfigError, match="float16.*must be float32 or bfloat16"):
        MegatronEngine(ModelConfig(path=models["llama"], dtype="float16"), TrainerConfig(), Device("cpu"), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "'gemma' in config.json is not supported; supported are llama, "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' in config.json is not supported; only 'silu' is"),
        ({"use_sliding_window": True}, "use_sliding_window=True in config.json is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_architectures_and_options_that_are_not_implemented_are_refused_by_name(models, tmp_path, change, message):
    config = {**read_hf_config(models["llama"]), **change}
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(ConfigError, match=message):
        MegatronEngine(ModelConfig(path=str(tmp_path)), TrainerConfig(), Device("cpu"), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_experts_per_tok": 2},
            "num_experts_per_tok=2 with topk_group=2.*ranks groups of experts by their best 1",
        ),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 in config.json is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "supported for deepseek_v3 are default, yarn",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}}, "needs factor, original_max_"),
        ({"rope_interleave": False}, "rope_interleave=False"),
    ],
)
def test_latent_attention_and_routing_that_are_not_implemented_are_refused_by_name(models, tmp_path, change, message):
    config = {**read_hf_config(models["deepseek_v3"]), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        MegatronEngine(ModelConfig(path=str(tmp_path)), TrainerConfig(), Device("cpu"), 0)


def test_devices():
    assert resolve_device("cpu").backend == "gloo"
    assert resolve_device("cpu").spec == "local"
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda"):
        resolve_device("tpu")


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.8828, 0.6, 0.3172]),
    ],
)
def test_learning_rates(decay, expected):
    config = OptimizerConfig(lr=1.0, decay=decay, warmup_steps=2, min_lr=0.2)
    assert [learning_rate(config, step, 6) for step in range(1, 7)] == pytest.approx(expected, abs=1e-4)
    # A run that was prolonged beyond the end of its schedule.
    assert learning_rate(config, 100, 6) == (1.0 if decay == "constant" else pytest.approx(0.2))


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_decay_without_warm_up_is_that_of_pytorchs_schedulers(decay, steps):
    """The first step has the whole rate and the last one some, so a run of one step learns."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if decay == "linear":
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=1e-9, total_iters=steps)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    expected = []
    for _ in range(steps):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    config = OptimizerConfig(lr=1.0, decay=decay)
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert rates == pytest.approx(expected, abs=1e-6) and min(rates) > 0


def test_an_unknown_decay_is_refused():
    with pytest.raises(ConfigError, match="'exponential'; it must be constant, linear or cosine"):
        learning_rate(OptimizerConfig(decay="exponential"), 1, 10)
