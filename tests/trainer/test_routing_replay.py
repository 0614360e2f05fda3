"""Given experts in every layout: log-probs, losses and gradients are Hugging Face's with the same experts.

Float32. Log-probs and losses agree to 1e-5, gradients to 1e-5 plus 1e-4 of their size. The experts are random, so that
a router that chooses itself is far off.
"""

from functools import cache

import pytest
import torch
from family_layouts import layout_of, reference
from random_routes import replayed_reference, routed

from megasync.layout.shards import assemble

LAYOUTS = {
    1: {
        "one": {},
        "recompute": {"recompute": "full", "tokens_per_microbatch": 64},
        "recompute-one-layer": {"recompute": "full", "recompute_layers": 1, "tokens_per_microbatch": 64},
        "recompute-moe": {"recompute": "selective", "recompute_modules": ["moe"], "tokens_per_microbatch": 64},
    },
    2: {
        "tp2-ep2-etp1": {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
            "recompute": "full",
        },
        "pp2-recompute": {"pipeline_parallel": 2, "recompute": "full", "tokens_per_microbatch": 64},
        "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2, "recompute": "full", "tokens_per_microbatch": 64},
        "ep2": {
            "data_parallel": 2,
            "expert_parallel": 2,
            "tokens_per_microbatch": 64,
            "distributed_optimizer": False,
        },
        "cp2": {"context_parallel": 2, "tokens_per_microbatch": 32, "distributed_optimizer": False},
    },
}
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", pytest.param("llama4_text", marks=pytest.mark.matrix))
NAMES = [label for layouts in LAYOUTS.values() for label in layouts]


@pytest.fixture(scope="module")
def results(run_ranks, models, rows, tmp_path_factory):
    """results(family) -> layout -> one result per rank. Each family runs once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def of(family):
        given, found = routed(rows, models[family]), {}
        for world, layouts in LAYOUTS.items():
            mine = {family: models[family]}
            ranks = run_ranks("layouts", world, models=mine, rows=given, layouts=layouts, folder=str(folder))
            found |= {label: [rank[family, label] for rank in ranks] for label in layouts}
        return found

    return of


@pytest.fixture(scope="module")
def expected(models, rows):
    return cache(lambda family: replayed_reference(models[family], routed(rows, models[family])))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", NAMES)
def test_scores_and_losses_are_hugging_faces_with_the_same_experts(results, expected, family, layout):
    logprobs, loss, _ = expected(family)
    for rank in results(family)[layout]:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", NAMES)
def test_gradients_are_hugging_faces_with_the_same_experts(results, expected, models, family, layout):
    """Gradients of recomputed layers too, which must go to the experts of the forward pass."""
    options = next(layouts[layout] for layouts in LAYOUTS.values() if layout in layouts)
    map_, ranks = layout_of(models[family], options), results(family)[layout]
    for name, grad in expected(family)[2].items():
        found = assemble(name, map_, lambda rank, param: ranks[rank]["gradients"][param])
        grad = torch.zeros_like(found) if grad is None else grad
        torch.testing.assert_close(found, grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_give_other_log_probs(expected, models, rows, family):
    own, *_ = reference(models[family], rows)
    assert (own - expected(family)[0]).abs().max() > 1e-3
