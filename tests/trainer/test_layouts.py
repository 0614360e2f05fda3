"""Every layout computes what one rank computes, and one rank computes what Hugging Face computes.

Float32. Log-probs agree to 1e-5 between layouts (sums in another order) and to 1e-4 with Hugging Face; losses to 1e-5
and gradient norms to 1e-4 of their size. Weights are compared after an Adam step of 1e-3: its first step is nearly the
sign of the gradient, so that an element whose gradient is all rounding may differ by up to the step itself.
"""

import pytest
import torch
from family_layouts import PADDED
from safetensors.torch import load_file
from trainer_ranks import TIMED

from megasync.errors import TrainingError
from megasync.layout.shards import export_checkpoint

LAYOUTS = {
    1: {
        "one": {},
        "small-microbatches": {"tokens_per_microbatch": 64},
        "recompute": {"recompute": "full"},
        "recompute-one-layer": {"recompute": "full", "recompute_layers": 1},
        "recompute-mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    },
    2: {
        "tp2": {"tensor_parallel": 2},
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
        "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1, "tokens_per_microbatch": 64},
        "tp2-head": {"tensor_parallel": 2, "float32_head": True},
        "tp2-sp-head": {"tensor_parallel": 2, "sequence_parallel": True, "float32_head": True},
        "dp2-overlap": {
            "data_parallel": 2,
            "overlap_grad_reduce": True,
            "tokens_per_microbatch": 64,
            "megatron": {"ddp": {"bucket_size": 1000}, "optimizer": {"apply_wd_to_qk_layernorm": True}},
        },
        "dp2-replicated-overlap": {
            "data_parallel": 2,
            "distributed_optimizer": False,
            "overlap_grad_reduce": True,
            "tokens_per_microbatch": 64,
        },
        "dp2": {"data_parallel": 2, "distributed_optimizer": True},
        "dp2-replicated": {"data_parallel": 2, "distributed_optimizer": False, "tokens_per_microbatch": 64},
    },
    4: {
        "tp4": {"tensor_parallel": 4},
        "tp2-pp2-sp": {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "last_stage_layers": 1,
            "sequence_parallel": True,
            **PADDED,
        },
        "tp2-dp2": {"tensor_parallel": 2, "data_parallel": 2, "tokens_per_microbatch": 64},
    },
}
NAMES = [label for layouts in LAYOUTS.values() for label in layouts if label != "one"]
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def results(run_ranks, models, rows, tmp_path_factory):
    """(family, layout) -> one result per rank, and where the checkpoints lie."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for world, layouts in LAYOUTS.items():
        mine = {family: models[family] for family in FAMILIES}
        ranks = run_ranks("layouts", world, models=mine, rows=rows, layouts=layouts, folder=str(folder))
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found, folder


@pytest.fixture(scope="module")
def one(results):
    return {family: results[0][family, "one"][0] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_hugging_face(results, models, rows, family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32, attn_implementation="eager")
    expected = []
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["response"]])
        with torch.no_grad():
            log_p = model(ids).logits[0].log_softmax(-1)
        expected.append(log_p[len(row["prompt"]) - 1 : -1].gather(1, ids[0, len(row["prompt"]) :, None])[:, 0])
    scores = results[0][family, "one"][0]["scores"]
    torch.testing.assert_close(scores, torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", NAMES)
def test_scores_and_losses_are_those_of_one_rank(results, one, family, layout):
    for rank in results[0][family, layout]:
        torch.testing.assert_close(rank["scores"], one[family]["scores"], atol=1e-5, rtol=0)
        assert rank["loss"] == pytest.approx(one[family]["loss"], abs=1e-5)
        assert rank["tokens"] == one[family]["tokens"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", NAMES)
def test_gradient_norms_are_those_of_one_rank(results, one, family, layout):
    for rank in results[0][family, layout]:
        assert rank["grad_norm"] == pytest.approx(one[family]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", NAMES)
def test_weights_after_a_step_are_those_of_one_rank(results, models, family, layout, tmp_path):
    _, folder = results
    weights = {}
    for label in ("one", layout):
        export_checkpoint(folder / f"{family}-{label}", models[family], tmp_path / label)
        weights[label] = load_file(tmp_path / label / "model.safetensors")
    assert weights["one"].keys() == weights[layout].keys()
    for name, expected in weights["one"].items():
        difference = (weights[layout][name] - expected).abs()
        assert difference.mean() < 1e-6, name
        assert difference.max() < 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_changes_the_scores_equally_on_every_layout(results, one, family):
    assert (one[family]["after"] - one[family]["scores"]).abs().max() > 1e-3
    for layout in NAMES:
        for rank in results[0][family, layout]:
            torch.testing.assert_close(rank["after"], one[family]["after"], atol=1e-4, rtol=0)


def test_fields_of_megatrons_classes_reach_them(results):
    for (_, layout), ranks in results[0].items():
        given = layout == "dp2-overlap"
        assert all((rank["buckets"] > 5, rank["decays_qk_norms"]) == (given, given) for rank in ranks), layout


def test_small_budgets_really_made_several_microbatches(results):
    for (_, layout), ranks in results[0].items():
        whole = ("one", "recompute", "recompute-one-layer", "recompute-mlp", "tp2", "tp2-sp", "tp2-head", "tp2-sp-head")
        several = layout not in (*whole, "dp2", "tp4")
        assert all((rank["microbatches"] > 1) == several for rank in ranks), layout


def test_padded_microbatches_have_one_length(results):
    for (_, layout), ranks in results[0].items():
        lengths = {length for rank in ranks for length in rank["lengths"]}
        assert lengths == {96} if layout == "tp2-pp2-sp" else lengths != {96}, layout


def test_padding_changes_no_metric_of_a_policy_step(run_ranks, models):
    """With KL and entropy terms, two optimizer steps a batch and clipping; ranks with different microbatches."""
    trainer = {"data_parallel": 2, "minibatches": 2, "tokens_per_microbatch": 128}
    run = {"model": models["qwen3"], "steps": 2, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}
    plain = run_ranks("train", 2, trainer=trainer, **run)
    padded = run_ranks("train", 2, trainer={**trainer, "pad_microbatches": True}, **run)
    for found, expected in zip(padded, plain, strict=True):
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - TIMED:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


def test_a_sequence_longer_than_a_padded_microbatch_is_an_error(run_ranks, models, rows):
    options = {"tokens_per_microbatch": 64, "pad_microbatches": True}
    (text,) = run_ranks(too_long, 1, model=models["qwen3"], rows=rows, trainer=options)
    assert "a sequence has 77 tokens, but trainer.pad_microbatches=true pads microbatches to 64" in text


def too_long(model, rows, trainer):
    """The error of a share that one of the rows does not fit."""
    from rank_engines import close, make_engine, to_samples

    engine = make_engine(model, trainer)
    try:
        engine.local_batch(to_samples(rows))
    except TrainingError as error:
        return str(error)
    finally:
        close(engine)
