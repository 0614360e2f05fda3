"""Training with Transformer Engine's layers on the CPU: bfloat16, resumed runs, states of the optimizer, and FP8."""

import pytest
import torch
from family_layouts import WHOLE, assert_gradients, layout_of, norm, reference
from random_models import MORE_MODELS, write_model
from tiny_models import make_tiny_model
from trainer_ranks import TIMED

SEQUENCE_PARALLEL = {"tensor_parallel": 2, "sequence_parallel": True}
# The head sizes of the tiny models of latent attention are none that cuDNN supports.
LATENT = {**MORE_MODELS["deepseek_v3"], "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# Family and the backend that attention takes in bfloat16.
BFLOAT16 = {"llama": "unfused", "qwen3": "fused", "glm4": "fused", "qwen3_moe": "fused", "latent": "fused"}


@pytest.fixture(scope="module")
def bfloat16(run_ranks, models, rows, tmp_path_factory):
    """flavour -> family -> result."""
    folder = tmp_path_factory.mktemp("bfloat16")
    paths = {family: models[family] for family in BFLOAT16 if family in models}
    paths["latent"] = str(write_model(folder / "latent", LATENT, seed=3))
    found = {}
    for flavour in ("te", "te 0.19.2", "local"):
        arguments = {"models": paths, "rows": rows, "layouts": {"one": {}}, "folder": str(folder / flavour)}
        (rank,) = run_ranks("layouts", 1, flavour=flavour, dtype="bfloat16", **arguments)
        found[flavour] = {family: rank[family, "one"] for family in paths}
    return found, {family: reference(path, rows) for family, path in paths.items()}


@pytest.mark.parametrize("flavour", ["te", "te 0.19.2"])
@pytest.mark.parametrize("family", BFLOAT16)
def test_bfloat16_is_as_exact_as_with_megatrons_own_layers(bfloat16, family, flavour):
    """Against Hugging Face in float32. Log-probs differ by 0.007 to 0.023 on average, with experts at single tokens
    by up to 0.45 in both flavours: their router chooses others."""
    found, hugging_face = bfloat16
    logprobs, loss, gradients = hugging_face[family]
    te, local = (found[layers][family] for layers in (flavour, "local"))
    assert te["attention"] == BFLOAT16[family]
    te_error, local_error = ((result["scores"] - logprobs).abs().mean() for result in (te, local))
    assert te_error < 1.3 * local_error
    assert te_error < 0.03
    assert te["loss"] == pytest.approx(loss, abs=0.01)
    assert te["grad_norm"] == pytest.approx(norm(gradients), rel=0.01)


MOMENTS = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
REMAINDERS = {"store_param_remainders": True}
RESUMED = {
    1: {
        "bfloat16": ("qwen3", "bfloat16", {}),
        "bfloat16-moments": ("qwen3", "bfloat16", {}, MOMENTS | REMAINDERS),
    },
    2: {
        "distributed-optimizer-bfloat16": ("qwen2", "bfloat16", {"data_parallel": 2}),
        "experts-virtual-pipeline": ("qwen3_moe", "float32", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        "bfloat16-moments": ("qwen2", "bfloat16", {"data_parallel": 2}, MOMENTS | REMAINDERS),
        "latent-attention-bfloat16": (
            "deepseek_v3",
            "bfloat16",
            {**SEQUENCE_PARALLEL, "expert_parallel": 2, "expert_tensor_parallel": 1},
        ),
    },
}


@pytest.mark.parametrize("world", RESUMED)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(run_ranks, models, tmp_path, world):
    runs = {
        name: {"model": models[model], "dtype": dtype, "trainer": trainer, "optimizer": dict(*optimizer)}
        for name, (model, dtype, trainer, *optimizer) in RESUMED[world].items()
    }
    for rank in run_ranks("resume", world, flavour="te", runs=runs, folder=str(tmp_path)):
        for name in runs:
            metrics, weights = rank[name]["straight"]
            resumed_metrics, resumed_weights = rank[name]["resumed"]
            assert metrics == resumed_metrics, name
            assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights), name
            assert rank[name]["state"] == {"step": 2, "note": "hello"}


# Ways to keep the states of the optimizer, and the dtypes of these.
STATES = {
    "plain": ({}, ["torch.float32"]),
    "moments": (MOMENTS, ["torch.bfloat16", "torch.float32"]),
    "first moment": ({"exp_avg_dtype": "bfloat16"}, ["torch.bfloat16", "torch.float32"]),
    "remainders": (REMAINDERS, ["torch.float32", "torch.int16"]),
    "both": (MOMENTS | REMAINDERS, ["torch.bfloat16", "torch.int16"]),
}


@pytest.mark.parametrize(
    ("names", "world", "megatron"),
    [
        (("plain", "moments", "both"), 2, ""),
        pytest.param(tuple(STATES), 2, " 0.19.2", marks=pytest.mark.matrix),
    ],
)
def test_states_of_the_optimizer_in_other_dtypes(run_ranks, models, tmp_path, names, world, megatron):
    """The first step has the same main weights, clipped gradients included, and moments that are those rounded.

    A checkpoint loads into every other way, with the same main weights, and the moments converted.
    """
    ways = {name: STATES[name][0] for name in names}
    arguments = {"model": models["qwen2"], "ways": ways, "folder": str(tmp_path)}
    for rank in run_ranks("states", world, flavour=f"te{megatron}", **arguments):
        plain = rank["plain"]
        assert plain["norm"] > 0.1  # clipped to 0.01
        for name, options in ways.items():
            found = rank[name]
            assert found["dtypes"] == STATES[name][1]
            assert found["norm"] == plain["norm"]
            assert_states(found["start"], plain["start"], options)
            assert_states(found["after"], plain["after"], options)
            for key, weight in plain["weights"].items():
                different = weight != found["weights"][key]
                assert different.sum() <= 3, "only values halfway between two weights are rounded to another one"
            for other, others in ways.items():
                loaded, saved = rank[name, other], rank[other]
                assert_states(loaded["after"], saved["after"], options, halfway="store_param_remainders" not in others)
                assert all(torch.equal(loaded["weights"][key], weight) for key, weight in saved["weights"].items())
                kinds = ("exp_avg", "exp_avg_sq")
                dtype = {kind: [way.get(f"{kind}_dtype", "float32") for way in (options, others)] for kind in kinds}
                assert loaded["converted"] == [kind for kind in kinds if len(set(dtype[kind])) > 1]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flavour", "families", "options"),
    [
        ("te", ("qwen2", "qwen3_moe", "deepseek_v3"), {}),
        ("te 0.19.2", ("qwen2", "qwen3_moe", "deepseek_v3"), {}),
        ("te", ("qwen2",), {"optimizer": MOMENTS | REMAINDERS, "dtype": "bfloat16"}),
        ("te 0.19.2", ("qwen2",), {"optimizer": MOMENTS | REMAINDERS, "dtype": "bfloat16"}),
        ("te", ("qwen2",), {"optimizer": {"offload": 0.5}, "dtype": "bfloat16"}),
    ],
)
def test_gathering_weights_in_forward_passes_changes_nothing(run_ranks, models, tmp_path, flavour, families, options):
    layouts = {"data": {"data_parallel": 2, "minibatches": 2}}
    paths = {family: models[family] for family in families}
    arguments = {"models": paths, "trainers": layouts, "folder": str(tmp_path), **options}
    for rank in run_ranks("overlapped", 2, flavour=flavour, **arguments):
        for family in paths:
            plain, overlapped = (rank[family, "data", overlap] for overlap in (False, True))
            assert overlapped["buckets"] > 3
            assert overlapped["metrics"] == plain["metrics"]
            for reader in ("weights", "save"):
                assert all(torch.equal(overlapped[reader][key], plain[reader][key]) for key in plain[reader])


def assert_states(found, expected, options, halfway=True):
    """Bitwise, after rounding moments to the dtypes of ``options``.

    ``halfway``: a remainder cannot keep a main weight halfway between two weights if it was rounded down.
    """
    assert found.keys() == expected.keys()
    for (name, kind), values in expected.items():
        if halfway and kind == "main_weight" and "store_param_remainders" in options:
            steps = found[name, kind].view(torch.int32) - values.view(torch.int32)
            assert steps.abs().max() <= 1 and steps.count_nonzero() <= 3, name
        else:
            dtype = getattr(torch, options.get(f"{kind}_dtype", "float32"))
            assert torch.equal(found[name, kind], values.to(dtype).float()), (name, kind)


def test_layers_compute_in_fp8(run_ranks):
    """With a factor per tensor, from earlier steps or from its values, and per block: within 6 % of bfloat16."""
    (found,) = run_ranks(fp8, 1, flavour="te")
    plain = found.pop("none")
    for recipe, tensors in found.items():
        for name, tensor in tensors.items():
            error = (tensor.float() - plain[name].float()).norm() / plain[name].float().norm()
            assert error < 0.06, (recipe, name)
            # Gradients of a bias are sums of what is not quantised.
            assert name == "bias" or error > 1e-3, (recipe, name)


# Split over two ranks, every product has multiples of 128.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def products(run_ranks, rows, tmp_path_factory):
    """(dtype, how linear layers compute) -> result of both ranks; and what Hugging Face computes in float32."""
    folder = tmp_path_factory.mktemp("products")
    model = str(make_tiny_model(folder / "model", "qwen3", tokenizer=False, **WIDE))
    options = {**SEQUENCE_PARALLEL, "tokens_per_microbatch": 64}
    ways = {
        "float32": {"plain": options, "fused": {**options, "gradient_accumulation_fusion": True}},
        "bfloat16": {"plain": options, "fused": {**options, "gradient_accumulation_fusion": True}},
    }
    ways["bfloat16"] |= {recipe: {**options, "fp8": recipe} for recipe in ("tensorwise", "blockwise")}
    found = {}
    for dtype, layouts in ways.items():
        arguments = {"models": {"model": model}, "rows": rows, "layouts": layouts, "folder": str(folder / dtype)}
        ranks = run_ranks("layouts", 2, flavour="te", dtype=dtype, **arguments)
        found |= {(dtype, way): [rank["model", way] for rank in ranks] for way in layouts}
    return found, reference(model, rows)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_model_trains_with_linear_layers_in_fp8(products, recipe):
    found, (logprobs, loss, gradients) = products
    errors = {way: (found["bfloat16", way][0]["scores"] - logprobs).abs().mean() for way in ("plain", recipe)}
    # The log-probs of this random model spread by 2.4.
    assert 4 * errors["plain"] < errors[recipe] < 0.5
    first = found["bfloat16", recipe][0]
    assert first["loss"] == pytest.approx(loss, abs=0.1)
    assert first["grad_norm"] == pytest.approx(norm(gradients), rel=0.03)


def test_gradients_are_added_up_within_the_product(products):
    """In float32 they are the same; in bfloat16 each microbatch's would otherwise be rounded first."""
    found, _ = products
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for rank in range(2):
        plain, fused = (found["float32", way][rank]["gradients"] for way in ("plain", "fused"))
        for each, gradient in plain.items():
            torch.testing.assert_close(fused[each], gradient, atol=1e-6, rtol=1e-4)
        plain, fused = (found["bfloat16", way][rank]["gradients"][name] for way in ("plain", "fused"))
        assert not torch.equal(fused, plain)
        torch.testing.assert_close(fused, plain, atol=1e-3, rtol=0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("flavour", ["te", "te 0.19.2"])
def test_the_balancing_loss_has_the_gradient_of_switch_transformers(run_ranks, models, rows, tmp_path, flavour):
    """One response, so that one microbatch counts; the other rank's is a masked copy."""
    options = {"data_parallel": 2, "expert_parallel": 2, **WHOLE, "moe_aux_loss": 0.5}
    path, layouts = models["qwen2_moe"], {"balanced": options}
    arguments = {"models": {"model": path}, "rows": [rows[3]], "layouts": layouts, "folder": str(tmp_path)}
    ranks = run_ranks("layouts", 2, flavour=flavour, **arguments)
    _, _, gradients = reference(path, [rows[3]], balance=0.5)
    held = [rank["model", "balanced"]["gradients"] for rank in ranks]
    assert_gradients(held, layout_of(path, options, "te"), gradients)


@pytest.mark.matrix
@pytest.mark.parametrize("flavour", ["te", "te 0.19.2"])
def test_reference_weights_stream_through_the_layers(run_ranks, models, flavour):
    runs = {
        "latent": (models["deepseek_v3"], {**SEQUENCE_PARALLEL, "recompute": "full"}),
        "interleaved": (models["mistral"], {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    }
    for rank in run_ranks("streamed_reference", 2, flavour=flavour, runs=runs):
        for name in runs:
            scores = rank[name]["scores"]
            assert (scores["others"] - scores["reference"]).abs().max() > 1e-3
            assert torch.equal(scores["streamed"], scores["reference"])
            assert torch.equal(scores["again"], scores["others"])
            assert rank[name]["in_place"]


@pytest.mark.matrix
@pytest.mark.parametrize("flavour", ["te", "te 0.19.2"])
def test_policy_steps_are_those_of_megatrons_own_layers(run_ranks, models, flavour):
    """With a KL term, two optimizer steps a batch and clipping."""
    run = {
        "steps": 2,
        "trainer": {"tensor_parallel": 2, "sequence_parallel": True, "minibatches": 2},
        "algorithm": {"kl_coef": 0.1},
    }
    te, local = (run_ranks("train", 2, flavour=each, model=models["qwen3"], **run) for each in (flavour, "local"))
    for found, expected in zip(te, local, strict=True):
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - TIMED:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


def fp8():
    """By recipe: output and gradients of a linear layer after two steps, and how far a quantised tensor is from its
    values, relative to the largest of its tensor or block. "none" is the layer in bfloat16."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    recipes = {
        "none": None,
        "delayed": recipe.DelayedScaling(),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }
    found = {}
    for name, scaling in recipes.items():
        torch.manual_seed(0)
        layer = te.LayerNormLinear(256, 128, params_dtype=torch.bfloat16, normalization="RMSNorm", device="cpu")
        x = torch.randn(128, 256).bfloat16().requires_grad_()
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            with te.autocast(enabled=scaling is not None, recipe=scaling):
                y = layer(x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16())
        found[name] = {"y": y.detach(), "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return found
