"""Transformer Engine's layers compute what Hugging Face computes and learn what Megatron's own layers learn.

Every family in every kind of layout, on the CPU over gloo, with the all-to-all dispatcher of GPU ranks, in float32
(`assert_agrees`). Some also with adapters beside fused norms and grouped experts, and with given experts.
"""

from functools import cache

import pytest
import torch
from family_layouts import FAMILIES, PADDED, WHOLE, assert_agrees, layout_of, reference
from random_adapters import ALPHA, RANK, adapted_reference, adapters_of, write_adapters
from random_models import MODELS
from random_routes import replayed_reference, routed
from safetensors.torch import load_file

from megasync.layout.shards import export_checkpoint

NEWEST = "te 0.19.2"
SEQUENCE_PARALLEL = {"tensor_parallel": 2, "sequence_parallel": True}
# The families of tests/trainer/test_layouts.py, and a pipeline without interleaving.
LAYOUTS = {family: dict(layouts) for family, layouts in FAMILIES.items()}
LAYOUTS |= {
    family: {
        1: {"one": {}},
        2: {
            "tp2": {"tensor_parallel": 2},
            "tp2-sp": SEQUENCE_PARALLEL,
            "pp2": {"pipeline_parallel": 2, "last_stage_layers": 1, **PADDED},
        },
    }
    for family in MODELS
}
# DeepEP's dispatcher.
for family, label in (("qwen3_moe", "ep2"), ("deepseek_v3", "tp2-ep2-etp1")):
    of_two = LAYOUTS[family][2]
    LAYOUTS[family][2] = of_two | {f"{label}-deepep": {**of_two[label], "moe_deepep": True}}
WORLDS = {
    (family, label): (world, options)
    for family, layouts in LAYOUTS.items()
    for world, part in layouts.items()
    for label, options in part.items()
}
# What runs in every change: each family, and each kind of parallelism; a part of it on the newest megatron-core.
LEAN = [
    *(("te", family, "one") for family in LAYOUTS),
    ("te", "llama", "tp2"),
    ("te", "qwen2", "tp2-sp"),
    ("te", "qwen3", "pp2"),
    ("te", "qwen3_moe", "ep2"),
    ("te", "qwen3_moe", "ep2-deepep"),
    (NEWEST, "deepseek_v3", "tp2-ep2-etp1-deepep"),
    ("te", "qwen3_moe", "pp2-vpp2"),
    ("te", "qwen2_moe", "ep2-distributed"),
    ("te", "deepseek_v3", "tp2-ep2-etp1"),
    *((NEWEST, family, "one") for family in ("qwen2", "glm4", "qwen2_moe", "deepseek_v3", "deepseek_v3_plain")),
    (NEWEST, "qwen3_moe", "pp2-vpp2"),
    (NEWEST, "deepseek_v3", "tp2-ep2-etp1"),
    (NEWEST, "glm4_moe", "tp2-ep2-etp1"),
    (NEWEST, "minimax_m2", "tp2-sp"),
    (NEWEST, "gpt_oss", "tp2-ep2-etp1"),
]
MATRIX = [case for flavour in ("te", NEWEST) for each in WORLDS if (case := (flavour, *each)) not in LEAN]
EVERY = [*LEAN, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MATRIX)]


@pytest.fixture(scope="module")
def run(run_ranks, models, rows, tmp_path_factory):
    """run(flavour, family, layout) -> one result per rank, and the folder of its checkpoint. Each runs once."""

    @cache
    def results(flavour, family, label):
        world, options = WORLDS[family, label]
        folder = tmp_path_factory.mktemp("checkpoints")
        arguments = {"models": {family: models[family]}, "layouts": {label: options}, "folder": str(folder)}
        ranks = run_ranks("layouts", world, flavour=flavour, rows=rows, **arguments)
        return [rank[family, label] for rank in ranks], folder / f"{family}-{label}"

    return results


@pytest.fixture(scope="module")
def hugging_face(models, rows):
    """family -> (log-probs, loss, gradients by checkpoint name)."""
    return cache(lambda family: reference(models[family], rows))


@pytest.mark.parametrize(("flavour", "family", "layout"), EVERY)
def test_scores_losses_and_gradients_are_hugging_faces(run, hugging_face, models, flavour, family, layout):
    ranks, _ = run(flavour, family, layout)
    assert_agrees(ranks, layout_of(models[family], WORLDS[family, layout][1], "te"), hugging_face(family))


@pytest.mark.parametrize(("flavour", "family", "layout"), EVERY)
def test_a_step_is_that_of_megatrons_own_layers(run, hugging_face, models, flavour, family, layout, tmp_path):
    """Adam's first step is nearly the sign of the gradient: elements whose gradient is all rounding go either way."""
    gradients = hugging_face(family)[2]
    results = {"te": run(flavour, family, layout), "local": run("local", family, "one")}
    weights = {}
    for layers, (_, checkpoint) in results.items():
        export_checkpoint(checkpoint, models[family], tmp_path / layers)
        weights[layers] = load_file(tmp_path / layers / "model.safetensors")
    assert weights["te"].keys() == weights["local"].keys()
    undecided = 0
    for name, expected in weights["local"].items():
        difference = (weights["te"][name] - expected).abs()
        undecided += int((difference > 1e-5).sum())
        assert difference.max() < 2.1e-3, name
        if name in gradients:
            assert (difference[gradients[name].abs() > 1e-4] < 1e-5).all(), name
        else:
            assert (difference == 0).all(), name
    # A weight that went the other way may change the log-prob of a token by as much as it differs itself.
    tolerance = 2.1e-3 if undecided else 1e-4
    for rank in results["te"][0]:
        torch.testing.assert_close(rank["after"], results["local"][0][0]["after"], atol=tolerance, rtol=0)


SPLIT_EXPERTS = {**SEQUENCE_PARALLEL, "expert_parallel": 2, "expert_tensor_parallel": 1, "recompute": "full"}
STAGES = {"pipeline_parallel": 2, "virtual_pipeline": 2, "recompute": "full", "tokens_per_microbatch": 64}
SELECTIVE = {"recompute": "selective", "recompute_modules": ["moe"], "tokens_per_microbatch": 64}
ADAPTED = [
    ("te", "mistral", SEQUENCE_PARALLEL),
    ("te", "gemma3_text", {}),
    ("te", "qwen3_moe", {"data_parallel": 2, "expert_parallel": 2, **WHOLE}),
    ("te", "qwen3_moe", {"data_parallel": 2, "expert_tensor_parallel": 2, **WHOLE}),
    (NEWEST, "qwen3_moe", {**SEQUENCE_PARALLEL, "recompute": "full"}),
    (NEWEST, "qwen3_moe", SPLIT_EXPERTS),
    (NEWEST, "deepseek_v3", SPLIT_EXPERTS),
]
ROUTED = [
    ("te", "qwen3_moe", SELECTIVE),
    ("te", "glm4_moe", STAGES),
    (NEWEST, "qwen3_moe", SPLIT_EXPERTS),
    (NEWEST, "deepseek_v3", SPLIT_EXPERTS),
]


@pytest.mark.parametrize(
    ("given", "flavour", "family", "options"),
    [*(("adapters", *case) for case in ADAPTED), *(("routes", *case) for case in ROUTED)],
)
def test_adapters_and_given_experts_compute_the_same(
    run_ranks, models, rows, tmp_path, given, flavour, family, options
):
    """As a model with the adapters merged, and as Hugging Face with the same experts."""
    path = models[family]
    if given == "routes":
        map_, rows = layout_of(path, options, "te"), routed(rows, path)
        expected = replayed_reference(path, rows)
    else:
        peft, merged = write_adapters(path, tmp_path)
        map_, expected = adapters_of(path, options, "te"), adapted_reference(peft, merged, rows)
        options = {**options, "lora": {"rank": RANK, "alpha": ALPHA, "path": str(peft)}}
    arguments = {"models": {family: path}, "rows": rows, "layouts": {"own": options}, "folder": str(tmp_path)}
    ranks = run_ranks("layouts", map_.topology.world, flavour=flavour, **arguments)
    assert_agrees([rank[family, "own"] for rank in ranks], map_, expected)
