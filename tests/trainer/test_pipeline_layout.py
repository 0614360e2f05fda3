"""Chunks of layers of different sizes in an interleaved pipeline: scores, gradients and weights after a step."""

import pytest
import torch
from random_models import MORE_MODELS, write_model
from safetensors.torch import load_file

from megasync.layout.shards import export_checkpoint

UNEVEN = {
    "pipeline_parallel": 2,
    "virtual_pipeline": 2,
    "pipeline_layout": [1, 2, 1, 2],
    "tokens_per_microbatch": 64,
}
LAYOUTS = {"uneven": UNEVEN, "dp2": {"data_parallel": 2}}

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def results(run_ranks, rows, tmp_path_factory):
    model = write_model(tmp_path_factory.mktemp("model") / "deep", {**MORE_MODELS["mistral"], "num_hidden_layers": 6})
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks = run_ranks("layouts", 2, models={"deep": str(model)}, rows=rows, layouts=LAYOUTS, folder=str(folder))
    return ranks, model, folder


def test_scores_are_those_of_hugging_face(results, rows):
    from transformers import AutoModelForCausalLM

    ranks, path, _ = results
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for row in rows:
        prompt, ids = len(row["prompt"]), torch.tensor([row["prompt"] + row["response"]])
        with torch.no_grad():
            log_p = model(ids).logits[0].log_softmax(-1)
        expected.append(log_p[prompt - 1 : -1].gather(1, ids[0, prompt:, None])[:, 0])
    for rank in ranks:
        torch.testing.assert_close(rank["deep", "uneven"]["scores"], torch.cat(expected), atol=1e-4, rtol=0)


def test_a_step_is_that_of_ranks_with_all_layers(results, tmp_path):
    ranks, model, folder = results
    for rank in ranks:
        found, expected = rank["deep", "uneven"], rank["deep", "dp2"]
        assert found["microbatches"] > 1
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        torch.testing.assert_close(found["after"], expected["after"], atol=1e-4, rtol=0)
    weights = {}
    for label in LAYOUTS:
        export_checkpoint(folder / f"deep-{label}", model, tmp_path / label)
        weights[label] = load_file(tmp_path / label / "model.safetensors")
    assert weights["dp2"].keys() == weights["uneven"].keys()
    for name, expected in weights["dp2"].items():
        difference = (weights["uneven"][name] - expected).abs()
        assert difference.mean() < 1e-6, name
        assert difference.max() < 1e-3, name
