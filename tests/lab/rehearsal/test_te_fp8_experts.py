"""Experts whose linear layers compute in FP8, with real Megatron and Transformer Engine over the stand-in.

Routes are given, so that another rounding does not choose other experts, and results can be compared token by token.
"""

import pytest
import torch
from family_layouts import WHOLE
from random_models import MODELS, MORE_MODELS, write_model
from random_routes import routed

SEQUENCE_PARALLEL = {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1}
# With sizes that are multiples of 16, though not of the blocks' 128.
SIXTEENS = {
    "qwen3_moe": {"num_hidden_layers": 2},
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen2_moe": {"hidden_size": 64, "shared_expert_intermediate_size": 64},
    "glm4_moe": {},
    "minimax_m2": {},
    "gpt_oss": {},
    "qwen3_next": {
        "shared_expert_intermediate_size": 64,
        "linear_value_head_dim": 16,
        "linear_num_value_heads": 16,
    },
}
# How far FP8 may be from bfloat16 at most: log-probs as a share of their spread, the gradient norm, and gradients of
# experts as a share of theirs. Gradients in bfloat16 are themselves 2 % off those in float32 in most of these models,
# but 8 % with delta nets, and up to 27 % for small biases of gpt-oss.
BOUNDS = {"qwen3_next": (0.3, 0.15, 0.9), "gpt_oss": (0.25, 0.05, 0.6)}
RECIPES = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
CASES = [
    ("te", "qwen3_moe", "tensorwise", {"data_parallel": 2, "expert_parallel": 2, **WHOLE}),
    (
        "te 0.19.2",
        "deepseek_v3",
        "blockwise",
        {**SEQUENCE_PARALLEL, "expert_parallel": 2, "moe_deepep": True, "recompute": "full"},
    ),
]
ALL_CASES = [
    (flavour, family, recipe, options)
    for flavour in ("te", "te 0.19.2")
    for family in SIXTEENS
    for recipe in RECIPES
    for options in ({**SEQUENCE_PARALLEL, "expert_parallel": 2}, {"pipeline_parallel": 2, "recompute": "full"})
]


@pytest.mark.parametrize(
    ("flavour", "family", "recipe", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in ALL_CASES)],
)
def test_experts_compute_in_fp8(run_ranks, rows, tmp_path, flavour, family, recipe, options):
    config = {**MODELS, **MORE_MODELS}[family] | SIXTEENS[family]
    if "pipeline_parallel" in options:
        # Of two layers, only the one on the second stage would have experts.
        config["num_hidden_layers"] = {**MODELS, **MORE_MODELS}[family]["num_hidden_layers"]
    model = str(write_model(tmp_path / "model", config, seed=5))
    ranks = run_ranks(
        experts_in_fp8, 2, flavour=flavour, model=model, rows=routed(rows, model), trainer=options, recipe=recipe
    )
    for found in ranks:
        plain, fp8, more = found["bfloat16"], found[recipe], found["more rows"]
        assert fp8["recipes"] == {RECIPES[recipe]}
        assert any(count % 16 for count in fp8["tokens"])
        assert fp8["filled"] == [-(-count // 16) * 16 for count in fp8["tokens"]]
        spread, norm, share = BOUNDS.get(family, (0.25, 0.05, 0.4))
        errors = (fp8["scores"] - plain["scores"]).abs()
        assert 1e-2 < errors.mean() / plain["scores"].std() < spread
        assert fp8["grad_norm"] == pytest.approx(plain["grad_norm"], rel=norm)
        for name, gradient in plain["gradients"].items():
            if ".experts." in name:
                assert (fp8["gradients"][name] - gradient).norm() < share * gradient.norm(), name
        # Rows of zeros count in no product, gradient or scale.
        assert more["filled"] == [-(-count // 64) * 64 for count in fp8["tokens"]]
        assert torch.equal(more["scores"], fp8["scores"])
        assert all(torch.equal(more["gradients"][name], value) for name, value in fp8["gradients"].items())
        # What a sync sends.
        assert all(torch.equal(fp8["served"][name], value) for name, value in plain["served"].items())
    # No token went to an expert that its router did not choose.
    for way in ("bfloat16", recipe, "more rows"):
        assert sum(sum(found[way]["tokens"]) for found in ranks) == sum(found[way]["chosen"] for found in ranks)


def experts_in_fp8(model, rows, trainer, recipe):
    """Scores, gradients and served weights in bfloat16, with a recipe, and with "more rows" of zeros than it needs.

    ``tokens`` of each expert, and to how many rows they are ``filled`` up, for each pass through a layer. ``chosen`` is
    the number of experts that the routers chose in all.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from rank_engines import close, cross_entropy, gradients, make_engine, to_samples
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    found = {}
    for name in ("bfloat16", recipe, "more rows"):
        engine = make_engine(model, {**trainer, "fp8": None if name == "bfloat16" else recipe}, dtype="bfloat16")
        notes = {"tokens": [], "filled": [], "recipes": set(), "chosen": 0}

        def before_layer(layer, inputs, notes=notes):
            notes["chosen"] += inputs[0].shape[:-1].numel() * layer.config.moe_router_topk

        def before_experts(_, inputs, notes=notes):
            notes["tokens"] += inputs[1].tolist()

        def before_product(_, inputs, notes=notes):
            notes["filled"] += [int(count) for count in inputs[1]]
            if FP8GlobalStateManager.is_fp8_enabled():
                notes["recipes"].add(type(FP8GlobalStateManager.get_fp8_recipe()).__name__)

        for part in (part for chunk in engine.chunks for part in chunk.modules()):
            if isinstance(part, MoELayer):
                part.register_forward_pre_hook(before_layer)
            elif isinstance(part, TEGroupedMLP):
                part.register_forward_pre_hook(before_experts)
                part.linear_fc1.register_forward_pre_hook(before_product)
                if name == "more rows":
                    part.quantization_padding.align_size = part.quantization_unpadding.align_size = 64
        samples = to_samples(rows)
        scores = torch.cat(engine.score_everywhere(samples))
        served = {key: param.clone() for key, param in engine.params().items()}
        tokens = sum(len(sample.scored) for sample in samples)
        engine.forward_backward(engine.local_batch(samples), cross_entropy(tokens))
        results = {"scores": scores, "served": served, "gradients": gradients(engine)}
        found[name] = {**notes, **results, "grad_norm": engine.update(1, loss_is_finite=True).grad_norm}
        close(engine)
    return found
