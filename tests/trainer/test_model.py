"""Reading config.json, and configurations that are refused before any process starts."""

import copy
import importlib
import json

import pytest
import torch
import torch.distributed as dist
import transformers
from random_models import MODELS, MORE_MODELS

from megasync.config.schema import ModelConfig, OptimizerConfig, TrainerConfig
from megasync.device import Device, resolve_device
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.trainer.architecture import (
    check_architecture,
    check_trainer,
    chunks_of,
    rope_parameters,
    window_options,
)
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.optimizer import learning_rate
from megasync.trainer.rotary import attention_factor, inverse_frequencies

CONFIGS = MODELS | MORE_MODELS
LLAMA4, GEMMA = MORE_MODELS["llama4_text"], MORE_MODELS["gemma3_text"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
# Options of a model that do not change its angles.
SMALL = {
    "llama": {"hidden_size": 256, "num_attention_heads": 4},
    "glm4": {"head_dim": 64},
    "deepseek_v3": {"max_position_embeddings": 163840},
}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "default"}),
        ("llama", LLAMA3),
        ("glm4", {"rope_type": "default"}),
        ("glm4", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("deepseek_v3", YARN),
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16}),
        ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 3}),
        ("deepseek_v3", {**YARN, "attention_factor": 1.25, "truncate": False}),
        ("deepseek_v3", {**YARN, "factor": 1.0}),
    ],
)
def test_angles_are_hugging_faces(family, rope):
    name, rope = family.title().replace("_", ""), {**rope, "rope_theta": 10000.0}
    config = getattr(transformers, f"{name}Config")(**SMALL[family], rope_parameters=dict(rope))
    modeling = f"transformers.models.{family}.modeling_{family}"
    theirs = getattr(importlib.import_module(modeling), f"{name}RotaryEmbedding")(config)
    actual = rope_parameters({"model_type": family, "rope_parameters": rope})
    torch.testing.assert_close(inverse_frequencies(actual, 64), theirs.inv_freq)
    assert attention_factor(actual) == pytest.approx(theirs.attention_scaling)


def test_old_and_new_spelling_of_rope_are_the_same():
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"model_type": "llama", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert torch.equal(inverse_frequencies(rope_parameters(old), 64), inverse_frequencies(rope_parameters(new), 64))


# What config.json of a family states otherwise (...: nothing), and what the refusal says.
SWITCHES = ("use_qk_norm", "use_routing_bias", "scoring_func")
REFUSED = {
    "llama": [
        ({"model_type": "gemma"}, "'gemma' in config.json is not supported; supported are llama, "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' in config.json is not supported; only 'silu' is"),
        ({"use_sliding_window": True}, "use_sliding_window=True in config.json is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'.*default, llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_theta": ...}, "neither rope_parameters.rope_theta nor rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
    # Without one of these, SGLang computes another model than Hugging Face does.
    "minimax_m2": [({switch: ...}, f"{switch}=.* is not supported for minimax_m2") for switch in SWITCHES],
    "gpt_oss": [
        ({"layer_types": ["full_attention"]}, "layer_types in config.json must have .* for each of .*=4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types in config.json .* chunked_attention"),
        ({"sliding_window": None}, "sliding_window=None in config.json must be a whole number"),
        ({"swiglu_limit": None}, "swiglu_limit=None in config.json must be a number above 0"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 .* is not supported for gpt_oss"),
        ({"rope_scaling": None}, "rope_type 'default' .* supported for gpt_oss are yarn"),
    ],
    "llama4_text": [
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
    "gemma3_text": [
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type 'linear'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
    ],
    "deepseek_v3": [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 with topk_group=2.*ranks groups of experts by their best"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 in config.json is not supported"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, "supported for deepseek_v3 are default, yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}}, "needs factor, original_max_"),
        ({"rope_interleave": False}, "rope_interleave=False"),
    ],
}


@pytest.mark.parametrize(
    ("family", "change", "words"), [(family, *case) for family, cases in REFUSED.items() for case in cases]
)
def test_what_a_family_does_not_compute_is_refused_by_name(family, change, words):
    check_architecture(CONFIGS[family])
    config = {key: value for key, value in {**CONFIGS[family], **change}.items() if value is not ...}
    with pytest.raises(ConfigError, match=words):
        check_architecture(config)
        Layout(config, Topology())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("minimax_m2", "tensor_parallel=4 is not a divisor of num_key_value_heads=2"),
        ("gpt_oss", r"set trainer.expert_tensor_parallel=1, not 4 \(as trainer.tensor"),
    ],
)
def test_norms_over_all_heads_and_biases_of_experts_are_not_split(family, words):
    with pytest.raises(ConfigError, match=words):
        Layout(MORE_MODELS[family], Topology(tensor=4))


OVERLAP = {"tensor_parallel": 2, "sequence_parallel": True, "pad_microbatches": True, "tp_comm_overlap": True}
OVERLAP |= {"expert_tensor_parallel": 1}
GRAPHS = {"pad_microbatches": True, "cuda_graphs": True}
CP2 = {"context_parallel": 2}


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("deepseek_v3", OVERLAP, ["trainer.tp_comm_overlap=true does not support latent attention"]),
        ("qwen3_next", OVERLAP, ["trainer.tp_comm_overlap=true does not support gated delta nets"]),
        *(
            (family, GRAPHS, [f"trainer.cuda_graphs=true does not support {part}" for part in parts])
            for family, parts in {
                "qwen3_moe": ["experts"],
                "deepseek_v3": ["experts", "latent attention"],
                "qwen3_5_text": ["gated delta nets"],
                "llama4_text_plain": ["experts", "attention in chunks"],
                "glm4": ["rotated pairs of adjacent channels"],
            }.items()
        ),
        ("gpt_oss", CP2, ["context_parallel=2 needs trainer.context_parallel_comm=a2a, but", "=p2p"]),
        ("qwen3", {**CP2, "context_parallel_comm": "a2a"}, ["a divisor of model's num_key_value_heads=1"]),
        ("llama4_text", {**CP2, "context_parallel_comm": "a2a"}, ["=2 does not support attention in chunks"]),
        (
            *("qwen3_next", {"context_parallel": 4, "tensor_parallel": 2}),
            ["tensor_parallel=2", "context_parallel=4", "= 8 must be a divisor of model's linear_num_key_heads"],
        ),
    ],
)
def test_what_a_model_does_not_support_is_refused_before_ranks_start(family, options, words):
    trainer = TrainerConfig(**options)
    layout = Layout(CONFIGS[family], Topology.from_config(trainer), "te")
    with pytest.raises(ConfigError) as refused:
        check_trainer(layout, trainer, ModelConfig(dtype="bfloat16"))
    assert all(word in str(refused.value) for word in words)


def test_ranks_that_share_sequences_on_gpus_need_bfloat16():
    trainer = TrainerConfig(**CP2)
    layout = Layout(MODELS["qwen3"], Topology.from_config(trainer), "te")
    with pytest.raises(ConfigError, match=r"context_parallel=2 needs model\.dtype=bfloat16, but"):
        check_trainer(layout, trainer, ModelConfig(dtype="float32"))


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
            actual = inverse_frequencies(rope_parameters(config, windowed=windowed), GEMMA["head_dim"])
            torch.testing.assert_close(actual, getattr(theirs, f"{kind}_inv_freq"), rtol=1e-6, atol=0)


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


def test_wrong_worlds_dtypes_and_models_are_refused_by_the_engine(models, monkeypatch, tmp_path):
    def engine(path=models["llama"], dtype="float32"):
        return MegatronLearner(ModelConfig(path=str(path), dtype=dtype), TrainerConfig(), Device("cpu"), 0)

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ConfigError, match="the trainer has 3 ranks"):
        engine().initialize()
    with pytest.raises(ConfigError, match="float16.*must be float32 or bfloat16"):
        engine(dtype="float16")
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama"], "hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        engine(tmp_path)


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
