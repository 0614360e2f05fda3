"""Adapters beside Transformer Engine's layers: fused norms and grouped experts, as tests/trainer/test_adapters.py."""

import pytest
import torch
from family_layouts import WHOLE, norm
from random_adapters import ALPHA, RANK, adapted_reference, adapters_of, write_adapters

from megasync.layout.shards import assemble

NEWEST = "te 0.19.2"
TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
SPLIT_EXPERTS = {**TENSOR, "expert_parallel": 2, "expert_tensor_parallel": 1, "recompute": "full"}
CASES = [
    ("te", "mistral", TENSOR),
    ("te", "gemma3_text", {}),
    ("te", "qwen3_moe", {"data_parallel": 2, "expert_parallel": 2, **WHOLE}),
    ("te", "qwen3_moe", {"data_parallel": 2, "expert_tensor_parallel": 2, **WHOLE}),
    (NEWEST, "qwen3_moe", {**TENSOR, "recompute": "full"}),
    (NEWEST, "qwen3_moe", SPLIT_EXPERTS),
    (NEWEST, "deepseek_v3", SPLIT_EXPERTS),
]


@pytest.mark.parametrize(("flavour", "family", "options"), CASES)
def test_scores_and_gradients_are_those_of_the_merged_model(
    run_ranks, models, rows, tmp_path, flavour, family, options
):
    peft, merged = write_adapters(models[family], tmp_path)
    logprobs, loss, grads = adapted_reference(peft, merged, rows)
    map_ = adapters_of(models[family], options, "te")
    layouts = {"own": {**options, "lora": {"rank": RANK, "alpha": ALPHA, "path": str(peft)}}}
    given = {"models": {family: models[family]}, "rows": rows, "layouts": layouts, "folder": str(tmp_path)}
    ranks = [rank[family, "own"] for rank in run_ranks("layouts", map_.topology.world, flavour=flavour, **given)]
    for rank in ranks:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)
        assert rank["grad_norm"] == pytest.approx(norm(grads), rel=1e-4)
    for name, grad in grads.items():
        found = assemble(name, map_, lambda rank, param: ranks[rank]["gradients"][param])
        torch.testing.assert_close(found, grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
