"""Given experts in the layers of Transformer Engine, as tests/trainer/test_routing_replay.py."""

import pytest
import torch
from family_layouts import layout_of
from random_routes import replayed_reference, routed

from megasync.layout.shards import assemble

NEWEST = "te 0.19.2"
SPLIT_EXPERTS = {
    "tensor_parallel": 2,
    "sequence_parallel": True,
    "expert_parallel": 2,
    "expert_tensor_parallel": 1,
    "recompute": "full",
}
STAGES = {"pipeline_parallel": 2, "virtual_pipeline": 2, "recompute": "full", "tokens_per_microbatch": 64}
CASES = [
    ("te", "qwen3_moe", {"recompute": "selective", "recompute_modules": ["moe"], "tokens_per_microbatch": 64}),
    ("te", "glm4_moe", STAGES),
    (NEWEST, "qwen3_moe", SPLIT_EXPERTS),
    (NEWEST, "deepseek_v3", SPLIT_EXPERTS),
]


@pytest.mark.parametrize(("flavour", "family", "options"), CASES)
def test_scores_and_gradients_are_those_with_the_same_experts(
    run_ranks, models, rows, tmp_path, flavour, family, options
):
    given = routed(rows, models[family])
    logprobs, loss, grads = replayed_reference(models[family], given)
    map_ = layout_of(models[family], options, "te")
    layouts = {"models": {family: models[family]}, "rows": given, "layouts": {"own": options}}
    found = run_ranks("layouts", map_.topology.world, flavour=flavour, folder=str(tmp_path), **layouts)
    ranks = [rank[family, "own"] for rank in found]
    for rank in ranks:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
    for name, grad in grads.items():
        found = assemble(name, map_, lambda rank, param: ranks[rank]["gradients"][param])
        grad = torch.zeros_like(found) if grad is None else grad
        torch.testing.assert_close(found, grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
