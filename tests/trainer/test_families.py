"""Each further family in each kind of layout computes what Hugging Face computes: log-probs, loss, every gradient.

Float32. Log-probs agree to 1e-5, losses to 1e-5, gradients to 1e-5 plus 1e-4 of their size, norms to 1e-4 of theirs.
"""

import gc
import weakref

import pytest
import torch
from family_layouts import (
    CASES,
    DENSE_LAYOUTS,
    FAMILIES,
    INTERLEAVED,
    LATENT_LAYOUTS,
    ONE_RANK,
    PADDED,
    SPARSE_LAYOUTS,
    WHOLE,
    WHOLE_EXPERT_LAYOUTS,
    WHOLE_GRADIENTS,
    biases,
    layout_of,
    norm,
    reference,
)
from safetensors.torch import load_file

from megasync.layout.shards import assemble, export_checkpoint


@pytest.fixture(scope="module")
def results(run_ranks, models, rows, tmp_path_factory):
    """(family, layout) -> one result per rank, and where the checkpoints lie."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for layouts in (SPARSE_LAYOUTS, DENSE_LAYOUTS, LATENT_LAYOUTS, WHOLE_EXPERT_LAYOUTS, ONE_RANK):
        mine = {family: models[family] for family, own in FAMILIES.items() if own is layouts}
        for world, part in layouts.items():
            ranks = run_ranks("layouts", world, models=mine, rows=rows, layouts=part, folder=str(folder))
            found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found, folder


@pytest.fixture(scope="module")
def hugging_face(models, rows):
    """family -> (log-probs, loss, gradients by checkpoint name)."""
    return {family: reference(models[family], rows) for family in FAMILIES}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_scores_and_losses_are_hugging_faces(results, hugging_face, family, layout):
    logprobs, loss, _ = hugging_face[family]
    for rank in results[0][family, layout]:
        # Machines round differently: of log-probs around 5, some differ by 1.1e-5.
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=1e-5)
        assert rank["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("family", "layout"), WHOLE_GRADIENTS)
def test_gradients_are_hugging_faces(results, hugging_face, models, family, layout):
    expected = hugging_face[family][2]
    ranks = results[0][family, layout]
    map_ = layout_of(models[family], CASES[family, layout])
    assert {name for name in map_.hf_tensors if name not in expected} == biases(map_)
    for name, grad in expected.items():
        found = assemble(name, map_, lambda rank, param: ranks[rank]["gradients"][param])
        torch.testing.assert_close(found, grad, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradient_norms_are_hugging_faces(results, hugging_face, family, layout):
    for rank in results[0][family, layout]:
        assert rank["grad_norm"] == pytest.approx(norm(hugging_face[family][2]), rel=1e-4)


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "one"])
def test_weights_after_a_step_are_those_of_one_rank(results, hugging_face, models, family, layout, tmp_path):
    """Adam's first step is nearly the sign of the gradient: elements whose gradient is all rounding go either way."""
    _, folder = results
    grads = hugging_face[family][2]
    weights = {}
    for label in ("one", layout):
        export_checkpoint(folder / f"{family}-{label}", models[family], tmp_path / label)
        weights[label] = load_file(tmp_path / label / "model.safetensors")
    assert weights["one"].keys() == weights[layout].keys()
    undecided = 0
    for name, expected in weights["one"].items():
        difference = (weights[layout][name] - expected).abs()
        undecided += int((difference > 1e-5).sum())
        if name not in grads:
            assert (difference == 0).all(), name
            continue
        assert difference.max() < 2.1e-3, name
        assert (difference[grads[name].abs() > 1e-4] < 1e-5).all(), name
    # A weight that went the other way may change the log-prob of a token by as much as it differs itself.
    tolerance = 2.1e-3 if undecided else 1e-4
    for rank in results[0][family, layout]:
        torch.testing.assert_close(rank["after"], results[0][family, "one"][0]["after"], atol=tolerance, rtol=0)


def test_interleaved_schedules_have_a_multiple_of_the_stages(results):
    for (_, layout), ranks in results[0].items():
        if "vpp2" in layout:
            assert all(rank["microbatches"] % 2 == 0 for rank in ranks)


# One response, so that every layout has one microbatch that counts; others are masked copies, and most are padded.
BALANCED = {
    1: {"one": {}},
    2: {
        "ep2": {"data_parallel": 2, "expert_parallel": 2, **WHOLE},
        "tp2-ep2-etp1-recompute": SPARSE_LAYOUTS[2]["tp2-ep2-etp1"],
        "pp2-vpp2": {**INTERLEAVED, **PADDED},
    },
    4: {"tp2-pp2": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}},
}


def test_losses_of_routers_are_those_of_papers_and_ignore_padding_and_masked_copies(
    run_ranks, models, rows, tmp_path_factory
):
    row = rows[3]
    assert (len(row["prompt"]) + len(row["response"]) - 1) % 2
    path = models["qwen2_moe"]
    _, _, plain = reference(path, [row])
    _, _, balanced = reference(path, [row], balance=0.5)
    _, _, expected = reference(path, [row], balance=0.5, squares=0.1)
    router = "model.layers.1.mlp.gate.weight"
    assert (balanced[router] - plain[router]).abs().max() > 1e-3 < (expected[router] - balanced[router]).abs().max()
    given = {"moe_aux_loss": 0.5, "megatron": {"model": {"moe_z_loss_coeff": 0.1}}}
    for world, layouts in BALANCED.items():
        options = {label: {**layout, **given} for label, layout in layouts.items()}
        folder = str(tmp_path_factory.mktemp("balanced"))
        ranks = run_ranks("layouts", world, models={"m": path}, rows=[row], layouts=options, folder=folder)
        for label in layouts:
            map_ = layout_of(path, options[label])
            held = [rank["m", label]["gradients"] for rank in ranks]
            for name in map_.hf_tensors:
                found = assemble(name, map_, lambda rank, param, held=held: held[rank][param])
                torch.testing.assert_close(
                    found, expected[name], atol=1e-5, rtol=1e-4, msg=lambda text, at=(label, name): f"{at}: {text}"
                )


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_closed_engine_frees_its_model(run_ranks, models, rows, family):
    (freed,) = run_ranks(is_freed, 1, model=models[family], rows=rows)
    assert freed


def is_freed(model, rows):
    """Whether a closed engine's model is freed after a training step."""
    from rank_engines import close, cross_entropy, make_engine, to_samples

    engine = make_engine(model)
    engine.forward_backward(engine.local_batch(to_samples(rows)), cross_entropy(10))
    chunk = weakref.ref(engine.chunks[0])
    close(engine)
    del engine
    gc.collect()
    return chunk() is None
