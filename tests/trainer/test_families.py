"""Each further family in each kind of layout computes what Hugging Face computes: log-probs, loss, every gradient.

Float32. Log-probs agree to 1e-5, losses to 1e-5, gradients to 1e-5 plus 1e-4 of their size, norms to 1e-4 of theirs.
"""

import pytest
import torch
from safetensors.torch import load_file

from megasync.layout.layout import Layout
from megasync.layout.shards import assemble, export_checkpoint
from megasync.layout.topology import Topology

WHOLE = {"distributed_optimizer": False}
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline": 2, "tokens_per_microbatch": 64}
SPARSE_LAYOUTS = {
    1: {"one": {}},
    2: {
        "ep2": {"data_parallel": 2, "expert_parallel": 2, "tokens_per_microbatch": 64, **WHOLE},
        "ep2-distributed": {"data_parallel": 2, "expert_parallel": 2},
        "dp2-distributed": {"data_parallel": 2},
        "tp2-ep2-etp1": {
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
            "recompute": "full",
        },
        "tp2-etp1": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
        "pp2-vpp2": INTERLEAVED,
    },
    4: {
        "tp2-dp2-ep2-etp2": {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "tokens_per_microbatch": 64,
            **WHOLE,
        },
        "tp2-dp2-ep2-etp1": {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
        "dp2-ep2-pp2-vpp2": {"data_parallel": 2, "expert_parallel": 2, **INTERLEAVED, **WHOLE},
    },
}
DENSE_LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
        "dp2-distributed": {"data_parallel": 2},
        "pp2-vpp2": INTERLEAVED,
    },
}
LATENT_LAYOUTS = {
    1: {"one": {}, "small-microbatches": {"tokens_per_microbatch": 64}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"},
        "tp2-ep2-etp1": SPARSE_LAYOUTS[2]["tp2-ep2-etp1"],
        "ep2": SPARSE_LAYOUTS[2]["ep2"],
        "ep2-distributed": SPARSE_LAYOUTS[2]["ep2-distributed"],
        "pp2-vpp2": INTERLEAVED,
    },
}
FAMILIES = {
    "qwen3_moe": SPARSE_LAYOUTS,
    "qwen2_moe": SPARSE_LAYOUTS,
    "mistral": DENSE_LAYOUTS,
    "glm4": DENSE_LAYOUTS,
    "deepseek_v3": LATENT_LAYOUTS,
    "deepseek_v3_plain": LATENT_LAYOUTS,
}
CASES = {
    (family, label): options for family, w in FAMILIES.items() for ls in w.values() for label, options in ls.items()
}
# With the distributed optimizer, each data-parallel rank has only a part of the gradients' sum.
WHOLE_GRADIENTS = [
    case for case, options in CASES.items() if "data_parallel" not in options or options.items() >= WHOLE.items()
]


@pytest.fixture(scope="module")
def results(run_ranks, models, rows, tmp_path_factory):
    """(family, layout) -> one result per rank, and where the checkpoints lie."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for layouts in (SPARSE_LAYOUTS, DENSE_LAYOUTS, LATENT_LAYOUTS):
        mine = {family: models[family] for family, own in FAMILIES.items() if own is layouts}
        for world, part in layouts.items():
            ranks = run_ranks("layouts", world, models=mine, rows=rows, layouts=part, folder=str(folder))
            found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found, folder


@pytest.fixture(scope="module")
def hugging_face(models, rows):
    """family -> (log-probs, loss, gradients by checkpoint name)."""
    return {family: reference(models[family], rows) for family in FAMILIES}


def reference(path, rows, balance=0.0):
    """With ``balance``, the loss has that much of Switch Transformer's load-balancing loss, summed over layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = sum(len(row["response"]) for row in rows)
    logprobs, loss = [], 0.0
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["response"]])
        output = model(ids, output_router_logits=True) if balance else model(ids)
        log_p = output.logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0])
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = loss - (logprobs[-1].sum() + 0.1 * entropy.sum()) / tokens
        if balance:
            # The last token is never fed to the engine's model.
            loss = loss + balance * sum(switch_loss(logits[:-1], 2) for logits in output.router_logits)
    loss.backward()
    return torch.cat(logprobs).detach(), loss.item(), dict(gradients(model))


def switch_loss(logits, topk):
    """Equation 4 of https://arxiv.org/abs/2101.03961, for top-k routing: experts x sum of load share x mean weight."""
    weights = logits.softmax(-1)
    chosen = torch.zeros_like(weights).scatter(1, weights.topk(topk).indices, 1.0)
    return weights.shape[1] * (chosen.mean(0) / topk * weights.mean(0)).sum()


def gradients(model):
    """Gradients under the names of a checkpoint, where experts are apart."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, grad in enumerate(parameter.grad):
                for half, part in zip(("gate", "up"), grad.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{half}_proj.weight"), part
        elif name.endswith("experts.down_proj"):
            for expert, grad in enumerate(parameter.grad):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), grad
        else:
            yield name, parameter.grad


def biases(map_):
    """Tensors without a gradient: the biases of a router's choice."""
    return {name for name in map_.hf_tensors if name.endswith("e_score_correction_bias")}


def norm(grads):
    return torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt().item()


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_scores_and_losses_are_hugging_faces(results, hugging_face, family, layout):
    logprobs, loss, _ = hugging_face[family]
    for rank in results[0][family, layout]:
        torch.testing.assert_close(rank["scores"], logprobs, atol=1e-5, rtol=0)
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
    for name, expected in weights["one"].items():
        difference = (weights[layout][name] - expected).abs()
        if name in biases(layout_of(models[family], {})):
            assert (difference == 0).all(), name
            continue
        assert difference.max() < 2.1e-3, name
        assert (difference[grads[name].abs() > 1e-4] < 1e-5).all(), name
    for rank in results[0][family, layout]:
        torch.testing.assert_close(rank["after"], results[0][family, "one"][0]["after"], atol=1e-4, rtol=0)


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
        "pp2-vpp2": INTERLEAVED,
    },
    4: {"tp2-pp2": {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}},
}


def test_the_balancing_loss_is_switch_transformers_and_ignores_padding_and_masked_copies(
    run_ranks, models, rows, tmp_path_factory
):
    row = rows[3]
    assert (len(row["prompt"]) + len(row["response"]) - 1) % 2
    path = models["qwen2_moe"]
    _, _, plain = reference(path, [row])
    _, _, expected = reference(path, [row], balance=0.5)
    router = "model.layers.1.mlp.gate.weight"
    assert (expected[router] - plain[router]).abs().max() > 1e-3
    for world, layouts in BALANCED.items():
        options = {label: {**layout, "moe_aux_loss": 0.5} for label, layout in layouts.items()}
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


def layout_of(path, options):
    from megasync.config.schema import TrainerConfig
    from megasync.layout.model_files import read_hf_config

    return Layout(read_hf_config(path), Topology.from_config(TrainerConfig(**options)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_closed_engine_frees_its_model(run_ranks, models, rows, family):
    (freed,) = run_ranks("is_freed", 1, model=models[family], rows=rows)
    assert freed
