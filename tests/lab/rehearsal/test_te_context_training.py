"""Training with sequences that ranks share, with Transformer Engine's layers: as exact as without sharing.

In bfloat16, because Transformer Engine has no attention in float32 for it.
"""

import pytest
import torch
from family_layouts import norm, reference
from random_models import MORE_MODELS, write_model

CP2 = {"context_parallel": 2}
TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
PP2 = {**CP2, "pipeline_parallel": 2, "last_stage_layers": 1}
# The head sizes of the tiny models of latent attention are none that cuDNN supports.
LATENT = {**MORE_MODELS["deepseek_v3"], "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GATHERED = {**CP2, "context_parallel_comm": "all_gather"}
EXPERTS = {
    "ring": {**CP2, "expert_parallel": 2, "tokens_per_microbatch": 48, "pad_microbatches": True},
    "gathered": GATHERED,
    "heads": {**CP2, "context_parallel_comm": "a2a"},
}
CASES = [
    ("te", "qwen3_moe", 2, EXPERTS),
    ("te 0.19.2", "qwen3_moe", 2, EXPERTS),
    ("te", "latent", 2, {"ring": CP2, "gathered": GATHERED}),
    ("te 0.19.2", "latent", 2, {"ring": CP2, "gathered": GATHERED}),
    ("te", "glm4", 2, {"ring": CP2, "gathered": GATHERED}),
    # Windows and sinks.
    ("te", "gpt_oss", 2, {"heads": {**EXPERTS["heads"], "expert_parallel": 2}}),
    ("te 0.19.2", "gpt_oss", 2, {"heads": EXPERTS["heads"]}),
    # Gated delta nets, whose heads are exchanged.
    ("te", "qwen3_next", 2, {"ring": CP2, "gathered": GATHERED}),
    ("te", "qwen3", 4, {"cp4": {"context_parallel": 4}, "tp2": {**CP2, **TP2}, "pp2": PP2}),
]
EVERY = [pytest.param(*case, marks=() if index == 0 else pytest.mark.matrix) for index, case in enumerate(CASES)]


@pytest.mark.parametrize(("flavour", "family", "world", "layouts"), EVERY)
def test_bfloat16_is_as_exact_as_with_one_rank(run_ranks, models, rows, tmp_path, flavour, family, world, layouts):
    path = str(write_model(tmp_path / "latent", LATENT, seed=3)) if family == "latent" else models[family]
    logprobs, loss, gradients = reference(path, rows)
    arguments = {"flavour": flavour, "dtype": "bfloat16", "models": {"m": path}, "rows": rows, "folder": str(tmp_path)}
    (one,) = run_ranks("layouts", 1, layouts={"one": {}}, **arguments)
    ranks = run_ranks("layouts", world, layouts=layouts, **arguments)
    usual = (one["m", "one"]["scores"] - logprobs).abs().mean()
    usual_loss = abs(one["m", "one"]["loss"] - loss)
    usual_norm = abs(one["m", "one"]["grad_norm"] / norm(gradients) - 1)
    for label in layouts:
        results = [rank["m", label] for rank in ranks]
        for result in results:
            assert result["attention"] == "fused"
            assert (result["scores"] - logprobs).abs().mean() < 1.3 * usual
            assert result["loss"] == pytest.approx(loss, abs=max(0.01, 1.3 * usual_loss))
            assert result["grad_norm"] == pytest.approx(norm(gradients), rel=max(0.01, 1.3 * usual_norm))
            assert torch.equal(result["after"], results[0]["after"])
