"""Transformer Engine's layers compute what Hugging Face computes and learn what Megatron's own layers learn.

Every family in every kind of layout, on the CPU over gloo, with the all-to-all dispatcher of GPU ranks. Float32:
log-probs and losses agree to 1e-5, gradients to 1e-5 plus 1e-4 of their size, norms to 1e-4 of theirs.
"""

from functools import cache

import pytest
import torch
from family_layouts import FAMILIES, PADDED, biases, layout_of, norm, reference
from random_models import MODELS
from safetensors.torch import load_file

from megasync.layout.shards import assemble, export_checkpoint

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
        ranks = run_ranks(
            "layouts",
            world,
            flavour=flavour,
            models={family: models[family]},
            rows=rows,
            layouts={label: options},
            folder=str(folder),
        )
        return [rank[family, label] for rank in ranks], folder / f"{family}-{label}"

    return results


@pytest.fixture(scope="module")
def hugging_face(models, rows):
    """family -> (log-probs, loss, gradients by checkpoint name)."""
    return cache(lambda family: reference(models[family], rows))


@pytest.mark.parametrize(("flavour", "family", "layout"), EVERY)
def test_scores_losses_and_gradients_are_hugging_faces(run, hugging_face, models, flavour, family, layout):
    logprobs, loss, gradients = hugging_face(family)
    ranks, _ = run(flavour, family, layout)
    for rank in ranks:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
        assert rank["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
    if ranks[0]["gradients"] is None:
        return
    map_ = layout_of(models[family], WORLDS[family, layout][1], "te")
    for name in map_.hf_tensors.keys() - biases(map_):
        found = assemble(name, map_, lambda rank, param: ranks[rank]["gradients"][param])
        expected = gradients[name]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


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
